"""The home of outer rules: how an average of pseudo-gradients becomes the update of an outer step.

The public network's is SGD with Nesterov momentum. Another one is a function like
:func:`nesterov_sgd` and one line, ``OUTER_RULES.register(name, function)``, in a module that
``--plugins`` names. Miners and validators of a network must have the same: each computes the new
weights itself, and their bits must agree. So a rule works on each element alone, since a rank holds
some rows, and in float32 on the CPU.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from distributed_training.common.kinds import Kinds
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError, choose_kind
from distributed_training.network import public_values

_PUBLIC = public_values()
OUTER_LEARNING_RATE = float(_PUBLIC["training.outer_learning_rate"])
OUTER_MOMENTUM = float(_PUBLIC["training.outer_momentum"])


class OuterRule(Protocol):
    """One step along ``grad``: return new ``(param, state)``, inputs untouched and not in them.

    ``state`` is one float32 tensor of the parameter's shape, None before the first step. It is kept
    in checkpoints and travels as ``momentum_buffer`` of ``outer_optimizer.pt``. ``lr`` and ``mu``
    are the network's outer learning rate and momentum.
    """

    def __call__(
        self, param: Tensor, grad: Tensor, state: Tensor | None, *, lr: float, mu: float
    ) -> tuple[Tensor, Tensor]: ...


#: Name -> rule.
OUTER_RULES: Kinds[OuterRule] = Kinds("outer rule")


@torch.no_grad()
def nesterov_sgd(
    param: Tensor,
    grad: Tensor,
    state: Tensor | None,
    *,
    lr: float = OUTER_LEARNING_RATE,
    mu: float = OUTER_MOMENTUM,
) -> tuple[Tensor, Tensor]:
    """Take one SGD step with Nesterov momentum: new ``(param, momentum)``, inputs untouched.

    float32 CPU tensors of one shape. ``state`` is the momentum; None means that there was no step
    yet. The bits are those of ``torch.optim.SGD(lr=lr, momentum=mu, nesterov=True)``: elementwise,
    so a shard gives the same bits as the whole tensor.
    """
    # A clone, since the average may lie in the swarm's memory, which the next round overwrites.
    new_momentum = grad.clone() if state is None else state.mul(mu).add_(grad)
    update = grad.add(new_momentum, alpha=mu)
    # Into ``update``: a third tensor for each parameter would be in host memory in every round.
    return torch.add(param, update, alpha=-lr, out=update), new_momentum


OUTER_RULES.register("nesterov", nesterov_sgd)


def outer_rule_of(settings: TrainingSettings) -> OuterRule:
    """Return the network's outer rule, once two steps of a small parameter were as they must be.

    Raises ConfigError for an unknown name, and for a rule that breaks :class:`OuterRule`.
    """
    name = settings.outer_rule
    rule = choose_kind(OUTER_RULES, name, key="training.outer_rule")
    rates = {"lr": settings.outer_learning_rate, "mu": settings.outer_momentum}
    param, grad, state = torch.ones(2, 3), torch.arange(6.0).view(2, 3) - 2, None
    problem = ""
    for _ in range(2):
        given = [t for t in (param, grad, state) if t is not None]
        before = [t.clone() for t in given]
        new, kept = rule(param, grad, state, **rates)
        lower = rule(param[1:], grad[1:], None if state is None else state[1:], **rates)
        if any((t.shape, t.dtype) != (param.shape, param.dtype) for t in (new, kept)):
            problem = "returns other tensors than float32 ones of the parameter's shape"
        elif not all(map(torch.equal, given, before)):
            problem = "changes what it is given"
        elif grad.untyped_storage().data_ptr() in (
            new.untyped_storage().data_ptr(),
            kept.untyped_storage().data_ptr(),
        ):
            # The average lies in the swarm's memory, which the next round overwrites.
            problem = "returns the average itself instead of a copy"
        elif not (torch.allclose(lower[0], new[1:]) and torch.allclose(lower[1], kept[1:])):
            problem = "moves each row by what is in other rows, which other ranks may have"
        if problem:
            raise ConfigError(
                f"the outer rule {name!r} {problem}, so nothing was started: correct the rule"
            )
        param, state = new, kept
    return rule
