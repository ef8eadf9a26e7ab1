"""The read key goes onto the chain for everybody to see, for good: it must read and never write.

Configuration can only see that two keys are not the same. What a key may do only the store knows,
so it is asked at a start, before the commitment: one read, then one write that has to be refused.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

from distributed_training.protocol import keys
from distributed_training.protocol.metadata import MAX_METADATA_BYTES

from .errors import AccessDeniedError, ClockSkewError, StoreError
from .retry import deadline_in, patient
from .s3 import S3ObjectStore

PROBE_KEY = ".miner/read-key-probe"


class WritableReadKeyError(StoreError):
    """The key that would be published may write. Nothing may be committed with it."""


def check_read_key(reader: S3ObjectStore, *, timeout: timedelta) -> None:
    """That ``reader``, opened with the read key, can read its bucket and not write it.

    ``timeout`` covers both requests with their retries. Leaves nothing in the bucket. Raises
    WritableReadKeyError; AccessDeniedError if validators could not read with this key;
    BucketMissingError; DeadlineError and other StoreErrors when the store gave no clear answer,
    which is no reason to publish the key either.
    """
    asked = patient(reader, until=deadline_in(timeout))
    # A read first: only a key that the store knows is refused for what it may not do.
    asked.get(keys.ROOT_METADATA, limit=MAX_METADATA_BYTES)
    try:
        asked.put(PROBE_KEY, b"")
    except ClockSkewError:
        raise
    except AccessDeniedError:
        return
    with contextlib.suppress(StoreError):
        reader.delete([PROBE_KEY])
    raise WritableReadKeyError(
        f"the key in R2_READ_ACCESS_KEY_ID can write to bucket {reader.bucket}; it is published on "
        "the chain, so anyone could replace or delete the uploads: nothing was committed. Make a "
        'token with "Object Read only" (R2 dashboard, Manage API tokens) and put it into .env'
    )
