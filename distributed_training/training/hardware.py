"""What this machine can do: process mesh, attention kernel, largest micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distributed_training.config.flags import ConfigError

from . import attention

OUT_OF_MEMORY_ADVICE = (
    "lower --neuron.local_batch_size_train (or give auto), add --neuron.activation_checkpointing "
    "full or --neuron.offload_optimizer on; --neuron.local_batch_size_train_effective does not "
    "change memory"
)
_MARGIN = 0.92  # a micro-batch that fills more of the GPU than this is not taken


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def is_compiler_error(error: BaseException) -> bool:
    """Whether torch.compile failed, and not the model it compiled."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def make_mesh(group: dist.ProcessGroup | None, device: torch.device, world_size: int) -> DeviceMesh:
    """One dimension over all ranks. A rank alone gets a process group if there is none."""
    if not dist.is_initialized():
        if world_size != 1:
            raise ConfigError(
                f"world size {world_size} but no process group, so ranks cannot meet: start the "
                "miner through its launcher or torchrun"
            )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if group is not None:
        return DeviceMesh.from_group(group, device.type)
    return init_device_mesh(device.type, (world_size,))


def attention_line(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Which of PyTorch's SDPA kernels runs, and why not flash attention."""
    if device.type != "cuda":
        short = config._attn_implementation == attention.NAME
        return f"attention: {'plain products (short sequences)' if short else 'SDPA'} on the CPU"
    from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    q = torch.empty(1, heads, 128, head_dim, device=device, dtype=dtype)
    params = SDPAParams(q, q, q, None, 0.0, True, False)
    if can_use_flash_attention(params):
        return "attention: SDPA, flash kernel"
    kernel = "memory-efficient" if can_use_efficient_attention(params) else "math"
    return (
        f"attention: SDPA, {kernel} kernel: flash attention does not take {dtype} with head_dim "
        f"{head_dim} on this GPU"
    )


def find_micro_batch(
    seconds_per_sequence: Callable[[int], float],
    *,
    device: torch.device,
    vote: Callable[[str | None], str | None],
    say: Callable[[str], None],
    largest: int,
) -> int:
    """The fastest micro-batch that fits, of 1, 2, 4, ... up to ``largest`` (on a CPU 16).

    ``seconds_per_sequence(n)`` runs one of ``n`` sequences without any collective in it that a
    failed rank would leave others in. All ranks call this; all take the same size, rank 0's.
    A doubling that gains less than 2 % is not worth its memory and ends the search.
    """
    found: dict[int, float] = {}
    limit = largest if device.type == "cuda" else min(largest, 16)
    size, ended = 1, "that is the effective batch" if limit == largest else "enough for a CPU"
    while size <= limit:
        problem: str | None = None
        seconds = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            seconds = seconds_per_sequence(size)
            if device.type == "cuda":
                total = torch.cuda.get_device_properties(device).total_memory
                peak = torch.cuda.max_memory_reserved(device)
                if peak > total * _MARGIN:
                    problem = f"{size} would fill {peak / total:.0%} of the GPU's memory"
        except torch.OutOfMemoryError:
            problem = f"{size} does not fit the GPU's memory"
            torch.cuda.empty_cache()
        problem = vote(problem)
        if problem is not None:
            ended = problem
            break
        found[size] = seconds
        gain = 1.0 if size == 1 else 1.0 - seconds / found[size // 2]
        if vote("slower" if gain < 0.02 else None) is not None:
            ended = f"{size} is not faster than {size // 2}"
            break
        size *= 2
    if not found:
        raise ConfigError(
            f"--neuron.local_batch_size_train auto: not even one sequence fits: "
            f"{OUT_OF_MEMORY_ADVICE}"
        )
    best = max(found) if "not faster" not in ended else max(found) // 2
    rates = ", ".join(f"{n}: {1 / s:.2f}" for n, s in found.items())
    say(
        f"--neuron.local_batch_size_train auto: {max(1, best)} (sequences/s by micro-batch: "
        f"{rates}; {ended})"
    )
    return max(1, best)
