"""Read the bucket of another, whose objects may be missing, slow, or hold anything at all.

So every read names the most bytes that it accepts, and ends within a time. Nothing of a file is
run.

A read key is committed to the chain, where everybody can read it for good, so it must never allow a
write. Only the store knows what a key allows. So a start tries it before the commitment, by a read
and by a write that the store has to refuse.
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

MOST_BYTES = 256 * 1024**3  # bytes of one file


class StateUnavailable(StoreError):
    """The state asked for is not there, not whole or not sound; the text says which."""


class BucketReader:
    """One bucket, read with read credentials. All methods raise StoreError.

    ``small`` covers a question with its retries, ``large`` a whole file or state.
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
        """End a fetch under way (it raises StoppedError); the next one continues with its files."""
        self._uplink.stop()

    # --- small objects --------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo | None:
        """Return size, etag and age of an object; None if there is no such object."""
        return self._retry(self.store.head, key)

    def get(self, key: str, *, limit: int) -> bytes | None:
        """Return a small object, None if there is none. IntegrityError for more than ``limit``."""
        return self._retry(self.store.get, key, limit=limit)

    def network(self) -> Shown | None:
        """Return whose network the global bucket is; None if it does not say.

        Raises StateUnavailable for a damaged ``network.json``.
        """
        data = self.get(keys.NETWORK, limit=LARGEST_SHOWN)
        try:
            return None if data is None else Shown.parse(data)
        except ValueError as error:
            raise StateUnavailable(f"{self.name}/{keys.NETWORK}: {error}") from None

    def version(self, number: int) -> str | None:
        """Return the text of that version of the network's file; None if it is not there.

        Bytes that are not text are replaced: no signature fits them.
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
            # The errors of reads and writes by a handle name no file.
            raise StoreError(f"{error.filename or 'the disk'}: {error.strerror or error}") from None

    def fetch_signed(self, key: str, path: Path, digest: str, *, limit: int) -> None:
        """Fetch the object of this SHA-256 into ``path``, unless it is there.

        Raises ObjectMissingError, and StateUnavailable for other bytes, of which nothing stays.
        """
        if path.exists() and sha256_of(path) == digest:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self.download(key, path, limit=limit)
        if (found := sha256_of(path)) != digest:
            path.unlink()
            raise StateUnavailable(
                f"{key} has the digest {found}, and the signed manifest {digest or 'none of it'}"
            )


# --- outer steps on the disk --------------------------------------------------------------------


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
    """The key that would be published may write. Nothing may be committed with it."""


def check_read_key(reader: ObjectStore, *, timeout: timedelta) -> None:
    """Check that ``reader``, opened with the read key, can read its bucket and not write it.

    ``timeout`` covers both requests with their retries. Leaves nothing in the bucket. Raises
    WritableReadKeyError; AccessDeniedError if validators could not read with this key;
    BucketMissingError. DeadlineError and other StoreErrors mean that the store gave no clear
    answer, which is no reason to publish the key either.
    """
    retry = Retry(until=deadline_in(timeout))
    # Read first, because a store refuses an unknown key too, whatever that key may do.
    retry(reader.get, keys.STATE, limit=LARGEST_SHOWN)
    try:
        retry(reader.put, PROBE_KEY, b"")
    except ClockSkewError:
        raise  # it is an AccessDeniedError too, but says nothing about the key
    except AccessDeniedError:
        return
    with contextlib.suppress(StoreError):
        reader.delete(PROBE_KEY)
    raise WritableReadKeyError(
        f"the key in R2_READ_ACCESS_KEY_ID can write to bucket {reader.bucket}; it is published on "
        "the chain, so anyone could replace or delete the uploads: nothing was committed. Make a "
        'key that may only read ("Object Read only" in the R2 dashboard) and put it into .env'
    )
