"""Lead the rounds of a hivemind network: call the miners, average with them, publish.

One clock of blocks, which miners count too. Between two rounds uploads are scored in passes
(:mod:`.scorer`), the newest of each miner again and again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch

from distributed_training.chain.base import Neuron
from distributed_training.config import Config
from distributed_training.node.identity import Member, miners_of
from distributed_training.node.start import Stopped
from distributed_training.protocol import keys, lines
from distributed_training.protocol.metadata import RoundNotes
from distributed_training.protocol.network_report import WORSE
from distributed_training.protocol.scoring import round_due
from distributed_training.protocol.types import AllReduceFault
from distributed_training.scoring.evaluator import Judgement
from distributed_training.store.errors import StoreError
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
from distributed_training.validator.validator import (
    MOST_STEPS_OF_A_BLOCK,
    Validator,
    ValidatorRules,
)

log = logging.getLogger(__name__)

PUBLICATION_RETRY = timedelta(seconds=2)
# Faults that somebody who was called may be the cause of.
THEIRS = frozenset({"TIMEOUT", "PEER_FAILED", "NOT_FINITE", "OUT_OF_BOUNDS", "SCHEMA", WORSE})


class HivemindValidator(Validator):
    """Leads rounds over hivemind; the swarm's owner cancels a running one at a stop."""

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
        super().__init__(
            rules=rules,
            member=member,
            standings=scorer.standings,
            run=run,
            reporter=reporter,
            after_step=after_step,
        )
        self._rounds = rounds
        self._publisher = publisher
        self._scorer = scorer
        self._noted = False  # whether the bucket may say something of the round before
        self._unsure = False  # whether a publication that failed may have reached the bucket
        self._scored_at = -1

    @property
    def peer_id(self) -> str:  # type: ignore[override]
        return self._rounds.peer_id

    @property
    def maddrs(self) -> Sequence[str]:  # type: ignore[override]
        return self._rounds.maddrs

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

    def _begin(self, state: GlobalState, *, found: bool) -> GlobalState:
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
            self._publisher.announce(state.outer_step, self.peer_id)
            self._noted = True
        # Miners need time to load and to train: a period never starts before the validator does.
        self.standings.last_round_block = max(block, self.standings.last_round_block or 0)
        return state

    def _check_bucket(self) -> None:
        if not self._unsure:
            return
        with suppress(StoreError):  # asked again at the next tick
            reached = unless_stopped(self._publisher.outer_step, stop=self._stop)
            self._unsure = False
            if reached > self.state.outer_step:
                # Miners go by the bucket: none of them would be at our outer step any more.
                raise GlobalStateError(
                    f"outer step {reached} was published after all, and this process is still "
                    f"at {self.state.outer_step}: start it again, and it continues from the bucket"
                )

    def _lead(self, block: int) -> bool:
        due = self._round_due(block)
        if due:
            self.round()
        return due

    def _between_rounds(self, block: int) -> None:
        # Finished, its miners end: judged on, they would lose the scores that they ended with.
        if not self.finished and block - self._scored_at >= self._rules.settings.score_blocks:
            self.score()

    def _show_next_round(self) -> None:
        self._reporter.due_at = self.last_allreduce_block + self.blocks_per_allreduce

    def _went_on(self, config: Config) -> None:
        self._rounds.rules_id = config.rules_id

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
            losses = self._rules.losses(following.weights)
            before, after = map(self._rules.mean, (self._losses, losses))
            self._record_losses(following.outer_step, losses)
            if not after <= (limit := self._rules.config.loss_limit(before)):  # also for NaN
                detail = f"held-out loss {before:.4f} -> {after:.4f}, limit {limit:.4f}"
                each = lines.describe_losses(losses)
                fault, detail = WORSE, f"{detail}, on {self._rules.config.held_out_name}{each}"
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
        self._remember_round(
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
        if good and following is not None:
            self._succeeded(following, losses, outcome, began)
        else:
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
            new, buffer = self._rules.outer_rule.step(
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
        tokens = steps * len(outcome.participants) * self._rules.config.tokens_of_step
        return state.after(weights, momentum, block=block, inner_steps=steps, tokens=tokens)

    def _succeeded(
        self,
        following: GlobalState,
        losses: dict[str, float],
        outcome: RoundOutcome,
        began: float,
    ) -> None:
        self.standings.published(following.outer_step)
        self.standings.last_round_block = following.last_allreduce_block
        self._save()
        self._reached(following, losses, outcome.participants, began, lines.ALL_REDUCE_DONE)

    def _failed(self, fault: str, detail: str) -> None:
        """Keep the outer step; the whole period starts again."""
        # A root whose answer was lost may be there: the next start finds out and credits the round.
        if not self._unsure:
            self.standings.reached = None
        self.standings.failed_rounds += 1
        self.standings.last_round_block = self._chain.block()
        # The sweep of a scoring pass tells the miners our outer step: some may have moved on.
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
            report = self._publisher.publish(state, self.peer_id)
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
