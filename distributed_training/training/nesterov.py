"""The outer step's arithmetic and its file: SGD with Nesterov momentum, without process groups.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105) treats what a miner learned in many inner steps,
``epoch start - current``, as one *pseudo-gradient*, averages it over miners and applies it with an
outer optimizer. Miners and the validator import this one implementation, so all of them compute the
same float32 bits from the same average.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributed_training.common.files import atomic_file
from distributed_training.network import public_values
from distributed_training.protocol.pt_file import read_pt, refuse_calls

_PUBLIC = public_values()
OUTER_LEARNING_RATE = float(_PUBLIC["training.outer_learning_rate"])
OUTER_MOMENTUM = float(_PUBLIC["training.outer_momentum"])


@torch.no_grad()
def nesterov_sgd(
    param: Tensor,
    grad: Tensor,
    momentum: Tensor | None,
    *,
    lr: float = OUTER_LEARNING_RATE,
    mu: float = OUTER_MOMENTUM,
) -> tuple[Tensor, Tensor]:
    """Take one SGD step with Nesterov momentum: new ``(param, momentum)``, inputs untouched.

    float32 CPU tensors of one shape. ``momentum=None`` means that there was no step yet. The bits
    are those of ``torch.optim.SGD(lr=lr, momentum=mu, nesterov=True)``: elementwise, so a shard
    gives the same bits as the whole tensor.
    """
    # A clone, since the average may lie in the swarm's memory, which the next round overwrites.
    new_momentum = grad.clone() if momentum is None else momentum.mul(mu).add_(grad)
    update = grad.add(new_momentum, alpha=mu)
    # Into ``update``: a third tensor for each parameter would be in host memory in every round.
    return torch.add(param, update, alpha=-lr, out=update), new_momentum


@dataclass(frozen=True)
class OuterOptimizerState:
    """The content of ``outer_optimizer.pt``. ``momentum`` is None before the first outer step."""

    momentum: list[Tensor] | None
    learning_rate: float
    mu: float
    outer_step: int


def save_outer_optimizer(
    path: Path, state: OuterOptimizerState, *, parameters: int | None = None
) -> None:
    """Write ``outer_optimizer.pt`` in the public network's form (protocol page, section 3).

    ``state.momentum`` are whole float32 tensors in state-dict order. ``parameters``: of the model,
    needed before the first outer step, when there is no momentum: torch's SGD refuses a parameter
    group that does not list them all. Written to a temporary name, synced, renamed.
    """
    count = len(state.momentum) if state.momentum is not None else parameters or 0
    content = {
        "optimizer_state_dict": {
            "state": {i: {"momentum_buffer": t} for i, t in enumerate(state.momentum or ())},
            "param_groups": [
                {
                    "lr": state.learning_rate,
                    "momentum": state.mu,
                    "dampening": 0,
                    "weight_decay": 0,
                    "nesterov": True,
                    "maximize": False,
                    "foreach": None,
                    "differentiable": False,
                    "fused": None,
                    "params": list(range(count)),
                }
            ],
        },
        "learning_rate": state.learning_rate,
        "epoch": state.outer_step,
    }
    with atomic_file(path) as handle:
        torch.save(content, handle)


def load_outer_optimizer(
    path: Path, schema: Sequence[tuple[str, tuple[int, ...]]]
) -> OuterOptimizerState:
    """Read ``outer_optimizer.pt``; tensors are memory-mapped, in the order of ``schema``.

    Raises ValueError, in one line, when the file is not a SGD state for this model.
    """
    try:
        # Downloaded: looked through before torch reads it, and no class but torch's own is made of
        # it.
        refuse_calls(read_pt(path))
        # Mapped: 4 bytes a parameter, of which one tensor at a time is needed.
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        groups = content["optimizer_state_dict"]["param_groups"]
        entries = content["optimizer_state_dict"]["state"]
        learning_rate = float(groups[0]["lr"])
        mu = float(groups[0].get("momentum", OUTER_MOMENTUM))
        outer_step = int(content.get("epoch", 0))
        buffers = [entries[key].get("momentum_buffer") for key in sorted(entries)]
        if not (math.isfinite(learning_rate) and learning_rate > 0 and 0 <= mu < 1):
            raise ValueError(f"learning rate {learning_rate}, momentum {mu}")
    except (
        OSError,
        RuntimeError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        EOFError,
        OverflowError,
        pickle.UnpicklingError,
    ) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{path} is not an outer optimizer's state ({why:.200}), so it was not loaded: fetch "
            "it again"
        ) from error
    if not buffers or all(b is None for b in buffers):
        return OuterOptimizerState(None, learning_rate, mu, outer_step)
    if len(buffers) != len(schema):
        raise ValueError(
            f"{path} holds {len(buffers)} momentum tensors, the model has {len(schema)}, so it was "
            "not loaded: it belongs to another model"
        )
    for (name, shape), buffer in zip(schema, buffers, strict=True):
        if not isinstance(buffer, Tensor) or tuple(buffer.shape) != shape:
            found = tuple(buffer.shape) if isinstance(buffer, Tensor) else type(buffer).__name__
            raise ValueError(
                f"{path}: momentum of {name} is {found}, the model has {shape}, so it was not "
                "loaded: it belongs to another model"
            )
    return OuterOptimizerState([b.float() for b in buffers], learning_rate, mu, outer_step)
