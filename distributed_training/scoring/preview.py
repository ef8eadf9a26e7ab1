"""What a validator would compute now, for some miners or all: the score preview.

It is the reference validator's own evaluator over what anybody may read: the chain, the global
bucket, and miners' buckets, whose read keys are public. Nothing it finds flows back into training:
which block a validator will draw from a miner's list can be computed, but training on it
preferentially would only fool the figure that says how good the training is.

A validator knows more in two things. Its ratings have a history; the preview starts from fresh ones
(see ``ranking``). And it draws its random block itself; the preview draws another from the same
range, so the figures agree to the last digit only for the same blocks.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice

from distributed_training.chain.base import Neuron
from distributed_training.protocol import schedule
from distributed_training.scoring.causes import Cause
from distributed_training.scoring.evaluator import Evaluator, Judgement
from distributed_training.scoring.judged import Judged
from distributed_training.scoring.pages import DataUnavailable
from distributed_training.scoring.ranking import (
    PASSES,
    Interval,
    Standing,
    chance_assigned_wins,
    rank,
)
from distributed_training.scoring.repository import OpenBucket, Repository, inspect
from distributed_training.scoring.upload import InvalidUpload, Upload, read_upload, within

READERS = 8  # buckets looked into at once


@dataclass(frozen=True)
class Row:
    """One miner. ``random`` and ``assigned``: relative improvement; None if it was not judged.
    ``cause``: why its score is zero or will fall to it, None if nothing stands in its way."""

    uid: int
    hotkey: str
    revision: str
    valid: bool
    age: timedelta | None
    age_limit: timedelta
    judgement: Judgement | None
    cause: Cause | None
    reason: str
    standing: Standing | None = None

    @property
    def random(self) -> Interval | None:
        found = self.judgement.random if self.judgement else None
        return Interval.of(found) if found else None

    @property
    def assigned(self) -> Interval | None:
        found = self.judgement.assigned if self.judgement else None
        return Interval.of(found) if found else None

    @property
    def assigned_wins(self) -> bool | None:
        """Whether assigned text gained more than random text, in nats per token."""
        judgement = self.judgement
        if judgement is None or judgement.random is None or judgement.assigned is None:
            return None
        return judgement.assigned.absolute > judgement.random.absolute

    @property
    def chance(self) -> float | None:
        """That a validator finds the same of other text."""
        return chance_assigned_wins(self.judgement) if self.judgement else None


@dataclass(frozen=True)
class Preview:
    """``compared``: how many uploads the ranks and shares are among."""

    block: int
    global_outer_step: int
    outer_step: int
    random_blocks: tuple[int, ...]
    compared: int
    rows: tuple[Row, ...]
    seconds: float


class Previewer:
    """``timeout`` covers all that is read from one miner's bucket; one that takes longer costs its
    own row a reason and nobody else anything."""

    def __init__(
        self,
        *,
        judged: Judged,
        open_bucket: OpenBucket,
        evaluator: Evaluator,
        age_limit: timedelta,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self._judged = judged
        self._open_bucket = open_bucket
        self._evaluator = evaluator
        self._age_limit = age_limit
        self._timeout = timeout

    def run(
        self,
        neurons: Sequence[Neuron],
        *,
        random_blocks: Sequence[int],
        passes: int = PASSES,
    ) -> Preview:
        """``passes``: of which the ranks and shares speak, see :func:`~.ranking.rank`. Raises
        ChainError, Stopped."""
        began = time.monotonic()
        rows = [
            self._row(neuron, repository, self._judge(upload, random_blocks))
            for neuron, repository, upload in self._read_ahead(neurons)
        ]
        judgements = [row.judgement for row in rows if row.judgement is not None]
        # Alone there is no rank, and no share of a train score to lose.
        standings = rank(judgements, passes=passes) if len(judgements) > 1 else {}
        return Preview(
            block=self._judged.block,
            global_outer_step=self._judged.global_outer_step,
            outer_step=self._judged.outer_step,
            random_blocks=tuple(random_blocks),
            compared=len(judgements),
            rows=tuple(_with_standing(row, standings.get(row.uid)) for row in rows),
            seconds=time.monotonic() - began,
        )

    def _read_ahead(
        self, neurons: Sequence[Neuron]
    ) -> Iterator[tuple[Neuron, Repository, Upload | Judgement | None]]:
        """In order; while one is judged the next are read, ``READERS`` of them at most."""
        rest = iter(neurons)
        with ThreadPoolExecutor(READERS, thread_name_prefix="preview") as pool:
            ahead = deque((n, pool.submit(self._read, n)) for n in islice(rest, READERS))
            while ahead:
                neuron, future = ahead.popleft()
                repository, upload = future.result()
                ahead.extend((n, pool.submit(self._read, n)) for n in islice(rest, 1))
                yield neuron, repository, upload

    def _read(self, neuron: Neuron) -> tuple[Repository, Upload | Judgement | None]:
        """What is to be judged; a judgement if it is reset unread, None if it is not chosen."""
        judged, uid = self._judged, neuron.uid
        look = partial(
            inspect,
            neuron,
            self._open_bucket,
            outer_step=judged.outer_step,
            age_limit=self._age_limit,
        )
        began = time.monotonic()
        try:
            repository = within(self._timeout, look)
        except TimeoutError:
            cause, reason = Cause.TOO_SLOW, f"no answer in {self._timeout.total_seconds():g} s"
            return Repository(uid, False, cause, reason), None
        if repository.metadata is None:
            return dataclasses.replace(
                repository, cause=repository.cause or Cause.NO_METADATA
            ), None
        if repository.metadata.inner_step == 0:
            return dataclasses.replace(
                repository, cause=repository.cause or Cause.INNER_STEP_ZERO
            ), None
        left = self._timeout - timedelta(seconds=time.monotonic() - began)
        try:
            return repository, read_upload(
                repository,
                judged.schema,
                outer_step=judged.outer_step,
                block=judged.block,
                bpa=judged.bpa,
                timeout=left,
            )
        except InvalidUpload as error:
            reset = Judgement.reset(uid, judged.outer_step, error.cause, str(error))
            return repository, reset

    def _judge(
        self, upload: Upload | Judgement | None, random_blocks: Sequence[int]
    ) -> Judgement | DataUnavailable | None:
        if not isinstance(upload, Upload):
            return upload
        try:
            return self._evaluator.judge(
                upload,
                weights=self._judged.weights,
                outer_step=self._judged.outer_step,
                outer_learning_rate=self._judged.learning_rate,
                random_blocks=random_blocks,
            )
        except DataUnavailable as error:
            return error

    def _row(
        self,
        neuron: Neuron,
        repository: Repository,
        judgement: Judgement | DataUnavailable | None,
    ) -> Row:
        cause, reason = repository.cause, repository.reason
        if isinstance(judgement, DataUnavailable):
            cause, reason, judgement = cause or Cause.NO_DATA, reason or str(judgement), None
        elif judgement is not None and judgement.cause is not None:
            cause, reason = cause or judgement.cause, reason or judgement.reason
        return Row(
            uid=neuron.uid,
            hotkey=neuron.hotkey,
            revision=repository.tag,
            valid=repository.valid,
            age=repository.age,
            age_limit=self._age_limit,
            judgement=judgement,
            cause=cause,
            reason=reason,
        )


def _with_standing(row: Row, standing: Standing | None) -> Row:
    cause = row.cause
    if cause is None and row.judgement is not None and row.judgement.random is not None:
        if row.judgement.random.absolute <= 0:
            cause = Cause.MAKES_IT_WORSE
        elif not row.assigned_wins:
            cause = Cause.ASSIGNED_NOT_BETTER
        elif standing is not None and standing.train == 0:
            cause = Cause.RANKED_LOW
    return dataclasses.replace(row, standing=standing, cause=cause)


def draw_random_blocks(block: int, count: int, generator: random.Random) -> tuple[int, ...]:
    """Drawn from where validators draw theirs at ``block``."""
    return tuple(generator.randrange(*schedule.random_block_range(block)) for _ in range(count))
