"""Is an upload valid, and does it help? As the network's validators judge it (protocol page,
sections 3, 4 and 7).

An upload is read from ``epoch-X`` of the miner's bucket and applied to the global weights of outer
step X: ``weights - outer_lr * 0.5 * decoded``. Loss before and after on *random* pages (one block
for all uids of a pass) and on *assigned* pages (a block the miner says it trained on).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from distributed_training.protocol import keys, schedule
from distributed_training.protocol.commitment import CommitmentError, parse_commitment
from distributed_training.protocol.metadata import (
    MAX_CONFIG_BYTES,
    MAX_METADATA_BYTES,
    Metadata,
    MetadataError,
    parse_config,
)
from distributed_training.protocol.payload import (
    GradientPayload,
    PayloadError,
    load_payload,
    max_payload_bytes,
)
from distributed_training.protocol.scoring import relative_improvement
from distributed_training.validator.buckets import BucketError, OpenBucket, ReadBucket
from distributed_training.validator.model import EvaluationModel

log = logging.getLogger(__name__)

# Of the decoded gradient times the outer learning rate (protocol page, section 4).
APPLIED_FRACTION = 0.5

# (uid, block) -> int64 (n, sequence length). Raises DataUnavailable.
Pages = Callable[[int, int], Tensor]


class DataUnavailable(RuntimeError):
    """Pages cannot be had now; says nothing about the upload."""


class InvalidUpload(ValueError):
    """An upload that is reset, and why."""


@dataclass(frozen=True)
class Repository:
    """What one look at a miner's bucket showed.

    ``valid``: the factor of the total score; ``reason`` says why not. ``metadata``: of the root,
    None if it could not be read.
    """

    uid: int
    valid: bool
    reason: str = ""
    bucket: ReadBucket | None = None
    metadata: Metadata | None = None
    age: timedelta | None = None  # of epoch-X/gradients.pt


@dataclass(frozen=True)
class Judgement:
    """One upload on one pair of blocks. Losses: (before, after) in nats, None if it was reset."""

    uid: int
    outer_step: int  # X, the folder that was judged
    ok: bool
    reason: str = ""
    random: tuple[float, float] | None = None
    assigned: tuple[float, float] | None = None
    random_block: int | None = None
    assigned_block: int | None = None


def inspect(
    uid: int,
    commitment: str | None,
    *,
    open_bucket: OpenBucket,
    outer_step: int,
    age_limit: timedelta,
    now: float | None = None,
) -> Repository:
    """Whether the repository is valid: commitment, credentials, age of ``epoch-X/gradients.pt``."""
    try:
        bucket = open_bucket(uid, parse_commitment(commitment or ""))
        data = bucket.get(keys.ROOT_METADATA, limit=MAX_METADATA_BYTES)
        info = bucket.head(keys.epoch_key(outer_step, keys.GRADIENTS))
    except (CommitmentError, BucketError, ValueError) as error:
        return Repository(uid, False, str(error))
    metadata, reason = None, ""
    try:
        metadata = Metadata.parse(data) if data is not None else None
    except MetadataError as error:
        reason = str(error)
    if info is None:
        reason = f"no {keys.epoch_key(outer_step, keys.GRADIENTS)}"
        return Repository(uid, False, reason, bucket, metadata)
    age = timedelta(seconds=max(0.0, (time.time() if now is None else now) - info.modified))
    if age >= age_limit:
        reason = (
            f"upload is {age.total_seconds():.0f} s old, limit {age_limit.total_seconds():.0f} s"
        )
        return Repository(uid, False, reason, bucket, metadata, age)
    return Repository(uid, True, reason, bucket, metadata, age)


class Evaluator:
    """Judges uploads against the global weights of one outer step.

    ``pages``: the evaluation's sequences. ``rng``: draws the random blocks; the assigned block is
    drawn by a generator seeded with the uid, as the network's validators do.
    """

    def __init__(self, *, model: EvaluationModel, pages: Pages, rng: random.Random) -> None:
        self._model = model
        self._pages = pages
        self._rng = rng

    def draw_random_block(self, block: int) -> int:
        return self._rng.randrange(*schedule.random_block_range(block))

    def judge(
        self,
        repository: Repository,
        *,
        weights: list[Tensor],
        outer_step: int,
        outer_learning_rate: float,
        block: int,
        bpa: int,
        random_block: int,
    ) -> Judgement:
        """``weights``: global, of ``outer_step`` (X). Raises DataUnavailable, Stopped."""
        uid = repository.uid
        try:
            blocks, payload = self._read(repository, outer_step, block=block, bpa=bpa)
        except (InvalidUpload, BucketError) as error:
            return Judgement(uid, outer_step, False, str(error))
        assigned_block = random.Random(uid).sample(blocks, 1)[0]
        on_random, on_assigned = self._pages(uid, random_block), self._pages(uid, assigned_block)
        self._model.load(weights)
        before = self._model.loss(on_random), self._model.loss(on_assigned)
        self.apply(payload, outer_learning_rate)
        after = self._model.loss(on_random), self._model.loss(on_assigned)
        if not all(torch.isfinite(torch.tensor(after))):
            return Judgement(uid, outer_step, False, "the loss after it is not finite")
        return Judgement(
            uid=uid,
            outer_step=outer_step,
            ok=True,
            random=(before[0], after[0]),
            assigned=(before[1], after[1]),
            random_block=random_block,
            assigned_block=assigned_block,
        )

    def apply(self, payload: GradientPayload, outer_learning_rate: float) -> None:
        """``weights -= outer_lr * 0.5 * decoded`` for every parameter that was sent."""
        for name, shape in self._model.schema:
            decoded = payload.decode(name, shape)
            if decoded is not None:
                self._model.subtract(name, decoded, outer_learning_rate * APPLIED_FRACTION)

    def _read(
        self, repository: Repository, outer_step: int, *, block: int, bpa: int
    ) -> tuple[list[int], GradientPayload]:
        bucket, metadata = repository.bucket, repository.metadata
        if not repository.valid or bucket is None:
            raise InvalidUpload(repository.reason)
        if metadata is None:
            raise InvalidUpload(repository.reason or "no root metadata")
        if metadata.inner_step == 0:
            raise InvalidUpload("inner_step of the root metadata is 0")
        data = bucket.get(keys.epoch_key(outer_step, keys.CONFIG), limit=MAX_CONFIG_BYTES)
        try:
            blocks = parse_config(data)[1].block_list if data is not None else ()
        except MetadataError as error:
            raise InvalidUpload(str(error)) from None
        if not blocks:
            raise InvalidUpload("block_list is empty")
        if not schedule.blocks_are_fresh(blocks, block=block, bpa=bpa):
            raise InvalidUpload(f"newest trained block {max(blocks)} is too old at block {block}")
        limit = max_payload_bytes(self._model.schema)
        raw = bucket.get(keys.epoch_key(outer_step, keys.GRADIENTS), limit=limit)
        if raw is None:
            raise InvalidUpload("gradients.pt is gone")
        try:
            return list(blocks), load_payload(raw, self._model.schema)
        except PayloadError as error:
            raise InvalidUpload(str(error)) from None


def event_fields(judgement: Judgement, repository: Repository) -> Mapping[str, object]:
    """Fields of an ``upload_scored`` event."""
    fields: dict[str, object] = {
        "uid": judgement.uid,
        "outer_step": judgement.outer_step,
        "ok": judgement.ok,
        "reason": judgement.reason,
    }
    if repository.metadata is not None:
        fields["revision"] = repository.metadata.revision.tag
    for name in ("random", "assigned"):
        pair: tuple[float, float] | None = getattr(judgement, name)
        if pair is not None:
            fields[f"{name}_before"], fields[f"{name}_after"] = pair
            fields[f"{name}_relative"] = relative_improvement(*pair)
            fields[f"{name}_block"] = getattr(judgement, f"{name}_block")
    return fields
