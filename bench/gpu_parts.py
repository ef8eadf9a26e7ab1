"""The parts of bench/gpu.py: each runs in a process of its own and writes rows as they come.

On a CPU (``--device cpu --quick``) the same code runs at toy size; what only a GPU can do is stood
in for where it is said.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bench.common import joined
from bench.inner_step import AsThePublicMiner, our_step, set_weights, tokens
from distributed_training.common.gpus import peak_flops
from distributed_training.common.llama import named_config
from distributed_training.common.memory import Arrangement, ModelShape, device_memory, loss_chunk
from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol.types import StepReport
from distributed_training.training import sharding
from distributed_training.training.collectives import Layout
from distributed_training.training.trainer import Trainer
from testbed.first_weights import begin


class Bench:
    """Know where a part runs, and keep its results: ``path`` is written after each row."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        *,
        quick: bool,
        length: int = 1024,
        until: float | None = None,
    ) -> None:
        self.path, self.device, self.quick = path, device, quick
        self.length = 32 if quick else length
        self.until = until
        self.layout = Layout()
        self.cuda = device.type == "cuda"
        self.rows: list[dict[str, Any]] = []
        self.total = torch.cuda.get_device_properties(device).total_memory if self.cuda else 0
        self._most_gb = 0.0
        self.peak = peak_flops(torch.cuda.get_device_name(device)) if self.cuda else None
        self.machine: dict[str, Any] = {"torch": torch.__version__}
        if self.cuda:
            self.machine |= {
                "device": torch.cuda.get_device_name(device),
                "memory_gb": round(self.total / 1e9),
                "peak_tflops": None if self.peak is None else self.peak / 1e12,
            }

    def row(self, name: str, text: str, **figures: Any) -> None:
        print(f"{name}: {text}", flush=True)
        self.rows.append({"name": name, "text": text, **figures})
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"machine": self.machine, "rows": self.rows}))
        os.replace(temporary, self.path)

    def left(self) -> float:
        """Return the seconds that this part still has."""
        return float("inf") if self.until is None else self.until - time.time()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def forget(self) -> None:
        """Memory of what was dropped before."""
        gc.collect()
        torch._dynamo.reset()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        self._most_gb = 0.0

    def step(self, trainer: Trainer, batches: list[Tensor]) -> StepReport:
        report = our_step(trainer, batches)
        # A step ends with a reset of CUDA's own peak.
        self._most_gb = max(self._most_gb, report.gpu_memory_gb or 0.0)
        return report

    def memory_gb(self) -> float:
        """The most since :meth:`forget`."""
        since = torch.cuda.max_memory_allocated(self.device) / 1e9 if self.cuda else 0.0
        return max(since, self._most_gb)

    def trainer(
        self,
        model: str,
        micro: int | str,
        effective: int,
        *,
        weights: bool = False,
        run_folder: Path | None = None,
        **settings: Any,
    ) -> Trainer:
        """``weights``: as a start of the miner makes them; else some, made on the device.

        ``micro``: sequences of a micro-batch; ``effective``: those of an inner step of all ranks.
        """
        defaults: dict[str, Any] = {
            "sequence_length": self.length,
            "local_batch_size_train": micro,
            "local_batch_size_train_effective": effective,
        }
        # A toy is not worth compiling; on a GPU what a miner does by itself is measured.
        defaults |= {"compile": "off"} if self.quick else {}
        made = Trainer(
            settings=TrainingSettings(warmup_steps=4, **(defaults | settings)),
            model_config=self.model(model),
            device=self.device,
            layout=self.layout,
            say=lambda line: print(f"  {line}", flush=True),
            run_folder=run_folder,
        )
        if weights:
            begin(made)
        else:
            set_weights([item.local for item in made.sharded.shards])
        return made

    def model(self, name: str) -> dict[str, Any]:
        """On toy runs a model of a few thousand parameters, whatever is asked for."""
        if not self.quick:
            fewer = {"num_hidden_layers": 26} if name == "3b" else {}
            return named_config("4b" if fewer else name) | fewer
        small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}
        return named_config("tiny") | small | heads

    def speed(self, trainer: Trainer, seconds: float) -> tuple[str, dict[str, float | None]]:
        """Return the text and the figures of an inner step that takes ``seconds``."""
        rate = trainer.batch_plan.effective * trainer.settings.sequence_length / seconds
        text, mfu = f"{rate:,.0f} tokens/s", None
        if self.peak is not None:
            mfu = rate * trainer.sharded.flops_per_token / self.peak / self.layout.world_size
            text += f", MFU {mfu:.1%}"
        return text, {"tokens_per_second": rate, "mfu": mfu, "seconds": seconds}

    def batches(self, trainer: Trainer, step: int) -> list[Tensor]:
        length = trainer.settings.sequence_length
        config: Any = trainer.sharded.model.config
        where = self.layout.rank, self.layout.world_size
        return tokens(config.vocab_size, step, trainer.batch_plan, length, *where)

    def steps(self, trainer: Trainer, first: int, last: int) -> list[float]:
        """Seconds of each inner step."""
        return [
            self.seconds(partial(self.step, trainer, self.batches(trainer, step)))
            for step in range(first, last)
        ]

    def report_steps(self, name: str, trainer: Trainer, found: list[float]) -> float:
        """A row of the median; returns it."""
        median = statistics.median(found)
        text, figures = self.speed(trainer, median)
        text += f", {self.memory_gb():.1f} GB" if self.cuda else ""
        most = trainer.step.known.most
        text += "" if most is None else f" (memory ran out: {most} sequences at once)"
        figures |= {"memory_gb": self.memory_gb(), "micro_batch": trainer.micro_batch_size}
        self.row(name, text, **figures)
        return median


def micro_batch_of(bench: Bench, model: str, *, ranks: int = 1) -> int:
    """By the memory model, of 1, 2, 4, ... 32, without checkpointing or offload."""
    if bench.quick:
        return 2
    shape, fits = ModelShape.from_config(named_config(model)), 1
    for micro_batch in (2, 4, 8, 16, 32):
        how = Arrangement(
            world_size=ranks,
            micro_batch=micro_batch,
            sequence_length=bench.length,
            keep_unsharded=True,
            loss_chunk=loss_chunk(bench.total),
        )
        if device_memory(shape, how) <= 0.6 * bench.total:
            fits = micro_batch
    return fits


def fitting(bench: Bench, names: Sequence[str]) -> Iterator[str]:
    """Yield each name while the part has time for what took longest; a row has the others."""
    longest = 0.0
    for number, name in enumerate(names):
        if bench.left() < 1.2 * longest:
            bench.row("no time for", ", ".join(names[number:]))
            return
        began = time.monotonic()
        yield name
        longest = max(longest, time.monotonic() - began)


def line_of(error: Exception, number: int = 0) -> str:
    return (str(error).strip().splitlines() or [""])[number][:160]


# --- (a) ----------------------------------------------------------------------------------------


def checks(bench: Bench) -> None:
    """Run what tests marked ``cuda`` check, without pytest."""
    from tests.tools import cuda_checks

    wanted = {check.__name__: check for check in cuda_checks.CHECKS[:: 5 if bench.quick else 1]}
    passed = failed = 0
    for name in fitting(bench, [*wanted]):
        try:
            with tempfile.TemporaryDirectory() as folder:
                wanted[name](bench.device, Path(folder))
            passed += 1
        except Exception as error:  # noqa: BLE001 - each failure is a row; the others run too
            traceback.print_exc()
            failed += 1
            text = f"**failed** {type(error).__name__}: {line_of(error)}"
            bench.row(name.replace("_", " "), text, ok=False)
        bench.forget()
        # Again after each: the results so far when the time ends.
        bench.rows = [row for row in bench.rows if row["name"] != "passed"]
        bench.row("passed", f"{passed} of {len(wanted)}", ok=not failed)
    if failed:
        raise SystemExit(3)


# --- (b), (c) -----------------------------------------------------------------------------------


def inner_1b(bench: Bench) -> None:
    """Compare both in one process, with alternating steps."""
    micro = micro_batch_of(bench, "1b")
    effective = 4 if bench.quick else 128
    trainer = bench.trainer("1b", micro, effective)
    bench.steps(trainer, 0, 2)
    bench.report_steps(f"ours, micro-batch {micro}", trainer, bench.steps(trainer, 2, 6))
    held = torch.cuda.memory_allocated(bench.device) / 1e9 if bench.cuda else 0.0
    public = AsThePublicMiner.next_to(trainer, bench.model("1b"))
    for its in dict.fromkeys((2, micro)):  # 2 is the public miner's own
        compare(bench, trainer, public, its, held_gb=held)


def compare(
    bench: Bench, trainer: Trainer, public: AsThePublicMiner, micro: int, *, held_gb: float
) -> None:
    """Steps of both alternate, on the same tokens; ``micro``: the public miner's micro-batch."""
    mine, theirs, most_gb = list[float](), list[float](), 0.0
    try:
        public.step(list(torch.cat(bench.batches(trainer, 6)).split(micro))[:4])  # warm
        for step in range(7, 9):
            batches = bench.batches(trainer, step)
            split = list(torch.cat(batches).split(micro))
            theirs.append(bench.seconds(partial(public.step, split)))
            if bench.cuda:  # before ours, which ends with a reset
                most_gb = torch.cuda.max_memory_allocated(bench.device) / 1e9
            mine.append(bench.seconds(partial(our_step, trainer, batches)))
    except torch.OutOfMemoryError:
        bench.row(f"public way, micro-batch {micro}", "out of memory next to ours")
        return
    seconds, ratio = statistics.median(theirs), statistics.median(theirs) / statistics.median(mine)
    text, figures = bench.speed(trainer, seconds)
    text += f", {most_gb - held_gb:.1f} GB at most" if bench.cuda else ""
    text += f"; ratio **{ratio:.2f}x**"
    bench.row(f"public way, micro-batch {micro}", text, ratio=ratio, **figures)


def inner_4b(bench: Bench) -> None:
    """Compare one after the other, since both at once do not fit."""
    effective = 4 if bench.quick else 64
    trainer = bench.trainer("4b", "auto" if bench.cuda else 2, effective)
    bench.row("memory plan", trainer.sharded.plan.note)
    bench.steps(trainer, 0, 1)
    size = trainer.micro_batch_size
    ours = bench.report_steps(f"ours, micro-batch {size}", trainer, bench.steps(trainer, 1, 4))
    low, rate = trainer.sharded.compute_dtype, trainer.schedule.rate
    batches = torch.cat(bench.batches(trainer, 9))[: effective // 4]
    del trainer
    bench.forget()
    try:
        public = AsThePublicMiner(
            bench.model("4b"), bench.device, world_size=1, low=low, shards=None, rate=rate
        )
        public.step(list(batches[:4].split(2)))
        seconds = 4 * bench.seconds(lambda: public.step(list(batches.split(2))))
    except torch.OutOfMemoryError:
        bench.row("public way, micro-batch 2", "out of memory")
        return
    bench.row(
        "public way, micro-batch 2",
        f"{seconds:.2f} s for what takes ours {ours:.2f}, {bench.memory_gb():.1f} GB; "
        f"ratio **{seconds / ours:.2f}x** (from a quarter of a step)",
        seconds=seconds,
        ratio=seconds / ours,
    )


# --- (d) ----------------------------------------------------------------------------------------


KEEPS_ALL = "every activation kept"


def sweep(bench: Bench) -> None:
    """Measure one change at a time, and name the changes that had no time left."""
    micro = micro_batch_of(bench, "1b")
    # By worth: what might become another default, then what costs most, then the rest.
    variations: dict[str, dict[str, Any]] = {
        "as the miner does it": {},
        "micro-batch doubled": {"micro": micro * 2},
        KEEPS_ALL: {},
        "compile off": {"compile": "off"},
        "checkpointing budget": {"activation_checkpointing": "budget"},
        "micro-batch halved": {"micro": max(1, micro // 2)},
        "checkpointing full": {"activation_checkpointing": "full"},
        "checkpointing selective": {"activation_checkpointing": "selective"},
    }
    plain = {"micro": micro, "effective": 4 * micro}
    for name in fitting(bench, [*variations]):
        bench.forget()
        budget = 1.0 if name == KEEPS_ALL else sharding.LIGHT_BUDGET
        try:
            with mock.patch.object(sharding, "LIGHT_BUDGET", budget):
                trainer = bench.trainer("1b", **(plain | variations[name]))
            bench.steps(trainer, 0, 1)
            bench.report_steps(name, trainer, bench.steps(trainer, 1, 3))
        except Exception as error:  # noqa: BLE001 - a variation that fails is a result
            bench.row(name, f"not possible: {type(error).__name__}: {line_of(error)}")
        trainer = None  # type: ignore[assignment]


# --- (g) ----------------------------------------------------------------------------------------


def out_of_memory(bench: Bench) -> None:
    """A micro-batch four times too large for the memory there is; then a restart."""
    small, large = (1, 4) if bench.quick else (4, 16)
    trainer = bench.trainer("125m", small, large * 2, weights=True)
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
            place = Path(folder)
            trainer = bench.trainer("125m", large, large * 2, weights=True, run_folder=place)
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
        report = bench.step(trainer, bench.batches(trainer, step))
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
    """Compare loss curves in bf16 on the device and in float32 on the CPU."""
    steps = 3 if bench.quick else 100
    low = "bf16" if bench.cuda else "auto"
    curves: dict[str, list[float]] = {}
    for name, device, precision in (
        ("device", bench.device, low),
        ("cpu", torch.device("cpu"), "fp32"),
    ):
        there = Bench(bench.path, device, quick=bench.quick)
        trainer = there.trainer(
            *("tiny", 4, 8),
            weights=True,
            learning_rate=1e-3,
            precision=precision,
            sequence_length=32 if bench.quick else 256,
        )
        curves[name] = _losses(there, trainer, 0, steps)
    apart = [abs(a - b) for a, b in zip(curves["device"], curves["cpu"], strict=True)]
    bench.row(
        f"{steps} steps",
        f"losses {curves['cpu'][0]:.4f} to {curves['cpu'][-1]:.4f}; the curves differ by at most "
        f"{max(apart):.4f} nats, {statistics.mean(apart):.4f} on average",
        largest=max(apart),
        mean=statistics.mean(apart),
        curves=curves,
    )
    # Not the largest: a step of the end, where batches are known by heart, jumps in one of them.
    if statistics.mean(apart) > 0.02:
        raise RuntimeError("the curves are not the same")


# --- (i) ----------------------------------------------------------------------------------------


def small_memory(bench: Bench) -> None:
    """A model of 3.0 billion parameters with 24 GB of the card's memory, then with all of it."""
    medians = []
    for name, size in (("24 GB", 24 * 10**9), ("without the limit", None)):
        with _of_memory(bench, size):
            micro, effective = "auto" if bench.cuda else 2, 4 if bench.quick else 32
            trainer = bench.trainer("3b", micro, effective)
            bench.row("memory plan", trainer.sharded.plan.note)
            bench.steps(trainer, 0, 1)
            label = f"{name}, micro-batch {trainer.micro_batch_size}"
            medians.append(bench.report_steps(label, trainer, bench.steps(trainer, 1, 4)))
            del trainer
            bench.forget()
    limited, free = medians
    bench.row("with 24 GB", f"**{free / limited:.2f}x** the step rate", ratio=free / limited)


@contextlib.contextmanager
def _of_memory(bench: Bench, size: int | None) -> Iterator[None]:
    """Let the card have ``size`` bytes, for whoever asks it too; None: all. On a CPU: nothing."""
    if size is None or not bench.cuda:
        yield
        return
    facts = torch.cuda.get_device_properties(bench.device)
    names = [name for name in dir(facts) if not name.startswith("_")]
    fewer = SimpleNamespace(**{name: getattr(facts, name) for name in names})
    fewer.total_memory = size
    torch.cuda.set_per_process_memory_fraction(size / bench.total, bench.device)
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: fewer),
        mock.patch.object(
            torch.cuda, "mem_get_info", lambda *_: (size - torch.cuda.memory_reserved(), size)
        ),
    ):
        yield
    torch.cuda.set_per_process_memory_fraction(1.0, bench.device)


def run(part: Callable[[Bench], None], options: argparse.Namespace) -> int:
    """Run one part, in the child. Exit status 1: it failed; its rows are kept."""
    how = {"quick": options.quick, "length": options.length, "until": options.until}
    with joined(dist.HashStore(), cuda=options.device == "cuda") as device:
        part(Bench(options.out, device, **how))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads of libraries outlive their use, and abort at the interpreter's end
