"""Plan a step for this hardware: precision, batch arithmetic, what stays in memory.

Model shapes have names here for the local subnet and the benches. A real network's model comes from
the global bucket's ``config.json``; nothing about its shape is fixed in the code.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from distributed_training.common.memory import (
    Arrangement,
    Checkpointing,
    ModelShape,
    device_memory,
    host_memory,
    loss_chunk,
)
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError

from .inner_optimizer import find_state


def llama_config(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    max_positions: int,
    tied: bool = False,
) -> dict[str, Any]:
    """Return a Hugging Face Llama config as a plain dict, the content of ``config.json``."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }


def local_llama_config(*, vocab_size: int = 264, sequence_length: int = 256) -> dict[str, Any]:
    """Return a model of about 1.9 M parameters, for bytes: of a network founded without another."""
    return llama_config(
        hidden=192,
        layers=4,
        heads=6,
        kv_heads=6,
        intermediate=512,
        vocab=vocab_size,
        max_positions=max(512, sequence_length),
    )


def named_config(name: str) -> dict[str, Any]:
    """Return a shape of the benches: ``tiny`` 1.9 M, ``125m``, ``1b`` 1.1 B, ``4b`` 3.9 B values.

    Raises ValueError for another name.
    """
    if name == "tiny":
        return local_llama_config()
    shapes: dict[str, dict[str, Any]] = {
        "125m": {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 12, "intermediate": 2048},
        "1b": {"hidden": 2048, "layers": 22, "heads": 32, "kv_heads": 4, "intermediate": 5632},
        "4b": {"hidden": 3072, "layers": 32, "heads": 24, "kv_heads": 8, "intermediate": 8960},
    }
    if name not in shapes:
        raise ValueError(f"model size {name!r} is none of: tiny, {', '.join(shapes)}")
    return llama_config(vocab=32000, max_positions=2048, **shapes[name])


# Below this many parameters the whole model is one FSDP group. Each group costs a collective, and
# over gloo a collective costs about as much as moving 10 MB: measured with 1.7 M parameters on two
# CPU ranks, one group takes 0.81 s a step where a group per block takes 1.04 s.
ROOT_ONLY_BELOW = 50_000_000
MARGIN = 0.90  # of the device's memory; the rest is the allocator's and other libraries'


def compute_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype of the computation and a log line with the reason."""
    if wanted == "fp32":
        return torch.float32, "Precision: float32 as asked"
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
    """Round the effective batch up to what divides. Raises ConfigError when it cannot hold one."""
    if effective < 1 or micro_batch > effective:
        raise ConfigError(
            f"--neuron.local_batch_size_train {micro_batch} is larger than "
            f"--neuron.local_batch_size_train_effective {effective}, so no step could be made: "
            "lower the first or raise the second"
        )
    # Each rank runs equally many, or the ranks' collectives would not match.
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
    """Decided by :func:`plan_memory`, for the network's inner optimizer.

    ``bytes_needed`` is an estimate for one rank's device.
    """

    per_block: bool
    keep_unsharded: bool
    sync_every: bool
    offload_optimizer: bool
    bytes_needed: int
    note: str


def plan_memory(
    settings: TrainingSettings,
    *,
    model_config: Mapping[str, Any],
    parameters: int | None = None,
    world_size: int,
    micro_batch: int,
    device_bytes: int | None,
    host_bytes: int | None = None,
) -> MemoryPlan:
    """Return the fastest arrangement that fits ``device_bytes`` (None: no limit is set).

    Gathered weights and whole gradients kept through a step cost memory and save a gather and a
    reduction per micro-batch. The optimizer's state in host memory costs one trip over the bus per
    step; where ``host_bytes`` (None: enough) cannot hold it that is the last resort. What the
    operator fixed by flag stays fixed. Raises ConfigError for a model whose ``config.json`` does
    not give its size as a Llama's does.
    """
    try:
        shape = ModelShape.from_config(model_config, parameters)
    except ValueError as error:
        raise ConfigError(
            f"config.json: {error}, so the model's size is not known and it cannot be trained "
            "here: use a Llama-like model"
        ) from None
    per_block = settings.wrap == "block" or (
        settings.wrap == "auto" and shape.parameters >= ROOT_ONLY_BELOW
    )
    # On before off, unlike the others: what is kept saves a gather in each micro-batch.
    keeps = _choices(settings.keep_unsharded, "on")[::-1]
    if not per_block:
        keeps = keeps[:1]  # one group is whole in forward and backward anyway
    # The last changes first. To offload AdamW costs 16 bytes a parameter and step over the bus; to
    # reduce each time, and to gather each time, cost more than that for each of a step's hundred
    # micro-batches (docs/performance.md, On paper), and to gather more than to reduce.
    sync, offload = settings.gradient_sync, settings.offload_optimizer
    ways = list(itertools.product(keeps, _choices(sync, "every"), _choices(offload, "on")))
    moments = len(find_state(settings).rows)
    offloaded = Arrangement(
        world_size, 1, settings.sequence_length, offload_optimizer=True, moments=moments
    )
    if host_bytes is not None and host_memory(shape, offloaded) > host_bytes:
        ways.sort(key=lambda way: way[2])
    chosen: MemoryPlan | None = None
    for keep, sync_every, offloads in ways:
        how = Arrangement(
            world_size=world_size,
            micro_batch=micro_batch,
            sequence_length=settings.sequence_length,
            checkpointing=cast(Checkpointing, settings.activation_checkpointing),
            keep_unsharded=keep,
            reduce_at_last=not sync_every,
            offload_optimizer=offloads,
            cuda=device_bytes is not None,
            compiled=settings.compile != "off",
            loss_chunk=loss_chunk(device_bytes),
            moments=moments,
        )
        need = device_memory(shape, how)
        fits = device_bytes is None or need <= device_bytes * MARGIN
        size = f"{need / 1e9:.1f} GB" if need >= 1e8 else f"{need / 1e6:.0f} MB"
        note = (
            f"Memory: about {size} per rank. FSDP: "
            f"{'a group per decoder layer' if per_block else 'one group'}, gathered "
            f"weights {'kept through a step' if keep else 'dropped after use'}, "
            f"gradients reduced at {'every' if sync_every else 'the last'} micro-batch, "
            f"{settings.optimizer}'s state in {'host' if offloads else 'device'} memory"
        )
        if device_bytes is not None and not fits:
            note += (
                f"; more than {MARGIN:.0%} of the device's {device_bytes / 1e9:.1f} GB: "
                "if it runs out, use --neuron.activation_checkpointing full or more GPUs"
            )
        chosen = MemoryPlan(per_block, keep, sync_every, offloads, need, note)
        if fits:
            break
    assert chosen is not None
    return chosen


def _choices(value: str, on: str) -> list[bool]:
    """List the arrangements that the operator leaves open: off before on."""
    return [False, True] if value == "auto" else [value == on]
