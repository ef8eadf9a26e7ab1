"""The lease of a bucket: one small object names the miner that may upload into it.

Two miners that upload into one bucket (a copied ``.env``, a forgotten process) overwrite each
other's files and are both scored for the mixture. The lease is renewed while its miner runs and
lapses when it does not, so moving to another machine needs a few minutes' wait or a flag.

A miner is identified by its run folder *and* the place of that folder: a copy on another machine,
or under another path, is another miner's.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import secrets
from datetime import timedelta
from pathlib import Path

from distributed_training.common.files import write_bytes

from .s3 import IntegrityError, S3ObjectStore, StoreError

OWNER_KEY = ".miner/owner.json"
RENEW_EVERY = timedelta(minutes=4)
LAPSES_AFTER = timedelta(minutes=15)
_MOST_BYTES = 4096
_MACHINE_ID = Path("/etc/machine-id")


class ForeignBucketError(StoreError):
    """Another miner publishes into this bucket."""


def instance_of(folder: Path) -> str:
    """Who publishes from this run folder: the same at each start, another in a copy elsewhere.

    Half of it is random, in ``folder/instance``, written once: machines that were made from one
    image are alike in all that can be asked of them. Raises OSError.
    """
    path = folder / "instance"
    try:
        token = path.read_bytes()[:64].decode("ascii", "replace")
    except FileNotFoundError:
        token = ""
    if not re.fullmatch(r"[0-9a-f]{32}", token):
        token = secrets.token_hex(16)
        write_bytes(path, token.encode())
    place = "\0".join((token, machine(), str(folder.resolve())))
    return hashlib.sha256(place.encode(errors="replace")).hexdigest()[:16]


def machine() -> str:
    """What tells this machine, or this container, from another."""
    try:
        identity = _MACHINE_ID.read_text(errors="replace").strip()
    except OSError:
        identity = ""
    return f"{identity}:{platform.node()}"


def claim_bucket(store: S3ObjectStore, instance: str, *, take: bool = False) -> None:
    """Make or renew the claim of ``instance``. Raises ForeignBucketError, StoreError.

    ``take``: also over a claim of another that has not lapsed. Two claims at the same moment: the
    later write wins, and the other finds out at its next renewal.
    """
    if not take:
        check_claim(store, instance)
    store.put(OWNER_KEY, json.dumps({"instance": instance}).encode())


def check_claim(store: S3ObjectStore, instance: str) -> None:
    """Raises ForeignBucketError if another's claim stands."""
    info = store.head(OWNER_KEY)
    if info is None or (info.age_seconds or 0.0) > LAPSES_AFTER.total_seconds():
        return
    owner = _owner(store)
    if owner is not None and owner != instance:
        raise ForeignBucketError(
            f"another miner claimed bucket {store.bucket} {info.age_seconds or 0:.0f} s ago, so "
            "nothing is published here: stop it, or, if it is gone for good, wait "
            f"{LAPSES_AFTER.total_seconds() / 60:.0f} minutes or start with --r2.take_bucket"
        )


def release_bucket(store: S3ObjectStore, instance: str) -> None:
    """Give the claim up at a clean stop, so that the next machine need not wait."""
    if _owner(store) == instance:
        store.delete([OWNER_KEY])


def _owner(store: S3ObjectStore) -> str | None:
    """None if nobody wrote a claim, or none that can be read: the next claim replaces it."""
    try:
        owner = json.loads(store.get(OWNER_KEY, limit=_MOST_BYTES) or b"{}").get("instance")
    except (IntegrityError, ValueError, AttributeError, RecursionError):
        return None
    return owner if isinstance(owner, str) else None
