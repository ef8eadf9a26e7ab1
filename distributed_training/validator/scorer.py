"""One scoring pass over all miners' uploads, between two rounds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

from distributed_training.chain.base import Neuron
from distributed_training.protocol import schedule
from distributed_training.validator.buckets import BucketError, OpenBucket
from distributed_training.validator.evaluator import (
    DataUnavailable,
    Evaluator,
    Judgement,
    Repository,
    event_fields,
    inspect,
)
from distributed_training.validator.events import EventSink
from distributed_training.validator.ledger import Ledger
from distributed_training.validator.publisher import GlobalPublisher, GlobalState

log = logging.getLogger(__name__)


class Scorer:
    """Checks every repository, judges at most ``uids_per_pass`` uploads, updates the ledger.

    ``commitment``: what a hotkey committed, None if nothing; may raise ChainError, which is passed
    on. ``age_limit``: of an upload, before failed rounds prolong it.
    """

    def __init__(
        self,
        *,
        commitment: Callable[[str], str | None],
        open_bucket: OpenBucket,
        publisher: GlobalPublisher,
        evaluator: Evaluator,
        events: EventSink,
        age_limit: timedelta,
        uids_per_pass: int,
    ) -> None:
        self._commitment = commitment
        self._open_bucket = open_bucket
        self._publisher = publisher
        self._evaluator = evaluator
        self._events = events
        self._age_limit = age_limit
        self._uids_per_pass = uids_per_pass

    def score(
        self,
        miners: Sequence[Neuron],
        state: GlobalState,
        ledger: Ledger,
        *,
        block: int,
        bpa: int,
        interrupted: Callable[[], bool],
    ) -> list[Judgement]:
        """What was judged. ``interrupted`` is asked between two uploads; the pass then ends with
        what it has. Raises Stopped."""
        outer_step = schedule.scored_epoch(
            outer_step=state.outer_step,
            block=block,
            last_allreduce_block=state.last_allreduce_block,
            bpa=bpa,
        )
        limit = schedule.upload_age_limit(failed_rounds=ledger.failed_rounds, base=self._age_limit)
        repositories = [
            inspect(
                neuron.uid,
                self._commitment(neuron.hotkey),
                open_bucket=self._open_bucket,
                outer_step=outer_step,
                age_limit=limit,
            )
            for neuron in miners
        ]
        for repository in repositories:
            self._tell_if_new(repository, outer_step, ledger)
        chosen = self._choose(repositories, ledger)
        judgements = self._judge(
            chosen, state, outer_step, block=block, bpa=bpa, interrupted=interrupted
        )
        scores = ledger.judged(judgements, {r.uid: r.valid for r in repositories}, block=block)
        self._events.write(
            "scores",
            outer_step=outer_step,
            block=block,
            scores={str(uid): figures for uid, figures in scores.items()},
        )
        return judgements

    def _choose(self, repositories: Sequence[Repository], ledger: Ledger) -> list[Repository]:
        """Those not judged for longest first; who never published an inner step is left out."""
        published = [r for r in repositories if r.metadata is not None and r.metadata.inner_step]
        published.sort(key=lambda r: ledger.entries[r.uid].scored_at)
        return published[: self._uids_per_pass]

    def _judge(
        self,
        chosen: Sequence[Repository],
        state: GlobalState,
        outer_step: int,
        *,
        block: int,
        bpa: int,
        interrupted: Callable[[], bool],
    ) -> list[Judgement]:
        if not chosen:
            return []
        try:
            weights = self._publisher.weights(outer_step, state.schema)
        except (BucketError, ValueError) as error:
            log.warning("No scoring: global weights of outer step %d: %s", outer_step, error)
            return []
        random_block = self._evaluator.draw_random_block(block)
        judgements: list[Judgement] = []
        for repository in chosen:
            if judgements and interrupted():
                log.info("A round is due: %d of %d uploads judged", len(judgements), len(chosen))
                break
            try:
                judgement = self._evaluator.judge(
                    repository,
                    weights=weights,
                    outer_step=outer_step,
                    outer_learning_rate=state.learning_rate,
                    block=block,
                    bpa=bpa,
                    random_block=random_block,
                )
            except DataUnavailable as error:
                log.warning("uid %d is not scored now: %s", repository.uid, error)
                continue
            judgements.append(judgement)
            self._events.write("upload_scored", **event_fields(judgement, repository))
            log.info("%s", _line(judgement, repository))
        return judgements

    def _tell_if_new(self, repository: Repository, outer_step: int, ledger: Ledger) -> None:
        if repository.metadata is None:
            return
        entry = ledger.entries[repository.uid]
        tag = repository.metadata.revision.tag
        if tag != entry.seen:
            entry.seen = tag
            self._events.write(
                "upload_seen",
                uid=repository.uid,
                revision=tag,
                outer_step=outer_step,
                age_seconds=repository.age.total_seconds() if repository.age else None,
            )


def _line(judgement: Judgement, repository: Repository) -> str:
    tag = repository.metadata.revision.tag if repository.metadata else "?"
    if judgement.random is None or judgement.assigned is None:
        return f"UID {judgement.uid:03d}: {tag} reset: {judgement.reason}"
    return (
        f"UID {judgement.uid:03d}: {tag} random {judgement.random[0]:.4f} -> "
        f"{judgement.random[1]:.4f}, assigned {judgement.assigned[0]:.4f} -> "
        f"{judgement.assigned[1]:.4f}"
    )
