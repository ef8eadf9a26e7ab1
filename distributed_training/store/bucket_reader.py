"""Read another member's bucket, whose objects may be missing, slow, or contain anything at all.

So every read has a limit on its bytes and on its time, and nothing from a file is executed.

A read key is committed to the chain, where everybody can read it forever, so it must never allow a
write. Only the store knows what a key allows. So before the key is committed, a start tests it with
a read, and with a write that the store has to refuse.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from datetime import timedelta
from pathlib import Path

from distributed_training.common.files import sha256_of
from distributed_training.network import LARGEST_FILE, LARGEST_SHOWN, Shown
from distributed_training.protocol import keys

from .base import ObjectInfo, ObjectStore, Uplink
from .errors import AccessDeniedError, ClockSkewError, StoreError
from .transfer import Retry, deadline_in, download

log = logging.getLogger(__name__)

MOST_BYTES = 256 * 1024**3  # the most bytes in one file


class StateUnavailable(StoreError):
    """The requested state is missing, incomplete or damaged; the text says which."""


class BucketReader:
    """One bucket, opened with read credentials. All methods raise StoreError.

    ``small``: time limit of a small request with its retries; ``large``: of a whole file or state.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        small: timedelta = timedelta(minutes=1),
        large: timedelta = timedelta(minutes=40),
    ) -> None:
        self._large = large
        self._uplink = Uplink()
        self.store = store
        self._retry = Retry(each=min(small, large), uplink=self._uplink)

    @property
    def name(self) -> str:
        return self.store.bucket

    def stop(self) -> None:
        """Stop the current fetch, which raises StoppedError; the next one continues its files."""
        self._uplink.stop()

    # --- small objects --------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo | None:
        """Return the size, etag and age of an object; None if there is no such object."""
        return self._retry(self.store.head, key)

    def get(self, key: str, *, limit: int) -> bytes | None:
        """Return a small object, or None if it is missing. IntegrityError if over ``limit``."""
        return self._retry(self.store.get, key, limit=limit)

    def network(self) -> Shown | None:
        """Return which network the global bucket belongs to; None if it does not say.

        Raises StateUnavailable for a damaged ``network.json``.
        """
        data = self.get(keys.NETWORK, limit=LARGEST_SHOWN)
        try:
            return None if data is None else Shown.parse(data)
        except ValueError as error:
            raise StateUnavailable(f"{self.name}/{keys.NETWORK}: {error}") from None

    def version(self, number: int) -> str | None:
        """Return the text of version ``number`` of the network's file; None if it is missing.

        Bytes that are not valid text are replaced; no signature will match such a text anyway.
        """
        data = self.get(keys.VERSION.format(number), limit=LARGEST_FILE)
        return None if data is None else data.decode(errors="replace")

    # --- large objects --------------------------------------------------------------------------

    def download(
        self,
        key: str,
        path: Path,
        *,
        limit: int,
        deadline: float | None = None,
    ) -> ObjectInfo:
        """Fetch the object into ``path``, complete or not at all. Raises ObjectMissingError."""
        try:
            return download(
                self.store,
                key,
                path,
                limit=limit,
                deadline=deadline_in(self._large) if deadline is None else deadline,
                uplink=self._uplink,
            )
        except OSError as error:
            # Errors from reading or writing through a file handle do not name the file.
            raise StoreError(f"{error.filename or 'the disk'}: {error.strerror or error}") from None

    def fetch_signed(self, key: str, path: Path, digest: str, *, limit: int) -> None:
        """Fetch the object with this SHA-256 into ``path``, unless it is already there.

        Raises ObjectMissingError, and StateUnavailable for other bytes, which are deleted.
        """
        if path.exists() and sha256_of(path) == digest:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self.download(key, path, limit=limit)
        if (found := sha256_of(path)) != digest:
            path.unlink()
            raise StateUnavailable(
                f"{key} has the digest {found}, but the manifest has {digest or 'nothing for it'}"
            )


# --- outer steps on disk ------------------------------------------------------------------------


def states(folder: Path) -> list[tuple[int, Path]]:
    """Return the outer steps whose files are in ``folder``, with their folders; oldest first."""
    found = ((path.name.partition("-")[2], path) for path in folder.glob("epoch-*"))
    return sorted((int(number), path) for number, path in found if number.isdigit())


def remove_states(folder: Path, *, before: int) -> None:
    """Delete the files of the outer steps before ``before``."""
    for outer_step, path in states(folder):
        if outer_step < before:
            shutil.rmtree(path, ignore_errors=True)


# --- what a read key may do ----------------------------------------------------------------------

PROBE_KEY = ".miner/read-key-probe"


class WritableReadKeyError(StoreError):
    """The key that would be published can write, so it must not be committed."""


def check_read_key(reader: ObjectStore, *, timeout: timedelta) -> None:
    """Check that ``reader``, opened with the read key, can read its bucket but not write to it.

    ``timeout`` covers both requests with their retries. The check leaves nothing in the bucket.
    Raises WritableReadKeyError; AccessDeniedError if validators could not read with this key;
    BucketMissingError. DeadlineError and other StoreErrors mean that the store gave no clear
    answer, so the key must not be published in that case either.
    """
    retry = Retry(until=deadline_in(timeout))
    # Read first: a store refuses an unknown key too, so only a key that can read is tested.
    retry(reader.get, keys.STATE, limit=LARGEST_SHOWN)
    try:
        retry(reader.put, PROBE_KEY, b"")
    except ClockSkewError:
        raise  # this is an AccessDeniedError too, but says nothing about the key
    except AccessDeniedError:
        return
    with contextlib.suppress(StoreError):
        reader.delete(PROBE_KEY)
    raise WritableReadKeyError(
        f"the key in R2_READ_ACCESS_KEY_ID can write to bucket {reader.bucket}; it is published on "
        "the chain, so anyone could replace or delete the uploads: nothing was committed. Create a "
        'key that can only read ("Object Read only" in the R2 dashboard) and put it into .env'
    )
