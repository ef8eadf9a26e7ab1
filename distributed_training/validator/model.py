"""The model on which uploads and outer steps are judged. One process, no sharding."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributed_training.node.signals import Stopped
from distributed_training.protocol.payload import Schema
from distributed_training.training.loss import CausalLoss, linear_cross_entropy
from distributed_training.training.model import hf_config, schema_of


def read_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a safetensors file one after another, memory-mapped. Raises ValueError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None


def load_weights(path: Path, schema: Schema) -> list[Tensor]:
    """Float32 tensors in the order of ``schema``; names the schema does not know are left out.

    Raises ValueError for a missing name, another shape, NaN or Inf, or an unreadable file.
    """
    shapes = dict(schema)
    found = {}
    for name, tensor in read_weights(path):
        if name not in shapes:
            continue  # other names of tied weights
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise ValueError(
                f"{path.name}: {name} has shape {tuple(tensor.shape)}, not {tuple(shapes[name])}"
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{path.name}: {name} is not finite floating-point numbers")
        found[name] = tensor.to(torch.float32)
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ValueError(f"{path.name} lacks {missing[0]} and {len(missing) - 1} more")
    return [found[name] for name, _ in schema]


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

    def load(self, weights: list[Tensor]) -> None:
        for (name, _), tensor in zip(self.schema, weights, strict=True):
            self._parameters[name].copy_(tensor)

    def subtract(self, name: str, delta: Tensor, factor: float) -> None:
        """``weight -= factor * delta``."""
        self._parameters[name].sub_(delta.to(self.device), alpha=factor)

    @torch.no_grad()
    def loss(self, sequences: Tensor) -> float:
        """Mean cross-entropy in nats per predicted token. ``sequences``: int64 ``(n, length)``.

        Raises ValueError without sequences, Stopped when asked to stop in between.
        """
        if sequences.shape[0] == 0:
            raise ValueError("there is no sequence to evaluate")
        total = 0.0
        for batch in sequences.split(self._micro_batch):
            if self._stop.is_set():
                raise Stopped
            with self._autocast():
                total += float(self._loss(batch.to(self.device)))
        return total / (sequences.shape[0] * (sequences.shape[1] - 1))

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return contextlib.nullcontext()
