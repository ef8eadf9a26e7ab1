"""Measure the speed of training: a step's time and MFU, and a profiler trace on request.

A step's time is wall time: from the end of the step before to its own end. It includes whatever
happens between two micro-batches (commands of rank 0, waiting for data, a snapshot's copy, a
gradient check, a checkpoint): an hour has no more steps than that. Only pauses of a round are left
out (:meth:`StepMeter.pause`), since then there is nothing to train.

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
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
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


class StepMeter:
    """Measures one step after the other on ``device``.

    ``utilization``: of this rank's GPU in percent; None where nothing measures it.
    ``flops_per_token``: this rank's share of the model's. Without a known peak there is no MFU.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        utilization: Callable[[], float | None] | None,
        flops_per_token: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = device
        self._utilization = utilization
        self._flops_per_token = flops_per_token
        self._clock = clock
        self.peak = None
        if device.type == "cuda":
            self.peak = peak_flops(torch.cuda.get_device_name(device))
        # When the step before ended, or the first batch was taken.
        self._began: float | None = None
        self._paused = 0.0
        self._waited = 0.0

    def micro_batch(self, data_wait_seconds: float) -> None:
        """Note that a micro-batch begins, after ``data_wait_seconds`` of waiting for it."""
        if self._began is None:
            self._began = self._clock() - data_wait_seconds
            self._paused = 0.0
        self._waited += data_wait_seconds

    def pause(self, seconds: float) -> None:
        """Leave ``seconds``, in which there was nothing to train, out of the step's time."""
        self._paused += seconds

    def drop(self) -> None:
        """Give up the step under way; the next one begins with its first micro-batch."""
        self._began, self._paused, self._waited = None, 0.0, 0.0

    def finish(self, tokens: int) -> dict[str, Any]:
        """Return what the step that ends now took, as a report has it; the next one begins."""
        now = self._clock()
        began = now if self._began is None else self._began
        seconds = max(now - began - self._paused, 1e-9)
        waited, self._began, self._paused, self._waited = self._waited, now, 0.0, 0.0
        memory = None
        if self._device.type == "cuda":  # the most since the last step
            memory = torch.cuda.max_memory_allocated(self._device) / 1e9
            torch.cuda.reset_peak_memory_stats(self._device)
        speed = tokens * self._flops_per_token / seconds
        return {
            "tokens": tokens,
            "seconds": seconds,
            "data_wait_seconds": waited,
            "gpu_memory_gb": memory,
            "gpu_utilization": self._utilization() if self._utilization else None,
            "mfu": None if self.peak is None else speed / self.peak,
        }


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
