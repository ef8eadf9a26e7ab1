"""Reading a bucket: the global state, or one's own after a lost disk.

What is fetched is a stranger's until it is checked: sizes are bounded before anything is read, the
files are written aside, checked (size, form, finite values, one revision) and renamed together. The
last good state stays until then.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from distributed_training.common.files import sync_folder, write_bytes
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import (
    MAX_CONFIG_BYTES,
    MAX_METADATA_BYTES,
    Metadata,
    MetadataError,
    parse_config,
)
from distributed_training.protocol.types import Revision

from .contents import PtFile, safetensors_not_finite
from .download import download
from .errors import IntegrityError, ObjectMissingError, StoreError
from .retry import deadline_in, patient
from .s3 import S3ObjectStore
from .snapshot_folder import read_config
from .uplink import Uplink

_T = TypeVar("_T")
MOST_BYTES = 256 * 1024**3  # of one file


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

        A folder of the same revision that is there already is returned as it is. Raises
        StateUnavailable (not there, unsound, changed meanwhile), other StoreErrors when the store
        does not answer, StoppedError.
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
        final = destination / keys.epoch_folder(outer_step)
        if _is_whole(final, before.revision, names):
            return final
        aside = destination / f".{final.name}.{before.revision.tag}"
        aside.mkdir(parents=True, exist_ok=True)
        for stale in destination.glob(f".{final.name}.*"):
            if stale != aside:
                shutil.rmtree(stale, ignore_errors=True)
        for name in names:
            key = keys.epoch_key(outer_step, name)
            try:
                download(
                    self._once,
                    key,
                    aside / name,
                    limit=MOST_BYTES,
                    deadline=deadline,
                    concurrency=self._concurrency,
                    uplink=self._uplink,
                )
                check_file(aside / name)
            except ObjectMissingError:
                raise StateUnavailable(f"{self._store.bucket}/{key} is missing") from None
            except IntegrityError as error:
                shutil.rmtree(aside, ignore_errors=True)
                raise StateUnavailable(
                    f"{self._store.bucket}/{key} is refused: {error}; the last good state stays"
                ) from None
        after = self.epoch_metadata(outer_step)
        if after is None or after.revision != before.revision:
            raise StateUnavailable(
                f"outer step {outer_step} of bucket {self._store.bucket} was published anew while "
                "it was fetched: try again"
            )
        if keys.CONFIG in names:
            extras = read_config(aside / keys.CONFIG)
            if extras.inner_step != before.inner_step:
                shutil.rmtree(aside, ignore_errors=True)
                raise StateUnavailable(
                    f"epoch-{outer_step} of bucket {self._store.bucket} is a mixture: metadata "
                    f"says {before.revision.tag}, config.json inner step {extras.inner_step}"
                )
        write_bytes(aside / keys.METADATA, before.to_json())
        sync_folder(aside)
        if final.exists():
            old = destination / f".old.{final.name}"
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            aside.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            aside.rename(final)
        sync_folder(destination)
        return final


def _is_whole(folder: Path, revision: Revision, names: Collection[str]) -> bool:
    try:
        held = Metadata.parse((folder / keys.METADATA).read_bytes())
    except (OSError, MetadataError):
        return False
    return held.revision == revision and all((folder / name).is_file() for name in names)


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
