"""What a step time means for uploads, against the limits of validators."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from distributed_training.diagnostics.checks import Check
from distributed_training.diagnostics.report import accumulation_steps

# Gradients older than this are worth nothing to validators (protocol page, section 7).
MAXIMUM_UPLOAD_AGE = timedelta(seconds=4800)
# After a successful round the first upload of the new outer step must be there by then.
FIRST_UPLOAD_DUE = timedelta(seconds=4500)
# What an upload is taken to need before one was measured, as in the operator guide.
UPLOAD_TIME = timedelta(minutes=5)


def check_batch(*, micro_batch: int | None, effective: int, world_size: int) -> Check:
    """``micro_batch`` None: it will be measured at start (``auto``)."""
    name = "batch"
    if micro_batch is None:
        return Check(name, "ok", f"micro-batch auto, {effective} sequences per inner step")
    steps = accumulation_steps(effective=effective, micro_batch=micro_batch, world_size=world_size)
    actual = steps * micro_batch * world_size
    finding = f"{actual} sequences = {steps} micro-batches of {micro_batch} on {world_size} rank(s)"
    if micro_batch > effective:
        finding = f"the micro-batch {micro_batch} is larger than the effective batch {effective}"
        remedy = f"give --neuron.local_batch_size_train {effective} or less"
        return Check(name, "fail", finding, remedy)
    if actual != effective:
        remedy = f"give --neuron.local_batch_size_train_effective {actual}"
        return Check(name, "warn", f"{finding}: rounded up from {effective}", remedy)
    return Check(name, "ok", finding)


@dataclass(frozen=True)
class StepEstimate:
    """From a short measurement: what an inner step and the first valid upload will take."""

    micro_batch_seconds: float
    micro_batches: int  # per rank and inner step
    upload_steps: int
    minimum_inner_step: int

    @property
    def step_seconds(self) -> float:
        return self.micro_batch_seconds * self.micro_batches

    @property
    def first_upload_step(self) -> int:
        """The first multiple of ``upload_steps`` that the gate lets through. Where that is too late
        for the round, the miner takes the first step the gate lets through."""
        return -(-max(1, self.minimum_inner_step) // self.upload_steps) * self.upload_steps

    @property
    def first_upload_seconds(self) -> float:
        """From the start of an outer step to the first valid upload's begin."""
        return self.first_upload_step * self.step_seconds

    @property
    def earliest_upload(self) -> timedelta:
        """From the start of an outer step to the end of the first upload the gate allows."""
        steps = max(1, self.minimum_inner_step)
        return timedelta(seconds=steps * self.step_seconds) + UPLOAD_TIME


def check_speed(estimate: StepEstimate, *, slow_step: timedelta) -> list[Check]:
    """The step time against the warning threshold, the uploads against the validators' limits."""
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
    if between > 0.8 * MAXIMUM_UPLOAD_AGE:
        limit = _minutes(MAXIMUM_UPLOAD_AGE)
        text += f", but validators give 0 from {limit} on, upload time included"
        steps = max(1, int(0.5 * MAXIMUM_UPLOAD_AGE.total_seconds() / estimate.step_seconds))
        remedy = f"give --neuron.upload_steps {steps} or less"
        age = Check("upload age", "fail" if between > MAXIMUM_UPLOAD_AGE else "warn", text, remedy)
    return [time, first, age]


def _minutes(time: timedelta) -> str:
    seconds = time.total_seconds()
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
