"""Lead the rounds of a store network: take the uploads of a close, judge, merge, publish.

From a close on each upload is fetched as it comes and judged once (:mod:`.judging`). The round
ends when all who are waited for have uploaded, at the latest after the grace. Those are the members
that came to the close before, and at times the others: a newcomer whose link is slower than all
others' would else find each round over. The accepted uploads are merged (:mod:`.merge`). The outer
step is published (:mod:`.outer_steps`) if the held-out loss allows it; if not, whoever spoils it is
looked for by halves. Whatever fails on the way, a store, a disk or a kill, is begun again from what
is in the store: a round may be late, but no upload is lost.

No wait for somebody else is without an end. An upload that the store does not deliver, that does
not fit on this disk or whose text is away delays nobody once the grace is over: it is not judged,
which costs its member nothing. Half a period later, judging ends too.

One thread does all of it. At each tick, a round comes first when it is due, then the weights on
the chain. Everything that the validator needs is handed to it (``program.build``), so tests run it
with a chain, a bucket and members in memory.

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
    uid, outer_step, revision, ok; if it was reset, cause (of ``scoring.Evaluation``) and reason
    (the same in words, with its figures), else both empty; random_before, random_after,
    random_relative, assigned_before, assigned_after, assigned_relative, assigned_page, random_page.
    Losses in nats; absent when ok is False.
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
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from distributed_training.chain.base import ChainError
from distributed_training.common.backoff import Throttle
from distributed_training.node.start import StopNow
from distributed_training.protocol import keys, lines
from distributed_training.protocol.manifest import Manifest, Merged
from distributed_training.protocol.network_report import GATE, MOST_ROUNDS, TOO_FEW, printable
from distributed_training.protocol.scoring import random_block
from distributed_training.scoring.evaluator import Evaluation
from distributed_training.store.errors import StoreError
from distributed_training.training.model import kind_of
from distributed_training.training.weights import GlobalState
from distributed_training.validator.closes import LOOK, CloseJudge, Intake, MergedSome, Run
from distributed_training.validator.errands import Errands, unless_stopped
from distributed_training.validator.judging import CAUSES, find_copies, share_alike
from distributed_training.validator.merge import OuterState, find_spoilers
from distributed_training.validator.outer_steps import NextStep, next_state, renewed
from distributed_training.validator.own_copy import RECOVER
from distributed_training.validator.standings import PastRound

log = logging.getLogger(__name__)

LEDGER = "ledger.json"  # in an outer step's folder: the scores that hold once it is published
_PATIENT = 3  # closes in a row that the held-out loss refuses, before the founder is asked
_RECENT = 2.0  # rounds: an older progress upload is not valid
_FORGIVEN = 3  # closes missed in a row, from which on progress makes nobody's upload valid
_UNKNOWN = "?"  # what the bucket says of the network's end


@dataclass(frozen=True)
class _Reached:
    """An outer step that is merged, and published as soon as the store takes it."""

    prepared: NextStep
    values: OuterState
    state: GlobalState
    losses: dict[str, float]
    began: float
    samples: Mapping[str, Tensor]  # samples of what all can read from then on


class StoreValidator(CloseJudge):
    """Leads rounds through the store, which only ``steps`` writes.

    Call :meth:`start`, then :meth:`run`. A stop ends both soon. ``of_member``: opens a member's
    bucket, where each has its own.
    """

    def __init__(
        self, *, run: Run, after_step: Callable[[GlobalState], None], **given: Any
    ) -> None:
        super().__init__(run=run, **given)
        self._after_step = after_step  # returns at once
        self._standings_path = run.folder / LEDGER
        self._losses: dict[str, float]  # losses of the state on each domain, since the start
        self.finished = ""  # why no round is called any more
        self._finish_shown = ""  # the end that the bucket shows
        config = self._rules.config  # none of these changes while the validator runs
        self._period = config.round_period.total_seconds()
        self._weights_due = Throttle(self._period / 4)
        self._close: Intake | None = None
        self._reached_step: _Reached | None = None
        self._looked = 0.0
        self._problem = ""
        self._take_over = config.validator.take_over
        self._leads = False  # otherwise another process may, until its renewal is overdue

    # --- life -----------------------------------------------------------------------------------

    def start(self, state: GlobalState, *, found: bool) -> None:
        """Continue from the ``state`` that was found in the global bucket, or else publish it.

        Raises GlobalStateError, StoreError when the bucket cannot be written.
        """
        self.state = state
        self._begin(state, found=found)
        self._losses = self._rules.losses(state.weights)
        self._record(
            "start",
            uid=self._chain.uid(self._member.hotkey),
            hotkey=self._member.hotkey,
            outer_step=state.outer_step,
            resumed=found,
        )
        self._record_losses(state.outer_step, self._losses)
        log.info(
            "Outer step %d, held-out loss %.4f on %s%s",
            state.outer_step,
            self._rules.mean(self._losses),
            self._rules.config.held_out_name,
            lines.describe_losses(self._losses),
        )
        self._find_end()
        self._report("starting")

    def run(self) -> None:
        """Tick until stopped."""
        while not self._stop.wait(self._rules.settings.tick.total_seconds()):
            try:
                self.tick()
            except ChainError as error:
                log.warning("The chain does not answer (%s). Trying again.", error)
            except StopNow:
                break
        self._save()
        self._report("stopped", reason="asked to stop")
        self._record("stop", reason="asked to stop")

    def tick(self) -> None:
        """Do what is due now: a round, or else weights on the chain.

        Raises ChainError, Stopped, OtherRules, and AnotherLeadsError where another process leads.
        """
        self._rules.follow(self.state.outer_step, self.finished)
        if self.finished != self._finish_shown:
            with suppress(StoreError):  # asked again at the next tick
                show = partial(self._rules.show_finished, self.finished)
                unless_stopped(show, stop=self._stop)
                self._finish_shown = self.finished
        self._reporter.report(at_once=False)
        weights = self.standings.weights()
        # Before all else: the miners have timed their uploads by it.
        if self._lead():
            return
        # Counted also if it fails: the chain limits how often weights are set.
        if weights and self._weights_due():
            try:
                unless_stopped(partial(self._chain.set_weights, weights), stop=self._stop)
                by_uid = {str(uid): weight for uid, weight in weights.items()}
                self._record("weights", weights=by_uid)
            except ChainError as error:
                log.warning("Weights were not set (%s). Trying again in a quarter period.", error)

    # --- its turn to lead -------------------------------------------------------------------------

    def _begin(self, state: GlobalState, *, found: bool) -> None:
        """Publish a first state, or show that this process leads on from the one found.

        Raises as :meth:`start`.
        """
        steps = self._steps
        if not found:
            values = OuterState(state.weights)
            files = steps.write_values(state, values)
            manifest = self._manifest(
                state,
                values,
                previous="",
                update="",
                merged=(),
                refused=(),
                losses_before={},
                losses_after={},
                scores={},
                closed_at=0.0,
                serial=0,
                made_at=time.time(),
                files=files,
            )
            steps.publish(self._signed(manifest))
            steps.went_on(manifest, values)
        self._miners()
        if not self.standings.successful_rounds:  # on an empty disk take the scores from the chain
            hotkeys = dict[int, str]()  # a uid may be another's by now, as of its last upload
            for past in steps.history:
                hotkeys |= {one.uid: one.hotkey for one in past.merged}
                hotkeys |= {one.uid: one.hotkey for one in past.refused}
            for uid, score in steps.head.scores.items():
                if (entry := self.standings.entries.get(uid)) and entry.hotkey == hotkeys.get(uid):
                    entry.published = score
        if found and not steps.led_last and not self._take_over and not self._is_free():
            log.warning(
                "Another validator may lead this network, since this machine's disk does not have "
                "its newest %s: this one waits for up to %.0f s, leads if that is not renewed "
                "until then, and stops if it is. With --take-over it leads at once",
                keys.STATE,
                self._period / 2,
            )
        else:
            self._lead_from_now(
                "its own disk has the newest signed state"
                if steps.led_last
                else "--take-over was given"
                if self._take_over
                else "nobody else does"
            )

    def _is_free(self) -> bool:
        """Return whether nobody leads the network. Raises AnotherLeadsError if somebody does."""
        return self._steps.seconds_of_other(self._period) <= 0

    def _lead_from_now(self, why: str) -> None:
        """Write what the store lacks, and a state that shows that this process leads."""
        steps = self._steps
        log.info("This validator leads the network's rounds from now on: %s", why)
        if steps.unsure:
            log.warning(
                "The newest %s that is known is an old one: if the bucket was restored from a "
                "backup, members do not follow before the founder says so: %s",
                keys.STATE,
                RECOVER,
            )
        gone = steps.restore()
        steps.require_path(gone)
        now = steps.now()
        state = steps.state
        if state is None or state.head != steps.head.digest or state.serial < steps.serial:
            self._show(now)
        else:
            steps.write(renewed(state, now=now, period=self._period, finished=self.finished))
        self._leads = True

    def _lead(self) -> bool:
        """Lead a round if one is due; whether it was. Raises as :meth:`tick`."""
        if time.monotonic() - self._looked < LOOK:
            return False
        try:
            done = self._advance()
            self._problem = ""
        except (StoreError, OSError) as error:
            self._looked = time.monotonic()
            if str(error) != self._problem:
                log.warning("The round waits: %s; it continues as soon as it can", error)
            self._problem = str(error)
            return False
        self._looked = time.monotonic()
        return done

    def _save(self) -> None:
        if self._reached_step is not None:
            return  # or scores of an outer step that nobody saw would count
        try:
            self.standings.save(self._standings_path)
        except OSError as error:  # a round must not be lost with the miners' steps
            log.warning(
                "%s was not written (%s): a restart would continue with older scores; free the "
                "disk of --neuron.run_folder",
                self._standings_path,
                error.strerror,
            )

    # --- a round ----------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Do what can be done for the present close; whether its round has ended.

        Raises StoreError, OSError, Stopped.
        """
        steps = self._steps
        assert steps.state is not None
        if not self._leads:
            if not self._is_free():
                return False
            self._lead_from_now(f"the renewal of {keys.STATE} is overdue")
        now = steps.restore_lost()
        if steps.emptied:  # then of the network's file, too
            self._finish_shown, steps.emptied = _UNKNOWN, False
        behind = steps.state.head != steps.head.digest  # the store failed before it named the head
        # No close is so far away, unless the store's clock was wrong.
        if behind or steps.state.closes_at > now + 2 * self._period:
            self._show(now)
        state = steps.state
        renewal = renewed(state, now=now, period=self._period, finished=self.finished)
        # Well before half a period, from which on another process may lead.
        if state.finished != renewal.finished or now > state.written_at + self._period / 4:
            steps.write(renewal)
        if self._reached_step is not None:
            return self._publish(self._reached_step)
        if self.finished or now < state.closes_at:
            return False
        miners = self._miners()
        if self._close is None or self._close.state.serial != state.serial:
            draw = self._draw(state.serial)
            self._close = Intake(
                state,
                [random_block(draw) for _ in range(self._texts)],
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
            self._reporter.report(at_once=False)
            return False
        # A member that was expelled meanwhile is in no outer step any more.
        present = {miner.uid: miner.hotkey for miner in miners}
        close.accepted = {
            u: one for u, one in close.accepted.items() if present.get(u) == one.hotkey
        }
        return self._end(close, now)

    # --- the end of a round -----------------------------------------------------------------------

    def _end(self, close: Intake, now: float) -> bool:
        """End the round of a close: publish its outer step, or let the close move."""
        for uid, why in [*close.waiting.items()]:
            hotkey = self.standings.entries[uid].hotkey
            self._refuse(close, uid, hotkey, "", "not-judged", why)
        momentum = self._steps.values.momentum
        known = self._samples.known()
        if momentum is not None:
            known["the outer momentum"] = self._judge.sample(momentum)
        for uid, why in find_copies([*close.accepted.values()], known).items():
            self._blame(close, uid, "copy", why)
        self._judge_clipped(close)
        close.accepted = {one.uid: one for one in share_alike([*close.accepted.values()])}
        least = self._rules.settings.least
        if len(close.accepted) < least:
            detail = f"{lines.counted(len(close.accepted), 'upload')} accepted of {len(close.came)}"
            return self._move(close, TOO_FEW, f"{detail}, {least} are needed", now)
        if len(close.accepted) < 3 and not any(m.merged for m in self._steps.history):
            log.info(
                "%s to merge, and none was merged before: nothing bounds a hostile one",
                lines.counted(len(close.accepted), "upload"),
            )
        # Put the least trusted last, since the search for a spoiler begins there.
        counted = [uid for uid, factor in self._factors(close).items() if factor]
        trusted = sorted(counted, key=lambda u: -self.standings.entries[u].published)
        before = self._rules.mean(self._losses)
        limit = self._rules.config.loss_limit(before)
        merged = self._merge_all(close, [*close.accepted])

        def passes(places: Sequence[int]) -> bool:
            some = self._merge(close, [trusted[i] for i in places])
            return self._rules.mean(some.losses) <= limit

        # "Not below", for NaN.
        if not (after := self._rules.mean(merged.losses)) <= limit:
            detail = f"held-out loss {before:.4f} -> {after:.4f}, limit {limit:.4f}"
            self._record_losses(close.state.outer_step + 1, merged.losses)
            del merged  # the merge is as large as three models, and so is each that is tried
            spoilers = find_spoilers(len(trusted), passes)
            if spoilers is None or len(trusted) - len(spoilers) < least:
                return self._move(close, GATE, detail, now)
            for place in spoilers:
                self._blame(close, trusted[place], "spoiler", f"with it {detail}")
            merged = self._merge(close, [*close.accepted])
            # Without the spoilers other uploads may help, or determine what is usual.
            if not self._rules.mean(merged.losses) <= limit:
                return self._move(close, GATE, detail, now)
        self._prepare(close, merged, now)
        assert self._reached_step is not None
        return self._publish(self._reached_step)

    def _manifest(self, state: GlobalState, values: OuterState, **of_close: Any) -> Manifest:
        """Return the manifest of ``state``; ``of_close``: the fields that its close decides."""
        rule = self._outer_rule
        weights, momentum, residual = values.digests
        return Manifest(
            run_id=self._judge.run_id,
            rules_id=self._rules.config.rules_id,
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

    def _prepare(self, close: Intake, merged: MergedSome, now: float) -> None:
        """Make all that is published of the outer step that the merge leads to."""
        chosen, values = [close.accepted[u] for u in merged.uids], merged.values
        steps, head = self._steps_of(close, chosen), self._steps.head
        count = self._contributors(sum(map(bool, merged.factors)))
        tokens = steps * count * self._rules.config.tokens_of_step
        state = replace(
            self.state,
            outer_step=self.state.outer_step + 1,
            weights=[*values.weights],
            total_inner_steps=self.state.total_inner_steps + steps,
            total_tokens=self.state.total_tokens + tokens,
        )
        # First: what fails for a full disk is done again, and scores count once.
        files = self._steps.write_values(state, values)
        self._score(close)
        self._remember_round(self._past(close, "", "", tokens))
        self.standings.failed_rounds = 0
        self.standings.successful_rounds += 1
        manifest = self._manifest(
            state,
            values,
            previous=head.digest,
            recovered=head.recovered,
            update=merged.update,
            merged=tuple(
                Merged(
                    one.uid,
                    one.hotkey,
                    one.file.digest,
                    one.norm,
                    factor,
                    one.improvement,
                    one.file.header.inner_steps,
                    one.file.header.tokens,
                    one.measured.chance,
                    one.share,
                )
                for one, factor in zip(chosen, merged.factors, strict=True)
            ),
            refused=tuple(close.refused[uid] for uid in sorted(close.refused)),
            losses_before=_named(self._losses),
            losses_after=_named(merged.losses),
            scores={uid: entry.published for uid, entry in self.standings.present().items()},
            closed_at=close.state.closes_at,
            serial=close.state.serial,
            made_at=now,
            files=files if state.outer_step % self._rules.settings.weights_every == 0 else {},
        )
        # Next to the scores that count: the manifest in the store decides which ones do.
        with suppress(OSError):
            self.standings.save(self._steps.place(state.outer_step) / LEDGER)
        counted = [one for one, factor in zip(chosen, merged.factors, strict=True) if factor]
        for uid in close.accepted.keys() - {one.uid for one in counted}:
            log.info("uid %d: carried over: it helps less than the others or than chance", uid)
        self._choose_text(close)
        uploads = {one.uid: one.file.path for one in counted}
        step = f"of outer step {state.outer_step}"
        samples = {f"that of uid {one.uid} {step}": one.sample for one in counted}
        old, new = (self._judge.sample(each) for each in (self.state.weights, values.weights))
        samples[f"the update {step}"] = old - new
        self._reached_step = _Reached(
            self._signed(manifest, uploads), values, state, merged.losses, close.began, samples
        )

    def _signed(self, manifest: Manifest, uploads: Mapping[int, Path] | None = None) -> NextStep:
        names = [*manifest.files, *([keys.UPDATE] if manifest.update else [])]
        folder = self._steps.place(manifest.outer_step)
        data = manifest.to_bytes(self._steps.sign)
        return NextStep(manifest, data, {name: folder / name for name in names}, uploads or {})

    def _publish(self, reached: _Reached) -> bool:
        """Publish an outer step and continue from it. Raises StoreError: it is tried again."""
        began = time.monotonic()
        sent = self._steps.publish(reached.prepared)
        manifest = reached.prepared.manifest
        self._record(
            "publication",
            revision=f"{manifest.outer_step}.{manifest.serial}",
            ok=True,
            seconds=round(time.monotonic() - began, 3),
            bytes_sent=sent,
            reason="",
        )
        self._steps.went_on(manifest, reached.values)
        self._reached_step = None
        self._samples.add(manifest.outer_step, reached.samples)
        self._close = None
        try:
            os.replace(self._steps.place(manifest.outer_step) / LEDGER, self._standings_path)
        except OSError:  # the disk had no room for it
            self._save()
        self._record_losses(manifest.outer_step, reached.losses)
        uids = [one.uid for one in manifest.merged]
        self._reached(reached.state, reached.losses, uids, reached.began, "Merged")
        self._show(self._steps.restore_lost())
        self._steps.delete_past()
        self._report("waiting")
        return True

    def _show(self, now: float, *, gate: int = 0) -> None:
        """Let the store name the head, or another time of the present close."""
        self._steps.write(
            next_state(
                self._steps.state,
                self._steps.head,
                self._steps.serial + 1,
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
        self._remember_round(self._past(close, fault, detail, 0))
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
            # A damaged object may keep all members from training, and only reading it shows that.
            self._steps.restore(deep=True)
        self._report("waiting")
        return True

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
        self._rules.follow(self.state.outer_step, self.finished)
        self._find_end()

    def _remember_round(self, past: PastRound) -> None:
        self.standings.rounds.append(past)
        del self.standings.rounds[:-MOST_ROUNDS]

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
        named = self._steps.state
        reporter.closes_at = None if self.finished or named is None else named.closes_at
        reporter.report()

    def _find_end(self) -> None:
        """Call no round any more, and say so, once a [stop] of the network's file is reached."""
        state, loss = self.state, self._rules.mean(self._losses)
        reason = self._rules.config.finished(
            outer_step=state.outer_step, tokens=state.total_tokens, loss=loss
        )
        if reason:
            self.finished = reason
            self._record("finished", outer_step=state.outer_step, reason=reason)
            log.info("The network is finished (%s): no round is called any more", reason)

    # --- what a round leaves behind ---------------------------------------------------------------

    def _score(self, close: Intake) -> None:
        """Let scores follow from what the round has found of each member."""
        judgements = [one.judgement for one in close.accepted.values()]
        judgements += [
            Evaluation(uid, close.state.outer_step, cause=CAUSES[one.cause], reason=one.reason)
            for uid, one in close.refused.items()
            if one.cause != "not-judged"  # this cause says nothing about the upload
        ]
        entries, took_part = self.standings.present(), self._participants(close)
        for uid, entry in entries.items():
            entry.all_reduce = int(uid in took_part)
            entry.fault = "" if uid in close.came else "it sent no upload for the last close"
        # Merged and no better than nothing scores 0.
        valid = {u: u in close.accepted and close.accepted[u].improvement > 0 for u in entries}
        known = [judgement for judgement in judgements if judgement.uid in entries]
        if self._of_member is not None:
            unjudged = entries.keys() - {judgement.uid for judgement in known}
            valid |= dict.fromkeys(self._find_progress(unjudged, close.state.closes_at), True)
        scores = self.standings.judged(known, valid)
        self._record(
            "scores",
            outer_step=close.state.outer_step,
            scores={str(uid): figures for uid, figures in scores.items()},
        )

    def _find_progress(self, uids: Collection[int], closes_at: float) -> list[int]:
        """Return those of ``uids`` whose last progress was recent enough at the close to be valid.

        Whoever missed several closes in a row is not among them: nobody looks into progress.
        """
        by_uid = {
            miner.uid: miner
            for miner in self._miners()
            if miner.uid in uids and self.standings.entries[miner.uid].missed < _FORGIVEN
        }

        def age(uid: int) -> float:
            info = self._reader(by_uid[uid]).head(keys.progress_key(uid))
            return math.inf if info is None else closes_at - info.modified

        found = Errands().run(age, [*by_uid], within=LOOK, patience=LOOK, stop=self._stop)
        oldest = _RECENT * (self._period + self._grace)
        return [uid for uid, each in found.items() if isinstance(each, float) and each <= oldest]

    def _past(self, close: Intake, fault: str, detail: str, tokens: int) -> PastRound:
        """Record a round that has ended, and who missed it; return it for the standings."""
        for uid, entry in self.standings.present().items():
            entry.missed = 0 if uid in close.came else entry.missed + 1
            entry.uploaded = close.came.get(uid, entry.uploaded)
        seconds = time.monotonic() - close.began
        uids = [] if fault else sorted(close.accepted)
        self._record(
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
        return PastRound(
            outer_step=close.state.outer_step,
            ended=time.time(),
            seconds=seconds,
            participants=uids,
            tokens=tokens,
            fault=fault,
            detail=detail,
        )


def _named(losses: Mapping[str, float]) -> dict[str, float]:
    """Return losses by names as a manifest may have them."""
    return {printable(name, 100): loss for name, loss in losses.items()}
