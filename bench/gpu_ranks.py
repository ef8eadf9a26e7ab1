"""The part of bench/gpu.py that takes several GPUs: FSDP over all that are visible, against one.

Each rank is a process, as a miner's is. A GPU has as many micro-batches of the same size whether it
is one or one of eight, so what is lost is what the links cost. On a CPU two ranks train a toy over
gloo.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu_parts import Bench, micro_batch_of
from distributed_training.training.collectives import Layout

_ON_CPU = 2  # ranks
_MICRO_BATCHES = 4  # of a step, on each GPU
_GATHERED = 2**28  # bytes that each rank gives to a gather that is timed
_STUCK = timedelta(minutes=2)


@dataclass(frozen=True)
class Job:
    """One measurement; picklable."""

    folder: Path
    ranks: int
    model: str
    micro_batch: int
    length: int
    quick: bool
    cuda: bool


def several(bench: Bench) -> None:
    """All GPUs against one with the 1B, then the 4B on all."""
    ranks = torch.cuda.device_count() if bench.cuda else _ON_CPU
    if ranks < 2:
        bench.row("GPUs", "one is visible: nothing to compare it with")
        return
    if bench.cuda:
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        peers = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        bench.row("links", f"{peers} of {len(pairs)} pairs of GPUs reach each other's memory")
    longest, one = 0.0, None
    jobs = [("1b", 1), ("1b", ranks), ("4b", ranks)]
    for number, (model, count) in enumerate(jobs):
        if bench.left() < 1.2 * longest:
            rest = ", ".join(f"{m} on {c}" for m, c in jobs[number:])
            bench.row("no time for", rest)
            break
        began = time.monotonic()
        micro_batch = micro_batch_of(bench, model, ranks=count)
        name = f"{model.upper()} on {count}, micro-batch {micro_batch}"
        try:
            found = measure(bench, model, count, micro_batch)
        except Exception as error:  # noqa: BLE001 - what one cannot do is a result
            line = (str(error).strip().splitlines() or [""])[-1][:160]
            bench.row(name, f"not possible: {type(error).__name__}: {line}")
            continue
        longest = max(longest, time.monotonic() - began)
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


def measure(bench: Bench, model: str, ranks: int, micro_batch: int) -> dict[str, Any]:
    """Return figures of a step on so many GPUs. Raises whatever a rank raises."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), ranks, model, micro_batch, bench.length, bench.quick, bench.cuda)
        torch.multiprocessing.spawn(run_rank, args=(job,), nprocs=ranks)
        result: dict[str, Any] = json.loads((job.folder / "result.json").read_text())
        return result


def run_rank(rank: int, job: Job) -> None:
    """One of ``job.ranks`` processes."""
    device = torch.device("cuda", rank) if job.cuda else torch.device("cpu")
    if job.cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.ranks))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if job.cuda else "gloo",
        store=dist.FileStore(str(job.folder / "store"), job.ranks),
        rank=rank,
        world_size=job.ranks,
        timeout=_STUCK,
    )
    bench = Bench(job.folder / f"rank{rank}.json", device, quick=job.quick, length=job.length)
    bench.layout = Layout(rank, job.ranks)
    trainer = bench.trainer(
        job.model,
        local_batch_size_train=job.micro_batch,
        local_batch_size_train_effective=_MICRO_BATCHES * job.micro_batch * job.ranks,
    )
    bench.steps(trainer, 0, 2)
    bench.report_steps("steps", trainer, bench.steps(trainer, 2, 6))
    found = bench.rows[-1] | {"gather": _gather(bench, job)}
    if rank == 0:
        names = ("tokens_per_second", "mfu", "memory_gb", "seconds", "gather")
        (job.folder / "result.json").write_text(json.dumps({n: found[n] for n in names}))
    dist.barrier()
    dist.destroy_process_group()


def _gather(bench: Bench, job: Job) -> float:
    """Return the GB a second that reach each rank in a gather like that of a layer's weights."""
    count = (2**12 if job.quick else _GATHERED) // 2
    mine = torch.zeros(count, dtype=torch.bfloat16, device=bench.device)
    whole = torch.zeros(count * job.ranks, dtype=torch.bfloat16, device=bench.device)
    work = partial(dist.all_gather_into_tensor, whole, mine)
    work()
    return min(1e9, 2 * count * (job.ranks - 1) / 1e9 / bench.seconds(work))
