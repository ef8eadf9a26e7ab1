"""Lead the rounds of a store network: fetch, judge and merge the uploads of a close, and publish.

Read :meth:`StoreValidator._advance` first: it leads a round, from the close to its end. From the
close on, each upload is fetched when it arrives and judged once (:mod:`.judging`). The round ends
when all members that it waits for have uploaded, and at the latest after the grace. It waits for
the members that uploaded for the previous close. At some closes it waits for the others too,
because otherwise every round would be over before a newcomer with the slowest link has uploaded.

The accepted uploads are merged (:mod:`.merge`), and the outer step is published
(:mod:`.outer_steps`) if the held-out loss allows it. If not, a bisection finds the upload that
spoils it. If a store or a disk fails in the meantime, or the process is killed, the round begins
again from what the store has. So a round may be late, but no upload is lost.

Every wait for others ends. Some uploads are not delivered by the store, do not fit on this disk, or
need a text that is unavailable. They delay nobody once the grace is over: they are not judged, and
their members lose nothing. Half a period later, judging ends too.

One thread does all of it. At each tick, a round comes first if it is due, and then the weights on
the chain. The validator gets everything that it needs from ``program.build``, so tests run it with
a chain, a bucket and members in memory.

The validator writes ``events.jsonl``, with one JSON object per line, for programs that follow it.

Every line has ``kind`` and ``time`` (seconds since the epoch, written by the event log). These are
the fields of each kind, in the order in which they happen; readers ignore kinds and fields that
they do not know:

``start``
    uid, hotkey, outer_step, resumed (False if the initial model was new).
``publication``
    revision (``outer_step.serial`` of its close), ok, seconds, bytes_sent, reason (empty when ok).
``held_out``
    outer_step, before, after: mean loss in nats per token on held-out text; text: its name;
    domains: the losses after it by name, if there are several. Written once at the start with
    before == after (the state that the run begins from), then for each outer step *before* its
    ``outer_step`` event; outer_step is the outer step that was reached. A step that was refused for
    its loss has the event too, but no ``outer_step`` event follows: the last event of an outer_step
    counts.
``upload_seen``
    uid, revision (``outer_step.serial`` of its close), outer_step, age_seconds. Once per upload.
``upload_scored``
    uid, outer_step, revision, ok; if it was reset, cause (of ``scoring.Evaluation``) and reason
    (the same in words, with its figures), else both empty; random_before, random_after,
    random_relative, assigned_before, assigned_after, assigned_relative, assigned_page, random_page.
    Losses in nats; absent when ok is False.
``scores``
    outer_step, scores: {uid as text: {random (mu - 3 sigma), mu, sigma, assigned, train,
    all_reduce, repo_valid, total, published (EMA of total: the weight set on the chain)}}.
``round``
    outer_step (that the round was meant to end), ok, fault (``TOO_FEW`` or ``GATE``: the close
    moved; or empty), detail, called (uids that sent an upload for the close), participants (uids
    whose uploads were accepted), causes ({uid as text: why its upload was refused}), seconds.
``outer_step``
    outer_step (reached; the new global state is published and complete), participants (uids),
    carried_over (participants whose uploads count in a later outer step), seconds (from the close
    to the end of the publication).
``finished``
    outer_step, reason: which [stop] of the network's file was reached. No round follows.
``export``
    outer_step, folder, ok, reason (empty when ok), seconds, results: {name: number}, of the
    founder's command.
``weights``
    weights: {uid as text: weight}.
``network``
    verdict, words, level (good, wait, bad, idle): how the network is doing; next_report: the most
    seconds until the next such event.
``stop``
    reason.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

from distributed_training.chain.base import ChainError
from distributed_training.common.backoff import Throttle
from distributed_training.node.start import StopNow
from distributed_training.protocol import keys, lines
from distributed_training.protocol.manifest import Manifest
from distributed_training.protocol.network_report import GATE, MOST_ROUNDS, TOO_FEW, printable
from distributed_training.protocol.scoring import random_block
from distributed_training.scoring.evaluator import Evaluation, Judged
from distributed_training.store.errors import StoreError
from distributed_training.training.model import kind_of
from distributed_training.training.weights import GlobalState
from distributed_training.validator.closes import LOOK, CloseJudge, Intake, MergedSome
from distributed_training.validator.errands import Errands, unless_stopped
from distributed_training.validator.judging import CAUSES, Accepted, find_copies, share_alike
from distributed_training.validator.merge import OuterState, find_spoilers
from distributed_training.validator.outer_steps import next_state, renewed
from distributed_training.validator.own_copy import RECOVER
from distributed_training.validator.standings import PastRound

log = logging.getLogger(__name__)

LEDGER = "ledger.json"  # in an outer step's folder: the scores that count once it is published
_PATIENT = 3  # consecutive closes that the held-out loss refuses before an error is logged
_RECENT = 2.0  # number of rounds after which a progress upload is no longer valid
_FORGIVEN = 3  # consecutive missed closes after which a member's progress is not checked


#: Values at outer step 0 of the manifest's fields that a close decides.
_OF_NO_CLOSE: dict[str, Any] = {
    **dict.fromkeys(("previous", "update"), ""),
    **dict.fromkeys(("merged", "refused"), ()),
    **{name: {} for name in ("losses_before", "losses_after", "scores")},
    **{"closed_at": 0.0, "serial": 0},
}


@dataclass(frozen=True)
class _Reached:
    """A merged outer step, which is published as soon as the store accepts it."""

    manifest: Manifest
    data: bytes  # the signed manifest
    counted: Sequence[Accepted]  # the uploads that the update contains
    state: GlobalState
    merged: MergedSome


@dataclass(kw_only=True)
class StoreValidator(CloseJudge):
    """Leads rounds through the store, which only ``steps`` writes.

    Call :meth:`start`, then :meth:`run`. A stop ends both soon. ``found`` says whether ``state``
    was found in the global bucket. ``after_step`` gets each new state and returns at once.
    ``follow`` gets the outer step, and raises OtherRules if another version of the network's file
    is in force. ``publish_files`` writes the network's files into a store that was emptied, and
    raises StoreError.
    """

    found: bool
    after_step: Callable[[GlobalState], None]
    follow: Callable[[int], None]
    publish_files: Callable[[], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._standings_path = self.folder / LEDGER
        self._losses: dict[str, float]  # losses of the state on each domain, set by start()
        self.finished = ""  # why no more rounds are led; empty while rounds are led
        self._period = self.config.rounds.period.total_seconds()
        self._weights_due = Throttle(self._period / 4)
        self._close: Intake | None = None
        self._reached_step: _Reached | None = None
        self._looked = 0.0
        self._problem = ""
        self._leads = False  # while False, another process may lead

    # --- start and loop -------------------------------------------------------------------------

    def start(self) -> None:
        """Continue from the state that was found in the global bucket, or else publish ours.

        Raises GlobalStateError, and StoreError if the bucket cannot be written.
        """
        state = self.state
        self._begin(state)
        self._losses = self.losses_of(state.weights)
        self.record(
            "start",
            uid=self.member.chain.uid(self.member.hotkey),
            hotkey=self.member.hotkey,
            outer_step=state.outer_step,
            resumed=self.found,
        )
        self._record_losses(state.outer_step, self._losses)
        self._log_losses("Outer step")
        self._find_end()
        self._report("starting")

    def run(self) -> None:
        """Tick until stopped."""
        while not self.stop.wait(self.config.validator.tick.total_seconds()):
            try:
                self.tick()
            except ChainError as error:
                log.warning("The chain does not answer (%s). Trying again.", error)
            except StopNow:
                break
        self._save()
        self._report("stopped", reason="asked to stop")
        self.record("stop", reason="asked to stop")

    def tick(self) -> None:
        """Do what is due now: lead a round, or else set the weights on the chain.

        Raises ChainError, StopNow, OtherRules, and AnotherLeadsError if another process leads.
        """
        self.follow(self.state.outer_step)
        if self.steps.emptied:
            with suppress(StoreError):  # the next tick tries again
                unless_stopped(self.publish_files, stop=self.stop)
                self.steps.emptied = False
        self.reporter.keep_up()
        weights = self.standings.weights()
        # A round comes first, because miners have timed their uploads for its close.
        if self._lead():
            return
        # A failed try counts too, because the chain limits how often weights are set.
        if weights and self._weights_due():
            try:
                unless_stopped(partial(self.member.chain.set_weights, weights), stop=self.stop)
                by_uid = {str(uid): weight for uid, weight in weights.items()}
                self.record("weights", weights=by_uid)
            except ChainError as error:
                log.warning("Weights were not set (%s). Trying again in a quarter period.", error)

    # --- its turn to lead -------------------------------------------------------------------------

    def _begin(self, state: GlobalState) -> None:
        """Publish a first state, or show that this process leads from the state that was found.

        Raises the same errors as :meth:`start`.
        """
        steps = self.steps
        if not self.found:
            values = OuterState(state.weights)
            manifest = self._manifest(
                state, values, made_at=time.time(), files=steps.write_values(state, values)
            )
            steps.publish(manifest, manifest.to_bytes(steps.sign))
            steps.went_on(manifest, values)
        self._miners()
        if not self.standings.successful_rounds:  # on an empty disk take the scores from the chain
            hotkeys = dict[int, str]()  # at a uid's last upload, as the uid may have a new hotkey
            for past in steps.history:
                hotkeys |= {one.uid: one.hotkey for one in past.merged}
                hotkeys |= {one.uid: one.hotkey for one in past.refused}
            for uid, score in steps.head.scores.items():
                if (entry := self.standings.entries.get(uid)) and entry.hotkey == hotkeys.get(uid):
                    entry.published = score
        if (
            self.found
            and not steps.led_last
            and not self.config.validator.take_over
            and not steps.is_free(self._period)
        ):
            log.warning(
                "Another validator may lead this network, since this machine's disk does not have "
                "its newest %s: this one waits for up to %.0f s. If that is not renewed by then, "
                "it leads, otherwise it stops. With --take-over it leads at once",
                keys.STATE,
                self._period / 2,
            )
        else:
            self._lead_from_now(
                "its own disk has the newest signed state"
                if steps.led_last
                else "--take-over was given"
                if self.config.validator.take_over
                else "nobody else does"
            )

    def _lead_from_now(self, why: str) -> None:
        """Write what the store lacks, and a state that shows that this process leads."""
        steps = self.steps
        log.info("This validator leads the network's rounds from now on: %s", why)
        if steps.unsure:
            log.warning(
                "The newest known %s is old: if the bucket was restored from a backup, members do "
                "not follow it until the founder says so: %s",
                keys.STATE,
                RECOVER,
            )
        steps.restore()
        now = steps.now()
        state = steps.state
        if state is None or state.head != steps.head.digest or state.serial < steps.serial:
            self._show(now)
        else:
            steps.write(renewed(state, now=now, period=self._period, finished=self.finished))
        self._leads = True

    def _lead(self) -> bool:
        """Lead a round if one is due; return whether it has ended.

        Raises the same errors as :meth:`tick`.
        """
        if time.monotonic() - self._looked < LOOK:
            return False
        problem = ""
        try:
            return self._advance()
        except (StoreError, OSError) as error:
            problem = str(error)
            if problem != self._problem:
                log.warning("The round waits: %s; it continues as soon as it can", problem)
            return False
        finally:
            self._looked, self._problem = time.monotonic(), problem

    def _save(self) -> None:
        if self._reached_step is not None:
            return  # its scores must not count before everybody can see the outer step
        try:
            self.standings.save(self._standings_path)
        except OSError as error:  # a full disk must not lose a round and the members' work
            log.warning(
                "%s was not written (%s): a restart would continue with older scores; free disk "
                "space at --neuron.run_folder",
                self._standings_path,
                error.strerror,
            )

    # --- a round ----------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Do what can be done for the current close; return whether its round has ended.

        Raises StoreError, OSError, StopNow.
        """
        steps = self.steps
        assert steps.state is not None
        if not self._leads:
            if not steps.is_free(self._period):
                return False
            self._lead_from_now(f"the renewal of {keys.STATE} is overdue")
        now = steps.restore_lost()
        behind = steps.state.head != steps.head.digest  # the store failed before it named the head
        # A close is that far away only if the store's clock was wrong.
        if behind or steps.state.closes_at > now + 2 * self._period:
            self._show(now)
        state = steps.state
        renewal = renewed(state, now=now, period=self._period, finished=self.finished)
        # Renew the state well before half a period is over, when another process may take the lead.
        if state.finished != renewal.finished or now > state.written_at + self._period / 4:
            steps.write(renewal)
        if self._reached_step is not None:
            return self._publish()
        if self.finished or now < state.closes_at:
            return False
        miners = self._miners()
        if self._close is None or self._close.state.serial != state.serial:
            draw = self._draw(state.serial)
            texts = [random_block(draw) for _ in range(self._texts)]
            rate = self._outer_rule.learning_rate
            self._close = Intake(
                state,
                Judged(state.outer_step, self.state.weights, rate, texts),
                time.monotonic(),
                max(state.closes_at + state.grace, now) + self._period / 2,
                self._choose_awaited(state.serial, miners),
            )
            shutil.rmtree(self._uploads, ignore_errors=True)
            log.info("Close %d of outer step %d", state.serial, state.outer_step)
            self._report("round")
        close = self._close
        self._judge_new(close, miners, now)
        if self._missing(close, miners, now):
            self.reporter.keep_up()
            return False
        # Leave out members that were expelled in the meantime.
        present = {miner.uid: miner.hotkey for miner in miners}
        close.accepted = {
            u: one for u, one in close.accepted.items() if present.get(u) == one.hotkey
        }
        return self._end(close, now)

    # --- the end of a round -----------------------------------------------------------------------

    def _end(self, close: Intake, now: float) -> bool:
        """End the round of a close: publish its outer step, or move the close."""
        for uid, one in [*close.waiting.items()]:
            self._refuse(close, uid, "not-judged", one.why)
        momentum = self.steps.values.momentum
        known = self._samples.known()
        if momentum is not None:
            known["the outer momentum"] = self.judge.sample(momentum)
        for uid, why in find_copies([*close.accepted.values()], known).items():
            self._blame(close, uid, "copy", why)
        self._judge_clipped(close)
        close.accepted = {one.uid: one for one in share_alike([*close.accepted.values()])}
        least = self.config.rounds.least
        if len(close.accepted) < least:
            detail = f"{lines.counted(len(close.accepted), 'upload')} accepted of {len(close.came)}"
            return self._move(close, TOO_FEW, f"{detail}, {least} are needed", now)
        # Put the least trusted last, since the search for a spoiler begins there.
        counted = [uid for uid, factor in self._factors(close).items() if factor]
        trusted = sorted(counted, key=lambda u: -self.standings.entries[u].published)
        before = self.mean(self._losses)
        limit = self.config.loss_limit(before)
        merged = self._merge_all(close)

        def passes(places: Sequence[int]) -> bool:
            some = self._merge(close, [trusted[i] for i in places])
            return self.mean(some.losses) <= limit

        # Use "not <=", so that NaN fails too.
        if not (after := self.mean(merged.losses)) <= limit:
            detail = f"held-out loss {before:.4f} -> {after:.4f}, limit {limit:.4f}"
            self._record_losses(close.state.outer_step + 1, merged.losses)
            del merged  # a merge is as large as three models, and the search makes more of them
            spoilers = find_spoilers(len(trusted), passes)
            if spoilers is None or len(trusted) - len(spoilers) < least:
                return self._move(close, GATE, detail, now)
            for place in spoilers:
                self._blame(close, trusted[place], "spoiler", f"with it {detail}")
            merged = self._merge(close, [*close.accepted])
            # Without the spoilers other uploads may help, or determine what is usual.
            if not self.mean(merged.losses) <= limit:
                return self._move(close, GATE, detail, now)
        self._reached_step = self._prepare(close, merged, now)
        return self._publish()

    def _manifest(self, state: GlobalState, values: OuterState, **of_close: Any) -> Manifest:
        """Return the manifest of ``state``; ``of_close``: the fields that its close decides.

        Fields that are left out have the values of outer step 0.
        """
        rule = self._outer_rule
        weights, momentum, residual = values.digests
        of_close = _OF_NO_CLOSE | of_close
        return Manifest(
            run_id=self.judge.run_id,
            rules_id=self.config.network.rules_id,
            outer_step=state.outer_step,
            weights=weights,
            momentum=momentum,
            residual=residual,
            learning_rate=rule.learning_rate,
            mu=rule.mu,
            rule=rule.name,
            total_inner_steps=state.total_inner_steps,
            total_tokens=state.total_tokens,
            libraries={n: version(n) for n in kind_of(state.model_config).libraries} or None,
            **of_close,
        )

    def _prepare(self, close: Intake, merged: MergedSome, now: float) -> _Reached:
        """Make everything that is published for the outer step that the merge leads to."""
        values, head = merged.values, self.steps.head
        state = replace(
            self.state,
            outer_step=self.state.outer_step + 1,
            weights=[*values.weights],
            total_inner_steps=self.state.total_inner_steps + merged.header.inner_steps,
            total_tokens=self.state.total_tokens + merged.header.tokens,
        )
        # Write the values first: after a full disk all of this runs again, but scores count once.
        files = self.steps.write_values(state, values)
        self._score(close)
        self._record_round(close, tokens=merged.header.tokens)
        self.standings.failed_rounds = 0
        self.standings.successful_rounds += 1
        manifest = self._manifest(
            state,
            values,
            previous=head.digest,
            recovered=head.recovered,
            update=merged.update,
            merged=merged.merged,
            refused=tuple(close.refused[uid] for uid in sorted(close.refused)),
            losses_before=_named(self._losses),
            losses_after=_named(merged.losses),
            scores={uid: entry.published for uid, entry in self.standings.present().items()},
            closed_at=close.state.closes_at,
            serial=close.state.serial,
            made_at=now,
            files=files if state.outer_step % self.config.rounds.weights_every == 0 else {},
        )
        # The old scores also stay: they count until the manifest is published.
        with suppress(OSError):
            self.standings.save(self.steps.place(state.outer_step) / LEDGER)
        for uid in manifest.carried_over:
            log.info("uid %d: carried over: it helps less than others or than chance may", uid)
        self._choose_text(close)
        counted = [close.accepted[one.uid] for one in merged.merged if one.factor]
        return _Reached(manifest, manifest.to_bytes(self.steps.sign), counted, state, merged)

    def _publish(self) -> bool:
        """Publish an outer step and continue from it. After a StoreError it is tried again."""
        reached, close, began = self._reached_step, self._close, time.monotonic()
        assert reached is not None and close is not None
        manifest, merged = reached.manifest, reached.merged
        uploads = {one.uid: one.file.path for one in reached.counted}
        sent = self.steps.publish(manifest, reached.data, uploads)
        self.record(
            "publication",
            revision=f"{manifest.outer_step}.{manifest.serial}",
            ok=True,
            seconds=round(time.monotonic() - began, 3),
            bytes_sent=sent,
            reason="",
        )
        self.steps.went_on(manifest, merged.values)
        self._reached_step = self._close = None
        # Everybody can read these uploads and the update from now on, and send copies of them.
        step = f"of outer step {manifest.outer_step}"
        samples = {f"uid {one.uid}'s upload {step}": one.sample for one in reached.counted}
        old, new = (self.judge.sample(each.weights) for each in (self.state, reached.state))
        self._samples.add(manifest.outer_step, samples | {f"the update {step}": old - new})
        try:
            os.replace(self.steps.place(manifest.outer_step) / LEDGER, self._standings_path)
        except OSError:  # there was no room on the disk for it
            self._save()
        self._record_losses(manifest.outer_step, merged.losses)
        self.state, self._losses = reached.state, merged.losses
        self.record(
            "outer_step",
            outer_step=manifest.outer_step,
            participants=[one.uid for one in manifest.merged],
            carried_over=sorted(manifest.carried_over),
            seconds=round(time.monotonic() - close.began, 3),
        )
        self._log_losses("Merged: outer step")
        self.after_step(self.state)
        # Look for a new version first, because it may have put off the end of the network.
        self.follow(self.state.outer_step)
        self._find_end()
        self._show(self.steps.restore_lost())
        self.steps.delete_past()
        self._report("waiting")
        return True

    def _show(self, now: float, *, gate: int = 0) -> None:
        """Write a state that names the head, or a new time for the current close."""
        self.steps.write(
            next_state(
                self.steps.state,
                self.steps.head,
                self.steps.serial + 1,
                now=now,
                period=self._period,
                grace=self._grace,
                finished=self.finished,
                gate=gate,
            )
        )

    def _move(self, close: Intake, fault: str, detail: str, now: float) -> bool:
        """Move the close by one round period; uploads sent for it are void."""
        gate = close.state.gate + 1 if fault == GATE else 0
        self._close = None
        self.standings.failed_rounds += 1
        self._record_round(close, fault, detail)
        self._save()
        log.warning(
            "Close %d of outer step %d moves by %.0f s (%s): members send another upload",
            close.state.serial,
            close.state.outer_step,
            self._period,
            detail,
        )
        if gate == _PATIENT:
            log.error(
                "The held-out loss refused %d closes in a row and nobody is to blame, so training "
                "stands still: lower training.outer_learning_rate or raise round.held_out_rise in "
                "a new version of the network's file",
                _PATIENT,
            )
        self._show(now, gate=gate)
        failed = self.standings.failed_rounds
        if fault == TOO_FEW and not failed & (failed - 1):
            # A damaged object may keep all members from training, and only a full read finds it.
            self.steps.restore(deep=True)
        self._report("waiting")
        return True

    # --- what is reported ---------------------------------------------------------------------

    def _log_losses(self, what: str) -> None:
        log.info(
            "%s %d, held-out loss %.4f on %s%s",
            what,
            self.state.outer_step,
            self.mean(self._losses),
            self.config.held_out_name,
            lines.describe_losses(self._losses),
        )

    def _record_losses(self, outer_step: int, after: Mapping[str, float]) -> None:
        several = {"domains": after} if len(after) > 1 else {}
        self.record(
            "held_out",
            outer_step=outer_step,
            before=self.mean(self._losses),
            after=self.mean(after),
            text=self.config.held_out_name,
            **several,
        )

    def _report(
        self, phase: Literal["starting", "waiting", "round", "stopped"], reason: str = ""
    ) -> None:
        """Report on the network for people; nothing else depends on the report."""
        mean, named = self.mean(self._losses), self.steps.state
        several = len(self._losses) > 1
        self.reporter.report(
            phase="finished" if self.finished and phase != "stopped" else phase,
            reason=self.finished or reason,
            outer_step=self.state.outer_step,
            tokens=self.state.total_tokens,
            loss=mean,
            losses=self._losses if several else {self.config.held_out_name: mean},
            closes_at=None if self.finished or named is None else named.closes_at,
        )

    def _find_end(self) -> None:
        """Lead no more rounds, and log it, once a [stop] of the network's file is reached."""
        state, loss = self.state, self.mean(self._losses)
        reason = self.config.finished(
            outer_step=state.outer_step, tokens=state.total_tokens, loss=loss
        )
        if reason:
            self.finished = reason
            self.record("finished", outer_step=state.outer_step, reason=reason)
            log.info("The network is finished (%s): no more rounds are called", reason)

    # --- what a round leaves behind ---------------------------------------------------------------

    def _score(self, close: Intake) -> None:
        """Compute the scores that follow from the round's results for each member."""
        judgements = [one.judgement for one in close.accepted.values()]
        judgements += [
            Evaluation(uid, close.state.outer_step, cause=CAUSES[one.cause], reason=one.reason)
            for uid, one in close.refused.items()
            if one.cause != "not-judged"  # this cause says nothing about the upload
        ]
        took_part = self._participants(close)
        entries = self.standings.present()  # including those who took part for the first time
        for uid, entry in entries.items():
            entry.all_reduce = int(uid in took_part)
            entry.fault = "" if uid in close.came else "it sent no upload for the last close"
        # An upload that is merged but gains nothing scores 0.
        valid = {u: u in close.accepted and close.accepted[u].improvement > 0 for u in entries}
        known = [judgement for judgement in judgements if judgement.uid in entries]
        if self.of_member is not None:
            unjudged = entries.keys() - {judgement.uid for judgement in known}
            valid |= dict.fromkeys(self._find_progress(unjudged, close.state.closes_at), True)
        scores = self.standings.judged(known, valid)
        self.record(
            "scores",
            outer_step=close.state.outer_step,
            scores={str(uid): figures for uid, figures in scores.items()},
        )

    def _find_progress(self, uids: Collection[int], closes_at: float) -> list[int]:
        """Return the uids whose last progress upload was recent enough at the close to be valid.

        Members that missed ``_FORGIVEN`` or more consecutive closes are left out without checking
        their progress.
        """
        by_uid = {
            miner.uid: miner
            for miner in self._miners()
            if miner.uid in uids and self.standings.entries[miner.uid].missed < _FORGIVEN
        }

        def age(uid: int) -> float:
            info = self._reader(by_uid[uid]).head(keys.progress_key(uid))
            return math.inf if info is None else closes_at - info.modified

        found = Errands().run(age, [*by_uid], within=self._look, patience=LOOK, stop=self.stop)
        oldest = _RECENT * (self._period + self._grace)
        return [uid for uid, each in found.items() if isinstance(each, float) and each <= oldest]

    def _record_round(
        self, close: Intake, fault: str = "", detail: str = "", *, tokens: int = 0
    ) -> None:
        """Record a round that has ended, and the members that missed it."""
        for uid, entry in self.standings.present().items():
            entry.missed = 0 if uid in close.came else entry.missed + 1
        seconds = time.monotonic() - close.began
        uids = [] if fault else sorted(close.accepted)
        self.record(
            "round",
            outer_step=close.state.outer_step,
            ok=not fault,
            fault=fault,
            detail=detail,
            called=sorted(close.came),
            participants=uids,
            causes={str(u): f"{one.cause}: {one.reason}" for u, one in close.refused.items()},
            seconds=round(seconds, 3),
        )
        outer_step = close.state.outer_step
        past = PastRound(outer_step, time.time(), seconds, uids, tokens, fault, detail)
        self.standings.rounds.append(past)
        del self.standings.rounds[:-MOST_ROUNDS]


def _named(losses: Mapping[str, float]) -> dict[str, float]:
    """Return the losses with their names made printable and short enough for a manifest."""
    return {printable(name, 100): loss for name, loss in losses.items()}
