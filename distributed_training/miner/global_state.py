"""The global bucket as a miner reads it: which epoch, and that epoch's files, checked."""

from __future__ import annotations

import logging
import os
import shutil
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from distributed_training.miner.global_watch import GlobalUnavailableError
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import (
    MAX_CONFIG_BYTES,
    MAX_METADATA_BYTES,
    Metadata,
    MetadataError,
    parse_config,
)
from distributed_training.store.base import ObjectStore
from distributed_training.store.contents import safetensors_entries, safetensors_not_finite
from distributed_training.store.errors import IntegrityError, StoreError
from distributed_training.store.files import disk_allows
from distributed_training.store.retry import deadline_in, retrying

log = logging.getLogger(__name__)

_PIECE = 32 * 2**20


class GlobalBucket:
    """Reads the global bucket with the read credentials its owner committed to the chain.

    ``folder`` keeps the states fetched, one ``epoch-N`` each, so that a restart needs no download.
    ``small``: one metadata-sized read with its retries. ``large``: one file with its retries. All
    methods raise :class:`GlobalUnavailableError` with a line that says why.
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        run: int,
        folder: Path,
        small: timedelta = timedelta(seconds=20),
        large: timedelta = timedelta(minutes=40),
    ) -> None:
        self._store = store
        self._run = run
        self._folder = folder
        self._small = small
        self._large = large

    def outer_step(self) -> int:
        """Of the root metadata, which its owner writes last."""
        try:
            data = self._get(keys.ROOT_METADATA, limit=MAX_METADATA_BYTES)
            metadata = Metadata.parse(data)
        except MetadataError as error:
            raise GlobalUnavailableError(f"bucket {self._store.bucket}: {error}") from None
        if metadata.run != self._run:
            raise GlobalUnavailableError(
                f"bucket {self._store.bucket} is of run {metadata.run}, this miner of run "
                f"{self._run}: upgrade the miner"
            )
        return metadata.outer_step

    def model_config(self, outer_step: int) -> dict[str, Any]:
        """Content of that epoch's ``config.json``, without what is added to it."""
        try:
            data = self._get(keys.epoch_key(outer_step, keys.CONFIG), limit=MAX_CONFIG_BYTES)
            content, _ = parse_config(data)
        except MetadataError as error:
            raise GlobalUnavailableError(f"epoch-{outer_step}: {error}") from None
        return {k: v for k, v in content.items() if k not in ("block_list", "inner_step")}

    def fetch(self, outer_step: int) -> Path:
        """The folder with ``model.safetensors`` and ``outer_optimizer.pt`` of that epoch.

        Files appear under their names once complete and checked; a poisoned one is refused and
        what was there before stays.
        """
        folder = self._folder / keys.epoch_folder(outer_step)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._download(outer_step, keys.MODEL, folder)
            self._download(outer_step, keys.OUTER_OPTIMIZER, folder)
        except (StoreError, OSError) as error:
            raise GlobalUnavailableError(f"global state epoch-{outer_step}: {error}") from None
        self._forget_before(outer_step)
        return folder

    def _get(self, key: str, *, limit: int) -> bytes:
        try:
            data = retrying(
                f"read {key}",
                lambda: self._store.get(key, limit=limit),
                deadline=deadline_in(self._small),
            )
        except StoreError as error:
            raise GlobalUnavailableError(str(error)) from None
        if data is None:
            raise GlobalUnavailableError(f"bucket {self._store.bucket} holds no {key}")
        return data

    def _download(self, outer_step: int, name: str, folder: Path) -> None:
        key = keys.epoch_key(outer_step, name)
        target = folder / name
        if target.exists():
            return  # objects of an epoch are written once, and this one was checked
        deadline = deadline_in(self._large)
        info = retrying(f"head {key}", lambda: self._store.head(key), deadline=deadline)
        if info is None:
            raise IntegrityError(f"bucket {self._store.bucket} holds no {key}")
        problem = disk_allows(folder, info.size)
        if problem is not None:
            raise OSError(problem)
        temporary = folder / f".{name}.part"
        with temporary.open("ab") as file:
            # A download cut short is gone on with, unless the object is another one by now.
            if file.tell() > info.size or not self._same_object(temporary, info.etag):
                file.truncate(0)
            while (start := file.tell()) < info.size:
                fetch = partial(self._store.get_range, key, start, _PIECE, etag=info.etag)
                piece = retrying(f"read {key}", fetch, deadline=deadline)
                if not piece:
                    raise IntegrityError(f"{key} ended after {start} of {info.size} bytes")
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if name == keys.MODEL:
            safetensors_entries(temporary)
            bad = safetensors_not_finite(temporary)
            if bad is not None:
                temporary.unlink()
                raise IntegrityError(f"{key} is refused: NaN or Inf in {bad}")
        temporary.replace(target)

    def _same_object(self, temporary: Path, etag: str) -> bool:
        note = temporary.with_suffix(".etag")
        same = note.exists() and note.read_text() == etag
        note.write_text(etag)
        return same

    def _forget_before(self, outer_step: int) -> None:
        for old in self._folder.glob("epoch-*"):
            number = old.name.partition("-")[2]
            if number.isdigit() and int(number) < outer_step - 1:
                shutil.rmtree(old, ignore_errors=True)
