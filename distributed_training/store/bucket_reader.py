"""Read a bucket: the global state, one's own files after a lost disk, and what a read key may do.

Fetched files are untrusted until they are checked: sizes are bounded before anything is read; files
are written under temporary names, checked (size, form, finite values, one revision) and renamed
together. The last good state stays until then.

A read key is committed to the chain for everybody, for good, so it must read and never write. Only
the store knows what a key may do. So a start tries it before the commitment: one read, then one
write that has to be refused.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from distributed_training.common.files import (
    read_json_object,
    sync_folder,
    write_bytes,
    write_json,
)
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import (
    MAX_CONFIG_BYTES,
    MAX_METADATA_BYTES,
    Metadata,
    MetadataError,
    parse_config,
)
from distributed_training.protocol.types import Revision
from distributed_training.store.contents import PtFile, safetensors_not_finite
from distributed_training.store.snapshot_folder import read_config

from .progress import Progress
from .s3 import (
    AccessDeniedError,
    ClockSkewError,
    IntegrityError,
    NoRoomError,
    ObjectInfo,
    ObjectMissingError,
    S3ObjectStore,
    StoreError,
    Uplink,
)
from .transfer import bytes_missing, check_room, deadline_in, download, patient
from .upload_rules import size_text

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


log = logging.getLogger(__name__)

_T = TypeVar("_T")
MOST_BYTES = 256 * 1024**3  # of one file
_ETAGS = ".etags.json"  # in a state's folder: of the objects that its files are


class StateUnavailable(StoreError):
    """The state asked for is not there, not whole or not sound; the text says which."""


class RemoteState:
    """One bucket, read with read credentials. ``deadline`` covers one call with all its retries.

    ``concurrency`` ranges of 16 MiB are fetched at once, each held in memory.
    """

    def __init__(
        self,
        *,
        store: S3ObjectStore,
        deadline: timedelta = timedelta(minutes=40),
        concurrency: int = 6,
    ) -> None:
        self._deadline = deadline
        self._concurrency = concurrency
        self._uplink = Uplink()
        self._once = store
        self._store = patient(store, each=min(deadline, timedelta(minutes=1)), uplink=self._uplink)
        self._fetching = threading.Lock()

    def stop(self) -> None:
        """End a fetch under way (it raises StoppedError); what was fetched stays for the next."""
        self._uplink.stop()

    def metadata(self) -> Metadata | None:
        """The root metadata, None if there is none. Raises StoreError, StateUnavailable."""
        return self._read(keys.ROOT_METADATA, MAX_METADATA_BYTES, Metadata.parse)

    def epoch_metadata(self, outer_step: int) -> Metadata | None:
        key = keys.epoch_key(outer_step, keys.METADATA)
        return self._read(key, MAX_METADATA_BYTES, Metadata.parse)

    def age(self, outer_step: int) -> timedelta | None:
        """Age of ``gradients.pt`` by the store's clock, as validators look at it."""
        info = self._store.head(keys.epoch_key(outer_step, keys.GRADIENTS))
        return None if info is None else timedelta(seconds=info.age_seconds or 0.0)

    def block_list(self, outer_step: int) -> tuple[int, ...]:
        """The chain blocks that an upload says it was trained on, as validators read it."""
        found = self._read(keys.epoch_key(outer_step, keys.CONFIG), MAX_CONFIG_BYTES, parse_config)
        return found[1].block_list if found else ()

    def _read(self, key: str, limit: int, parse: Callable[[bytes], _T]) -> _T | None:
        data = self._store.get(key, limit=limit)
        try:
            return None if data is None else parse(data)
        except MetadataError as error:
            raise StateUnavailable(f"{self._store.bucket}/{key}: {error}") from None

    def reader(self, key: str) -> tuple[int, Callable[[int, int], bytes]]:
        """The object's size, and (first byte, bytes) -> content of this version of it. The function
        and this raise StoreError; StateUnavailable when it is not there or was replaced."""
        deadline = deadline_in(min(self._deadline, timedelta(minutes=5)))
        store = patient(self._once, until=deadline, uplink=self._uplink)
        info = store.head(key)
        if info is None:
            raise StateUnavailable(f"{self._store.bucket}/{key} is missing")

        def read(first: int, count: int) -> bytes:
            data = store.get_range(key, first, count, etag=info.etag)
            if len(data) != count:
                raise StateUnavailable(
                    f"{self._store.bucket}/{key} is shorter than its header says"
                )
            return data

        return info.size, read

    # --- whole states ---------------------------------------------------------------------------

    def fetch(
        self,
        outer_step: int,
        destination: Path,
        names: Collection[str] = keys.GLOBAL_DATA_FILES,
    ) -> Path:
        """The files of an outer step, checked, as ``destination/epoch-N``; that folder.

        A folder of the same objects that is there already is returned as it is. Room is asked for
        the sum of the files before the first byte; see :func:`_make_room`. Raises StateUnavailable
        (not there, unsound, changed meanwhile), NoRoomError, other StoreErrors when the store does
        not answer, StoppedError.
        """
        with self._fetching:
            return self._fetch(outer_step, destination, names)

    def _fetch(self, outer_step: int, destination: Path, names: Collection[str]) -> Path:
        deadline = deadline_in(self._deadline)
        before = self.epoch_metadata(outer_step)
        if before is None:
            raise StateUnavailable(
                f"bucket {self._store.bucket} holds no whole outer step {outer_step}"
            )
        if before.outer_step != outer_step:
            raise StateUnavailable(
                f"epoch-{outer_step} of bucket {self._store.bucket} holds {before.revision.tag}"
            )
        objects = {name: self._look_up(keys.epoch_key(outer_step, name)) for name in names}
        final = destination / keys.epoch_folder(outer_step)
        aside = destination / f".{final.name}.{before.revision.tag}"
        for left in (*destination.glob(".epoch-*"), *destination.glob(".old.epoch-*")):
            if left != aside:
                shutil.rmtree(left, ignore_errors=True)  # of a fetch that was given up
        if _is_whole(final, before.revision, objects):
            return final
        aside.mkdir(parents=True, exist_ok=True)
        came = read_json_object(aside / _ETAGS) or {}
        wanted = {
            name: info
            for name, info in objects.items()
            if came.get(name) != info.etag or not (aside / name).is_file()
        }
        # All files are asked for before the first byte: a state that ends at 98 % helps nobody.
        needed = sum(bytes_missing(info, aside / name) for name, info in wanted.items())
        what = f"global state of outer step {outer_step}"
        _make_room(destination, needed, what=what)
        total, began = sum(info.size for info in objects.values()), time.monotonic()
        log.info("Downloading %s: %s, %s to come", what, size_text(total), size_text(needed))
        progress = Progress(
            f"Downloading {what}", total, held=total - needed, clock=self._uplink.clock
        )
        for name, info in wanted.items():
            try:
                found = download(
                    self._once,
                    info.key,
                    aside / name,
                    limit=MOST_BYTES,
                    deadline=deadline,
                    concurrency=self._concurrency,
                    uplink=self._uplink,
                    progress=progress,
                )
                check_file(aside / name)
            except ObjectMissingError:
                raise StateUnavailable(f"{self._store.bucket}/{info.key} is missing") from None
            except IntegrityError as error:
                shutil.rmtree(aside, ignore_errors=True)
                raise self._refused(info.key, error) from None
            write_json(aside / _ETAGS, came := came | {name: found.etag})
        after = self.epoch_metadata(outer_step)
        # A publication that was under way at the first look has changed some object by now.
        replaced = any(
            came[name] != info.etag or self._look_up(info.key).etag != info.etag
            for name, info in objects.items()
        )
        if replaced or after is None or after.revision != before.revision:
            raise StateUnavailable(
                f"outer step {outer_step} of bucket {self._store.bucket} was published again while "
                "it was fetched: the next attempt fetches what is there then"
            )
        if keys.CONFIG in names:
            extras = read_config(aside / keys.CONFIG)
            if extras.inner_step != before.inner_step:
                shutil.rmtree(aside, ignore_errors=True)
                raise StateUnavailable(
                    f"epoch-{outer_step} of bucket {self._store.bucket} is a mixture: metadata "
                    f"says {before.revision.tag}, config.json inner step {extras.inner_step}"
                )
        write_bytes(aside / keys.METADATA, before.to_json())  # its sync is of the whole folder
        if final.exists():
            old = destination / f".old.{final.name}"
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            aside.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            aside.rename(final)
        sync_folder(destination)
        log.info("Downloaded %s in %.0f s", what, time.monotonic() - began)
        return final

    def _look_up(self, key: str) -> ObjectInfo:
        """Return the object's size and etag. Raises StateUnavailable."""
        info = self._store.head(key)
        if info is None:
            raise StateUnavailable(f"{self._store.bucket}/{key} is missing")
        if info.size > MOST_BYTES:
            raise self._refused(
                key, f"it has {info.size} bytes, more than the {MOST_BYTES} allowed"
            )
        return info

    def _refused(self, key: str, why: object) -> StateUnavailable:
        return StateUnavailable(
            f"{self._store.bucket}/{key} is refused: {why}; the last good state stays"
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


def _make_room(destination: Path, needed: int, *, what: str) -> None:
    """Delete the oldest states in ``destination`` until ``needed`` bytes fit. Raises NoRoomError.

    Nothing is deleted where even that would not make room: a state that is there spares a later
    start its download. No state on the disk is in use while another one is fetched.
    """
    states = sorted(
        (path for path in destination.glob("epoch-*") if path.name[6:].isdigit()),
        key=lambda path: int(path.name[6:]),
    )
    held = sum(file.stat().st_size for path in states for file in path.iterdir())
    check_room(destination, needed, what=what, older=held)
    for state in states:
        try:
            return check_room(destination, needed, what=what)
        except NoRoomError:
            log.info("Deleting %s: %s needs the room", state, what)
            shutil.rmtree(state, ignore_errors=True)
    check_room(destination, needed, what=what)


def check_file(path: Path) -> None:
    """Form and finite values, by the file's kind. Raises IntegrityError."""
    bad = None
    if path.suffix == ".safetensors":
        bad = safetensors_not_finite(path)
    elif path.suffix == ".pt":
        bad = PtFile(path).not_finite()
    elif path.name == keys.CONFIG:
        read_config(path)
    if bad is not None:
        raise IntegrityError(f"NaN or Inf in {bad}")
