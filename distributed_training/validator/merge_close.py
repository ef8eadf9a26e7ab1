"""Merge the accepted uploads of a close into the file of its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distributed_training.protocol import keys
from distributed_training.protocol.types import UPDATE_CODEC
from distributed_training.protocol.update_file import Header, UpdateLayout
from distributed_training.training.outer_rule import UploadFacts
from distributed_training.validator.fetch_close import Intake
from distributed_training.validator.judge_close import CloseJudge
from distributed_training.validator.judging import Accepted
from distributed_training.validator.merge import (
    OuterState,
    Values,
    count_steps,
    merge,
    merge_factors,
    whole_uploads,
)

_MOST_STEPS_OF_A_SECOND = 1.0  # inner steps: more than any network takes


@dataclass(frozen=True)
class MergedSome:
    """The result of merging the uploads of ``uids``. ``update``: digest of its file."""

    uids: list[int]
    update: str
    values: OuterState
    factors: list[float]
    losses: dict[str, float]


class CloseMerger(CloseJudge):
    """Merges what :class:`CloseJudge` has accepted."""

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
