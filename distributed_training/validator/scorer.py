"""One scoring pass over all miners' uploads, between two rounds."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from datetime import timedelta

from distributed_training.chain.base import Neuron
from distributed_training.config.validator import ValidatorSettings
from distributed_training.protocol import lines, schedule
from distributed_training.scoring.evaluator import Evaluator, Judgement, judgement_fields
from distributed_training.scoring.pages import DataUnavailable
from distributed_training.scoring.repository import OpenBucket, Repository, inspect
from distributed_training.scoring.upload import InvalidUpload, read_upload
from distributed_training.store.errors import StoreError
from distributed_training.validator.global_state import GlobalPublisher, GlobalState
from distributed_training.validator.standings import Standings

log = logging.getLogger(__name__)
_UPLOAD_PATIENCE = timedelta(minutes=5)  # with one upload: a store may drip for ever


class Scorer:
    """Checks every repository, judges at most ``--validator.score_uids`` uploads, updates the
    standings. ``rng`` draws the random block of each pass."""

    def __init__(
        self,
        *,
        settings: ValidatorSettings,
        open_bucket: OpenBucket,
        publisher: GlobalPublisher,
        evaluator: Evaluator,
        rng: random.Random,
        record: Callable[..., None],
    ) -> None:
        self._settings = settings
        self._open_bucket = open_bucket
        self._publisher = publisher
        self._evaluator = evaluator
        self._rng = rng
        self._record = record

    def score(
        self,
        miners: Sequence[Neuron],
        state: GlobalState,
        standings: Standings,
        *,
        block: int,
        bpa: int,
        interrupted: Callable[[], bool],
    ) -> list[Judgement]:
        """What was judged. ``interrupted`` is asked between two uploads; the pass then ends with
        what it has. Raises ChainError, Stopped."""
        outer_step = schedule.scored_epoch(
            outer_step=state.outer_step,
            block=block,
            last_allreduce_block=state.last_allreduce_block,
            bpa=bpa,
        )
        limit = schedule.upload_age_limit(
            failed_rounds=standings.failed_rounds, base=self._settings.upload_age_limit
        )
        repositories = [
            inspect(neuron, self._open_bucket, outer_step=outer_step, age_limit=limit)
            for neuron in miners
        ]
        for repository in repositories:
            self._tell_if_new(repository, outer_step, standings)
        chosen = self._choose(repositories, standings)
        judgements = self._judge_all(
            chosen, state, outer_step, block=block, bpa=bpa, interrupted=interrupted
        )
        valid = {r.uid: r.valid for r in repositories}
        scores = standings.judged(judgements, valid, block=block)
        self._record(
            "scores",
            outer_step=outer_step,
            block=block,
            scores={str(uid): figures for uid, figures in scores.items()},
        )
        return judgements

    def _choose(self, repositories: Sequence[Repository], standings: Standings) -> list[Repository]:
        """Those not judged for longest first; who never published an inner step is left out."""
        published = [r for r in repositories if r.metadata is not None and r.metadata.inner_step]
        published.sort(key=lambda r: standings.entries[r.uid].scored_at)
        return published[: self._settings.score_uids]

    def _judge_all(
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
        except (StoreError, ValueError) as error:
            log.warning("No scoring: global weights of outer step %d: %s", outer_step, error)
            return []
        random_block = self._rng.randrange(*schedule.random_block_range(block))
        judgements: list[Judgement] = []
        for repository in chosen:
            if judgements and interrupted():
                log.info("A round is due: %d of %d uploads judged", len(judgements), len(chosen))
                break
            try:
                upload = read_upload(
                    repository,
                    state.schema,
                    outer_step=outer_step,
                    block=block,
                    bpa=bpa,
                    timeout=_UPLOAD_PATIENCE,
                )
                judgement = self._evaluator.judge(
                    upload,
                    weights=weights,
                    outer_step=outer_step,
                    outer_learning_rate=state.learning_rate,
                    random_blocks=(random_block,),
                )
            except InvalidUpload as error:
                judgement = Judgement.reset(repository.uid, outer_step, error.cause, str(error))
            except DataUnavailable as error:
                log.warning("uid %d is not scored now: %s", repository.uid, error)
                continue
            judgements.append(judgement)
            self._record("upload_scored", **judgement_fields(judgement, repository.tag))
            log.info("%s", _line(judgement, repository.tag))
        return judgements

    def _tell_if_new(self, repository: Repository, outer_step: int, standings: Standings) -> None:
        if repository.metadata is None:
            return
        entry = standings.entries[repository.uid]
        tag = repository.tag
        if tag != entry.seen:
            entry.seen = tag
            self._record(
                "upload_seen",
                uid=repository.uid,
                revision=tag,
                outer_step=outer_step,
                age_seconds=repository.age.total_seconds() if repository.age else None,
            )


def _line(judgement: Judgement, tag: str) -> str:
    start = f"UID {judgement.uid:03d}: {lines.judged_upload(tag, judgement.outer_step)}"
    if judgement.random is None or judgement.assigned is None:
        return f"{start} reset: {judgement.reason}"
    (r_before, r_after), (a_before, a_after) = judgement.random.losses, judgement.assigned.losses
    return (
        f"{start} random {r_before:.4f} -> {r_after:.4f}, assigned {a_before:.4f} -> {a_after:.4f}"
    )
