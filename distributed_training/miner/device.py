"""Choose the device of a rank, and report its facts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from distributed_training.config import Config, ConfigError
from distributed_training.health.gpus import (
    cuda_state,
    describe_gpu,
    gpu_report_lines,
    gpu_utilization,
    keep_driver_open,
    sample_gpu,
    visible_gpu_count,
)
from distributed_training.node.start import NetworkFailure

log = logging.getLogger(__name__)


def rank_device(wanted: str, local_rank: int, *, remembered: int = 0) -> torch.device:
    """Return the device of ``--neuron.device``; a GPU becomes the process's current one.

    ``remembered``: GPUs that earlier ranks of this run folder ran on. Raises ConfigError for cuda
    without a GPU. Raises NetworkFailure where there are fewer than ranks, and for auto if there are
    GPUs, or were before: just after a reboot or a driver's upgrade that passes, and a rank that is
    once on the CPU would stay there, and take days for a step.
    """
    if wanted != "cpu" and torch.cuda.is_available():
        if local_rank >= (count := torch.cuda.device_count()):
            raise NetworkFailure(
                f"rank {local_rank} has no GPU, since torch sees {count}: one is lost or hidden "
                "(nvidia-smi -L, dmesg | grep Xid). Reboot, or give --nproc_per_node "
                f"{count}"
            )
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
        raise NetworkFailure(
            f"torch {torch.__version__} cannot use the {gpus} GPUs this miner has, so nothing is "
            "trained until it can, rather than on the CPU: nvidia-smi and python "
            "scripts/diagnose.py say why; --neuron.device cpu takes the CPU"
        )
    return torch.device("cpu")


def cuda_failure(error: BaseException | None, gpu: int) -> str | None:
    """Return what is known of GPU ``gpu`` that failed, and what follows; None for another error.

    ``error`` ended a rank. No further call of its process reaches the GPU after such an error, so
    closing what was open may have raised another one behind it.
    """
    while error is not None:
        first = (str(error).strip().splitlines() or [""])[0]
        lost = isinstance(error, torch.AcceleratorError) or "CUDA error" in first
        if lost and not isinstance(error, torch.OutOfMemoryError):
            break
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    card = describe_gpu(gpu) or "which the driver does not show any more"
    return (
        f"GPU {gpu} ({card}) failed: {first:.200}. All ranks start again from the last "
        "checkpoint, so the inner steps since are repeated. If it comes back: dmesg | grep Xid "
        "says why; leave the card out with CUDA_VISIBLE_DEVICES"
    )


def expects_gpu(config: Config, device: torch.device) -> bool:
    """Return whether a GPU is used, or is there to be used: steps without its memory are wrong."""
    return device.type == "cuda" or (config.miner.device != "cpu" and visible_gpu_count() > 0)


def utilization_of(device: torch.device) -> Callable[[], float | None] | None:
    """Return what measures the device's utilization in percent; None if nothing does."""
    if device.type != "cuda":
        return None
    if sample_gpu(device.index) is not None:
        keep_driver_open()
        return partial(gpu_utilization, device.index)
    log.warning(
        "GPU utilization is not reported: NVML is not usable (`python scripts/diagnose.py`)"
    )
    return None


def report_device(
    config: Config, device: torch.device, *, micro_batch: int, world_size: int
) -> None:
    """Log the GPU block, once the model is there; problems as warnings."""
    for line in gpu_report_lines(
        cuda=cuda_state(device.index),
        model_device=str(device),
        micro_batch=micro_batch,
        effective=config.training.local_batch_size_train_effective,
        world_size=world_size,
        expect_gpu=config.miner.device != "cpu",
    ):
        log.log(logging.WARNING if line.startswith("❌") else logging.INFO, "%s", line)
