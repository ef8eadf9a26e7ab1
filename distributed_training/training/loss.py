"""Cross-entropy without the logits: computed for a chunk of tokens at a time, with its gradients.

The logits of a micro-batch in float32 are its largest tensor by far (2 x 1024 tokens x 128,000
words: 1 GiB, and as much again for their gradient). Here at most one chunk of them exists. The
gradients with respect to hidden states and head are computed with the loss, so that backward only
scales them: nothing is computed twice.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

CHUNK_ELEMENTS = 1 << 24  # of float32 logits alive at once: 64 MiB, and as much for the gradient


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, with_grad: bool
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if with_grad else None
        # Sums over chunks are kept in float32: in bf16 late chunks would be rounded away.
        grad_weight: Tensor | None = None
        for start in range(0, hidden.shape[0], rows):
            part = hidden[start : start + rows]
            target = labels[start : start + rows].unsqueeze(1)
            logits = (part @ weight.t()).float()
            log_norm = torch.logsumexp(logits, dim=1, keepdim=True)
            total += (log_norm - logits.gather(1, target)).sum()
            if grad_hidden is None:
                continue
            # d loss / d logits = softmax - one-hot
            grad_logits = logits.sub_(log_norm).exp_()
            grad_logits.scatter_add_(1, target, torch.full_like(log_norm, -1.0))
            low = grad_logits.to(hidden.dtype)
            grad_hidden[start : start + rows] = low @ weight
            piece = low.t() @ part
            if hidden.shape[0] <= rows:
                grad_weight = piece
            elif grad_weight is None:
                grad_weight = piece.float()
            else:
                grad_weight += piece
        if with_grad and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        (scale,) = grads
        return grad_hidden * scale, grad_weight * scale, None, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens of the cross-entropy of ``hidden @ weight.T`` against ``labels``, in nats.

    ``hidden`` (tokens, width), ``weight`` (words, width) of the same dtype, ``labels`` (tokens,)
    int64. Returns a float32 scalar. Softmax and sums are float32 whatever the dtype. There is no
    ignored label: sequences are packed, every token counts.
    """
    rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden, weight, labels, rows, with_grad)


def choose_loss_kernel(wanted: str, device: torch.device) -> tuple[Any, str]:
    """The function to use in place of :func:`linear_cross_entropy`, and a line saying which."""
    if wanted == "chunked" or (wanted == "auto" and device.type != "cuda"):
        return linear_cross_entropy, "cross-entropy: chunked (built in)"
    if device.type != "cuda":
        return linear_cross_entropy, "cross-entropy: chunked; liger-kernel needs CUDA"
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        return linear_cross_entropy, f"cross-entropy: chunked; liger-kernel is not usable: {error}"
    fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")

    def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return fused(weight, hidden, labels).float()

    return liger, "cross-entropy: liger-kernel"


class CausalLoss(nn.Module):
    """A Hugging Face causal model and its loss as one module, so that FSDP's root covers both.

    ``forward(ids)``: int64 (sequences, length) -> the summed loss over the (length - 1) predicted
    tokens of each sequence.
    """

    def __init__(self, model: nn.Module, kernel: Any) -> None:
        super().__init__()
        self.model = model
        self._kernel = kernel

    def forward(self, ids: Tensor) -> Tensor:
        decoder: Any = self.model.get_decoder()  # type: ignore[operator]
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
        weight = self.model.get_output_embeddings().weight  # type: ignore[operator]
        flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
        return self._kernel(flat, weight, ids[:, 1:].reshape(-1))
