"""The checks before training that need no other room: the doctor (``distributed_training.doctor``)
runs them all, the miner's start the quick ones."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from distributed_training.common.memory import DeviceMemory, HostMemory
from distributed_training.config import Config
from distributed_training.config.flags import ConfigError
from distributed_training.diagnostics.checks import Check, check_disk, check_port
from distributed_training.diagnostics.nvml import NvmlSampler, driver_version, visible_gpu_count
from distributed_training.diagnostics.report import accumulation_steps

# Gradients older than this are worth nothing to validators (protocol page, section 7).
MAXIMUM_UPLOAD_AGE = timedelta(seconds=4800)
# After a successful round the first upload of the new outer step must be there by then.
FIRST_UPLOAD_DUE = timedelta(seconds=4500)
# What an upload is taken to need before one was measured, as in the operator guide.
UPLOAD_TIME = timedelta(minutes=5)


class ProbeError(Exception):
    """A probe found what it checks broken. The text is the finding."""


def run_probe(name: str, probe: Callable[[], str], *, remedy: str) -> Check:
    """``probe`` returns its finding, or raises ProbeError, ConfigError or OSError."""
    try:
        return Check(name, "ok", probe())
    except (ProbeError, ConfigError, OSError) as error:
        finding = (
            " ".join(str(error).split()) or type(error).__name__
        )  # libraries' texts have lines
        return Check(name, "fail", finding, remedy)


def start_checks(config: Config, *, folder: Path, ranks: int) -> list[Check]:
    """What a look at the machine tells before anything is started: no torch, no network, < 1 s.

    The miner's launcher refuses to start on a failure unless ``--diagnostics.start_check false``.
    """
    needed = round(config.diagnostics.minimum_disk_gb * 1e9)
    ports = [
        check_port(name, config.get(name))
        for name in ("axon.port", "dht.port")
        if isinstance(config.get(name), int)
    ]
    gpus = check_gpus(wanted=ranks, device=config.miner.device)
    return [*gpus, check_disk(folder, needed_bytes=needed), *ports]


def check_python() -> Check:
    return Check("python", "ok", f"{platform.python_version()}, {os.cpu_count()} cores")


def check_torch(*, gpus: int | None = None) -> Check:
    """The torch build against what the driver shows. ``gpus``: visible by NVML, None to look."""
    seen = visible_gpu_count() if gpus is None else gpus
    try:
        import torch
    except ImportError as error:
        return Check("torch", "fail", f"torch cannot be imported ({error})", "make setup")
    build = f"torch {torch.__version__}"
    build += f", CUDA {torch.version.cuda}" if torch.version.cuda else ", CPU build"
    if seen and not torch.version.cuda:
        return Check(
            "torch",
            "fail",
            f"{build}, but the driver shows {seen} GPU(s), which would stay idle",
            "rm -rf .venv && DT_TORCH=cuda make setup",
        )
    if seen and not torch.cuda.is_available():
        return Check(
            "torch",
            "fail",
            f"{build} cannot use the {seen} GPU(s) of driver {driver_version() or '?'}",
            "upgrade the NVIDIA driver (nvidia-smi shows its CUDA version), or install a torch "
            "built for it",
        )
    return Check("torch", "ok", build)


def check_gpus(*, wanted: int, device: str) -> list[Check]:
    """``wanted``: ranks. ``device``: ``--neuron.device``."""
    count = visible_gpu_count()
    if device == "cpu":
        return [Check("gpu", "ok", "not used: --neuron.device cpu")]
    if count == 0:
        finding = "no NVIDIA GPU is visible; the model would run on CPU, which is very slow"
        if device == "cuda":
            return [
                Check(
                    "gpu",
                    "fail",
                    finding,
                    "check nvidia-smi and CUDA_VISIBLE_DEVICES, or give --neuron.device cpu",
                )
            ]
        remedy = "fine for --preset local; otherwise check nvidia-smi and CUDA_VISIBLE_DEVICES"
        return [Check("gpu", "warn", finding, remedy)]
    if wanted > count:
        return [
            Check(
                "gpu",
                "fail",
                f"{wanted} ranks on {count} visible GPU(s), so ranks would share one",
                f"give --nproc_per_node {count}, or free CUDA_VISIBLE_DEVICES",
            )
        ]
    return [_check_gpu(index) for index in range(wanted)]


def _check_gpu(index: int) -> Check:
    name = f"gpu {index}"
    sampler = NvmlSampler.open(index)
    sample = sampler.sample() if sampler else None
    if sampler:
        sampler.close()
    if sample is None:
        return Check(name, "fail", "the driver does not answer for it", "nvidia-smi; then reboot")
    used, total = sample.memory_used_gb, sample.memory_total_gb
    finding = f"{sample.name}, {used:.1f} of {total:.1f} GB in use"
    if used > 0.1 * total:
        return Check(name, "warn", finding, "another program holds memory: nvidia-smi shows which")
    return Check(name, "ok", finding)


def check_memory(
    device: DeviceMemory, host: HostMemory, *, device_bytes: int | None, host_bytes: int | None
) -> list[Check]:
    """The estimates against what is there; ``device_bytes`` None without a GPU."""
    checks = []
    if device_bytes is not None:
        checks.append(
            _fits(
                "gpu memory",
                device.total,
                device_bytes,
                "give --neuron.local_batch_size_train 1, --neuron.activation_checkpointing full, "
                "--neuron.offload_optimizer on, or more GPUs",
            )
        )
    if host_bytes is not None:
        remedy = "use a machine with more memory, or --neuron.offload_optimizer off if it is on"
        check = _fits("host memory", host.needed, host_bytes, remedy)
        if check.status == "ok" and host.peak > host_bytes:
            finding = (
                f"{check.finding}, but {host.peak / 1e9:.1f} GB when a snapshot, a checkpoint and "
                "a round come together"
            )
            check = Check(check.name, "warn", finding, remedy)
        checks.append(check)
    return checks


def _fits(name: str, needed: int, there: int, remedy: str) -> Check:
    finding = f"about {needed / 1e9:.1f} of {there / 1e9:.1f} GB needed"
    if needed > 1.15 * there:  # the estimate is not exact enough to refuse a near miss
        return Check(name, "fail", f"{finding}, so training would run out of memory", remedy)
    if needed > 0.9 * there:
        return Check(name, "warn", f"{finding}: tight", remedy)
    return Check(name, "ok", finding)


def check_batch(*, micro_batch: int | None, effective: int, world_size: int) -> Check:
    """``micro_batch`` None: it will be measured at start (``auto``)."""
    name = "batch"
    if micro_batch is None:
        return Check(name, "ok", f"micro-batch auto, {effective} sequences per inner step")
    steps = accumulation_steps(effective=effective, micro_batch=micro_batch, world_size=world_size)
    actual = steps * micro_batch * world_size
    finding = f"{actual} sequences = {steps} micro-batches of {micro_batch} on {world_size} rank(s)"
    if micro_batch > effective:
        return Check(
            name,
            "fail",
            f"the micro-batch {micro_batch} is larger than the effective batch {effective}",
            f"give --neuron.local_batch_size_train {effective} or less",
        )
    if actual != effective:
        return Check(
            name,
            "warn",
            f"{finding}: rounded up from {effective}",
            f"give --neuron.local_batch_size_train_effective {actual}",
        )
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
    checks = [
        Check("step time", "warn", text, faster)
        if step > slow_step
        else Check("step time", "ok", text)
    ]
    text = f"step {estimate.first_upload_step}, about {_minutes(regular)} after a round"
    if regular + UPLOAD_TIME > FIRST_UPLOAD_DUE:
        minimum = max(1, estimate.minimum_inner_step)
        text = f"step {minimum}, there about {_minutes(estimate.earliest_upload)} after a round"
    if estimate.earliest_upload > FIRST_UPLOAD_DUE:
        checks.append(
            Check(
                "first upload",
                "fail",
                f"{text}, but validators want it within {_minutes(FIRST_UPLOAD_DUE)}",
                f"{faster}, or lower --neuron.minimum_valid_inner_step",
            )
        )
    else:
        checks.append(Check("first upload", "ok", text))
    text = f"one every {_minutes(between)}"
    if between > 0.8 * MAXIMUM_UPLOAD_AGE:
        limit = _minutes(MAXIMUM_UPLOAD_AGE)
        steps = max(1, int(0.5 * MAXIMUM_UPLOAD_AGE.total_seconds() / estimate.step_seconds))
        checks.append(
            Check(
                "upload age",
                "fail" if between > MAXIMUM_UPLOAD_AGE else "warn",
                f"{text}, but validators give 0 from {limit} on, upload time included",
                f"give --neuron.upload_steps {steps} or less",
            )
        )
    else:
        checks.append(Check("upload age", "ok", text))
    return checks


def _minutes(time: timedelta) -> str:
    seconds = time.total_seconds()
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
