"""A folder on this machine read like a bucket: a copy of one, or a snapshot not yet published."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from distributed_training.protocol import keys, names
from distributed_training.protocol.metadata import (
    MAX_CONFIG_BYTES,
    MAX_METADATA_BYTES,
    Metadata,
    parse_config,
)
from distributed_training.store.contents import PtFile
from distributed_training.store.errors import IntegrityError, ObjectMissingError, StoreError
from distributed_training.store.s3 import ObjectInfo


class FolderReader:
    """A :class:`~distributed_training.node.peers.Reader`. Its files have no age: a copy says
    nothing of when the original was published, and what is not published cannot be too old.

    ``folder`` is laid out like a bucket (``epoch-N/...``), or holds the files of one outer step, as
    a snapshot does and as a miner keeps the global state. Its root metadata is ``metadata.json``,
    else the newest ``epoch-N/metadata.json``, else what the files say of themselves.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._flat = not any(folder.glob("epoch-*"))

    @property
    def name(self) -> str:
        return str(self._folder)

    def root(self) -> Metadata | None:
        """None for a folder that holds none. Raises StoreError, MetadataError."""
        found = [self._folder / keys.ROOT_METADATA]
        found += sorted(self._folder.glob(f"epoch-*/{keys.METADATA}"), key=_epoch, reverse=True)
        for path in found:
            if path.exists():
                return Metadata.parse(_read(path, MAX_METADATA_BYTES))
        gradients, config = (self._folder / name for name in (keys.GRADIENTS, keys.CONFIG))
        if not gradients.exists() or not config.exists():
            return None
        content = PtFile(gradients).content
        said = content.get("metadata") if isinstance(content, dict) else None
        outer_step = said.get("outer_step") if isinstance(said, dict) else None
        if type(outer_step) is not int or outer_step < 0:
            raise IntegrityError(f"{gradients} does not say of which outer step it is")
        inner_step = parse_config(_read(config, MAX_CONFIG_BYTES))[1].inner_step
        return Metadata(names.RUN, outer_step, inner_step, "")

    def head(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        with _store_errors(path):
            if not path.exists():
                return None
            status = path.stat()
        return ObjectInfo(key, status.st_size, "", status.st_mtime, 0.0)

    def get(self, key: str, *, limit: int) -> bytes | None:
        if key == keys.ROOT_METADATA:
            root = self.root()
            return root.to_json() if root is not None else None
        path = self._path(key)
        return _read(path, limit) if path.exists() else None

    read = get

    def download(self, key: str, path: Path, *, limit: int) -> None:
        info, source = self.head(key), self._path(key)
        if info is None:
            raise ObjectMissingError(f"{source} does not exist")
        _check_size(source, info.size, limit)
        with _store_errors(source):
            shutil.copyfile(source, path)

    def open(self, key: str) -> IO[bytes]:
        with _store_errors(self._path(key)):
            return self._path(key).open("rb")

    def _path(self, key: str) -> Path:
        parsed = keys.parse_epoch_key(key)
        if self._flat and parsed is not None:
            root = self.root()
            if root is not None and root.outer_step == parsed[0]:
                return self._folder / parsed[1]
        return self._folder / key


def _epoch(path: Path) -> int:
    number = path.parent.name.partition("-")[2]
    return int(number) if number.isdigit() else -1


def _read(path: Path, limit: int) -> bytes:
    with _store_errors(path):
        _check_size(path, path.stat().st_size, limit)
        return path.read_bytes()


def _check_size(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise IntegrityError(f"{path} has {size} bytes, more than the {limit} allowed")


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ObjectMissingError(f"{path} does not exist") from None
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None
