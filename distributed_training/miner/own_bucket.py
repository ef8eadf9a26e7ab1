"""This miner's own bucket, as a start finds it."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass, replace

from distributed_training.chain.base import ChainUnavailable
from distributed_training.config import Config
from distributed_training.node import buckets
from distributed_training.node.identity import Member
from distributed_training.node.start import NetworkFailure
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import StoreError
from distributed_training.telemetry import unix_time
from distributed_training.telemetry.verdict import Upload

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnBucket:
    """``commitment``: its read credentials, as the chain holds them.

    The others are of the newest upload when this process started: ``time.monotonic()`` of its
    gradients, the newest block of its list, and its outer step. None: there is none, or it could
    not be read. ``known``: its metadata could be read, or there are none.
    """

    name: str
    commitment: str
    published_at: float | None = None
    newest_block: int | None = None
    outer_step: int | None = None
    known: bool = True

    def uploads(self) -> tuple[Upload, ...]:
        """Return the newest upload as a fact of the verdict; empty: there is none."""
        if self.outer_step is None or (at := unix_time(self.published_at)) is None:
            return ()
        return (Upload(self.outer_step, at, block=self.newest_block),)


def open_own_bucket(config: Config, member: Member, bucket: str) -> OwnBucket:
    """Return our bucket as it is now, both keys checked.

    Raises ConfigError, NetworkFailure.
    """
    try:
        with closing(buckets.open_own(config.store, bucket)) as store:
            buckets.check_own(store)
            found = read_newest(BucketReader(store, large=buckets.BUCKET_CHECK))
        commitment = buckets.own_commitment(config.store, bucket)
        return replace(found, name=bucket, commitment=commitment)
    except NetworkFailure as error:
        commitment = buckets.commitment_text(config.store)
        try:
            shown = member.chain.commitment(member.hotkey)
        except ChainUnavailable:  # only the neurons could be read so far
            shown = None
        # What the chain shows was tried by an earlier start; other keys are not published untried.
        if shown != commitment:
            raise
        log.warning(
            "Bucket %s does not answer (%s): starting without a look into it; uploads are tried "
            "until it answers",
            bucket,
            error,
        )
        return OwnBucket(bucket, commitment, known=False)


def read_newest(bucket: BucketReader) -> OwnBucket:
    """Return what the bucket says of its newest upload."""
    at = block = outer_step = None
    known = False
    try:
        root = bucket.metadata()
        known, outer_step = True, None if root is None else root.outer_step
        age = None if root is None else bucket.age(root.outer_step)
        if root is not None and age is not None:
            at = time.monotonic() - age.total_seconds()
            # After the age is noted: a list that cannot be read leaves the age known.
            block = max(bucket.config(root.outer_step)[1].block_list, default=None)
    except StoreError as error:
        what = "the newest upload" if at is None else "the uploaded block list"
        log.warning("The age of %s is not known before the next upload: %s", what, error)
    return OwnBucket("", "", at, block, outer_step, known)
