"""Measure the speed of training: MFU against a known peak, and a profiler trace on request.

Model FLOPs utilization, as PaLM defines it (Chowdhery et al. 2022, appendix B):

    FLOPs per token = 6 * N + 12 * layers * heads * head_dim * sequence_length
    MFU = tokens per second * FLOPs per token / (GPUs * peak)

``N`` counts the parameters that take part in a matrix product: the input embedding is a look-up and
is left out unless it is tied to the head. Recomputed activations do not count, so activation
checkpointing lowers MFU. Attention is counted whole although a causal kernel does half of it; at
1024 tokens that flatters a 4B model by less than 2 %.

Peaks are dense bf16 tensor-core rates with float32 accumulation, without sparsity. They come from
NVIDIA's data sheets (A100, A10, A40, L4, L40S, H100, H200, B200) and architecture white papers
(GA102, AD102, Blackwell RTX). An unknown GPU, and a CPU, has no MFU: better none than a wrong one.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger(__name__)

# Longer names first: "H100 PCIe" must be found before "H100".
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H200 NVL", 835.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100", 989.4),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("RTX A6000", 154.8),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090 Ti", 80.0),
    ("RTX 3090", 71.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L4", 121.0),
)
# Cut-down variants whose names contain one of the above but whose peak differs or is not known.
_NOT_KNOWN = ("RTX 4090 D", "RTX 4090 Laptop", "RTX 5090 D", "RTX 5090 Laptop", "GB200")


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a GPU by its name, or None."""
    if any(name in device_name for name in _NOT_KNOWN):
        return None
    words = device_name.replace("-", " ").split()
    for name, tera in PEAK_TFLOPS:
        wanted = name.split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return tera * 1e12
    return None


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Forward and backward of one token (formula above). Works on the meta device."""
    config: Any = model.config
    inputs: Any = model.get_input_embeddings()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    params = sum(p.numel() for p in model.parameters())
    if inputs.weight is not head.weight:
        params -= inputs.weight.numel()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 6.0 * params + 12.0 * config.num_hidden_layers * heads * head_dim * sequence_length


def start_profiler(*, steps: int, rank: int) -> profile:
    """Record ``steps`` inner steps after the first three; its ``step`` is called after each.

    Writes ``profile-rank-R.json`` (Chrome trace) into the current folder.
    """
    from torch.profiler import profile, schedule

    path = Path.cwd() / f"profile-rank-{rank}.json"

    def write(recorded: profile) -> None:
        recorded.export_chrome_trace(str(path))
        log.info("Profile of %d inner steps written to %s", steps, path)

    # The first steps compile and fill the allocator. The one before is recorded and thrown away: in
    # its first one the profiler itself is slow.
    profiler = profile(
        schedule=schedule(wait=2, warmup=1, active=steps, repeat=1),
        on_trace_ready=write,
    )
    profiler.start()
    return profiler
