"""The step time, by training random tokens on random weights for some seconds on all ranks.

:func:`measure` starts this module once for each rank; DT_MEASURE holds model and seconds as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from distributed_training.common.ports import free_ports
from distributed_training.common.processes import die_with_parent, without_secrets
from distributed_training.config import ConfigError, exit_with, load_config
from distributed_training.diagnostics.checks import ProbeError
from distributed_training.miner.rank_group import rank_environment_defaults, rank_variables
from distributed_training.miner.run_folder import rank_environment

# Loading torch and the model on every rank, before the measured time begins.
_START = timedelta(minutes=3)
WARM_UP_STEPS = 2  # micro-batches: the first ones compile kernels and fill caches


def measure(
    flags: Sequence[str], *, ranks: int, model: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """``micro_batch_seconds`` and ``micro_batches``. ProbeError: with the last line it said."""
    environment = without_secrets() | rank_environment_defaults(ranks=ranks)
    environment["DT_MEASURE"] = json.dumps({"model": model, "seconds": seconds})
    limit = _START.total_seconds() + 3 * seconds
    port = free_ports(1)[0]
    with tempfile.TemporaryFile("w+") as output, contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            process = subprocess.Popen(
                [sys.executable, "-m", "distributed_training.doctor.measure", *flags],
                env=environment | rank_variables(rank, world_size=ranks, port=port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + limit
        # A rank that failed leaves the others waiting for it.
        while None in [p.poll() for p in processes] and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                raise ProbeError(f"no inner step in {limit:.0f} s")
            time.sleep(0.1)
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith('{"micro_batch_seconds"'):
            found: dict[str, Any] = json.loads(line)
            return found
    errors = [line for line in lines if "Error" in line or line.startswith("error:")] or lines
    raise ProbeError(f"training failed: {errors[-1].strip() if errors else 'no output'}")


def main(argv: list[str]) -> int:
    """Be one rank; rank 0 prints the speed."""
    die_with_parent(signal.SIGKILL)
    if "DT_MEASURE" not in os.environ:
        raise ConfigError("DT_MEASURE is not set, so nothing is measured: run the doctor")
    order = json.loads(os.environ["DT_MEASURE"])
    config = load_config("miner", argv, check=False)
    me = rank_environment()

    import torch
    import torch.distributed as dist

    from distributed_training.training.collectives import Layout
    from distributed_training.training.trainer import Trainer

    cuda = config.miner.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", me.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    trainer = Trainer(
        settings=config.training,
        model_config=order["model"],
        device=device,
        layout=Layout(me.rank, me.world_size),
    )
    trainer.load_weights(None)
    trainer.begin_epoch(0)
    shape = (trainer.micro_batch_size, config.training.sequence_length)
    batch = torch.randint(0, int(order["model"]["vocab_size"]), shape, dtype=torch.int64)

    def run() -> None:
        trainer.add_micro_batch(batch, data_wait_seconds=0.0)
        if cuda:
            torch.cuda.synchronize()

    for _ in range(WARM_UP_STEPS):
        run()
    done, start, ours = 0, time.perf_counter(), torch.zeros(1)
    while not ours.item():
        run()
        done += 1
        ours[0] = float(time.perf_counter() - start > order["seconds"])
        dist.broadcast(ours, 0, group=dist.group.WORLD)  # all ranks stop at the same micro-batch
    seconds = (time.perf_counter() - start) / done
    if me.rank == 0:
        found = {"micro_batch_seconds": seconds, "micro_batches": trainer.micro_batches_per_step}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except ConfigError as error:
        status = exit_with(error)
    sys.exit(status)
