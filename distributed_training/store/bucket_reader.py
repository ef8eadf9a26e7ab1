"""Read the bucket of another: single objects, and the whole state of an outer step.

Such a bucket may be missing, slow, or hold anything at all. So every read names the most bytes it
takes and ends within a time. The files of a state are written under temporary names, checked (size,
form, finite values, one revision) and renamed together; the last good state stays until then.
Nothing in a file can run: see :mod:`..protocol.pt_file`. Files are checked without torch.

A read key is committed to the chain for everybody, for good, so it must read and never write. Only
the store knows what a key may do. So a start tries it before the commitment: one read, then one
write that has to be refused.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from distributed_training import __version__
from distributed_training.common.files import (
    read_json_object,
    read_state,
    sha256_of,
    sync_folder,
    write_bytes,
    write_json,
    write_state,
)
from distributed_training.network import LARGEST_FILE, LARGEST_SHOWN, Shown
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import (
    MAX_CONFIG_BYTES,
    MAX_METADATA_BYTES,
    ConfigExtras,
    Metadata,
    MetadataError,
    parse_config,
)
from distributed_training.protocol.pt_file import (
    PtContent,
    PtFileError,
    read_pt,
    safetensors_table,
)
from distributed_training.protocol.types import Revision

from .base import ObjectInfo, ObjectStore
from .errors import (
    AccessDeniedError,
    ClockSkewError,
    DeadlineError,
    IntegrityError,
    NoRoomError,
    ObjectMissingError,
    StoreError,
)
from .snapshot_folder import read_config, size_text
from .transfer import Progress, Retry, bytes_missing, deadline_in, download, require_room
from .uplink import Uplink

log = logging.getLogger(__name__)

_T = TypeVar("_T")
MOST_BYTES = 256 * 1024**3  # of one file
RANGE = 4 * 1024 * 1024  # bytes of one request of a read into memory
_SAMPLE = timedelta(minutes=5)  # for all that is read of one object piece by piece
_ETAGS = ".etags.json"  # in a state's folder: of the objects that its files are
_REFUSED = "refused.json"  # in a state's folder
_TRIED_AGAIN = "this state is tried once more"
_CHUNK = 4 * 1024 * 1024  # divides by every item size
#: By float type: an integer of its size, and the bits that only NaN and Inf have all set.
_FLOATS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),  # has NaN, no Inf
    "F8_E8M0": ("<u1", 0xFF),  # has NaN, no Inf
}
_OF_STORAGE = {
    **{"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16"},
    **{"BFloat16Storage": "BF16", "ComplexFloatStorage": "F32", "ComplexDoubleStorage": "F64"},
}


class StateUnavailable(StoreError):
    """The state asked for is not there, not whole or not sound; the text says which."""


def check_run(metadata: Metadata, run: int) -> Metadata:
    """Return ``metadata`` of the global bucket; StoreError if it is of another run than ``run``."""
    if metadata.run != run:
        raise StoreError(
            f"the global bucket is of run {metadata.run}, this network of run {run}: take its "
            "newest file (or update the program), or correct store.global_bucket"
        )
    return metadata


class BucketReader:
    """One bucket, read with read credentials. All methods raise StoreError.

    ``small`` covers a question with its retries, ``large`` a whole file or state. ``concurrency``
    ranges of 16 MiB are fetched at once, each held in memory.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        small: timedelta = timedelta(minutes=1),
        large: timedelta = timedelta(minutes=40),
        concurrency: int = 6,
    ) -> None:
        self._large = large
        self._concurrency = concurrency
        self._uplink = Uplink()
        self.store = store
        self._retry = Retry(each=min(small, large), uplink=self._uplink)
        # Two fetches at once would write and delete each other's temporary folders.
        self._fetching = threading.Lock()

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

    def metadata(self, outer_step: int | None = None) -> Metadata | None:
        """Return the metadata of an outer step, or of the root; None if there is none.

        Raises StateUnavailable for a damaged one.
        """
        key = keys.ROOT_METADATA
        if outer_step is not None:
            key = keys.epoch_key(outer_step, keys.METADATA)
        return self._parsed(key, MAX_METADATA_BYTES, Metadata.parse)

    def network(self) -> Shown | None:
        """Return whose network the global bucket is; None if it does not say.

        Raises StateUnavailable for a damaged ``network.json``.
        """
        return self._parsed(keys.NETWORK, LARGEST_SHOWN, Shown.parse)

    def version(self, number: int) -> str | None:
        """Return the text of that version of the network's file; None if it is not there.

        Bytes that are no text are replaced: no signature fits them.
        """
        key = keys.VERSION.format(number)
        return self._parsed(key, LARGEST_FILE, lambda data: data.decode(errors="replace"))

    def config(self, outer_step: int) -> tuple[dict[str, Any], ConfigExtras]:
        """Return ``config.json`` and its extras. Raises StateUnavailable: missing or damaged."""
        key = keys.epoch_key(outer_step, keys.CONFIG)
        found = self._parsed(key, MAX_CONFIG_BYTES, parse_config)
        if found is None:
            raise StateUnavailable(f"{self.name}/{key} is missing")
        return found

    def age(self, outer_step: int) -> timedelta | None:
        """Return the age of ``gradients.pt`` by the store's clock, as validators look at it."""
        info = self.head(keys.epoch_key(outer_step, keys.GRADIENTS))
        return None if info is None else timedelta(seconds=max(0.0, info.age_seconds or 0.0))

    def _parsed(self, key: str, limit: int, parse: Callable[[bytes], _T]) -> _T | None:
        try:
            data = self.get(key, limit=limit)
            return None if data is None else parse(data)
        except ValueError as error:  # MetadataError too
            raise StateUnavailable(f"{self.name}/{key}: {error}") from None

    # --- large objects --------------------------------------------------------------------------

    def read(self, key: str, *, limit: int) -> bytes:
        """Return a large object whole.

        Raises ObjectMissingError, IntegrityError for more than ``limit`` bytes, DeadlineError when
        it comes too slowly.
        """
        file = self.open(key, within=self._large)
        if file.size > limit:
            raise IntegrityError(
                f"{self.name}/{key} has {file.size} bytes, more than the {limit} allowed, so it is "
                "not read"
            )
        return file.read_at(0, file.size)

    def open(self, key: str, *, within: timedelta = _SAMPLE) -> RemoteFile:
        """Return the object to seek and read in, without fetching more than is read.

        Raises ObjectMissingError.
        """
        info = self.head(key)
        if info is None:
            raise ObjectMissingError(f"{self.name}/{key} is missing")
        within = min(self._large, within)
        retry = Retry(until=deadline_in(within), uplink=self._uplink)
        return RemoteFile(self.store, info, within, retry=retry)

    def download(
        self,
        key: str,
        path: Path,
        *,
        limit: int,
        deadline: float | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        """Fetch the object into ``path``, complete or not at all. Raises ObjectMissingError."""
        with _disk_errors():
            return download(
                self.store,
                key,
                path,
                limit=limit,
                deadline=deadline_in(self._large) if deadline is None else deadline,
                concurrency=self._concurrency,
                uplink=self._uplink,
                progress=progress,
            )

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

    # --- whole states ---------------------------------------------------------------------------

    def fetch(
        self,
        outer_step: int,
        destination: Path,
        names: Collection[str] = keys.GLOBAL_DATA_FILES,
        *,
        limit: int = MOST_BYTES,
        reserved: int = 0,
    ) -> Path:
        """Return the folder ``destination/epoch-N`` with the files of an outer step, checked.

        A folder of the same objects that is there already is returned as it is. Room for the sum of
        the files and for ``reserved`` more bytes is made before the first byte; the oldest states
        are deleted for it. ``limit``: most bytes of one file. Raises StateUnavailable
        (not there, unsound, changed meanwhile), NoRoomError, other StoreErrors when the store does
        not answer, StoppedError.
        """
        with self._fetching, _disk_errors():
            before = self.metadata(outer_step)
            if before is None or before.outer_step != outer_step:
                held = before.revision.tag if before else "nothing published"
                raise StateUnavailable(
                    f"bucket {self.name} holds no whole outer step {outer_step} but {held}"
                )
            objects = {name: self._find(keys.epoch_key(outer_step, name), limit) for name in names}
            final = destination / keys.epoch_folder(outer_step)
            aside = destination / f".{final.name}.{before.revision.tag}"
            for left in (*destination.glob(".epoch-*"), *destination.glob(".old.epoch-*")):
                if left != aside:
                    shutil.rmtree(left, ignore_errors=True)  # of a fetch that was given up
            if not _is_whole(final, before.revision, objects):
                self._fetch(before, objects, aside, reserved)
                old = final.with_name(f".old.{final.name}")
                if final.exists():
                    shutil.rmtree(old, ignore_errors=True)
                    # A rename does not replace a folder that holds files. Killed between the two,
                    # the next fetch finds ``aside`` whole and only renames it.
                    try:
                        final.rename(old)
                    except OSError as error:
                        # One of the container's image is not renamed (overlayfs), and can be
                        # deleted.
                        if error.errno != errno.EXDEV:
                            raise
                        shutil.rmtree(final)
                aside.rename(final)
                shutil.rmtree(old, ignore_errors=True)
                sync_folder(final.parent)
            return final

    def _fetch(
        self, before: Metadata, objects: Mapping[str, ObjectInfo], aside: Path, reserved: int
    ) -> None:
        """Fetch into ``aside`` what an earlier attempt did not, and check that all is of one state.

        Raises StateUnavailable.
        """
        began, deadline = time.monotonic(), deadline_in(self._large)
        what = f"global state of outer step {before.outer_step}"
        aside.mkdir(parents=True, exist_ok=True)
        came = read_json_object(aside / _ETAGS) or {}
        wanted = {
            name: info
            for name, info in objects.items()
            if came.get(name) != info.etag or not (aside / name).is_file()
        }
        # All files are asked for before the first byte: a state that ends at 98 % helps nobody.
        needed = sum(bytes_missing(info, aside / name) for name, info in wanted.items())
        total = sum(info.size for info in objects.values())
        # No state on the disk is in use while another one is fetched, but one that is there spares
        # a later start its download: none is deleted where even all would not make room.
        folder, needed_in_all = aside.parent, needed + reserved
        older = [path for _, path in states(folder)]
        held = sum(file.stat().st_size for path in older for file in path.iterdir())
        require_room(folder, needed_in_all, what=what, older=held)
        for state in (*older, None):
            try:
                require_room(folder, needed_in_all, what=what)
                break
            except NoRoomError:
                if state is None:
                    raise
                log.info("Deleting %s: %s needs the room", state, what)
                shutil.rmtree(state, ignore_errors=True)
        log.info("Downloading %s: %s, %s to come", what, size_text(total), size_text(needed))
        progress = Progress(
            f"Downloading {what}", total, held=total - needed, clock=self._uplink.clock
        )
        for name, info in wanted.items():
            path = aside / name
            try:
                found = self.download(
                    info.key, path, limit=MOST_BYTES, deadline=deadline, progress=progress
                )
                check_file(path)
            except ObjectMissingError:
                raise StateUnavailable(f"{self.name}/{info.key} is missing") from None
            except IntegrityError as error:
                shutil.rmtree(aside, ignore_errors=True)
                raise self._refused(info.key, error) from None
            # After its check: a file whose etag is noted is not looked into again.
            write_json(aside / _ETAGS, came := came | {name: found.etag})
        # After the last byte: tens of gigabytes take minutes, in which the owner may publish again.
        after = self.metadata(before.outer_step)
        replaced = any(
            came[name] != info.etag or self._find(info.key).etag != info.etag
            for name, info in objects.items()
        )
        if replaced or after is None or after.revision != before.revision:
            raise StateUnavailable(
                f"outer step {before.outer_step} of bucket {self.name} was published again while "
                "it was fetched: the next attempt fetches what is there then"
            )
        path, inner_step = aside / keys.CONFIG, before.inner_step
        if path.exists() and (found_step := read_config(path).inner_step) != inner_step:
            shutil.rmtree(aside, ignore_errors=True)
            raise StateUnavailable(
                f"epoch-{before.outer_step} of bucket {self.name} is a mixture: metadata says "
                f"{before.revision.tag}, config.json inner step {found_step}"
            )
        # Last of all: a folder without metadata is not whole.
        write_bytes(aside / keys.METADATA, before.to_json())  # its sync is of the whole folder
        log.info("Downloaded %s in %.0f s", what, time.monotonic() - began)

    def _find(self, key: str, limit: int = MOST_BYTES) -> ObjectInfo:
        """Return the object's size and etag. Raises StateUnavailable."""
        info = self.head(key)
        if info is None:
            raise StateUnavailable(f"{self.name}/{key} is missing")
        if info.size > limit:
            raise self._refused(key, f"it has {info.size} bytes, more than the {limit} allowed")
        return info

    def _refused(self, key: str, why: object) -> StateUnavailable:
        return StateUnavailable(f"{self.name}/{key} is refused: {why}; the last good state stays")


class RemoteFile(io.RawIOBase):
    """One version of an object as a file, read range by range.

    ``within``: from now on; no range is begun after it. Reading raises StoreError.
    """

    def __init__(
        self, store: ObjectStore, info: ObjectInfo, within: timedelta, *, retry: Retry
    ) -> None:
        super().__init__()
        self.name = info.key
        self.size = info.size
        self._store = store
        self._etag = info.etag
        self._retry = retry
        self._within = within
        self._deadline = deadline_in(within)
        self._at = 0

    def read_at(self, first: int, count: int) -> bytes:
        """Return ``count`` bytes from ``first`` on; IntegrityError if there are fewer."""
        where, content = f"{self._store.bucket}/{self.name}", io.BytesIO()
        while (came := content.tell()) < count:
            if time.monotonic() > self._deadline:
                seconds = self._within.total_seconds()
                raise DeadlineError(f"{where}: {came} of {count} bytes came in {seconds:g} s")
            length = min(RANGE, count - came)
            for _ in range(2):  # a single empty answer makes no object shorter
                piece = self._retry(
                    self._store.get_range, self.name, first + came, length, etag=self._etag
                )
                if piece:
                    break
            else:
                raise IntegrityError(f"{where} is shorter than it says: {came} of {count} came")
            content.write(piece)
        return content.getvalue()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self.size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read_at(self._at, max(0, min(len(view), self.size - self._at)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Reads and writes by a handle name no file.
        raise StoreError(f"{error.filename or 'the disk'}: {error.strerror or error}") from None


# --- states on the disk -------------------------------------------------------------------------


def states(folder: Path) -> list[tuple[int, Path]]:
    """Return the outer steps whose state lies in ``folder``, with their folders; oldest first."""
    found = ((path.name.partition("-")[2], path) for path in folder.glob("epoch-*"))
    return sorted((int(number), path) for number, path in found if number.isdigit())


def remove_states(folder: Path, *, before: int) -> None:
    """Delete the states of the outer steps before ``before``."""
    for outer_step, path in states(folder):
        if outer_step < before:
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class _Refusal:
    version: str  # of the program
    problem: str


def refuse(folder: Path, problem: str) -> None:
    """Note that this version of the program cannot load the state in ``folder``.

    The files stay, since they are the bucket's until other ones are published: deleted ones would
    be downloaded again by every start, tens of gigabytes each time.
    """
    write_state(folder / _REFUSED, _Refusal(__version__, problem), lost=_TRIED_AGAIN)


def refusal(folder: Path) -> str | None:
    """Return why this version refused the state, and how to try it again; None: it did not."""
    noted = read_state(folder / _REFUSED, _Refusal, lost=_TRIED_AGAIN)
    if noted is None or noted.version != __version__:
        return None
    return (
        f"{folder.name} of the global bucket was refused: {noted.problem}; it is neither "
        "downloaded nor loaded again before another one is published; to try it, delete "
        f"{folder / _REFUSED}"
    )


def _is_whole(folder: Path, revision: Revision, objects: Mapping[str, ObjectInfo]) -> bool:
    """Return whether ``folder`` holds the objects as they are in the bucket now.

    A state may be published again under the same revision, so the etags decide. A folder without
    them is an earlier version's: it is whole if no object is of another size or younger.
    """
    try:
        held = Metadata.parse((folder / keys.METADATA).read_bytes())
        written = (folder / keys.METADATA).stat().st_mtime
        sizes = {name: (folder / name).stat().st_size for name in objects}
    except (OSError, MetadataError):
        return False
    if held.revision != revision or any(sizes[name] != objects[name].size for name in objects):
        return False
    etags = read_json_object(folder / _ETAGS)
    if etags is None:
        return all(info.modified <= written for info in objects.values())
    return all(etags.get(name) == info.etag for name, info in objects.items())


# --- single files -------------------------------------------------------------------------------


def check_file(path: Path) -> None:
    """Check form and finite values, by the file's kind. Raises IntegrityError."""
    if path.name == keys.CONFIG:
        read_config(path)
    elif path.suffix == ".pt":
        found = pt_content(path)
        try:
            with zipfile.ZipFile(path) as archive:
                for key, member in found.members.items():
                    kind = _OF_STORAGE.get(found.storages[key].kind, "")
                    with archive.open(member) as handle:
                        if not _finite(handle, member.file_size, kind):
                            raise IntegrityError(f"NaN or Inf in {path.name}")
        except (IntegrityError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - zipfile promises none; its texts quote the file
            raise IntegrityError(f"{path.name} is not whole: {str(error)[:200]}") from None
    elif path.suffix == ".safetensors":
        with path.open("rb") as file:

            def read(first: int, count: int) -> bytes:
                file.seek(first)
                return file.read(count)

            try:
                entries = safetensors_table(read, path.stat().st_size)
            except ValueError as error:
                what = f"{path.name} is not a whole safetensors file: {error}"
                raise IntegrityError(what) from None
            for name, entry in entries.items():
                file.seek(entry.start)
                if not _finite(file, entry.size, entry.dtype):
                    raise IntegrityError(f"NaN or Inf in {name!r:.80} of {path.name}")


def _finite(handle: IO[bytes], size: int, kind: str) -> bool:
    """Return whether the next ``size`` bytes hold neither NaN nor Inf; True if no floats."""
    if kind not in _FLOATS:
        return True
    integers, mask = _FLOATS[kind]
    while size > 0:
        data = handle.read(min(size, _CHUNK))
        if not data:
            raise IntegrityError("a file became shorter while it was read")
        size -= len(data)
        bits = np.frombuffer(data, integers)
        if bool(((bits & bits.dtype.type(mask)) == mask).any()):
            return False
    return True


def pt_content(path: Path | IO[bytes]) -> PtContent:
    """Return a ``.pt`` file's content, inert values in place of tensors.

    Of an open file only the pickle and the table of contents are read. Raises IntegrityError for a
    file that ``torch.save`` did not write.
    """
    try:
        return read_pt(path)
    except PtFileError as error:
        name = Path(path.name).name
        raise IntegrityError(f"{name} is not a whole .pt file: {error}") from None


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
    # A read first: only a key that the store knows is refused for what it may not do.
    retry(reader.get, keys.ROOT_METADATA, limit=MAX_METADATA_BYTES)
    try:
        retry(reader.put, PROBE_KEY, b"")
    except ClockSkewError:
        raise  # an AccessDeniedError too, which says nothing about the key
    except AccessDeniedError:
        return
    with contextlib.suppress(StoreError):
        reader.delete(PROBE_KEY)
    raise WritableReadKeyError(
        f"the key in R2_READ_ACCESS_KEY_ID can write to bucket {reader.bucket}; it is published on "
        "the chain, so anyone could replace or delete the uploads: nothing was committed. Make a "
        'key that may only read ("Object Read only" in the R2 dashboard) and put it into .env'
    )
