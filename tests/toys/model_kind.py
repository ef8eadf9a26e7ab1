"""A model of its own: ``--plugins tests.toys.model_kind``, ``model.kind = "toy"``.

It has two tied tensors, a module that is used twice, a scalar, and a part that is not trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distributed_training.training.model import MODELS, ModelKind

WORDS, WIDTH = 67, 8


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.again = self.inner
        self.scale = nn.Parameter(torch.ones(()))
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        hidden = self.again(self.inner(hidden)) + self.base(hidden)
        logits: Tensor = self.head(hidden * self.scale)
        return logits


class Toy(ModelKind):
    def build(self, config: Mapping[str, Any]) -> nn.Module:
        return ToyModel()

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        labels = batch[:, 1:].flatten()
        logits = model(batch[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels)


MODELS.register("toy", Toy)
