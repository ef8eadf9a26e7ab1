"""What a rank trains on, and what it says about it at start."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from distributed_training.config import Config, ConfigError
from distributed_training.diagnostics.nvml import NvmlSampler, visible_gpu_count
from distributed_training.diagnostics.report import cuda_state, gpu_report_lines, step_warnings
from distributed_training.protocol.types import StepReport

log = logging.getLogger(__name__)


class DeviceAway(RuntimeError):
    """There are GPUs, but torch cannot use them now. Exit status 1: just after a reboot or a
    driver's upgrade that passes."""


def rank_device(wanted: str, local_rank: int, *, remembered: int = 0) -> torch.device:
    """Of ``--neuron.device``; a GPU becomes the process's current one. ``remembered``: GPUs that
    earlier ranks of this run folder ran on.

    Raises ConfigError for cuda without a GPU. Raises DeviceAway for auto if there are GPUs, or were
    before: once on the CPU, a rank would stay there, and take days for a step.
    """
    if wanted != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    if wanted == "cuda":
        raise ConfigError(
            f"--neuron.device cuda, but torch {torch.__version__} sees no GPU, so nothing would be "
            "trained in time: python scripts/diagnose.py says why; --neuron.device cpu takes the "
            "CPU"
        )
    if wanted == "auto" and (gpus := visible_gpu_count() or remembered):
        raise DeviceAway(
            f"torch {torch.__version__} cannot use the {gpus} GPUs this miner has, so nothing is "
            "trained until it can, rather than on the CPU: nvidia-smi and python "
            "scripts/diagnose.py say why; --neuron.device cpu takes the CPU"
        )
    return torch.device("cpu")


def warnings_of(config: Config, device: torch.device) -> Callable[[StepReport], list[str]]:
    """What tells the warnings of an inner step. One that used no GPU memory is wrong where a GPU
    is used, or is there to be used."""

    def expects_gpu() -> bool:
        return device.type == "cuda" or (config.miner.device != "cpu" and visible_gpu_count() > 0)

    return lambda report: step_warnings(report, config.diagnostics, expect_gpu=expects_gpu())


def utilization_of(device: torch.device) -> Callable[[], float | None]:
    """What tells the device's utilization in percent; None where nobody measures it."""
    sampler = NvmlSampler.open(device.index) if device.type == "cuda" else None
    if sampler is not None:
        return sampler.utilization
    if device.type == "cuda":
        log.warning(
            "GPU utilization is not reported: NVML is not usable (`python scripts/diagnose.py`)"
        )
    return lambda: None


def report_device(
    config: Config, device: torch.device, *, micro_batch: int, world_size: int
) -> None:
    """The GPU block, once the model is there; what is wrong as a warning."""
    for line in gpu_report_lines(
        cuda=cuda_state(device.index),
        model_device=str(device),
        micro_batch=micro_batch,
        effective=config.training.local_batch_size_train_effective,
        world_size=world_size,
        expect_gpu=config.miner.device != "cpu",
    ):
        log.log(logging.WARNING if line.startswith("❌") else logging.INFO, "%s", line)
