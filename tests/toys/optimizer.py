"""A plug-in: Lion (Chen et al. 2023, arXiv 2302.06675) as inner optimizer, and torch's SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distributed_training.config.settings import TrainingSettings
from distributed_training.training.inner_optimizer import OPTIMIZERS


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an interpolated momentum; keeps one tensor of a parameter."""

    def __init__(self, parameters: Any, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": 0.0, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(momentum.lerp(p.grad, 1 - fast).sign_(), alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - slow)


def lion(parameters: list[nn.Parameter], settings: TrainingSettings) -> Lion:
    return Lion(parameters, (settings.adam_beta1, settings.adam_beta2), settings.weight_decay)


def sgd(parameters: list[nn.Parameter], settings: TrainingSettings) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, momentum=settings.adam_beta1)


OPTIMIZERS.register("lion", lion)
OPTIMIZERS.register("sgd", sgd)
