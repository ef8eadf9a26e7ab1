"""The reference validator: owns the global bucket, leads the rounds, scores the uploads.

One thread, one clock of blocks. At each tick, in this order: a round when it is due, else weights,
else a scoring pass. Everything it needs is handed to it (see ``program.build``), so that tests run
it with a chain, a bucket and miners in memory.

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
    Once for each new revision.
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
    left_out ({uid as text: why}: alive and not called), causes (likewise: called, and not in the
    average),
    top_uid (whose checkpoint gave the validator's pseudo-gradient, or null), seconds,
    matchmaking_seconds, transfer_seconds.
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

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from distributed_training.chain.base import ChainError, Neuron
from distributed_training.config import Config
from distributed_training.config.settings import ValidatorSettings
from distributed_training.config.types import Domain
from distributed_training.data.held_out import mean_loss
from distributed_training.node.identity import Member, miners_of
from distributed_training.node.start import Stopped
from distributed_training.protocol import keys, lines
from distributed_training.protocol.metadata import RoundNotes
from distributed_training.protocol.network_report import MOST_ROUNDS, WORSE
from distributed_training.protocol.scoring import round_due
from distributed_training.protocol.types import AllReduceFault
from distributed_training.scoring.evaluator import Judgement
from distributed_training.store.errors import StoreError
from distributed_training.training.outer_rule import OuterRule
from distributed_training.training.outer_step import GlobalState
from distributed_training.validator.global_state import GlobalPublisher, GlobalStateError
from distributed_training.validator.reporter import Reporter
from distributed_training.validator.rounds import (
    Attendance,
    RoundCaller,
    RoundOutcome,
    Run,
    unless_stopped,
)
from distributed_training.validator.scorer import PastRound, Reached, Scorer

log = logging.getLogger(__name__)

PUBLICATION_RETRY = timedelta(seconds=2)
MOST_STEPS_OF_A_BLOCK = 12  # inner steps: one a second is more than any network takes
# Faults that somebody who was called may be the cause of.
THEIRS = frozenset({"TIMEOUT", "PEER_FAILED", "NOT_FINITE", "OUT_OF_BOUNDS", "SCHEMA", WORSE})


@dataclass(frozen=True)
class HeldOutText:
    """Text that outer steps are judged on, called ``name``.

    ``losses``: of a model with the given weights on each domain, in nats per token; ``limit``: of
    their mean after an outer step, by that before.
    """

    name: str
    domains: Sequence[Domain]
    losses: Callable[[Sequence[Tensor]], dict[str, float]]
    limit: Callable[[float], float]

    def mean(self, losses: Mapping[str, float]) -> float:
        """Return the judged loss, of those on each domain."""
        return mean_loss(losses, self.domains)


@dataclass(frozen=True)
class Ending:
    """When the network is finished, and who is told.

    ``tokens_of_step``: of one inner step of one miner. ``reached``: which [stop] of the file is
    reached, in words, by outer step, tokens and loss. ``show``: tells all miners. Raises
    StoreError.
    """

    tokens_of_step: int
    reached: Callable[..., str]
    show: Callable[[str], None]


@dataclass(frozen=True)
class ValidatorRules:
    """The part of the network's file that the validator goes by.

    ``follow``: gives the rules of an outer step if they are others, by why the network is finished.
    Raises NetworkFailure for rules that take a restart.
    """

    settings: ValidatorSettings
    outer_rule: OuterRule
    held_out: HeldOutText
    ending: Ending
    follow: Callable[[int, str], Config | None]


class Validator:
    """Call :meth:`start`, then :meth:`run`.

    A stop ends both soon; the swarm's owner also cancels a running round then.
    """

    def __init__(
        self,
        *,
        rules: ValidatorRules,
        member: Member,
        rounds: RoundCaller,
        publisher: GlobalPublisher,
        scorer: Scorer,
        run: Run,
        reporter: Reporter,
        after_step: Callable[[GlobalState], None],
    ) -> None:
        # collaborators
        self._rules = rules
        self._member = member
        self._chain = member.chain
        self._rounds = rounds
        self._publisher = publisher
        self._scorer = scorer
        self._after_step = after_step  # returns at once
        self._reporter = reporter
        self._clock_fault = run.clock_fault
        self._record = run.record
        self._stop = run.stop
        # what it knows
        self.standings = scorer.standings
        self._standings_path = run.folder / "ledger.json"
        self.state: GlobalState  # since the start
        self._losses: dict[str, float]  # of the state on each domain, since the start
        self._noted = False  # whether the bucket may say something of the round before
        self._unsure = False  # whether a publication that failed may have reached the bucket
        self._scored_at = -1
        self._weights_at = -1
        self.finished = ""  # why no round is called any more
        self._finish_shown = ""  # of it, in the bucket

    @property
    def blocks_per_allreduce(self) -> int:
        later = self._rules.settings.blocks_per_allreduce_later
        if later and self.standings.successful_rounds:
            return later
        return self._rules.settings.blocks_per_allreduce

    @property
    def last_allreduce_block(self) -> int:
        """The block at which the present period began: the last round, good or bad."""
        return max(self.state.last_allreduce_block, self.standings.last_round_block or 0)

    # --- life -----------------------------------------------------------------------------------

    def start(self, state: GlobalState, *, found: bool) -> None:
        """Go on from the ``state`` that was found in the global bucket, or else publish it.

        Raises GlobalStateError, StoreError when the bucket cannot be written.
        """
        block = self._chain.block()
        if not found:
            state = replace(state, last_allreduce_block=block)
            if not self._published(state):
                raise GlobalStateError(
                    "the initial model could not be published, so there is nothing to train: check "
                    "the write keys and the bucket of store.global_bucket"
                )
        else:
            # If the last process was killed while it published, the bucket tells whether it had.
            self.standings.published(state.outer_step)
            self._publisher.announce(state.outer_step, self._rounds.peer_id)
            self._noted = True
        self.state = state
        self._losses = self._rules.held_out.losses(state.weights)
        # Miners need time to load and to train: a period never starts before the validator does.
        self.standings.last_round_block = max(block, self.standings.last_round_block or 0)
        self._record(
            "start",
            uid=self._chain.uid(self._member.hotkey),
            hotkey=self._member.hotkey,
            peer_id=self._rounds.peer_id,
            maddrs=list(self._rounds.maddrs),
            outer_step=state.outer_step,
            resumed=found,
        )
        self._record_losses(state.outer_step, self._losses)
        log.info(
            "Global state %d.%d.0, held-out loss %.4f on %s%s",
            self._publisher.run,
            state.outer_step,
            self._rules.held_out.mean(self._losses),
            self._rules.held_out.name,
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
        """Do what is due at the present block: a round, or weights, or a scoring pass.

        Raises ChainError, Stopped, and GlobalStateError if the bucket is ahead of us.
        """
        self._adopt_rules()
        if self._unsure:
            with suppress(StoreError):  # asked again at the next tick
                reached = unless_stopped(self._publisher.outer_step, stop=self._stop)
                self._unsure = False
                if reached > self.state.outer_step:
                    # Miners go by the bucket: none of them would be at our outer step any more.
                    raise GlobalStateError(
                        f"outer step {reached} was published after all, and this process is still "
                        f"at {self.state.outer_step}: start it again, which goes on from the bucket"
                    )
        if self.finished != self._finish_shown:
            with suppress(StoreError):  # asked again at the next tick
                show = partial(self._rules.ending.show, self.finished)
                unless_stopped(show, stop=self._stop)
                self._finish_shown = self.finished
        self._reporter.report(at_once=False)
        block = self._chain.block()
        weights = self.standings.weights()
        # Before all else: the miners count the same blocks and have timed their uploads by it.
        if self._round_due(block):
            self.round()
        elif weights and block - self._weights_at >= self._rules.settings.epoch_length:
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
        # Finished, its miners end: judged on, they would lose the scores that they ended with.
        elif not self.finished and block - self._scored_at >= self._rules.settings.score_blocks:
            self.score()

    # --- the round --------------------------------------------------------------------------------

    def round(self) -> bool:
        """Lead one round and, if it was good, publish the next outer step; whether it was.

        Raises ChainError, Stopped.
        """
        began = time.monotonic()
        state = self.state
        log.info("Round due at outer step %d", state.outer_step)
        self._report("round")
        suspects = self.standings.suspects
        scores = self.standings.weights()
        outcome = self._rounds.run(state, self._miners, suspects, scores, self._on_sweep)
        # One count a round, however many sweeps it took to gather the miners.
        self._attended(outcome.attendance)
        # A stop cancelled it: that is no failed round, which would lengthen period and age limit.
        if outcome.averaged is None and self._stop.is_set():
            raise Stopped
        fault, detail = outcome.fault.name if outcome.fault else "", outcome.detail
        if outcome.fault is AllReduceFault.NO_GROUP and (why := self._clock_fault()):
            detail = f"{detail}; {why}" if detail else why
        following: GlobalState | None = None
        if outcome.averaged is not None:
            following = self._outer_step(outcome)
            if following is None:
                fault, detail = AllReduceFault.NOT_FINITE.name, "the new weights are not finite"
        if following is not None:
            losses = self._rules.held_out.losses(following.weights)
            before, after = map(self._rules.held_out.mean, (self._losses, losses))
            self._record_losses(following.outer_step, losses)
            if not after <= (limit := self._rules.held_out.limit(before)):  # also for NaN
                detail = f"held-out loss {before:.4f} -> {after:.4f}, limit {limit:.4f}"
                each = lines.describe_losses(losses)
                fault, detail = WORSE, f"{detail}, on {self._rules.held_out.name}{each}"
                following = None
        result = outcome.result
        self._record(
            "round",
            outer_step=state.outer_step,
            ok=not fault,
            fault=fault,
            detail=detail,
            peers=list(result.peers) if result else [],
            failed_peers=list(result.failed_peers) if result else [],
            called=list(outcome.called),
            participants=list(outcome.participants),
            left_out={str(uid): why for uid, why in outcome.left_out.items()},
            causes={str(uid): why for uid, why in outcome.causes.items()},
            top_uid=outcome.top_uid,
            seconds=round(outcome.seconds, 3),
            matchmaking_seconds=result.matchmaking_seconds if result else None,
            transfer_seconds=result.transfer_seconds if result else None,
        )
        self._remember(outcome, fault)
        good = False
        if following is not None:
            # Saved first: the publication may be this process's last act, and is to be credited.
            attendance = outcome.attendance
            alive = sorted(set(attendance.alive) - set(outcome.failed))
            self.standings.reached = Reached(following.outer_step, list(attendance.asked), alive)
            self._save()
            good = self._published(following)
            self._unsure = not good
        self.standings.rounds.append(
            PastRound(
                outer_step=state.outer_step,
                ended=time.time(),
                seconds=time.monotonic() - began,
                participants=list(outcome.participants),
                tokens=following.total_tokens - state.total_tokens if following else 0,
                fault="" if good else fault or "publication",
                detail=detail,
            )
        )
        del self.standings.rounds[:-MOST_ROUNDS]
        self._reporter.count("rounds")
        if good and following is not None:
            self._succeeded(following, losses, outcome, began)
        else:
            self._reporter.count("rounds_failed")
            self._failed(fault or "publication", detail)
        self._report("waiting")
        # Who was not in it, and why, for score previews. Last: a bucket that is slow, or a stop,
        # must not keep a good round from being published.
        other = "its network's file is another version: it runs {}, so it is not called"
        notes = {u: other.format(run) for u, run in outcome.attendance.other_runs.items()}
        notes |= {uid: f"it was not called: {why}" for uid, why in outcome.left_out.items()}
        notes |= {uid: f"it is not in the average: {why}" for uid, why in outcome.causes.items()}
        # Nothing to say after a round with nothing to say: one write less.
        if notes or self._noted:
            write = partial(self._publisher.write_notes, RoundNotes(state.outer_step, notes))
            try:
                unless_stopped(write, stop=self._stop)
                self._noted = bool(notes)
            except StoreError as error:
                log.info("%s was not written (%s): it is after the next round", keys.ROUND, error)
        return good

    def _remember(self, outcome: RoundOutcome, fault: str) -> None:
        """Take in who was in a round, so that the next one leaves out who spoils it."""
        if fault and fault not in THEIRS:
            return
        # Of a round without an average nobody knows who was in the group.
        group = outcome.called if outcome.result is None else outcome.participants
        if outcome.result is not None and outcome.fault is AllReduceFault.PEER_FAILED:
            group = ()  # too few: whoever is in it is not to blame for who is not
        found = self.standings.suspects.ended(group, fault=fault, causes=outcome.causes)
        for uid, sentence in sorted(found.items()):
            log.warning(
                "uid %d is not called for %s (%s)",
                uid,
                lines.counted(sentence.rest, "good round"),
                sentence.cause,
            )

    def _outer_step(self, outcome: RoundOutcome) -> GlobalState | None:
        """Take the outer step along the round's average; None if the result is not finite."""
        state, averaged = self.state, outcome.averaged or ()
        weights, momentum = [], []
        for i, (start, gradient) in enumerate(zip(state.weights, averaged, strict=True)):
            old = None if state.momentum is None else state.momentum[i]
            new, buffer = self._rules.outer_rule(
                start, gradient, old, lr=state.learning_rate, mu=state.mu
            )
            # Published, a NaN would be in every miner's weights after the next load.
            if not bool(torch.isfinite(new).all()):
                return None
            weights.append(new)
            momentum.append(buffer)
        # Of now: miners read it in config.json and count their period from it.
        block = self._chain.block()
        most = MOST_STEPS_OF_A_BLOCK * max(0, block - state.last_allreduce_block)
        steps = min(outcome.inner_steps, most)
        tokens = steps * len(outcome.participants) * self._rules.ending.tokens_of_step
        return state.after(weights, momentum, block=block, inner_steps=steps, tokens=tokens)

    def _succeeded(
        self,
        following: GlobalState,
        losses: dict[str, float],
        outcome: RoundOutcome,
        began: float,
    ) -> None:
        self.state, self._losses = following, losses
        self.standings.published(following.outer_step)
        self.standings.last_round_block = following.last_allreduce_block
        self._save()
        self._record(
            "outer_step",
            outer_step=following.outer_step,
            participants=list(outcome.participants),
            seconds=round(time.monotonic() - began, 3),
        )
        log.info(
            "%s: outer step %d, held-out loss %.4f on %s%s",
            lines.ALL_REDUCE_DONE,
            following.outer_step,
            self._rules.held_out.mean(losses),
            self._rules.held_out.name,
            lines.describe_losses(losses),
        )
        self._after_step(following)
        # First: a version that holds from here on may have put the end off.
        self._adopt_rules()
        self._look_for_end()

    def _failed(self, fault: str, detail: str) -> None:
        """Keep the outer step; the whole period starts again."""
        # A root whose answer was lost may be there: the next start finds out and credits the round.
        if not self._unsure:
            self.standings.reached = None
        self.standings.failed_rounds += 1
        self.standings.last_round_block = self._chain.block()
        # The sweep of a scoring pass tells the miners our outer step: some may have gone on.
        self._scored_at = -1
        self._save()
        log.warning(
            "The round failed (%s: %s), so outer step %d stays; the next round is due in %d blocks",
            fault,
            detail,
            self.state.outer_step,
            self.blocks_per_allreduce,
        )

    def _on_sweep(self, attendance: Attendance) -> None:
        alive = set(attendance.alive)
        self._reporter.attendance = attendance
        self._record(
            "sweep",
            outer_step=self.state.outer_step,
            block=self._chain.block(),
            alive=sorted(alive),
            not_alive=sorted(set(attendance.asked) - alive),
            elsewhere={str(uid): step for uid, step in attendance.elsewhere.items()},
            other_runs={str(uid): run_id for uid, run_id in attendance.other_runs.items()},
        )
        self._reporter.report(at_once=False)

    def _attended(self, attendance: Attendance) -> None:
        """Take in who answered; say once who trains by another file or stands elsewhere."""
        entries = self.standings.entries
        for uid, run_id in attendance.other_runs.items():
            if uid in entries and entries[uid].run_id != run_id:
                log.warning(
                    "uid %d runs with another version of the network's file (run %s), so it is "
                    "neither called nor paid: hand its operator the present one",
                    uid,
                    run_id,
                )
        elsewhere = attendance.elsewhere.keys() & entries.keys()
        new = {uid for uid in elsewhere if entries[uid].elsewhere_since is None}
        if new:
            log.info(
                "At another outer step than ours (%d), and not called until they are back: %s",
                self.state.outer_step,
                ", ".join(f"uid {uid} at {attendance.elsewhere[uid]}" for uid in sorted(new)),
            )
        patience = self.blocks_per_allreduce
        self.standings.record_sweep(attendance, block=self._chain.block(), patience=patience)

    # --- scoring ----------------------------------------------------------------------------------

    def score(self) -> list[Judgement]:
        """Make one pass over the miners' uploads: check all, judge some, update scores.

        Raises ChainError, Stopped. Stops early when a round falls due.
        """
        block, state = self._chain.block(), self.state
        # Before anything that raises: a failed pass is not begun again at the next tick.
        self._scored_at = block
        if not self._scorer.store_answers():
            self._report("waiting", reason="the global bucket does not answer")
            return []
        # Each time: who registered or left since the pass before counts from now on.
        miners = self._miners()
        attendance = self._rounds.sweep(miners, state.outer_step)
        self._attended(attendance)
        self._on_sweep(attendance)
        judgements = self._scorer.score(
            miners,
            state,
            block=block,
            bpa=self.blocks_per_allreduce,
            interrupted=self._interrupted,
        )
        self._save()
        self._reporter.count("uploads_judged", len(judgements))
        self._reporter.count("uploads_reset", sum(not judgement.ok for judgement in judgements))
        self._report("waiting")
        return judgements

    def _interrupted(self) -> bool:
        self._reporter.report(at_once=False)
        return self._round_due(self._chain.block())

    def _record_losses(self, outer_step: int, after: Mapping[str, float]) -> None:
        several = {"domains": after} if len(after) > 1 else {}
        self._record(
            "held_out",
            outer_step=outer_step,
            before=self._rules.held_out.mean(self._losses),
            after=self._rules.held_out.mean(after),
            text=self._rules.held_out.name,
            **several,
        )

    def _report(
        self, phase: Literal["starting", "waiting", "round", "stopped"], reason: str = ""
    ) -> None:
        """Report on the network for its readers; nothing depends on it."""
        reporter, several = self._reporter, len(self._losses) > 1
        mean = self._rules.held_out.mean(self._losses)
        reporter.phase, reporter.reason = phase, self.finished or reason
        if self.finished and phase != "stopped":
            reporter.phase = "finished"
        reporter.outer_step, reporter.tokens = self.state.outer_step, self.state.total_tokens
        reporter.loss, reporter.losses = (
            mean,
            self._losses if several else {self._rules.held_out.name: mean},
        )
        reporter.due_at = self.last_allreduce_block + self.blocks_per_allreduce
        reporter.report()

    def _adopt_rules(self) -> None:
        """Go by the rules that hold at this outer step. Raises NetworkFailure: by a restart."""
        if (config := self._rules.follow(self.state.outer_step, self.finished)) is None:
            return
        self._rounds.rules_id = config.rules_id
        self._rules = replace(
            self._rules,
            settings=config.validator,
            held_out=replace(self._rules.held_out, limit=config.loss_limit),
            ending=replace(self._rules.ending, reached=config.finished),
        )
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
        state, loss = self.state, self._rules.held_out.mean(self._losses)
        reason = self._rules.ending.reached(
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
                "%s was not written (%s): a restart would go on with older scores; free the disk "
                "of --neuron.run_folder",
                self._standings_path,
                error.strerror,
            )

    def _round_due(self, block: int) -> bool:
        return not self.finished and round_due(
            block=block,
            last_allreduce_block=self.last_allreduce_block,
            bpa=self.blocks_per_allreduce,
        )

    def _miners(self) -> list[Neuron]:
        """List the miners: registered, with an endpoint, not us and not a validator.

        The standings take them in.
        """
        found = miners_of(self._chain.neurons(), max_uids=self._rules.settings.max_uids)
        miners = [n for n in found if n.hotkey != self._member.hotkey]
        self.standings.sync(miners)
        return miners

    def _published(self, state: GlobalState) -> bool:
        """Publish, trying again for a while: the miners have made the step already."""
        deadline = time.monotonic() + self._rules.settings.publication_budget.total_seconds()
        while True:
            report = self._publisher.publish(state, self._rounds.peer_id)
            self._record(
                "publication",
                revision=report.revision.tag,
                ok=report.ok,
                seconds=round(report.seconds, 3),
                bytes_sent=report.bytes_sent,
                reason=report.reason,
            )
            if report.ok:
                return True
            log.error("Outer step %d is not published yet: %s", state.outer_step, report.reason)
            pause = PUBLICATION_RETRY.total_seconds()
            if time.monotonic() + pause > deadline or self._stop.wait(pause):
                return False
