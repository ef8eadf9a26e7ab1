"""Which attention the model's blocks run: PyTorch's SDPA, or plain products.

*On a GPU* SDPA under a name of our own, ``sdpa_causal``. For its own name transformers looks at
each forward whether sequences are packed, by reading a value back from the device: that waits for
everything queued before it, at every micro-batch. For a name it has no mask for, it makes none, and
SDPA without a mask is causal.

*On a CPU*, for short sequences, plain products (:func:`short_causal`). PyTorch's fused CPU kernel
is made for long ones. With 256 tokens and heads of 32, one thread, bf16, its forward and backward
take 1.4 and 3.8 ms where three plain products and a softmax take 0.9 and 1.1 ms (AMD EPYC with
avx512_bf16, torch 2.13): a quarter of a small model's whole step. Beyond ``LONGEST`` tokens the
matrix of scores no longer fits the cache and the fused kernel is used.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

NAME = "short_causal_cpu"
CAUSAL = "sdpa_causal"
LONGEST = 512


@functools.lru_cache(maxsize=4)
def _mask(length: int, dtype: torch.dtype) -> Tensor:
    return torch.full((length, length), float("-inf"), dtype=dtype).triu_(1)


def short_causal(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: (batch, heads, tokens, width) -> (batch, tokens, heads, width).

    Causal, no padding (sequences are packed), no dropout.
    """
    batch, heads, length, width = query.shape
    if attention_mask is not None or dropout:
        raise ValueError("this attention takes packed sequences without dropout only")
    groups = heads // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = 1.0 / math.sqrt(width) if scaling is None else scaling
    scores = torch.baddbmm(
        _mask(length, query.dtype),
        query.reshape(-1, length, width),
        key.reshape(-1, length, width).transpose(1, 2),
        alpha=scale,
    )
    mixed = torch.softmax(scores, -1) @ value.reshape(-1, length, width)
    return mixed.view(batch, heads, length, width).transpose(1, 2), None


def implementation(device: torch.device, sequence_length: int, dropout: float) -> str:
    """The transformers name of the attention to use."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if device.type != "cpu":
        AttentionInterface.register(CAUSAL, sdpa_attention_forward)  # and no mask: see above
        return CAUSAL
    if sequence_length > LONGEST or dropout:
        return "sdpa"
    AttentionInterface.register(NAME, short_causal)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def kernel_line(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Which of PyTorch's SDPA kernels runs, and why if it is a slow one."""
    if device.type != "cuda":
        short = config._attn_implementation == NAME
        return f"attention: {'plain products (short sequences)' if short else 'SDPA'} on the CPU"
    name = sdpa_kernel_name(config, device, dtype)
    if name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        return f"attention: SDPA, {name.partition('_')[0].lower()} kernel"
    width = _head_dim(config)
    return (
        f"attention: SDPA, {name.lower()} kernel: flash attention does not take {dtype} with "
        f"head_dim {width} on this GPU"
    )


def sdpa_kernel_name(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """The backend PyTorch chooses for this model's heads, as ``SDPBackend`` names it."""
    from torch.nn.attention import SDPBackend

    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads

    def some(count: int) -> Tensor:
        return torch.empty(1, count, 128, _head_dim(config), device=device, dtype=dtype)

    q, k = some(heads).requires_grad_(), some(groups)
    choice = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=groups != heads)
    return str(SDPBackend(choice).name)


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
