"""Is a miner's bucket valid? As the network's validators judge it (protocol page, section 7).

An invalid bucket multiplies the total score by 0 whatever the upload is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from distributed_training.chain.base import Neuron
from distributed_training.node.peers import NoBucket, Reader
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import MAX_METADATA_BYTES, Metadata, MetadataError
from distributed_training.scoring.causes import Cause
from distributed_training.store.errors import StoreError

# A miner's bucket, by its commitment. Raises NoBucket, and ChainError.
OpenBucket = Callable[[Neuron], Reader]


@dataclass(frozen=True)
class Repository:
    """What one look at a miner's bucket showed.

    ``valid``: the factor of the total score. ``cause`` and ``reason`` say why not; a valid bucket
    has them too when its metadata cannot be used. ``metadata``: of the root, None if unreadable.
    """

    uid: int
    valid: bool
    cause: Cause | None = None
    reason: str = ""
    bucket: Reader | None = None
    metadata: Metadata | None = None
    age: timedelta | None = None  # of epoch-X/gradients.pt, by the store's clock

    @property
    def tag(self) -> str:
        """``run.outer.inner`` of the root metadata, empty without one."""
        return self.metadata.revision.tag if self.metadata else ""


def inspect(
    neuron: Neuron, open_bucket: OpenBucket, *, outer_step: int, age_limit: timedelta
) -> Repository:
    """Commitment, credentials, age of ``epoch-X/gradients.pt``. Raises ChainError."""
    key = keys.epoch_key(outer_step, keys.GRADIENTS)
    try:
        bucket = open_bucket(neuron)
        data = bucket.get(keys.ROOT_METADATA, limit=MAX_METADATA_BYTES)
        info = bucket.head(key)
    except NoBucket as error:
        return Repository(neuron.uid, False, Cause.NO_COMMITMENT, str(error))
    except StoreError as error:
        return Repository(neuron.uid, False, Cause.UNREACHABLE, str(error))
    metadata: Metadata | None = None
    cause: Cause | None = Cause.NO_METADATA
    reason = f"no {keys.ROOT_METADATA} at the root"
    try:
        if data is not None:
            metadata, cause, reason = Metadata.parse(data), None, ""
    except MetadataError as error:
        reason = str(error)
    if info is None:
        cause = Cause.NOTHING_PUBLISHED
        return Repository(neuron.uid, False, cause, f"no {key}", bucket, metadata)
    age = timedelta(seconds=info.age_seconds or 0.0)
    if age >= age_limit:
        cause, reason = (
            Cause.STALE,
            f"upload is {age.total_seconds():.0f} s old, limit {age_limit.total_seconds():.0f} s",
        )
        return Repository(neuron.uid, False, cause, reason, bucket, metadata, age)
    return Repository(neuron.uid, True, cause, reason, bucket, metadata, age)
