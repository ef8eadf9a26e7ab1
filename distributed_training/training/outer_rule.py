"""Define outer rules, which say how uploads become the update of an outer step.

A rule has up to five parts (:class:`OuterRule`). It decides what members send of their movement and
how much of the rest they keep for the next upload. It also decides which members average with each
other, how the merged uploads become one pseudo-gradient, and what step is taken along it. The
public network's rule has only a step: SGD with Nesterov momentum.

To add a rule, write an ``OuterRule`` and one line, ``OUTER_RULES.register(name, rule)``, in a
module that ``--plugins`` names. All miners and validators of a network must have the same rule:
each computes the new weights itself, and the results must be bit-identical. So a rule works in
float32 on the CPU. Since a rank or a block holds only some of the rows, the step must treat each
element independently, and select and merge must treat each row independently.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from distributed_training.common.kinds import Kinds, PluginError, import_plugins
from distributed_training.config import Config
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError, choose_kind
from distributed_training.protocol.codecs import CODECS
from distributed_training.protocol.types import UPDATE_CODEC


class OuterStepOf(Protocol):
    """One step along ``grad``: return a new ``(param, state)``.

    The inputs must stay unchanged, and the results must not share their memory. ``state`` is a
    float32 tensor of the parameter's shape that the validator keeps, None before the first step.
    ``lr`` and ``mu`` are the network's outer learning rate and momentum.
    """

    def __call__(
        self, param: Tensor, grad: Tensor, state: Tensor | None, *, lr: float, mu: float
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class UploadFacts:
    """Facts about an upload for a rule that merges it; the manifest lists them for replays.

    Attributes:
        tokens: Number of tokens that it was trained on, according to the member's file.
        norm: Euclidean norm of all its values, before clipping.
        gain: Nats per token by which it lowers the loss on text, as the judge measured.
    """

    tokens: int
    norm: float
    gain: float


@dataclass(frozen=True)
class OuterRule:
    """Says how uploads become an update.

    An error in any part is raised as a ConfigError with one line that names the rule and the part.

    Args:
        step: Computes new weights from a group's mean weights at the start and its mean
            pseudo-gradient, both float32 on the CPU.
        select: Takes the rows ``(r, c)`` that a member could upload, and returns what it sends: new
            rows of that shape, with zeros for the rest. What is not sent is the member's residual.
            None: everything is sent.
        feedback: Share of the residual that is added to the next upload.
        groups: Takes the number of members and the outer step, and returns the groups that average
            among themselves, as lists of members' numbers. None: all members average together. With
            groups the members' weights differ, but a network publishes one update for all. So
            networks refuse such a rule; ``examples/compare.py`` can compare it.
        merge: Takes new float32 rows ``(members, r, c)`` of the merged uploads, clipped and in uid
            order, and their facts in the same order. It returns the rows ``(r, c)`` of the
            pseudo-gradient that ``step`` gets. None: their mean.

    Examples:
        >>> rule = OuterRule(nesterov_sgd, feedback=0.5)
        >>> rule.select is None, rule.feedback  # all values are sent
        (True, 0.5)
    """

    step: OuterStepOf
    select: Callable[[Tensor], Tensor] | None = None
    feedback: float = 1.0
    groups: Callable[[int, int], Sequence[Sequence[int]]] | None = None
    merge: Callable[[Tensor, Sequence[UploadFacts]], Tensor] | None = None

    def __post_init__(self) -> None:
        for part in ("step", "select", "groups", "merge"):
            function = getattr(self, part)
            if function is not None and function is not nesterov_sgd:
                object.__setattr__(self, part, functools.partial(_call, self, part, function))

    def __repr__(self) -> str:
        return f"OuterRule({self._name!r})"

    @property
    def _name(self) -> str:
        return next((name for name in OUTER_RULES if OUTER_RULES[name] is self), "without a name")

    def merge_rows(self, rows: Tensor, facts: Sequence[UploadFacts]) -> Tensor:
        """Merge a block of rows and check the result. Raises ConfigError.

        Args:
            rows: ``(members, r, c)``, float32 on the CPU.
            facts: Facts about each member's upload, in the same order.
        """
        assert self.merge is not None
        wanted = rows.shape[1:]
        found = self.merge(rows, facts)
        if (
            not isinstance(found, Tensor)
            or (found.shape, found.dtype) != (wanted, rows.dtype)
            or not found.isfinite().all()
        ):
            raise _failed(self, "merge", "it does not return finite float32 rows")
        return found


def _call(
    rule: OuterRule, part: str, function: Callable[..., Any], *given: Any, **rates: Any
) -> Any:
    try:
        return function(*given, **rates)
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # plug-in code may raise anything
        text = "".join(filter(str.isprintable, str(error).partition("\n")[0]))
        raise _failed(rule, part, f"{type(error).__name__}: {text:.300}") from error


def _failed(rule: OuterRule, part: str, why: str) -> ConfigError:
    return ConfigError(
        f"the outer rule {rule._name!r} fails in its {part} ({why}), so nothing can be trained "
        "with it: correct that function, or choose another training.outer_rule"
    )


#: The outer rules, keyed by the names that a network's file may give.
OUTER_RULES: Kinds[OuterRule] = Kinds("outer rule")


@torch.no_grad()
def nesterov_sgd(
    param: Tensor,
    grad: Tensor,
    state: Tensor | None,
    *,
    lr: float,
    mu: float,
) -> tuple[Tensor, Tensor]:
    """Take one SGD step with Nesterov momentum; return a new ``(param, momentum)``.

    All are float32 CPU tensors of the same shape; the inputs stay unchanged. ``state`` is the
    momentum, or None before the first step. The result is bit-identical to that of
    ``torch.optim.SGD(lr=lr, momentum=mu, nesterov=True)``. The step is elementwise, so a shard
    gives the same bits as the whole tensor.
    """
    # Clone it, since the average may be in hivemind's memory, which the next round overwrites.
    new_momentum = grad.clone() if state is None else state.mul(mu).add_(grad)
    update = grad.add(new_momentum, alpha=mu)
    # Write into ``update``; otherwise every round would need a third tensor per parameter in host
    # memory.
    return torch.add(param, update, alpha=-lr, out=update), new_momentum


NESTEROV = OuterRule(nesterov_sgd)
OUTER_RULES.register("nesterov", NESTEROV)


def find_rule(text: str) -> str:
    """Return the name of an outer rule; ``text`` is the name, or the path of a file with the rule.

    Raises ConfigError.
    """
    path, before = Path(text), set(OUTER_RULES)
    if path.suffix != ".py":
        choose_kind(OUTER_RULES, text, key="the outer rule")
        return text
    if not path.is_file():
        raise ConfigError(f"there is no file {text}, so nothing was started: name the rule's file")
    # Append the folder at the end, so that no file in it can shadow a library.
    sys.path.append(os.path.dirname(path.absolute()))
    try:
        import_plugins([path.stem])
    except PluginError as error:
        raise ConfigError(str(error)) from None
    found = set(OUTER_RULES) - before
    if len(found) != 1:
        raise ConfigError(
            f"{text} registers {len(found)} new outer rules, not one, so nothing was started: add "
            "one line OUTER_RULES.register(name, rule), and choose a file name that no library has"
        )
    return found.pop()


def outer_rule_of(
    settings: TrainingSettings, exchange: str | None = "store", *, codec: str = UPDATE_CODEC
) -> OuterRule:
    """Return the network's outer rule, after checking with small tensors that it works.

    ``exchange``: the network's exchange, hivemind or store; None: the rule is not for a network.
    ``codec``: the codec of the network's uploads. Raises ConfigError for an unknown name, for a
    rule that does not keep to :class:`OuterRule`, and for one that such a network cannot use.
    """
    name = settings.outer_rule
    rule = choose_kind(OUTER_RULES, name, key="training.outer_rule")
    if not (problem := _refuse_network(rule, exchange, codec)):
        problem = _try_step(rule.step, settings) or _try_select(rule) or _try_merge(rule)
    if problem:
        raise ConfigError(
            f"the outer rule {name!r} {problem}, so nothing was started: correct the rule, or "
            "choose another training.outer_rule"
        )
    return rule


def rule_of_network(config: Config) -> OuterRule:
    """Return a network's outer rule; see :func:`outer_rule_of`. Raises ConfigError."""
    return outer_rule_of(config.training, config.rounds.exchange, codec=config.rounds.codec)


def _refuse_network(rule: OuterRule, exchange: str | None, codec: str) -> str:
    if exchange is None:
        return ""
    uploads = choose_kind(CODECS, codec, key="round.codec")
    if rule.groups is not None:
        return (
            "lets members average in groups, so that their weights differ, but all members of a "
            "network have the same (examples/compare.py can compare it with others)"
        )
    if rule.merge is not None and exchange != "store":
        return "merges members' uploads, but over hivemind peers average among themselves"
    if rule.select is not None and not uploads.has_zero:
        return f"sends zeros, which the uploads' codec {codec!r} lacks ({UPDATE_CODEC!r} has them)"
    return ""


def _try_step(step: OuterStepOf, settings: TrainingSettings) -> str:
    rates = {"lr": settings.outer_learning_rate, "mu": settings.outer_momentum}
    param, grad, state = torch.ones(2, 3), torch.arange(6.0).view(2, 3) - 2, None
    for _ in range(2):
        given = [t for t in (param, grad, state) if t is not None]
        before = [t.clone() for t in given]
        found = step(param, grad, state, **rates)
        if not (isinstance(found, tuple) and len(found) == 2 and _are_tensors(*found)):
            return "does not return a pair of tensors (param, state) from its step"
        new, kept = found
        lower = step(param[1:], grad[1:], None if state is None else state[1:], **rates)
        if any((t.shape, t.dtype) != (param.shape, param.dtype) for t in (new, kept)):
            return "does not return float32 tensors of the parameter's shape"
        if not all(map(torch.equal, given, before)):
            return "changes its inputs in place"
        if grad.untyped_storage().data_ptr() in (
            new.untyped_storage().data_ptr(),
            kept.untyped_storage().data_ptr(),
        ):
            # The average may be in hivemind's memory, which the next round overwrites.
            return "returns the average itself instead of a copy"
        if not (torch.allclose(lower[0], new[1:]) and torch.allclose(lower[1], kept[1:])):
            return "moves a row depending on other rows, which other ranks may have"
        param, state = new, kept
    return ""


def _are_tensors(*found: object) -> bool:
    return all(isinstance(each, Tensor) for each in found)


def _try_select(rule: OuterRule) -> str:
    if not isinstance(rule.feedback, int | float) or not 0 <= rule.feedback <= 1:
        return f"keeps {rule.feedback} of the residual, but a share is from 0 to 1"
    if rule.select is None:
        return ""
    rows = torch.arange(24.0).view(3, 8).sub_(9.25)  # no row has two values of equal magnitude
    before = rows.clone()
    sent, lower = rule.select(rows), rule.select(rows[1:])
    if not _are_tensors(sent, lower) or (sent.shape, sent.dtype) != (rows.shape, rows.dtype):
        return "does not send float32 tensors of the rows' shape"
    if not torch.equal(rows, before):
        return "changes its inputs in place"
    if not torch.equal(lower, sent[1:]):
        return "selects from a row depending on other rows, which other ranks may have"
    return ""


def _try_merge(rule: OuterRule) -> str:
    if rule.merge is None:
        return ""
    for members in (1, 3):
        facts = [UploadFacts(1000 + n, 1.0 + n, 0.1 * n - 0.1) for n in range(members)]
        rows = torch.sin(torch.arange(members * 24.0) ** 2).view(members, 3, 8)
        merged = rule.merge_rows(rows.clone(), facts)
        lower = rule.merge_rows(rows[:, 1:].clone(), facts)
        if not torch.equal(lower, merged[1:]):
            return "merges a row depending on other rows, which other blocks may have"
    return ""
