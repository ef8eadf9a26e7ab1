"""The model on which uploads and outer steps are judged. One process, no sharding."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distributed_training.config import ConfigError
from distributed_training.node.signals import Stopped
from distributed_training.protocol.payload import Schema
from distributed_training.training.loss import CausalLoss, linear_cross_entropy
from distributed_training.training.model import hf_config, schema_of


def model_bytes(schema: Schema) -> int:
    """Most bytes of a float32 ``model.safetensors`` (tied weights may be in it twice)."""
    tensors = sum(4 * math.prod(shape) + 256 + len(name) for name, shape in schema)
    return 2 * tensors + 1024 * 1024


def load_weights(path: Path, schema: Schema) -> list[Tensor]:
    """Float32 tensors in the order of ``schema``; names the schema does not know are left out.

    Raises ValueError for a missing name, another shape, NaN or Inf, or an unreadable file.
    """
    try:
        with safe_open(path, "pt") as file:  # memory-mapped, one tensor after another
            missing = sorted({name for name, _ in schema} - set(file.keys()))
            if missing:
                raise ValueError(f"{path.name} lacks {missing[0]} and {len(missing) - 1} more")
            return [_checked(path, name, file.get_tensor(name), shape) for name, shape in schema]
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None


def _checked(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{path.name}: {name} has shape {tuple(tensor.shape)}, not {shape}")
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{path.name}: {name} is not finite floating-point numbers")
    return tensor.to(torch.float32)


def evaluation_device(wanted: str) -> torch.device:
    """Of ``--neuron.device``. Raises ConfigError for cuda without a GPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "no GPU is visible, so nothing can be evaluated on one: give --neuron.device cpu"
        )
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(auto if wanted == "auto" else wanted)


class EvaluationModel:
    """A Hugging Face causal model whose weights are changed between evaluations.

    ``micro_batch``: sequences at once. Computes in bf16 on CUDA, as the network's validators do,
    and in float32 on the CPU, where improvements of small models would drown in rounding.
    """

    def __init__(
        self,
        *,
        model_config: Mapping[str, Any],
        device: torch.device,
        micro_batch: int = 2,
        stop: threading.Event | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(
            hf_config(model_config), dtype=torch.float32, attn_implementation="sdpa"
        )
        self.schema: Schema = schema_of(model)
        self.device = device
        self._model = model.to(device).eval().requires_grad_(False)
        self._loss = CausalLoss(self._model, linear_cross_entropy)
        self._parameters = dict(self._model.named_parameters())
        self._micro_batch = micro_batch
        self._stop = stop if stop is not None else threading.Event()

    def state(self) -> list[Tensor]:
        """Copies of the weights, float32 on the CPU, in the order of ``schema``."""
        return [self._parameters[name].detach().cpu().clone() for name, _ in self.schema]

    def load(self, weights: Sequence[Tensor]) -> None:
        for (name, _), tensor in zip(self.schema, weights, strict=True):
            self._parameters[name].copy_(tensor)

    def subtract(self, name: str, delta: Tensor, factor: float) -> None:
        """``weight -= factor * delta``."""
        self._parameters[name].sub_(delta.to(self.device), alpha=factor)

    def tokens(self, sequences: Tensor) -> tuple[int, ...]:
        """Predicted tokens of each micro-batch."""
        return tuple(b.shape[0] * (b.shape[1] - 1) for b in sequences.split(self._micro_batch))

    @torch.no_grad()
    def losses(self, sequences: Tensor) -> tuple[float, ...]:
        """Mean cross-entropy of each micro-batch, nats per predicted token. ``sequences``: int64
        ``(n, length)``. Raises ValueError without sequences, Stopped when asked to in between."""
        if sequences.shape[0] == 0:
            raise ValueError("there is no sequence to evaluate")
        found = []
        for batch in sequences.split(self._micro_batch):
            if self._stop.is_set():
                raise Stopped
            with self._autocast():
                total = float(self._loss(batch.to(self.device)))
            found.append(total / (batch.shape[0] * (batch.shape[1] - 1)))
        return tuple(found)

    def loss(self, sequences: Tensor) -> float:
        """Mean over all predicted tokens. Raises as :meth:`losses`."""
        tokens = self.tokens(sequences)
        pairs = zip(self.losses(sequences), tokens, strict=True)
        return sum(loss * n for loss, n in pairs) / sum(tokens)

    def loss_of(self, weights: Sequence[Tensor], sequences: Tensor) -> float:
        """Of the model with these weights, which stay loaded. Raises as :meth:`losses`."""
        self.load(weights)
        return self.loss(sequences)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return contextlib.nullcontext()
