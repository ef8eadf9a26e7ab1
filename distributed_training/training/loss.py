"""Cross-entropy without the logits: computed for a chunk of tokens at a time, with its gradients.

The logits of a micro-batch in float32 are its largest tensor by far (2 x 1024 tokens x 128,000
words: 1 GiB, and as much again for their gradient). Here at most one chunk of them exists. The
gradients with respect to hidden states and head are computed with the loss, so that backward only
scales them: nothing is computed twice.

What a chunk costs besides its three products is reading and writing logits. On a GPU that part is
compiled into two kernels (:func:`fused_logit_gradient`); eagerly it takes a dozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distributed_training.common.memory import LOSS_CHUNK

CHUNK_ELEMENTS = LOSS_CHUNK  # of float32 logits alive at once: 64 MiB, and as much for the gradient

#: (rows, words) logits, (rows, 1) labels -> summed float32 loss, and its gradient in their dtype.
LogitGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _summed_loss(wide: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Of float32 logits; and the logarithm of each row's normalizer."""
    log_norm = torch.logsumexp(wide, dim=1, keepdim=True)
    return (log_norm - wide.gather(1, target)).sum(), log_norm


def logit_gradient(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The eager form; with few temporaries."""
    wide = logits.float()
    loss, log_norm = _summed_loss(wide, target)
    # d loss / d logits = softmax - one-hot
    gradient = wide.sub_(log_norm).exp_()
    gradient.scatter_add_(1, target, torch.full_like(log_norm, -1.0))
    return loss, gradient.to(logits.dtype)


def fused_logit_gradient(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The form to compile: nothing is written in place, so that it fuses."""
    wide = logits.float()
    loss, log_norm = _summed_loss(wide, target)
    words = torch.arange(logits.shape[1], device=logits.device)
    gradient = torch.exp(wide - log_norm) - (words == target).float()
    return loss, gradient.to(logits.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        with_grad: bool,
        of_logits: LogitGradient,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if with_grad else None
        # Sums over chunks are kept in float32: in bf16 late chunks would be rounded away.
        grad_weight: Tensor | None = None
        for start in range(0, hidden.shape[0], rows):
            part = hidden[start : start + rows]
            target = labels[start : start + rows].unsqueeze(1)
            logits = part @ weight.t()
            if grad_hidden is None:
                total += _summed_loss(logits.float(), target)[0]
                continue
            loss, low = of_logits(logits, target)
            del logits
            total += loss
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
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        (scale,) = grads
        return grad_hidden * scale, grad_weight * scale, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int | None = None,
    of_logits: LogitGradient = logit_gradient,
) -> Tensor:
    """Sum over tokens of the cross-entropy of ``hidden @ weight.T`` against ``labels``, in nats.

    ``hidden`` (tokens, width), ``weight`` (words, width) of the same dtype, ``labels`` (tokens,)
    int64. Returns a float32 scalar. Softmax and sums are float32 whatever the dtype. There is no
    ignored label: sequences are packed, every token counts. ``chunk``: float32 logits alive at
    once.
    """
    tokens = hidden.shape[0]
    most = max(1, (chunk or CHUNK_ELEMENTS) // weight.shape[0])
    rows = max(1, math.ceil(tokens / max(1, math.ceil(tokens / most))))  # chunks of equal length
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden, weight, labels, rows, with_grad, of_logits)


class ChunkedLoss:
    """:func:`linear_cross_entropy` as a device runs it. ``chunk``: float32 logits alive at once."""

    def __init__(self, *, chunk: int, compiled: bool) -> None:
        self._chunk = chunk
        self._of_logits: LogitGradient = logit_gradient
        if compiled:
            self._of_logits = torch.compile(fused_logit_gradient, dynamic=False)

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, labels, chunk=self._chunk, of_logits=self._of_logits
        )

    def uncompile(self) -> None:
        """Eager from here."""
        self._of_logits = logit_gradient


class CausalLoss(nn.Module):
    """A Hugging Face causal model and its loss as one module, so that FSDP's root covers both.

    ``forward(ids)``: int64 (sequences, length) -> the summed loss over the (length - 1) predicted
    tokens of each sequence.
    """

    def __init__(self, model: nn.Module, kernel: Any) -> None:
        super().__init__()
        self.model = model
        self.kernel = kernel

    def forward(self, ids: Tensor) -> Tensor:
        decoder: Any = self.model.get_decoder()  # type: ignore[operator]
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
        weight = self.model.get_output_embeddings().weight  # type: ignore[operator]
        flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
        return self.kernel(flat, weight, ids[:, 1:].reshape(-1))
