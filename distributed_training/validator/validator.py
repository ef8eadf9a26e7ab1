"""The reference validator: owns the global bucket, leads the rounds, scores the uploads.

One thread. At each tick, in this order: a round when it is due, else weights, else what is to be
done between two rounds. How a round is led depends on the exchange: :mod:`.hivemind`, or
:mod:`.store_rounds`. Everything the validator needs is handed to it (see ``program.build``), so
that tests run it with a chain, a bucket and miners in memory.

What the validator writes to ``events.jsonl``, one JSON object a line, for whoever follows it.

Every line carries ``kind`` and ``time`` (seconds since the epoch, written by the event log). Fields
of each kind, in the order in which they happen; readers ignore kinds and fields they do not know:

``start``
    uid, hotkey, peer_id (the averager's), maddrs (where its DHT is reached: others' initial peers),
    outer_step, resumed (False: the initial model was new).
``publication``
    revision (tag ``run.outer_step.0``), ok, seconds, bytes_sent, reason (empty when ok).
``held_out``
    outer_step, before, after: mean loss in nats per token on held-out text; text: its name;
    domains: the losses after it by name, where there are several. Once at start with
    before == after (the state the run begins from), then for each outer step *before* its
    ``outer_step`` event; outer_step is the one reached by it. A step that was refused for its loss
    has the event too, and no ``outer_step`` event follows: for one outer_step the last counts.
``upload_seen``
    uid, revision (tag in the miner's root metadata), outer_step (folder looked at), age_seconds.
    Once for each new revision; in a store network for each upload, ``outer_step.serial``.
``upload_scored``
    uid, outer_step (folder that was judged), revision, ok; if it was reset, cause (name of a
    ``Cause`` of ``scoring``) and reason (the same in words, with its figures), else both empty;
    random_before, random_after, random_relative, assigned_before, assigned_after,
    assigned_relative, assigned_block, random_block. Losses in nats; absent when ok is False.
``scores``
    outer_step, block, scores: {uid as text: {random (mu - 3 sigma), mu, sigma, assigned, train,
    all_reduce, repo_valid, total, published (EMA of total: the weight set on the chain)}}.
``sweep``
    outer_step, block, alive (uids), not_alive (uids), elsewhere ({uid as text: outer step} of those
    that answered from another one), other_runs ({uid as text: run id} of those with another
    network's file). One IsAlive sweep.
``round``
    outer_step (the one the round was meant to end), ok, fault (name of an ``AllReduceFault``, or
    ``WORSE`` when the loss check refused the step, or empty), detail, peers (peer ids of the group,
    ours included), failed_peers, called (uids), participants (uids of miners in the group),
    left_out ({uid as text: why}: alive and not called), causes ({uid as text: why}: called, and
    not in the average),
    top_uid (whose checkpoint gave the validator's pseudo-gradient, or null), seconds,
    matchmaking_seconds, transfer_seconds. In a store network ``called`` sent an upload for the
    close, ``participants`` are merged, ``causes`` says why others are not, and fault may be
    ``TOO_FEW`` or ``GATE``: the close moved. What is of a swarm is empty or null.
``outer_step``
    outer_step (reached; the new global state is published and complete), participants (uids),
    seconds (from the call to the end of the publication).
``finished``
    outer_step, reason: which [stop] of the network's file it reached. No round follows.
``export``
    outer_step, folder, ok, reason (empty when ok), seconds, results: {name: number}, of the
    founder's command.
``weights``
    block, weights: {uid as text: weight}.
``network``
    verdict, words, level (good, wait, bad, idle): how the network does; next_report: seconds until
    the next such event, at most.
``stop``
    reason.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from distributed_training.chain.base import ChainError
from distributed_training.config import Config
from distributed_training.config.settings import ValidatorSettings
from distributed_training.data.held_out import mean_loss
from distributed_training.node.identity import Member
from distributed_training.node.start import Stopped
from distributed_training.protocol import lines
from distributed_training.protocol.network_report import MOST_ROUNDS
from distributed_training.store.errors import StoreError
from distributed_training.training.outer_rule import OuterRule
from distributed_training.training.outer_step import GlobalState
from distributed_training.validator.reporter import Reporter
from distributed_training.validator.rounds import Run, unless_stopped
from distributed_training.validator.scorer import PastRound, Standings

log = logging.getLogger(__name__)

MOST_STEPS_OF_A_BLOCK = 12  # inner steps: one a second is more than any network takes


@dataclass(frozen=True)
class ValidatorRules:
    """The network's file that the validator goes by, and what is done by it.

    ``losses``: of a model with the given weights on each held-out domain, in nats per token.
    ``follow``: gives the rules of an outer step if they are others, by why the network is finished;
    raises NetworkFailure for rules that take a restart. ``show_finished``: tells all miners why;
    raises StoreError.
    """

    config: Config
    outer_rule: OuterRule
    losses: Callable[[Sequence[Tensor]], dict[str, float]]
    follow: Callable[[int, str], Config | None]
    show_finished: Callable[[str], None]

    @property
    def settings(self) -> ValidatorSettings:
        return self.config.validator

    def mean(self, losses: Mapping[str, float]) -> float:
        """Return the judged loss, of those on each domain."""
        return mean_loss(losses, self.config.domains)


class Validator(abc.ABC):
    """Call :meth:`start`, then :meth:`run`.

    A stop ends both soon. A subclass leads the rounds of one exchange.
    """

    peer_id = ""  # of our averager, where there is one
    maddrs: Sequence[str] = ()  # the addresses of our DHT: others' initial peers

    def __init__(
        self,
        *,
        rules: ValidatorRules,
        member: Member,
        standings: Standings,
        run: Run,
        reporter: Reporter,
        after_step: Callable[[GlobalState], None],
    ) -> None:
        # collaborators
        self._rules = rules
        self._member = member
        self._chain = member.chain
        self._after_step = after_step  # returns at once
        self._reporter = reporter
        self._clock_fault = run.clock_fault
        self._record = run.record
        self._stop = run.stop
        self._run_number = run.number
        # what it knows
        self.standings = standings
        self._standings_path = run.folder / "ledger.json"
        self.state: GlobalState  # since the start
        self._losses: dict[str, float]  # of the state on each domain, since the start
        self._weights_at = -1
        self.finished = ""  # why no round is called any more
        self._finish_shown = ""  # of it, in the bucket

    # --- life -----------------------------------------------------------------------------------

    def start(self, state: GlobalState, *, found: bool) -> None:
        """Continue from the ``state`` that was found in the global bucket, or else publish it.

        Raises GlobalStateError, StoreError when the bucket cannot be written.
        """
        self.state = state = self._begin(state, found=found)
        self._losses = self._rules.losses(state.weights)
        self._record(
            "start",
            uid=self._chain.uid(self._member.hotkey),
            hotkey=self._member.hotkey,
            peer_id=self.peer_id,
            maddrs=list(self.maddrs),
            outer_step=state.outer_step,
            resumed=found,
        )
        self._record_losses(state.outer_step, self._losses)
        log.info(
            "Global state %d.%d.0, held-out loss %.4f on %s%s",
            self._run_number,
            state.outer_step,
            self._rules.mean(self._losses),
            self._rules.config.held_out_name,
            lines.describe_losses(self._losses),
        )
        self._look_for_end()
        self._report("starting")

    def run(self) -> None:
        """Tick until stopped."""
        while not self._stop.wait(self._rules.settings.tick.total_seconds()):
            try:
                self.tick()
            except ChainError as error:
                log.warning("The chain does not answer (%s). Trying again.", error)
            except Stopped:
                break
        self._save()
        self._report("stopped", reason="asked to stop")
        self._record("stop", reason="asked to stop")

    def tick(self) -> None:
        """Do what is due now: a round, or weights, or what there is between two rounds.

        Raises ChainError, Stopped, and GlobalStateError if the bucket is ahead of us.
        """
        self._adopt_rules()
        self._check_bucket()
        if self.finished != self._finish_shown:
            with suppress(StoreError):  # asked again at the next tick
                show = partial(self._rules.show_finished, self.finished)
                unless_stopped(show, stop=self._stop)
                self._finish_shown = self.finished
        self._reporter.report(at_once=False)
        block = self._chain.block()
        weights = self.standings.weights()
        # Before all else: the miners have timed their uploads by it.
        if self._lead(block):
            return
        if weights and block - self._weights_at >= self._rules.settings.epoch_length:
            # Also if it fails: the chain limits how often weights are set.
            self._weights_at = block
            try:
                unless_stopped(partial(self._chain.set_weights, weights), stop=self._stop)
                by_uid = {str(uid): weight for uid, weight in weights.items()}
                self._record("weights", block=block, weights=by_uid)
            except ChainError as error:
                log.warning(
                    "Weights were not set (%s). Trying again in %d blocks.",
                    error,
                    self._rules.settings.epoch_length,
                )
        else:
            self._between_rounds(block)

    # --- what depends on the exchange -------------------------------------------------------------

    @abc.abstractmethod
    def _begin(self, state: GlobalState, *, found: bool) -> GlobalState:
        """Publish a first state, or show that this process leads on from the one found.

        Returns the state of the network. Raises as :meth:`start`.
        """

    @abc.abstractmethod
    def _lead(self, block: int) -> bool:
        """Lead a round if one is due; whether it was. Raises as :meth:`tick`."""

    @abc.abstractmethod
    def _show_next_round(self) -> None:
        """Tell the reporter when the next round is due."""

    def _check_bucket(self) -> None:  # noqa: B027 - not each has something to check
        """Raise GlobalStateError if the bucket is ahead of us."""

    def _between_rounds(self, block: int) -> None:  # noqa: B027 - not each has something to do
        """Do what is due while no round is. Raises as :meth:`tick`."""

    def _went_on(self, config: Config) -> None:  # noqa: B027 - not each keeps such a rule
        """Take over what else another version of the network's file changes."""

    # --- the outer step ---------------------------------------------------------------------------

    def _reached(
        self,
        following: GlobalState,
        losses: dict[str, float],
        participants: Sequence[int],
        began: float,
        what: str,
    ) -> None:
        """Continue from an outer step that is published; ``what`` begins its line.

        ``began``: by ``time.monotonic()``.
        """
        self.state, self._losses = following, losses
        self._record(
            "outer_step",
            outer_step=following.outer_step,
            participants=list(participants),
            seconds=round(time.monotonic() - began, 3),
        )
        log.info(
            "%s: outer step %d, held-out loss %.4f on %s%s",
            what,
            following.outer_step,
            self._rules.mean(losses),
            self._rules.config.held_out_name,
            lines.describe_losses(losses),
        )
        self._after_step(following)
        # First: a version that holds from here on may have put the end off.
        self._adopt_rules()
        self._look_for_end()

    def _remember_round(self, past: PastRound) -> None:
        self.standings.rounds.append(past)
        del self.standings.rounds[:-MOST_ROUNDS]
        self._reporter.count("rounds")
        if past.fault:
            self._reporter.count("rounds_failed")

    def _record_losses(self, outer_step: int, after: Mapping[str, float]) -> None:
        several = {"domains": after} if len(after) > 1 else {}
        self._record(
            "held_out",
            outer_step=outer_step,
            before=self._rules.mean(self._losses),
            after=self._rules.mean(after),
            text=self._rules.config.held_out_name,
            **several,
        )

    def _report(
        self, phase: Literal["starting", "waiting", "round", "stopped"], reason: str = ""
    ) -> None:
        """Report on the network for its readers; nothing depends on it."""
        reporter, several = self._reporter, len(self._losses) > 1
        mean = self._rules.mean(self._losses)
        reporter.phase, reporter.reason = phase, self.finished or reason
        if self.finished and phase != "stopped":
            reporter.phase = "finished"
        reporter.outer_step, reporter.tokens = self.state.outer_step, self.state.total_tokens
        reporter.loss, reporter.losses = (
            mean,
            self._losses if several else {self._rules.config.held_out_name: mean},
        )
        self._show_next_round()
        reporter.report()

    def _adopt_rules(self) -> None:
        """Go by the rules that hold at this outer step. Raises NetworkFailure: by a restart."""
        if (config := self._rules.follow(self.state.outer_step, self.finished)) is None:
            return
        self._went_on(config)
        self._rules = replace(self._rules, config=config)
        assert config.network is not None
        log.info(
            "Outer step %d is trained by version %d of the network's file",
            self.state.outer_step,
            config.network.head.version,
        )
        if self.finished:
            self.finished = ""
            self._look_for_end()

    def _look_for_end(self) -> None:
        """Call no round any more, and say so, once a [stop] of the network's file is reached."""
        state, loss = self.state, self._rules.mean(self._losses)
        reason = self._rules.config.finished(
            outer_step=state.outer_step, tokens=state.total_tokens, loss=loss
        )
        if reason:
            self.finished = reason
            self._record("finished", outer_step=state.outer_step, reason=reason)
            log.info("The network is finished (%s): no round is called any more", reason)

    # --- small parts ------------------------------------------------------------------------------

    def _save(self) -> None:
        try:
            self.standings.save(self._standings_path)
        except OSError as error:  # a round must not be lost with the miners' steps
            log.warning(
                "%s was not written (%s): a restart would continue with older scores; free the "
                "disk of --neuron.run_folder",
                self._standings_path,
                error.strerror,
            )
