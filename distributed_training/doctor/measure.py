"""The step time, and what it means for uploads, against the limits of validators.

Ranks train random tokens on random weights for some seconds. :func:`measure` starts this module
once for each rank; DT_MEASURE holds model and seconds as JSON.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from distributed_training.common.ports import free_ports
from distributed_training.common.processes import die_with_parent, without_secrets
from distributed_training.config import OPERATORS_FILE, ConfigError, exit_with, load_config
from distributed_training.health.machine import Examination
from distributed_training.miner.rank_group import rank_environment_defaults, rank_variables
from distributed_training.miner.run_folder import rank_environment
from distributed_training.protocol.schedule import UPLOAD_AGE_LIMIT
from distributed_training.protocol.types import Check

# Loading torch and the model on every rank, before the measured time begins.
_START = timedelta(minutes=3)
WARM_UP_STEPS = 2  # micro-batches: the first ones compile kernels and fill caches


# After a successful round the first upload of the new outer step must be there by then.
FIRST_UPLOAD_DUE = timedelta(seconds=4500)
# What an upload is taken to need before one was measured, as in the operator guide.
UPLOAD_TIME = timedelta(minutes=5)
#: With one of these failed, no training can be measured.
_DECISIVE = ("torch", "gpu", "gpu memory", "host memory", "batch")


def check_step_time(
    examination: Examination, flags: Sequence[str], *, show: Callable[[str], None]
) -> list[Check]:
    """Measure a step and compare it with what validators want of uploads."""
    config = examination.config
    settings, seconds = config.diagnostics, config.diagnostics.measure.total_seconds()
    if seconds <= 0:
        return [Check("step time", "skip", "not measured: --diagnostics.measure 0")]
    if obstacle := examination.failed(*_DECISIVE):
        return [Check("step time", "skip", f"not measured: {obstacle} failed above")]
    show(f"measuring for {seconds:.0f} s, after the model was built")
    model = examination.model[0] if examination.model else {}
    try:
        measured = measure(flags, ranks=examination.ranks, model=model, seconds=seconds)
    except (RuntimeError, OSError) as error:
        remedy = "fix what failed above; --diagnostics.measure 0 leaves the measurement out"
        return [Check("step time", "fail", str(error), remedy)]
    estimate = StepEstimate(
        micro_batch_seconds=measured["micro_batch_seconds"],
        micro_batches=measured["micro_batches"],
        upload_steps=config.store.upload_steps,
        minimum_inner_step=config.store.minimum_valid_inner_step,
    )
    return check_speed(estimate, slow_step=settings.slow_step)


@dataclass(frozen=True)
class StepEstimate:
    """The expected times of an inner step and the first valid upload, from a short measurement."""

    micro_batch_seconds: float
    micro_batches: int  # per rank and inner step
    upload_steps: int
    minimum_inner_step: int

    @property
    def step_seconds(self) -> float:
        return self.micro_batch_seconds * self.micro_batches

    @property
    def first_upload_step(self) -> int:
        """The first multiple of ``upload_steps`` that the gate lets through.

        Where that is too late for the round, the miner takes the first step the gate lets through.
        """
        return -(-max(1, self.minimum_inner_step) // self.upload_steps) * self.upload_steps

    @property
    def first_upload_seconds(self) -> float:
        """Seconds from the start of an outer step to the first valid upload's begin."""
        return self.first_upload_step * self.step_seconds

    @property
    def earliest_upload(self) -> timedelta:
        """The time from an outer step's start to the end of the first upload the gate allows."""
        steps = max(1, self.minimum_inner_step)
        return timedelta(seconds=steps * self.step_seconds) + UPLOAD_TIME


def check_speed(estimate: StepEstimate, *, slow_step: timedelta) -> list[Check]:
    """Compare the step time with the warning threshold, the uploads with the validators' limits."""
    step = timedelta(seconds=estimate.step_seconds)
    regular = timedelta(seconds=estimate.first_upload_seconds)
    between = timedelta(seconds=estimate.step_seconds * estimate.upload_steps)
    faster = "use a GPU, or lower --neuron.local_batch_size_train_effective"
    text = f"about {step.total_seconds():.1f} s per inner step ({estimate.micro_batches} x "
    text += f"{1000 * estimate.micro_batch_seconds:.0f} ms)"
    slow = step > slow_step
    time = Check("step time", "warn" if slow else "ok", text, faster if slow else "")
    text = f"step {estimate.first_upload_step}, about {_minutes(regular)} after a round"
    if regular + UPLOAD_TIME > FIRST_UPLOAD_DUE:
        minimum = max(1, estimate.minimum_inner_step)
        text = f"step {minimum}, there about {_minutes(estimate.earliest_upload)} after a round"
    first = Check("first upload", "ok", text)
    if estimate.earliest_upload > FIRST_UPLOAD_DUE:
        text += f", but validators want it within {_minutes(FIRST_UPLOAD_DUE)}"
        remedy = f"{faster}, or lower --neuron.minimum_valid_inner_step"
        first = Check("first upload", "fail", text, remedy)
    text = f"one every {_minutes(between)}"
    age = Check("upload age", "ok", text)
    if between > 0.8 * UPLOAD_AGE_LIMIT:
        limit = _minutes(UPLOAD_AGE_LIMIT)
        text += f", but validators give 0 from {limit} on, upload time included"
        steps = max(1, int(0.5 * UPLOAD_AGE_LIMIT.total_seconds() / estimate.step_seconds))
        remedy = f"give --neuron.upload_steps {steps} or less"
        age = Check("upload age", "fail" if between > UPLOAD_AGE_LIMIT else "warn", text, remedy)
    return [time, first, age]


def _minutes(time: timedelta) -> str:
    seconds = time.total_seconds()
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def measure(
    flags: Sequence[str], *, ranks: int, model: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Return ``micro_batch_seconds`` and ``micro_batches``.

    Raises RuntimeError with the ranks' last line.
    """
    # Random tokens need no key, and what the ranks print is shown.
    environment = without_secrets() | rank_environment_defaults(ranks=ranks)
    environment["DT_MEASURE"] = json.dumps({"model": model, "seconds": seconds})
    limit = _START.total_seconds() + 3 * seconds
    port = free_ports(1)[0]
    # A file: ranks that print more than a pipe holds would stand still.
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
            # The stack unwinds in reverse: killed first, then waited for.
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + limit
        # A rank that failed leaves the others waiting for it.
        while None in [p.poll() for p in processes] and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no inner step in {limit:.0f} s")
            time.sleep(0.1)
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith('{"micro_batch_seconds"'):
            found: dict[str, Any] = json.loads(line)
            return found
    errors = [line for line in lines if "Error" in line or line.startswith("error:")] or lines
    raise RuntimeError(f"training failed: {errors[-1].strip() if errors else 'no output'}")


def main(argv: list[str]) -> int:
    """Run as one rank; rank 0 prints the speed."""
    die_with_parent(signal.SIGKILL)
    if "DT_MEASURE" not in os.environ:
        raise ConfigError("DT_MEASURE is not set, so nothing is measured: run the doctor")
    order = json.loads(os.environ["DT_MEASURE"])
    config = load_config("miner", argv, file=OPERATORS_FILE, check=False)
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
