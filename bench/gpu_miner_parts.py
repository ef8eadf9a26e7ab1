"""More parts of bench/gpu.py: what the miner does beside inner steps, and what must not happen."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import codec as codec_bench
from bench import gpu_parts
from bench.gpu_parts import Bench, vocabulary
from bench.inner_step import tokens
from distributed_training.protocol.types import Progress
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.error_feedback import Codec, ErrorFeedback
from distributed_training.training.trainer import Trainer

UPLOAD_STEPS, CHECKPOINT_STEPS = 60, 25  # of a miner on the public network

# --- (e) ----------------------------------------------------------------------------------------


def overhead(bench: Bench) -> None:
    """Inner steps with everything a miner does beside them, against bare ones."""
    effective = 4 if bench.quick else 512
    micro = 2 if bench.quick else 16
    trainer = bench.trainer(
        "125m",
        weights=True,
        local_batch_size_train=micro,
        local_batch_size_train_effective=effective,
    )
    length, wanted = trainer.settings.sequence_length, trainer.preview_micro_batches * micro
    trainer.hold_back(torch.zeros((wanted, length), dtype=torch.int64))
    bench.steps(trainer, 0, 2)
    bare = bench.report_steps("bare step, 125M", trainer, bench.steps(trainer, 2, 6))
    with tempfile.TemporaryDirectory() as folder:
        held, beside = _busy(bench, trainer, Path(folder), bare)
    names = ("snapshot", "preview", "checkpoint")
    snapshot, preview, checkpoint = (statistics.mean(held[name]) for name in names)
    rounds = UPLOAD_STEPS * bare
    total = snapshot + preview + UPLOAD_STEPS / CHECKPOINT_STEPS * checkpoint + beside
    bench.row(
        "training held",
        f"snapshot {snapshot:.3f} s, preview {preview:.3f} s, checkpoint {checkpoint:.3f} s; "
        f"steps beside their writing: {beside:+.3f} s in all",
        snapshot=snapshot,
        preview=preview,
        checkpoint=checkpoint,
        beside=beside,
    )
    bench.row(
        "overhead",
        f"**{total / rounds:.2%}** of the time ({UPLOAD_STEPS} steps a publication, "
        f"{CHECKPOINT_STEPS} a checkpoint, metrics of each step)",
        ratio=total / rounds,
    )


def _busy(
    bench: Bench, trainer: Trainer, folder: Path, bare: float
) -> tuple[dict[str, list[float]], float]:
    """Seconds that each thing held training; and how much longer the steps beside them took."""
    checkpointer = Checkpointer(trainer=trainer, folder=folder / "checkpoints", keep=1)
    held: dict[str, list[float]] = {"snapshot": [], "preview": [], "checkpoint": []}
    events = (folder / "events.jsonl").open("a")
    beside, step = 0.0, 10
    for turn in range(2):
        progress = Progress(0, step, step, [1])
        began = time.perf_counter()
        handle = trainer.snapshot(
            folder / f"snapshot-{turn}", progress=progress, block=1, last_loss=1.0
        )
        held["snapshot"].append(time.perf_counter() - began)
        checkpointer.save({}, progress)
        held["checkpoint"].append(checkpointer.hold_seconds)
        while not handle.done() and step < 40:
            batches = bench.batches(trainer, step)
            began = time.perf_counter()
            for batch in batches:
                report = trainer.add_micro_batch(batch)
            assert report is not None
            json.dump(dataclasses.asdict(report), events)
            bench.wait()
            beside += time.perf_counter() - began - bare
            step += 1
        handle.wait()
        held["preview"].append(bench.seconds(partial(trainer.preview, handle)))
        checkpointer.wait()
        if checkpointer.last_error is not None:
            raise RuntimeError(checkpointer.last_error)
    events.close()
    return held, max(0.0, beside) / 2


# --- (f) ----------------------------------------------------------------------------------------


def codec(bench: Bench) -> None:
    """Error feedback, top-k and removal of what is sent, of a whole model."""
    shapes = [(96, 64), (64,)] if bench.quick else codec_bench.shapes(300e6)
    on_cpu = [torch.randn(s) for s in shapes]
    count = sum(t.numel() for t in on_cpu)

    def timed(work: Any, device: torch.device, repeat: int) -> float:
        gradients = [t.to(device) for t in on_cpu]
        feedback = [t.to(device) * 0.5 for t in on_cpu]
        found = []
        for _ in range(repeat + 1):
            found.append(bench.seconds(lambda: work(gradients, feedback)))
        return statistics.median(found[1:])

    cpu = torch.device("cpu")
    public = timed(codec_bench.baseline, cpu, 1 if bench.cuda else 2)
    bench.row("public codec, CPU", f"{public:.2f} s for {count / 1e6:.0f} M parameters")
    for name, work in (("public codec", codec_bench.baseline), ("ours", codec_bench.ours)):
        seconds = timed(work, bench.device, 3)
        bench.row(
            f"{name}, {bench.device.type}",
            f"{seconds:.4f} s, **{public / seconds:.1f}x** the public codec on the CPU",
            seconds=seconds,
            ratio=public / seconds,
        )
    seconds = _as_a_snapshot(bench)
    text = f"{seconds:.2f} s: rows from host memory and codes back to it, beside training"
    bench.row("in a snapshot of the 125M model", text, seconds=seconds)


def _as_a_snapshot(bench: Bench) -> float:
    trainer = bench.trainer("125m", local_batch_size_train=1, local_batch_size_train_effective=1)
    feedback = ErrorFeedback(
        mode="upload",
        decay=0.999,
        codec=Codec(),
        shards=trainer.sharded.shards,
        stream=trainer.stream,
    )
    now = trainer.outer.current()
    start = [t + 0.01 * torch.randn_like(t) for t in now]
    (direction,) = feedback.directions(start, now, 0.8)
    return bench.seconds(direction.encode)


# --- (g) ----------------------------------------------------------------------------------------


def out_of_memory(bench: Bench) -> None:
    """A micro-batch four times too large for the memory there is; then a restart."""
    small, large = (1, 4) if bench.quick else (4, 16)
    how: dict[str, Any] = {"local_batch_size_train_effective": large * 2}
    trainer = bench.trainer("125m", weights=True, local_batch_size_train=small, **how)
    bench.steps(trainer, 0, 1)
    expected = _losses(bench, trainer, 1, 3)
    peak = bench.memory_gb() * 1e9
    del trainer
    bench.forget()
    if bench.cuda:
        share = min(1.0, 1.3 * peak / bench.total)
        torch.cuda.set_per_process_memory_fraction(share, bench.device)
    with tempfile.TemporaryDirectory() as folder:
        for start in ("first start", "restart"):
            trainer = bench.trainer(
                "125m",
                weights=True,
                local_batch_size_train=large,
                run_folder=Path(folder),
                **how,
            )
            if not bench.cuda:
                _holds_at_most(trainer, small)
            notes: list[str] = []
            losses = _losses(bench, trainer, 0, 3, notes=notes)[1:]
            apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            if apart > 0.05 or trainer.step.known.most is None:
                raise RuntimeError(f"{start}: losses {losses}, expected {expected}: {notes}")
            if bool(notes) != (start == "first start"):
                raise RuntimeError(f"{start}: {notes}")
            bench.row(
                start,
                f"micro-batch {large}, run {trainer.step.known.most} at once, {len(notes)} step(s) "
                f"retried; losses differ by {apart:.4f}",
                most=trainer.step.known.most,
            )
            del trainer
            bench.forget()


def _losses(
    bench: Bench, trainer: Trainer, first: int, last: int, *, notes: list[str] | None = None
) -> list[float]:
    found = []
    for step in range(first, last):
        for batch in bench.batches(trainer, step):
            report = trainer.add_micro_batch(batch)
        assert report is not None
        found.append(report.loss)
        if report.note and notes is not None:
            notes.append(report.note)
    return found


def _holds_at_most(trainer: Trainer, sequences: int) -> None:
    """Stands in for a GPU that is full."""
    root: Any = trainer.sharded.root
    real = root.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        if len(ids) > sequences:
            raise torch.OutOfMemoryError("as on a GPU")
        return real(ids)

    root.forward = forward


# --- (h) ----------------------------------------------------------------------------------------


def loss_curve(bench: Bench) -> None:
    """The same weights and tokens, in bf16 on the device and in float32 on the CPU."""
    steps = 3 if bench.quick else 100
    low = "bf16" if bench.cuda else "auto"
    curves: dict[str, list[float]] = {}
    for name, device, precision in (
        ("device", bench.device, low),
        ("cpu", torch.device("cpu"), "fp32"),
    ):
        there = Bench(bench.path, device, quick=bench.quick)
        length = 32 if bench.quick else 256
        trainer = there.trainer(
            "tiny",
            weights=True,
            local_batch_size_train=4,
            local_batch_size_train_effective=8,
            learning_rate=1e-3,
            precision=precision,
            sequence_length=length,
        )
        curve = curves[name] = []
        for step in range(steps):
            for batch in tokens(vocabulary(trainer), step, trainer.batch_plan, length, 0, 1):
                report = trainer.add_micro_batch(batch)
            assert report is not None
            curve.append(report.loss)
    apart = [abs(a - b) for a, b in zip(curves["device"], curves["cpu"], strict=True)]
    bench.row(
        f"{steps} steps",
        f"losses {curves['cpu'][0]:.4f} to {curves['cpu'][-1]:.4f}; the curves differ by at most "
        f"{max(apart):.4f} nats, {statistics.mean(apart):.4f} on average",
        largest=max(apart),
        curves=curves,
    )
    if max(apart) > 0.1:
        raise RuntimeError("the curves are not the same")


def run(name: str, path: Path, device: str, *, quick: bool) -> int:
    """In the child: one part. Exit status 1: it failed; what it wrote is kept."""
    if device == "cuda":
        torch.cuda.set_device(0)
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    part = globals().get(name) or getattr(gpu_parts, name)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    part(Bench(path, place, quick=quick))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries outlive their use, and abort at the interpreter's end
