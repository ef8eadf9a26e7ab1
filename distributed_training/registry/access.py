"""Decide what each member may read and write in the global bucket, and sign URLs for that.

The store's own key never leaves this machine. Members get URLs instead, each for one operation on
one object (:mod:`..store.presigned`). A URL to read anything outside ``uploads/`` is valid for an
hour. A URL to write the next upload is signed once the network's state names that close, and is
valid until the close is over. It fixes the length and the MD5 of the upload, so no other bytes can
be sent with it. At each close, a member gets URLs for one upload only. All times follow the store's
clock.

The state is read from the bucket, and the master's signature on it is verified. Multipart uploads
are begun, completed and, at the next close, aborted here, so a member cannot leave any unfinished.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field

from distributed_training.chain.base import ChainError
from distributed_training.common.backoff import Throttle
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Master, State
from distributed_training.store import presigned
from distributed_training.store.base import is_md5, same_etag
from distributed_training.store.errors import (
    AccessDeniedError,
    IntegrityError,
    StoreError,
    UploadMissingError,
)
from distributed_training.store.presigned import MOST_PARTS, UPLOADS, Do, Grant
from distributed_training.store.s3 import S3ObjectStore, base64_md5

from .files import ServedFolder

log = logging.getLogger(__name__)

READ_SECONDS = 3600.0
AFTER_SECONDS = 600.0  # seconds after a close and its grace in which a slow upload may still finish
_LONGEST_SECONDS = 7 * 86400.0  # the longest time for which an S3 URL can be valid
_STATE_KEPT = 2.0  # seconds for which the state is cached
# Seconds by which this machine's clock may differ from the store's without a warning.
_CLOCK_OFF = 5.0
_HEADER_BYTES = 2**20  # the largest header of an upload, in bytes
_NAME = "[A-Za-z0-9_][A-Za-z0-9._-]*"
# No part of a key is empty, begins with a dot or needs escaping, so the store looks up exactly the
# key that was signed.
Key = Annotated[str, Field(pattern=f"^{_NAME}(/{_NAME})*$", max_length=300)]
Size = Annotated[int, Field(ge=1, le=MOST_PARTS * presigned.PART)]
Md5 = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class StoreAway(ChainError):
    """The store did not answer, or has no state yet. A later request may succeed."""


class Access:
    """Sign URLs for members with the store's own key. Thread-safe. Close it after use.

    ``store``: the global bucket, opened for writing, or the folder that serves as the bucket.
    ``largest_upload``: the largest size of an upload in bytes, without its header. ``clock``:
    returns the Unix time in seconds.
    """

    def __init__(
        self,
        store: S3ObjectStore | ServedFolder,
        *,
        master: Master,
        largest_upload: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._master = master
        self._largest = largest_upload + _HEADER_BYTES
        self._clock = clock
        self._may_warn = Throttle(60.0)
        self._state: tuple[float, State] | None = None  # when it was read, and the state
        self._ahead = 0.0  # the store's clock minus ours, in seconds
        self._swept: tuple[int, int] | None = None  # the close of the last :meth:`_abort_earlier`
        # uid -> the close, and the digest of the upload for which this member got URLs. Memory is
        # enough: for URLs to two different uploads, a member would need a restart between two
        # grants, and must not have uploaded before it.
        self._chosen: dict[int, tuple[tuple[int, int], str]] = {}

    def close(self) -> None:
        self._store.close()

    def grant(
        self,
        uid: int,
        do: Do,
        key: Key,
        size: Size = 1,
        md5: Annotated[tuple[Md5, ...], Field(max_length=MOST_PARTS)] = (),
    ) -> dict[str, Any]:
        """Return a :class:`~..store.presigned.Grant`, as a dict, for the member with ``uid``.

        ``do``: "read" an object, "look" at the member's own upload, "write" or "complete" that
        upload. ``size``: the upload's size in bytes. ``md5``: the MD5 of each of its parts. Raises
        ChainError with the reason, or StoreAway.
        """
        try:
            return asdict(self._grant(uid, do, key, size, md5))
        except StoreError as error:
            # Warn here, since members can do nothing about the store's key.
            if self._may_warn("store"):
                log.warning("Members cannot access the store (%s), so nobody can upload", error)
            if isinstance(error, AccessDeniedError):  # only the key's owner can fix this
                raise StoreAway(
                    "access: the store refuses the registry's own requests, so nobody can upload "
                    "now: ask the founder, whose registry logs the cause"
                ) from None
            raise StoreAway(f"access: {error}") from None

    def _grant(self, uid: int, do: Do, key: str, size: int, md5: tuple[str, ...]) -> Grant:
        if do == "read":
            if key.startswith(UPLOADS):
                raise ChainError(
                    f"access: only the validator may read {key}; merged updates are in outer/"
                )
            reads = ("get_object", "head_object")
            urls = {name: self._store.presign(name, key, READ_SECONDS) for name in reads}
            return Grant(urls, READ_SECONDS)
        place = keys.parse_upload_key(key)
        if place is None or place[0] != uid:
            raise ChainError(
                f"access: {key} is not an upload of uid {uid}, and members may write nothing else"
            )
        if do == "look":
            return Grant(info=self._store.head(key))
        state = self._read_state()
        close = state.outer_step, state.serial
        if place[1:] != close:
            raise ChainError(
                f"access: {key} is for another close, not the next (outer step {close[0]}, "
                f"serial {close[1]}), so it would not be merged"
            )
        left = state.closes_at + state.grace + AFTER_SECONDS - (self._clock() + self._ahead)
        if left <= 0 or state.finished is not None:
            raise ChainError(
                f"access: the close of outer step {close[0]} is over, so {key} would not be merged"
            )
        if size > self._largest:
            raise ChainError(
                f"access: an upload of {size} bytes is larger than any upload of this model can be "
                f"({self._largest}), so nothing may be written"
            )
        if len(md5) != -(-size // presigned.PART):
            raise ChainError(f"access: an upload of {size} bytes does not have {len(md5)} parts")
        if self._store.head(key) is not None:
            raise ChainError(f"access: {key} already exists, and nobody may replace it")
        digest = hashlib.sha256(repr((size, md5)).encode()).hexdigest()
        # URLs for two different contents would let a member change its upload at will.
        if self._chosen.setdefault(uid, (close, digest)) != (close, digest):
            if self._chosen[uid][0] == close:
                raise ChainError(f"access: another file was granted as {key}, and only that counts")
            self._chosen[uid] = close, digest
        if self._largest > presigned.PART:  # otherwise no upload is multipart
            self._abort_earlier(close)
        left = min(left, _LONGEST_SECONDS)
        if len(md5) == 1:
            signed = {"ContentLength": size, "ContentMD5": base64_md5(md5[0])}
            url = self._store.presign("put_object", key, left, **signed)
            return Grant({"put_object": url}, left)
        return self._in_parts(key, size, md5, left, complete=do == "complete")

    def _in_parts(
        self, key: str, size: int, md5: tuple[str, ...], left: float, *, complete: bool
    ) -> Grant:
        """Return URLs for the missing parts of an upload, or complete the upload."""
        store = self._store
        began = [found for found in store.list_multiparts(key) if found.key == key]
        if not began and complete:
            raise ChainError(f"access: the upload of {key} was aborted, or never begun")
        upload_id = began[-1].upload_id if began else store.create_multipart(key)
        parts = store.list_parts(key, upload_id) if began else []
        sizes = [min(presigned.PART, size - at) for at in range(0, size, presigned.PART)]
        wanted = dict(enumerate(zip(sizes, md5, strict=True), 1))
        held = {
            part.number: part
            for part in parts
            # An etag that is not an MD5 cannot be compared, but the store checked the MD5 when the
            # part arrived.
            if (length_and_md5 := wanted.get(part.number)) is not None
            and part.size == length_and_md5[0]
            and (not is_md5(part.etag) or same_etag(part.etag, length_and_md5[1]))
        }
        if complete:
            if len(held) != len(wanted):
                raise ChainError(
                    f"access: {key} lacks {len(wanted) - len(held)} of {len(wanted)} parts"
                )
            return Grant(etag=store.complete_multipart(key, upload_id, [held[n] for n in wanted]))
        urls = {}
        for number, (length, digest) in wanted.items():
            if number not in held:
                urls[str(number)] = store.presign(
                    "upload_part",
                    key,
                    left,
                    UploadId=upload_id,
                    PartNumber=number,
                    ContentLength=length,
                    ContentMD5=base64_md5(digest),
                )
        return Grant(urls, left, upload_id)

    def _read_state(self) -> State:
        """Return the network's state, a few seconds old at most. Raises StoreError, StoreAway."""
        known = self._state
        if known is not None and time.monotonic() - known[0] < _STATE_KEPT:
            return known[1]
        newest, info = None if known is None else known[1], self._store.head(keys.STATE)
        try:
            data = self._store.get(keys.STATE, limit=State.most_bytes)
            if data is None and newest is None:
                raise StoreAway("access: the network has no state yet: its validator has never run")
            if data is None:
                raise ValueError(f"{keys.STATE} is missing")
            state = State.parse(data, self._master)
            age = state.serial, state.written_at
            if newest is not None and age < (newest.serial, newest.written_at):
                raise ValueError(f"{keys.STATE} is older than one seen before")
        except (IntegrityError, ValueError) as error:
            if self._may_warn("state"):  # otherwise each request would log a line
                log.warning(
                    "The state in the bucket is refused (%s), so %s: look at the validator's log, "
                    "and replace the store's key if the validator wrote another state",
                    error,
                    "nobody may upload" if newest is None else "the previous state stays in force",
                )
            if newest is None:
                raise StoreAway(f"access: {error}") from None
            state = newest
        if info is not None:  # follow the store's clock
            self._ahead = info.modified + (info.age_seconds or 0.0) - self._clock()
            if abs(self._ahead) > _CLOCK_OFF and not info.cached and self._may_warn("clock"):
                log.warning(
                    "This machine's clock is %.0f s %s the store's, which decides when members may "
                    "upload. Set it, or signatures will be refused (timedatectl set-ntp true)",
                    abs(self._ahead),
                    "behind" if self._ahead > 0 else "ahead of",
                )
        self._state = time.monotonic(), state
        return state

    def _abort_earlier(self, close: tuple[int, int]) -> None:
        """Abort unfinished multipart uploads for closes other than ``close``, once per close."""
        if self._swept == close:
            return
        for found in self._store.list_multiparts(UPLOADS):  # no retries, because a caller waits
            began = keys.parse_upload_key(found.key)
            if began is not None and began[1:] != close:
                with suppress(UploadMissingError):
                    self._store.abort_multipart(found.key, found.upload_id)
        self._swept = close
