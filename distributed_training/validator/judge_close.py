"""Judge the uploads of a close as they come, each once, and merge those that are accepted.

One that is merged clipped is judged again in that form.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from distributed_training.chain.base import Neuron
from distributed_training.node.start import StopNow
from distributed_training.protocol import keys
from distributed_training.protocol.types import UPDATE_CODEC
from distributed_training.protocol.update_file import Header, UpdateLayout
from distributed_training.scoring.evaluator import judgement_fields
from distributed_training.scoring.upload import DataUnavailable, Judged, in_a_line, of_this_machine
from distributed_training.training.outer_rule import UploadFacts
from distributed_training.validator.fetch_close import CloseFetcher, Intake
from distributed_training.validator.judging import (
    Accepted,
    KnownSamples,
    RefusedUploadError,
    UploadJudge,
    digest_file,
)
from distributed_training.validator.merge import (
    OuterState,
    Rule,
    Values,
    count_steps,
    helpful,
    longest_norm,
    merge,
    merge_factors,
    whole_uploads,
)
from distributed_training.validator.validator import Run

log = logging.getLogger(__name__)

_TURN = 30.0  # seconds of judging between two looks: the state is renewed in between
_MOST_TEXTS = 8  # random texts, each of which takes as long to judge as the first
_CLIPPED_AGAIN = 3  # times
_MOST_STEPS_OF_A_SECOND = 1.0  # inner steps: more than any network takes


@dataclass(frozen=True)
class MergedSome:
    """The result of merging the uploads of ``uids``. ``update``: digest of its file."""

    uids: list[int]
    update: str
    values: OuterState
    factors: list[float]
    losses: dict[str, float]


class CloseJudge(CloseFetcher):
    """Judges and merges the uploads of a close that :class:`CloseFetcher` has fetched."""

    def __init__(self, *, judge: UploadJudge, run: Run, **given: Any) -> None:
        super().__init__(judge=judge, run=run, **given)
        self._outer_rule = Rule.of(self._rules.config)
        self._seed = self._rules.settings.seed or secrets.randbits(62)
        self._samples = KnownSamples(run.folder / "samples", judge.secret)
        self._judge = replace(judge, secret=self._samples.secret)
        self._texts = 1  # random texts on which a close is judged

    def _judge_new(self, close: Intake, miners: Sequence[Neuron], now: float) -> None:
        """Fetch and judge the uploads that came since the last call."""
        began = time.monotonic()
        by_uid = {miner.uid: miner for miner in miners}
        self._fetch_new(close, by_uid, miners, now)
        turn = time.monotonic() + _TURN
        for uid in self._most_trusted(close, now, close.fetched & by_uid.keys()):
            if now + time.monotonic() - began >= close.until:
                break
            self._judge_one(close, uid, by_uid[uid].hotkey, now)
            self._reporter.report(at_once=False)
            if time.monotonic() > turn:
                break

    def _draw(self, serial: int) -> random.Random:
        """Return what draws for a close: the same after a restart, where a seed is set."""
        return random.Random(self._seed * serial)

    def _judge_one(self, close: Intake, uid: int, hotkey: str, now: float) -> None:
        path = self._upload_path(close, uid)
        revision = f"{close.state.outer_step}.{close.state.serial}"
        if uid not in close.lacks:
            self._record(
                "upload_seen",
                uid=uid,
                revision=revision,
                outer_step=close.state.outer_step,
                age_seconds=0.0,
            )
        try:
            found = self._judge.judge(
                uid,
                hotkey,
                path,
                self._judged(close),
                serial=close.state.serial,
                start=self._steps.head.weights,
                modified=close.came[uid],
                random_blocks=close.random_blocks,
                longest=longest_norm([], self._steps.history),
            )
        except RefusedUploadError as error:
            self._refuse(close, uid, hotkey, digest_file(path), error.cause, str(error))
            return
        except (StopNow, OSError, torch.AcceleratorError):
            raise
        except Exception as error:  # noqa: BLE001 - foreign bytes: they cost only their owner
            if not isinstance(error, DataUnavailable) and not of_this_machine(error):
                why = in_a_line(error)
                self._refuse(close, uid, hotkey, digest_file(path), "damaged", why)
                return
            self._lack(close, uid, str(error), now)
            return
        self._leave(close, uid)
        close.accepted[uid] = found
        self._record("upload_scored", **judgement_fields(found.judgement, revision))
        log.info("uid %d: accepted, random text %+.4f nats", uid, -found.improvement)

    def _judged(self, close: Intake) -> Judged:
        return Judged(
            outer_step=close.state.outer_step,
            schema=self.state.schema,
            weights=self.state.weights,
            learning_rate=self._outer_rule.learning_rate,
        )

    def _factors(self, close: Intake) -> dict[int, float]:
        """Return by which factor each accepted upload would be merged, by uid."""
        found = [close.accepted[uid].measured for uid in sorted(close.accepted)]
        factors = merge_factors(found, self._steps.history)
        return dict(zip(sorted(close.accepted), factors, strict=True))

    def _judge_clipped(self, close: Intake) -> None:
        """Judge those uploads again that are merged in another form than they were judged in.

        Which norm is usual is known only when all are judged, and each that turns out not to help
        may change it. So it is repeated, a few times at most.
        """
        for _ in range(_CLIPPED_AGAIN):
            factors = self._factors(close)
            other = [
                (close.accepted[uid], factor)
                for uid, factor in factors.items()
                if factor and not math.isclose(factor, close.accepted[uid].factor, rel_tol=0.01)
            ]
            if not other:
                break
            for one, factor in other:
                try:
                    again = self._judge.judge_clipped(
                        one, self._judged(close), factor, close.random_blocks
                    )
                    close.accepted[one.uid] = again
                except RefusedUploadError as error:
                    self._blame(close, one.uid, error.cause, f"clipped to {factor:.3g}: {error}")
                except DataUnavailable as error:
                    log.info("uid %d: judged only as it came: %s", one.uid, error)

    def _blame(self, close: Intake, uid: int, cause: str, reason: str) -> None:
        one = close.accepted.pop(uid)
        self._refuse(close, uid, one.hotkey, one.file.digest, cause, reason)

    def _choose_text(self, close: Intake) -> None:
        """Judge the next close on twice the text where fewer than half of the uploads help."""
        found = [one.measured for one in close.accepted.values()]
        if 2 * sum(helpful(found)) < len(found):
            self._texts = min(2 * self._texts, _MOST_TEXTS)
        elif 2 * sum(one.gain > 2 * one.chance for one in found) >= len(found):
            self._texts = max(self._texts // 2, 1)  # half as much tells enough, too

    # --- the update ---------------------------------------------------------------------------

    def _merge_all(self, close: Intake, uids: Sequence[int]) -> MergedSome:
        """Return what all accepted uploads lead to."""
        return self._merge(close, uids)

    def _merge(
        self, close: Intake, uids: Sequence[int], average: Values | None = None
    ) -> MergedSome:
        """Merge the uploads of some, into the one file that there is for the update.

        ``average``: the values that the members have averaged, in place of the uploads' mean.
        """
        ordered = [close.accepted[uid] for uid in sorted(uids)]
        found = [one.measured for one in ordered]
        factors, whole = merge_factors(found, self._steps.history), whole_uploads(found)
        steps, count = self._steps_of(close, ordered), sum(map(bool, factors))
        path = self._steps.place(close.state.outer_step + 1) / keys.UPDATE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        header = Header(
            kind="update",
            run_id=self._judge.run_id,
            outer_step=close.state.outer_step,
            serial=0,
            hotkey=self._member.hotkey,
            start=self._steps.head.weights,
            codec=UPDATE_CODEC,
            inner_steps=steps,
            tokens=steps * self._contributors(count) * self._rules.config.tokens_of_step,
        )
        digest, values = merge(
            [one.file for one in ordered] if average is None else [average],
            factors if average is None else [1.0],
            self._steps.values,
            self._outer_rule,
            path=path,
            layout=UpdateLayout.of(self.state.schema, header),
            sign=self._steps.sign,
            divisor=whole if average is None else whole / len(found),
            # As the manifest has them: whoever replays the step must get the same bits.
            facts=[UploadFacts(u.file.header.tokens, u.norm, u.improvement) for u in ordered],
        )
        losses = self._rules.losses(values.weights)
        return MergedSome(sorted(uids), digest, values, factors, losses)

    def _steps_of(self, close: Intake, chosen: Sequence[Accepted]) -> int:
        """Return by how many inner steps the outer step moves the schedule."""
        most = int(_MOST_STEPS_OF_A_SECOND * self._rules.settings.period.total_seconds())
        claims = [(one.measured, one.file.header.inner_steps) for one in chosen]
        return count_steps(claims, self._steps.history, close.state.closes_at, most)

    def _contributors(self, judged: int) -> int:
        """Count the members of which something is in the outer step; ``judged``: that we know."""
        return judged

    def _participants(self, close: Intake) -> frozenset[int]:
        """Return the uids of the members of which something is in the outer step."""
        return frozenset(close.accepted)
