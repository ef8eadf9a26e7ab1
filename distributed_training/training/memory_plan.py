"""Plan a step for this hardware: the precision, the batch arithmetic and what stays in memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distributed_training.common.memory import (
    MARGIN,
    MOST_WORKERS,
    Arrangement,
    Checkpointing,
    ModelShape,
    device_memory,
    host_memory,
    list_ways,
    loss_chunk,
)
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError

from .inner_optimizer import moments_of

# Below this many parameters the whole model is one FSDP group. Each group adds a collective, which
# over gloo takes about as long as moving 10 MB. With 1.7 M parameters on two CPU ranks, a step took
# 0.81 s with one group and 1.04 s with one group per block.
ROOT_ONLY_BELOW = 50_000_000


def compute_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype of the computation and a log line with the reason."""
    if wanted == "fp32":
        return torch.float32, "Precision: float32 as requested"
    if device.type == "cuda":
        # Emulated bf16 is slower than float32.
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware, flags = "this CPU", set[str]()
        with contextlib.suppress(OSError, IndexError):
            text = Path("/proc/cpuinfo").read_text()
            flags = set(text.split("flags", 1)[1].split("\n", 1)[0].split())
        supported = bool({"avx512_bf16", "amx_bf16"} & flags)
    if supported:
        return torch.bfloat16, f"Precision: bf16 computation, float32 weights ({hardware})"
    return torch.float32, f"Precision: float32, since {hardware} has no bf16 arithmetic"


@dataclass(frozen=True)
class BatchPlan:
    """``effective == micro_batch * micro_batches * world_size`` sequences per inner step."""

    micro_batch: int
    micro_batches: int
    effective: int
    note: str = ""


def plan_batch(*, micro_batch: int, effective: int, world_size: int) -> BatchPlan:
    """Round the effective batch up to a multiple of micro-batch size times ranks.

    Raises ConfigError if it is smaller than one micro-batch.
    """
    if effective < 1 or micro_batch > effective:
        raise ConfigError(
            f"--neuron.local_batch_size_train {micro_batch} is larger than "
            f"--neuron.local_batch_size_train_effective {effective}, so no step could be made: "
            "lower the first or raise the second"
        )
    # Each rank runs the same number of micro-batches; otherwise their collectives would not match.
    micro_batches = math.ceil(effective / (micro_batch * world_size))
    real = micro_batches * micro_batch * world_size
    note = ""
    if real != effective:
        note = (
            f"Effective batch rounded up from {effective} to {real}: "
            f"{micro_batch} per micro-batch x {world_size} ranks x {micro_batches} micro-batches"
        )
    return BatchPlan(micro_batch, micro_batches, real, note)


@dataclass(frozen=True)
class MemoryPlan:
    """The arrangement that :func:`plan_memory` has chosen, and the memory that it takes.

    ``bytes_needed`` is an estimate for one rank's device. ``rung``: the place on the ladder of
    arrangements, where 0 is the fastest. ``is_last``: whether no arrangement takes less memory.
    """

    per_block: bool
    bytes_needed: int
    shape: ModelShape
    way: Arrangement
    note: str
    rung: int
    is_last: bool

    def bytes_with(self, micro_batch: int) -> int:
        """Estimate the bytes needed on one rank's device with micro-batches of another size."""
        return device_memory(self.shape, replace(self.way, micro_batch=micro_batch))


def plan_memory(
    settings: TrainingSettings,
    *,
    model_config: Mapping[str, Any],
    parameters: int | None = None,
    part: int | None = None,
    itemsize: int = 4,
    world_size: int,
    micro_batch: int,
    device_bytes: int | None,
    host_bytes: int | None = None,
    rung: int = 0,
) -> MemoryPlan:
    """Return the fastest arrangement that fits ``device_bytes`` (None: no limit).

    Keeping gathered weights and whole gradients through a step takes memory, but saves a gather and
    a reduction per micro-batch. Recomputing activations takes up to a third of a step. Keeping the
    optimizer's state in host memory takes one trip over the bus per step; it is the last resort if
    ``host_bytes`` (None: enough) cannot hold the state. Whatever the operator has fixed by flags
    stays fixed. ``parameters``, ``part``, ``itemsize``: as in :class:`~.memory.ModelShape`.
    ``rung``: how many arrangements to skip that should have fitted but did not; the following ones
    take less memory. Raises ConfigError for a model whose ``config.json`` does not state its size
    the way a Llama's does.
    """
    try:
        shape = ModelShape.from_config(model_config, parameters, part=part, itemsize=itemsize)
    except ValueError as error:
        raise ConfigError(
            f"config.json: {error}, so the model's size is unknown and it cannot be trained "
            "here: use a Llama-like model"
        ) from None
    per_block = settings.wrap == "block" or (
        settings.wrap == "auto" and shape.parameters >= ROOT_ONLY_BELOW
    )
    # Try "on" before "off" here, since keeping the parameters saves a gather per micro-batch.
    keeps = _choices(settings.keep_unsharded, "on")[::-1]
    if not per_block:
        keeps = keeps[:1]  # a single group stays gathered in forward and backward anyway
    how = Arrangement(
        world_size=world_size,
        micro_batch=micro_batch,
        sequence_length=settings.sequence_length,
        cuda=device_bytes is not None,
        compiled=settings.compile != "off",
        loss_chunk=loss_chunk(device_bytes),
        moments=shape.moments(*moments_of(settings)),
        workers=MOST_WORKERS * world_size,
    )
    recompute = settings.activation_checkpointing
    kinds: tuple[Checkpointing, ...] = (
        ("none", "budget", "full") if recompute == "auto" else (recompute,)
    )
    every = _choices(settings.gradient_sync, "every")
    offload = _choices(settings.offload_optimizer, "on")
    ways = [
        replace(way, checkpointing=kind)
        for way in list_ways(how, keep=keeps, every=every, offload=offload)
        for kind in kinds
    ]
    offloaded = replace(how, offload_optimizer=True, cuda=True)
    if host_bytes is not None and host_memory(shape, offloaded) > host_bytes:
        ways.sort(key=lambda way: way.offload_optimizer)
    limit = math.inf if device_bytes is None else device_bytes * MARGIN
    ladder = list[tuple[int, Arrangement]]()
    needs = [(device_memory(shape, way), way) for way in ways]
    for need, way in [each for each in needs if each[0] <= limit] or needs[-1:]:
        if not ladder or need < ladder[-1][0]:
            ladder.append((need, way))
    rung = min(rung, len(ladder) - 1)
    need, way = ladder[rung]
    size = f"{need / 1e9:.1f} GB" if need >= 1e8 else f"{need / 1e6:.0f} MB"
    note = (
        f"Memory: about {size} per rank. FSDP: "
        f"{'a group per decoder layer' if per_block else 'one group'}, gathered "
        f"weights {'kept through a step' if way.keep_unsharded else 'dropped after use'}, "
        f"gradients reduced at {'the last' if way.reduce_at_last else 'every'} micro-batch, "
        f"activation checkpointing {way.checkpointing}, "
        f"{settings.optimizer}'s state in {'host' if way.offload_optimizer else 'device'} memory"
    )
    if need > limit:
        note += f"; over {MARGIN:.0%} of the device's memory: if that is too much, use more GPUs"
    if rung:
        note += f"; {rung} faster arrangements ran out of memory before"
    last = rung == len(ladder) - 1
    return MemoryPlan(per_block, need, shape, way, note, rung, last)


def _choices(value: str, on: str) -> list[bool]:
    """Return the choices that a setting leaves open, "off" before "on"."""
    return [False, True] if value == "auto" else [value == on]
