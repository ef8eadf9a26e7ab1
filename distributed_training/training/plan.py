"""How a step is carried out on this hardware: precision, batch arithmetic, what stays in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distributed_training.config.flags import ConfigError
from distributed_training.config.training import TrainingSettings

from .model import ROOT_ONLY_BELOW

_MARGIN = 0.90  # of the device's memory; the rest is the allocator's and other libraries'


def compute_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype of the computation and a line saying why."""
    if wanted == "fp32":
        return torch.float32, "precision: float32 as asked"
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        hardware = torch.cuda.get_device_name(device)
    else:
        supported, hardware = _cpu_has_bf16(), "this CPU"
    if supported:
        return torch.bfloat16, f"precision: bf16 computation, float32 weights ({hardware})"
    return torch.float32, f"precision: float32, since {hardware} has no bf16 arithmetic"


def _cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        return False
    return bool({"avx512_bf16", "amx_bf16"} & set(flags))


@dataclass(frozen=True)
class BatchPlan:
    """``effective == micro_batch * micro_batches * world_size`` sequences per inner step."""

    micro_batch: int
    micro_batches: int
    effective: int
    note: str = ""


def plan_batch(*, micro_batch: int, effective: int, world_size: int) -> BatchPlan:
    """Round the effective batch up to what divides. Raises ConfigError when it cannot hold one."""
    if effective < 1 or micro_batch > effective:
        raise ConfigError(
            f"--neuron.local_batch_size_train {micro_batch} is larger than "
            f"--neuron.local_batch_size_train_effective {effective}, so no step could be made: "
            "lower the first or raise the second"
        )
    micro_batches = math.ceil(effective / (micro_batch * world_size))
    real = micro_batches * micro_batch * world_size
    note = ""
    if real != effective:
        note = (
            f"effective batch rounded up from {effective} to {real}: "
            f"{micro_batch} per micro-batch x {world_size} ranks x {micro_batches} micro-batches"
        )
    return BatchPlan(micro_batch, micro_batches, real, note)


def check_sequence_length(length: int, config: Any) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if length < 2 or (limit is not None and length > limit):
        raise ConfigError(
            f"--neuron.sequence_length {length} is not within 2..{limit}, the positions this model "
            "has, so it cannot be trained on: lower the flag"
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Decided by :func:`plan_memory`. Byte figures are estimates per rank."""

    per_block: bool
    keep_unsharded: bool
    sync_every: bool
    offload_optimizer: bool
    bytes_needed: int
    note: str


def estimate_bytes(
    *,
    parameters: int,
    world_size: int,
    config: Any,
    micro_batch: int,
    sequence_length: int,
    keep_unsharded: bool,
    sync_every: bool,
    offload_optimizer: bool,
    checkpointing: str,
) -> int:
    """Device bytes of one rank, estimated: weights 4, AdamW 8, gradients 4 per sharded parameter;
    bf16 copies 2 and float32 accumulated gradients 4 per parameter where they are held whole;
    activations in bf16 of attention and MLP per token and block.
    """
    shard = parameters / world_size
    total = shard * (4 + 4 + (1 if offload_optimizer else 8))
    layers = config.num_hidden_layers
    group = parameters / layers
    total += 2 * (parameters if keep_unsharded else 2 * group)
    total += 4 * (2 * group if sync_every else parameters)
    tokens = micro_batch * sequence_length
    full = 2.0 * (8 * config.hidden_size + 3 * config.intermediate_size)
    kept = {"none": 1.0, "selective": 0.5, "full": 0.0}[checkpointing]
    total += tokens * (layers * (full * kept + 2.0 * config.hidden_size) + full)
    return int(total + (1 << 30))  # CUDA context, workspaces, the loss's chunk


def plan_memory(
    settings: TrainingSettings,
    *,
    parameters: int,
    world_size: int,
    config: Any,
    micro_batch: int,
    device_bytes: int | None,
) -> MemoryPlan:
    """The fastest arrangement that fits ``device_bytes`` (None: host memory, no limit is set).

    Gathered weights and whole gradients kept through a step cost memory and save a gather per
    micro-batch and a reduction per micro-batch. What the operator fixed by flag stays fixed.
    """

    def fixed(value: str, on: str) -> list[bool]:
        return [False, True] if value == "auto" else [value == on]

    per_block = settings.wrap == "block" or (
        settings.wrap == "auto" and parameters >= ROOT_ONLY_BELOW
    )
    keeps = sorted(fixed(settings.keep_unsharded, "on"), reverse=True)
    if not per_block:
        keeps = keeps[:1]  # one group is whole in forward and backward anyway
    chosen: MemoryPlan | None = None
    for offload in fixed(settings.offload_optimizer, "on"):
        for sync_every in fixed(settings.gradient_sync, "every"):
            for keep in keeps:
                need = estimate_bytes(
                    parameters=parameters,
                    world_size=world_size,
                    config=config,
                    micro_batch=micro_batch,
                    sequence_length=settings.sequence_length,
                    keep_unsharded=keep,
                    sync_every=sync_every,
                    offload_optimizer=offload,
                    checkpointing=settings.activation_checkpointing,
                )
                fits = device_bytes is None or need <= device_bytes * _MARGIN
                note = (
                    f"memory: about {need / 1e9:.1f} GB per rank; "
                    f"{'one FSDP group per block' if per_block else 'one FSDP group'}, gathered "
                    f"weights {'kept through a step' if keep else 'dropped after use'}, gradients "
                    f"reduced {'at every' if sync_every else 'once, at the last'} micro-batch, "
                    f"optimizer state in {'host' if offload else 'device'} memory"
                )
                if device_bytes is not None and not fits:
                    note += (
                        f"; more than {_MARGIN:.0%} of the device's {device_bytes / 1e9:.1f} GB: "
                        "if it runs out, use --neuron.activation_checkpointing full or more GPUs"
                    )
                chosen = MemoryPlan(per_block, keep, sync_every, offload, need, note)
                if fits:
                    return chosen
    assert chosen is not None
    return chosen
