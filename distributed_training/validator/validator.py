"""The reference validator: owns the global bucket, leads the rounds, scores the uploads.

One thread. At each tick, in this order: a round when it is due, else weights on the chain. How a
round is led is in :mod:`.store_rounds`. Everything the validator needs is handed to it (see
``program.build``), so that tests run it with a chain, a bucket and members in memory.

What the validator writes to ``events.jsonl``, one JSON object a line, for whoever follows it.

Every line carries ``kind`` and ``time`` (seconds since the epoch, written by the event log). Fields
of each kind, in the order in which they happen; readers ignore kinds and fields they do not know:

``start``
    uid, hotkey, outer_step, resumed (False: the initial model was new).
``publication``
    revision (``outer_step.serial`` of its close), ok, seconds, bytes_sent, reason (empty when ok).
``held_out``
    outer_step, before, after: mean loss in nats per token on held-out text; text: its name;
    domains: the losses after it by name, where there are several. Once at start with
    before == after (the state the run begins from), then for each outer step *before* its
    ``outer_step`` event; outer_step is the one reached by it. A step that was refused for its loss
    has the event too, and no ``outer_step`` event follows: for one outer_step the last counts.
``upload_seen``
    uid, revision (``outer_step.serial`` of its close), outer_step, age_seconds. Once for each.
``upload_scored``
    uid, outer_step, revision, ok; if it was reset, cause (name of a
    ``Cause`` of ``scoring``) and reason (the same in words, with its figures), else both empty;
    random_before, random_after, random_relative, assigned_before, assigned_after,
    assigned_relative, assigned_page, random_page. Losses in nats; absent when ok is False.
``scores``
    outer_step, scores: {uid as text: {random (mu - 3 sigma), mu, sigma, assigned, train,
    all_reduce, repo_valid, total, published (EMA of total: the weight set on the chain)}}.
``round``
    outer_step (the one the round was meant to end), ok, fault (``TOO_FEW`` or ``GATE``: the close
    moved; or empty), detail, called (uids that sent an upload for the close), participants (uids
    whose uploads were accepted), causes ({uid as text: why others' were refused}), seconds.
``outer_step``
    outer_step (reached; the new global state is published and complete), participants (uids),
    seconds (from the call to the end of the publication).
``finished``
    outer_step, reason: which [stop] of the network's file it reached. No round follows.
``export``
    outer_step, folder, ok, reason (empty when ok), seconds, results: {name: number}, of the
    founder's command.
``weights``
    weights: {uid as text: weight}.
``network``
    verdict, words, level (good, wait, bad, idle): how the network does; next_report: seconds until
    the next such event, at most.
``stop``
    reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from distributed_training.config import Config
from distributed_training.config.settings import ValidatorSettings
from distributed_training.data.held_out import mean_loss


@dataclass(frozen=True)
class Run:
    """One run of the validator.

    ``folder`` keeps what must not be lost; ``record(kind, **fields)`` writes an event (see above);
    ``stop`` is set when the program should end.
    """

    folder: Path
    record: Callable[..., None]
    stop: threading.Event


@dataclass(frozen=True)
class ValidatorRules:
    """The network's file that the validator goes by, and what is done by it.

    ``losses``: of a model with the given weights on each held-out domain, in nats per token.
    ``follow``: gets the outer step, and why the network is finished; raises OtherRules where
    another version holds. ``show_finished``: tells all miners why; raises StoreError.
    """

    config: Config
    losses: Callable[[Sequence[Tensor]], dict[str, float]]
    follow: Callable[[int, str], None]
    show_finished: Callable[[str], None]

    @property
    def settings(self) -> ValidatorSettings:
        return self.config.validator

    def mean(self, losses: Mapping[str, float]) -> float:
        """Return the judged loss, of those on each domain."""
        return mean_loss(losses, self.config.domains)
