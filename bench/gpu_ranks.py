"""The parts of bench/gpu.py that take all GPUs: their speed against one's, publications, a loss.

Each rank is a process, as a miner's is. For the first part a GPU has as many micro-batches of the
same size whether it is one or one of eight, so what is lost is what the links cost. On a CPU two
ranks train a toy over gloo.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.common import joined
from bench.gpu_parts import Bench, fitting, line_of, micro_batch_of
from distributed_training.common.memory import host_bytes
from distributed_training.protocol.types import Progress
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.collectives import Layout
from distributed_training.training.trainer import Trainer

_ON_CPU = 2  # ranks
_MICRO_BATCHES = 4  # of a step, on each GPU
_GATHERED = 2**28  # bytes that each rank gives to a gather that is timed
_STUCK = timedelta(minutes=2)
_ENDED = torch.multiprocessing.ProcessExitedException, torch.multiprocessing.ProcessRaisedException
CHECKPOINT_STEPS, CHECKPOINT_SECONDS = 25, 600.0  # between two checkpoints, at least


@dataclass(frozen=True)
class Job:
    """Describe one measurement on ``ranks``; picklable."""

    folder: Path
    ranks: int
    model: str
    micro_batch: int
    length: int
    quick: bool
    cuda: bool
    until: float | None

    @classmethod
    def of(cls, bench: Bench, folder: str, ranks: int, model: str, micro_batch: int) -> Job:
        how = bench.length, bench.quick, bench.cuda, bench.until
        return cls(Path(folder), ranks, model, micro_batch, *how)

    def run(self, work: Callable[[int, Job], None]) -> None:
        """Let each rank ``work``. Raises what torch raises when one fails."""
        torch.multiprocessing.spawn(work, args=(self,), nprocs=self.ranks)

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def keeper(self, trainer: Trainer) -> Checkpointer:
        return Checkpointer(trainer=trainer, folder=self.folder / "checkpoints", keep=1)


def several(bench: Bench) -> None:
    """Compare all GPUs with one on the 1B, then measure the 4B on all."""
    ranks = torch.cuda.device_count() if bench.cuda else _ON_CPU
    if ranks < 2:
        bench.row("GPUs", "one is visible: nothing to compare it with")
        return
    if bench.cuda:
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        peers = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        bench.row("links", f"{peers} of {len(pairs)} pairs of GPUs reach each other's memory")
    one = None
    for wanted in fitting(bench, ["1b on 1", f"1b on {ranks}", f"4b on {ranks}"]):
        model, count = wanted.split()[0], int(wanted.split()[-1])
        micro_batch = micro_batch_of(bench, model, ranks=count)
        name = f"{model.upper()} on {count}, micro-batch {micro_batch}"
        try:
            with tempfile.TemporaryDirectory() as folder:
                job = Job.of(bench, folder, count, model, micro_batch)
                job.run(run_rank)
                found = job.read("result.json")
        except Exception as error:  # noqa: BLE001 - what one cannot do is a result
            bench.row(name, f"not possible: {type(error).__name__}: {line_of(error, -1)}")
            continue
        rate = found["tokens_per_second"]
        text = f"{rate:,.0f} tokens/s"
        text += f", MFU {found['mfu']:.1%}" if found["mfu"] is not None else ""
        text += f", {found['memory_gb']:.1f} GB a GPU" if bench.cuda else ""
        text += f", gathers {found['gather']:.0f} GB/s" if count > 1 else ""
        if count == 1:
            one = rate
        elif model == "1b" and one is not None:
            found["ratio"] = rate / one
            text += f"; **{rate / one:.2f} times** one, {rate / one / count:.0%} of {count}"
        bench.row(name, text, **found)


@contextlib.contextmanager
def rank_bench(rank: int, job: Job) -> Iterator[Bench]:
    """Join the other ranks of ``job``; yield what this one measures with."""
    store = dist.FileStore(str(job.folder / "store"), job.ranks)
    with joined(store, rank, job.ranks, cuda=job.cuda, timeout=_STUCK) as device:
        bench = Bench(
            job.folder / f"rank{rank}.json",
            device,
            quick=job.quick,
            length=job.length,
            until=job.until,
        )
        bench.layout = Layout(rank, job.ranks)
        yield bench
        dist.barrier()


def run_rank(rank: int, job: Job) -> None:
    """Run one of ``job.ranks`` processes."""
    with rank_bench(rank, job) as bench:
        sequences = _MICRO_BATCHES * job.micro_batch * job.ranks
        trainer = bench.trainer(job.model, job.micro_batch, sequences)
        bench.steps(trainer, 0, 2)
        bench.report_steps("steps", trainer, bench.steps(trainer, 2, 6))
        found = bench.rows[-1] | {"gather": _gather(bench, job)}
        if rank == 0:
            names = ("tokens_per_second", "mfu", "memory_gb", "seconds", "gather")
            (job.folder / "result.json").write_text(json.dumps({n: found[n] for n in names}))


def _gather(bench: Bench, job: Job) -> float:
    """Return the GB a second that reach each rank in a gather like that of a layer's weights."""
    count = (2**12 if job.quick else _GATHERED) // 2
    mine = torch.zeros(count, dtype=torch.bfloat16, device=bench.device)
    whole = torch.zeros(count * job.ranks, dtype=torch.bfloat16, device=bench.device)
    work = partial(dist.all_gather_into_tensor, whole, mine)
    work()
    return min(1e9, 2 * count * (job.ranks - 1) / 1e9 / bench.seconds(work))


# --- publications -------------------------------------------------------------------------------


def overhead(bench: Bench) -> None:
    """Inner steps with the uploads and checkpoints of a miner on all GPUs, against bare ones."""
    ranks = torch.cuda.device_count() if bench.cuda else _ON_CPU
    with tempfile.TemporaryDirectory() as folder:
        disk = shutil.disk_usage(folder).free
        # Its copy and checkpoint are 40 GB, and lie in host memory meanwhile.
        room = bench.total > 50e9 and disk > 50e9 and (host_bytes() or 0) > 90e9
        model = "1b" if room else "125m"
        micro_batch = 2 if bench.quick else 16
        job = Job.of(bench, folder, ranks, model, micro_batch)
        job.run(run_publications)
        for row in job.read("rank0.json")["rows"]:
            bench.row(f"{row.pop('name')}, {model.upper()} on {ranks}", row.pop("text"), **row)


def run_publications(rank: int, job: Job) -> None:
    """Run one of ``job.ranks`` processes; rank 0's rows are the part's."""
    with rank_bench(rank, job) as bench:
        # Of 512 sequences a step of a 1B on one GPU would take too long.
        sequences = 512 if job.model == "125m" or job.ranks >= 4 else 128
        sequences = 4 * job.ranks if job.quick else sequences
        trainer = bench.trainer(job.model, job.micro_batch, sequences)
        trainer.begin_epoch(0)
        bench.steps(trainer, 0, 2)
        bare = bench.report_steps(f"bare step of {sequences}", trainer, bench.steps(trainer, 2, 6))
        # The same on all ranks: they take the same steps while they write.
        bare = max(trainer.stream.all_gather(bare))
        step = bare * 512 / sequences
        checkpoint = _checkpoint(bench, trainer, job.keeper(trainer), bare)
        between = max(CHECKPOINT_STEPS * step, CHECKPOINT_SECONDS)
        lost = ", ".join(f"{name} {s:.3f} s" for name, s in checkpoint.items())
        share = sum(checkpoint.values()) / between
        bench.row(
            "checkpoint",
            f"**{share:.2%}** of the time with one each {between:.0f} s: training loses {lost}",
            ratio=share,
            **checkpoint,
        )


def _checkpoint(
    bench: Bench, trainer: Trainer, checkpointer: Checkpointer, bare: float
) -> dict[str, float]:
    checkpointer.save({}, Progress(0, 1, 1))
    # Rank 0 waits for the files of all.
    done = lambda: trainer.rank != 0 or checkpointer.saved() is not None
    during = _steps_during(bench, trainer, done, bare)
    checkpointer.wait()
    if checkpointer.last_error is not None:
        raise RuntimeError(checkpointer.last_error)
    every = trainer.stream.all_gather({"held": checkpointer.hold_seconds, "writing": during})
    return {name: max(each[name] for each in every) for name in every[0]}


def _steps_during(
    bench: Bench, trainer: Trainer, done: Callable[[], bool | None], bare: float
) -> float:
    """Take inner steps until all ranks are ``done``; return how much longer they took in all."""
    longer = 0.0
    for step in range(10, 60):
        batches = bench.batches(trainer, step)
        longer += bench.seconds(partial(bench.step, trainer, batches)) - bare
        if not trainer.stream.sum([not done()])[0]:
            break
    return max(0.0, longer)


# --- a GPU that is lost ---------------------------------------------------------------------------


def lost(bench: Bench) -> None:
    """Lose the last GPU in the middle of training, and continue with the others.

    A card that falls off the bus fails every later call of its process, as after an assertion in a
    kernel: that is what the last rank gets here, and on a CPU ``kill -9``. Of one GPU its process
    starts again, as after a driver's reset. The loss of the next inner step must be that of a run
    that lost nothing.
    """
    ranks = torch.cuda.device_count() if bench.cuda else _ON_CPU
    with tempfile.TemporaryDirectory() as folder:
        job = Job.of(bench, folder, ranks, "125m", 2)
        try:
            job.run(lose)
        except _ENDED as error:
            line = line_of(error, -1)
        else:
            raise RuntimeError("no rank ended, so nothing was lost")
        expected = job.read("expected.json")
        ended = time.time() - expected["at"]
        bench.row("all ranks have ended", f"after {ended:.1f} s: {line}", seconds=ended)
        (job.folder / "store").unlink()  # of the process group that has ended
        rest, began = max(1, ranks - 1), time.monotonic()
        replace(job, ranks=rest).run(go_on)
        seconds = time.monotonic() - began
        apart = abs(job.read("loss.json") - expected["loss"])
        text = f"on {rest} of {ranks} after **{seconds:.1f} s**, losses {apart:.5f} apart"
        bench.row("next inner step", text, seconds=seconds, apart=apart)
        if apart > 0.01:
            raise RuntimeError("training did not continue where it was")


def _small(bench: Bench, job: Job) -> Trainer:
    """Return a trainer whose step has the same sequences on any number of ranks."""
    sequences = _MICRO_BATCHES * job.micro_batch * 2
    return bench.trainer(job.model, job.micro_batch, sequences, weights=True)


def lose(rank: int, job: Job) -> None:
    """Run one of the ranks, of which the last is lost after a checkpoint."""
    with rank_bench(rank, job) as bench:
        trainer = _small(bench, job)
        bench.steps(trainer, 0, 2)
        checkpointer = job.keeper(trainer)
        checkpointer.save({}, Progress(0, 2, 2))
        checkpointer.wait()
        loss = _next_loss(bench, trainer)
        if rank == 0:
            found = json.dumps({"loss": loss, "at": time.time()})
            (job.folder / "expected.json").write_text(found)
        dist.barrier()
        if rank == job.ranks - 1:
            if not job.cuda:
                os.kill(os.getpid(), signal.SIGKILL)
            places = torch.full((1,), 1 << 30, device=bench.device)
            torch.zeros(1, device=bench.device).index_select(0, places).cpu()
        bench.steps(trainer, 3, 4)


def go_on(rank: int, job: Job) -> None:
    """Run one of the ranks that are left, from the checkpoint."""
    with rank_bench(rank, job) as bench:
        trainer = _small(bench, job)
        if job.keeper(trainer).restore() is None:
            raise RuntimeError("there is no checkpoint to continue from")
        loss = _next_loss(bench, trainer)
        if rank == 0:
            (job.folder / "loss.json").write_text(json.dumps(loss))


def _next_loss(bench: Bench, trainer: Trainer) -> float:
    return bench.step(trainer, bench.batches(trainer, 2)).loss
