"""Keep this machine's copy of what the master has signed, and repair the store with it.

An object in the store means nothing until its signature and digest match. The store may lose or
damage objects, return old ones, confirm a write that it drops, or be restored from a backup. None
of this changes what the network's master has signed, and the store is only a cache of that. So this
machine keeps the state and all manifests, with the files of the outer steps that members may need.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Generic, TypeVar

from distributed_training.common.files import sha256_of, write_bytes
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master, State
from distributed_training.store.base import ObjectInfo, ObjectStore
from distributed_training.store.bucket_reader import (
    MOST_BYTES,
    BucketReader,
    StateUnavailable,
)
from distributed_training.store.errors import (
    IntegrityError,
    NoRoomError,
    ObjectMissingError,
    PreconditionError,
)
from distributed_training.store.transfer import RANGE, Retry

log = logging.getLogger(__name__)

RECOVER = "run dt-network recover NETWORK"
_SIGNED = "signed"  # subfolder with the state and all manifests
SMALL = 4 * 1024 * 1024  # bytes; objects up to this size are read to compare them
_SMALL_TIME = timedelta(seconds=30)  # time limit for one small object, including retries
#: Errors about an object, unlike those of a store that does not answer.
_FAULTS = (IntegrityError, ObjectMissingError, PreconditionError, StateUnavailable)
_Kind = TypeVar("_Kind", State, Manifest)


@dataclass(frozen=True)
class Signed(Generic[_Kind]):
    """A file that the master has signed, and its bytes."""

    file: _Kind
    data: bytes


@dataclass(frozen=True)
class Kept:
    """An object that the store must have: its SHA-256, and where our copy is or would be."""

    key: str
    digest: str
    path: Path


def age_of(state: State) -> tuple[int, float]:
    """Return a sort key that grows with each state that the master signs."""
    return state.serial, state.written_at


class OwnCopy:
    """Our copy of a network's chain in ``folder``. Methods that ask the store raise StoreError."""

    def __init__(self, store: ObjectStore, folder: Path, master: Master) -> None:
        self.reader = BucketReader(store)
        self._store = store
        self._folder = folder
        self._master = master
        self._retry = Retry(each=_SMALL_TIME)
        self._etags: dict[str, str] = {}  # key -> etag of the object when its content was right

    # --- signed files -----------------------------------------------------------------------------

    def own_state(self) -> Signed[State] | None:
        """Return our copy of the state; None if it is missing or damaged."""
        return self._read_own(keys.STATE, State)

    def stored_state(self) -> Signed[State] | None:
        """Return the store's state; None if it is missing, damaged or another network's."""
        return self._read_stored(keys.STATE, State)

    def manifest(self, outer_step: int) -> Manifest | None:
        """Return our copy of a manifest; None if it is missing or damaged."""
        found = self._read_own(f"{outer_step}.json", Manifest)
        return None if found is None else found.file

    def find_manifest(self, outer_step: int) -> Manifest | None:
        """Return the store's manifest of an outer step, else our copy, or None if there is neither.

        Raises ValueError if both are signed and differ.
        """
        key, ours = keys.outer_key(outer_step, keys.MANIFEST), self.manifest(outer_step)
        theirs = self.stored_manifest(outer_step)
        if theirs is None:
            return ours
        if ours is None:
            self.save(f"{outer_step}.json", theirs.data)
        elif ours.digest != theirs.file.digest:
            raise ValueError(f"{key} differs from this machine's copy, and both are signed")
        return theirs.file

    def stored_manifest(self, outer_step: int) -> Signed[Manifest] | None:
        """Return the store's manifest of an outer step; None as for :meth:`stored_state`."""
        found = self._read_stored(keys.outer_key(outer_step, keys.MANIFEST), Manifest)
        # The manifest of another outer step is the content of another object.
        return found if found is not None and found.file.outer_step == outer_step else None

    def steps(self) -> set[int]:
        """Return the outer steps whose manifests this machine has copied."""
        names = [path.stem for path in (self._folder / _SIGNED).glob("*.json")]
        return {int(name) for name in names if name.isdigit()}

    def save(self, name: str, data: bytes) -> None:
        """Write our copy of a signed file; if the disk is full, only the copy is lost."""
        path = self._folder / _SIGNED / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, data)
        except OSError as error:
            log.warning(
                "%s was not written (%s), so the next start finds an older copy and waits until "
                "nobody leads the network: free disk space at --neuron.run_folder",
                path,
                error.strerror,
            )

    def _read_own(self, name: str, kind: type[_Kind]) -> Signed[_Kind] | None:
        with suppress(OSError, ValueError):
            data = (self._folder / _SIGNED / name).read_bytes()
            return Signed(kind.parse(data, self._master), data)
        return None

    def _read_stored(self, key: str, kind: type[_Kind]) -> Signed[_Kind] | None:
        try:
            data = self._retry(self._store.get, key, limit=kind.most_bytes)
            return None if data is None else Signed(kind.parse(data, self._master), data)
        except (IntegrityError, ValueError) as error:
            log.info("%s in the store counts as missing: %s", key, error)
            return None

    # --- what the store has to hold ---------------------------------------------------------------

    def place(self, outer_step: int) -> Path:
        """Return the folder with the files of an outer step."""
        return self._folder / keys.epoch_folder(outer_step)

    def find_copies(self, head: Manifest, at: Sequence[int]) -> list[Kept]:
        """Return all that members may need since the oldest of the sets ``at``, newest first."""
        oldest = min(at, default=head.outer_step)
        found = []
        for manifest in self._chain(head):
            step = manifest.outer_step
            if step < oldest:
                break
            path = self._folder / _SIGNED / f"{step}.json"
            with suppress(OSError):
                found.append(Kept(keys.outer_key(step, keys.MANIFEST), sha256_of(path), path))
            files = dict(manifest.files) if step in at else {}
            if step != max(at, default=0):  # a validator starts from the newest set
                files.pop(keys.OUTER_STATE, None)
            if manifest.update and step > oldest:
                files[keys.UPDATE] = manifest.update
            found += [
                Kept(keys.outer_key(step, name), digest, self.place(step) / name)
                for name, digest in files.items()
            ]
        return found

    def _chain(self, head: Manifest) -> Iterator[Manifest]:
        """Yield our copies of the manifests, from the head back to the first that is missing."""
        last: Manifest | None = head
        while last is not None:
            yield last
            wanted = last.previous
            last = self.manifest(last.outer_step - 1) if wanted else None
            if last is not None and last.digest != wanted:
                return

    def fits(self, one: Kept, *, most: int = SMALL) -> bool:
        """Return whether the store has these bytes.

        An object of at most ``most`` bytes is read. A larger object must have our copy's size and
        the same etag as before.
        """
        info = self._retry(self._store.head, one.key)
        if info is None:
            return False
        there = one.path.exists()
        try:
            if not there and one.path.name not in (keys.MODEL, keys.OUTER_STATE):
                self.reader.fetch_signed(one.key, one.path, one.digest, limit=MOST_BYTES)
            elif info.size <= most or (there and one.path.stat().st_size != info.size):
                if self._digest(one.key, info) != one.digest:
                    return False
            else:
                return self._etags.setdefault(one.key, info.etag) == info.etag
        except _FAULTS:
            return False
        except NoRoomError:  # the object is right but was not copied
            return True
        self._etags[one.key] = info.etag
        return True

    def _digest(self, key: str, info: ObjectInfo) -> str:
        """Return the SHA-256 of an object, read piece by piece."""
        content, at = sha256(), 0
        while at < info.size:
            length = min(RANGE, info.size - at)
            piece = self._retry(self._store.get_range, key, at, length, etag=info.etag)
            if not piece:
                raise IntegrityError(f"{key} is shorter than its given size")
            content.update(piece)
            at += len(piece)
        return content.hexdigest()

    def wrong(self, kept: Sequence[Kept], *, most: int) -> list[Kept]:
        """Return the objects that the store lacks or has with other bytes."""
        return [
            one
            for one in kept
            # Do not read momentum and residual: the file is the largest, and no member needs it.
            if not self.fits(
                one, most=min(most, SMALL) if one.path.name == keys.OUTER_STATE else most
            )
        ]

    def lost_manifests(self, head: Manifest) -> list[Kept]:
        """Return our copies of the manifests, up to the head, that the store lacks or damaged."""
        found = []
        for manifest in self._chain(head):
            step = manifest.outer_step
            path = self._folder / _SIGNED / f"{step}.json"
            if path.exists() and self.stored_manifest(step) is None:
                key = keys.outer_key(step, keys.MANIFEST)
                found.append(Kept(key, sha256_of(path), path))
        return found
