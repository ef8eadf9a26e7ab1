"""One bucket, one miner: a small object in the bucket says whose it is.

Two miners that publish into one bucket (a copied ``.env``, a forgotten process) overwrite each
other's files and are both scored for the mixture. The claim is renewed while the miner runs and
lapses when it does not, so moving to another machine needs a few minutes' wait or a flag.
"""

from __future__ import annotations

import json
from datetime import timedelta

from .errors import StoreError
from .interface import ObjectStore

OWNER_KEY = ".miner/owner.json"
RENEW_EVERY = timedelta(minutes=4)
LAPSES_AFTER = timedelta(minutes=15)


class ForeignBucketError(StoreError):
    """Another miner publishes into this bucket."""


def claim_bucket(store: ObjectStore, instance: str, *, take: bool = False) -> None:
    """Make or renew the claim of ``instance``. Raises ForeignBucketError, StoreError.

    ``take``: also over a claim of another that has not lapsed. Two claims at the same moment: the
    later write wins, and the other finds out at its next renewal.
    """
    if not take:
        check_claim(store, instance)
    store.put(OWNER_KEY, json.dumps({"instance": instance}).encode())


def check_claim(store: ObjectStore, instance: str) -> None:
    """Raises ForeignBucketError if another's claim stands."""
    info = store.head(OWNER_KEY)
    if info is None or (info.age_seconds or 0.0) > LAPSES_AFTER.total_seconds():
        return
    data = store.get(OWNER_KEY, limit=4096)
    try:
        owner = json.loads(data or b"{}").get("instance")
    except (ValueError, AttributeError):
        return
    if owner is not None and owner != instance:
        raise ForeignBucketError(
            f"another miner claimed bucket {store.bucket} {info.age_seconds or 0:.0f} s ago, so "
            "nothing is published here: stop it, or, if it is gone for good, wait "
            f"{LAPSES_AFTER.total_seconds() / 60:.0f} minutes or start with --r2.take_bucket"
        )


def release_bucket(store: ObjectStore, instance: str) -> None:
    """Give the claim up at a clean stop, so that the next machine need not wait."""
    data = store.get(OWNER_KEY, limit=4096)
    if data is not None and f'"{instance}"'.encode() in data:
        store.delete([OWNER_KEY])
