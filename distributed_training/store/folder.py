"""Use a folder as a bucket of files, for example on a disk that several machines mount.

``--r2.endpoint_url folder:///PLACE`` chooses it; the folders in that place are the buckets. File
permissions decide who may write, so no keys are read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import IO
from urllib.parse import unquote

from distributed_training.common.files import atomic_file, is_full, open_at_once
from distributed_training.config.settings import StoreSettings
from distributed_training.protocol.metadata import BucketCredentials

from .base import MOST_LISTED, STORES, ObjectInfo, Section
from .errors import (
    AccessDeniedError,
    BucketMissingError,
    IntegrityError,
    ObjectMissingError,
    PreconditionError,
    RefusedError,
    StoreError,
    TransientError,
)

_LEFT_AFTER = 3600.0  # seconds without a write after which a temporary file counts as abandoned


class FolderStore:
    """The objects of one bucket, as files in ``folder``. An etag changes with each write."""

    def __init__(self, folder: Path, *, writes: bool = False) -> None:
        self._folder = folder
        self._writes = writes

    @property
    def bucket(self) -> str:
        return str(self._folder)

    def head(self, key: str) -> ObjectInfo | None:
        with (
            contextlib.suppress(ObjectMissingError, BucketMissingError),
            self._opened(key) as found,
        ):
            return found[1]
        return None

    def get(self, key: str, *, limit: int) -> bytes | None:
        with contextlib.suppress(ObjectMissingError), self._opened(key) as (file, info):
            if info.size > limit:
                raise IntegrityError(
                    f"{self.bucket}/{key} has {info.size} bytes, more than the {limit} allowed, so "
                    "it is not read"
                )
            return file.read(info.size)
        return None

    def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
        with self._opened(key) as (file, info):
            if etag and info.etag != etag:
                raise PreconditionError(f"{self.bucket}/{key}: the object changed meanwhile")
            file.seek(start)
            return file.read(length)

    def put(self, key: str, data: bytes | Section, *, new: bool = False) -> str:
        if not self._writes:
            raise AccessDeniedError(f"write {self.bucket}/{key}: it was opened for reading only")
        path = self._path(key)
        with self._errors(key):
            self._folder.stat()  # or the folder would be created where its disk is not mounted
        with self._errors(key), atomic_file(path, new=new) as file:
            if isinstance(data, Section):
                data.seek(0)
                shutil.copyfileobj(data, file, Section.BLOCK)
            else:
                file.write(data)
        with self._errors(key):
            return info_of(key, path.stat()).etag

    def put_new(self, key: str, data: bytes | Section) -> str:
        """Write a new object; return its etag. PreconditionError if it already exists."""
        return self.put(key, data, new=True)

    def delete(self, key: str) -> None:
        with contextlib.suppress(ObjectMissingError), self._errors(key):
            self._path(key).unlink()

    def list_objects(self, prefix: str = "", *, most: int = MOST_LISTED) -> list[ObjectInfo]:
        with self._errors(prefix):
            self._folder.stat()
            found: list[ObjectInfo] = []
            for path in self._folder.rglob("*"):
                key = path.relative_to(self._folder).as_posix()
                if not key.startswith(prefix) or path.name.endswith(".tmp"):
                    continue
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    status = path.lstat()
                    if S_ISREG(status.st_mode):
                        found.append(info_of(key, status))
                if len(found) > most:
                    raise StoreError(f"{self.bucket}/{prefix} lists more than {most} objects")
        return sorted(found, key=lambda info: info.key)

    def multipart(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _path(self, key: str) -> Path:
        path = self._folder / key
        # The bucket may be another member's, and a link could lead to any file on this machine.
        real = os.path.realpath(path) if "\0" not in key else ""
        if real != f"{os.path.realpath(self._folder)}/{key}":
            raise StoreError(f"{key!r:.200} is not a key of {self.bucket}, or it leads to a link")
        return path

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[IO[bytes], ObjectInfo]]:
        """Open an object so that the bytes match its info, even if it is replaced meanwhile."""
        with self._errors(key), open_at_once(self._path(key)) as file:
            status = os.fstat(file.fileno())
            if not S_ISREG(status.st_mode):
                raise FileNotFoundError
            yield file, info_of(key, status)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Raise errors of the disk as store errors."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            if not self._folder.is_dir():
                raise BucketMissingError(
                    f"bucket {self.bucket} does not exist, so nothing can be read or published "
                    "there: make this folder, or mount its disk"
                ) from None
            raise ObjectMissingError(f"{self.bucket}/{key}: no such object") from None
        except FileExistsError:
            raise PreconditionError(f"{self.bucket}/{key}: the object already exists") from None
        except PermissionError as error:
            raise AccessDeniedError(f"{self.bucket}/{key}: {error.strerror}") from None
        except OSError as error:
            if is_full(error):
                raise RefusedError(
                    f"{self.bucket}/{key}: {error.strerror}: free some space on that disk"
                ) from None
            # This error comes from a network disk, or from a section whose uplink was stopped.
            raise TransientError(f"{self.bucket}/{key}: {error.strerror or error}") from None


def info_of(key: str, status: os.stat_result) -> ObjectInfo:
    # The inode is not enough, since a file system may reuse it at once.
    etag = f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
    modified = status.st_mtime
    return ObjectInfo(key, status.st_size, etag, modified, time.time() - modified)


def _open(
    settings: StoreSettings,
    bucket: str,
    *,
    write: bool,
    credentials: BucketCredentials | None,
) -> FolderStore:
    place = unquote((settings.endpoint_url or "").partition("://")[2])
    if not place.startswith("/"):
        raise ValueError(f"{settings.endpoint_url} has no absolute path: use folder:///PLACE")
    parts = bucket.split("/")  # BUCKET or BUCKET/PREFIX
    if len(parts) > 2 or any(not part or part.startswith(".") for part in parts):
        raise ValueError(f"{bucket!r:.80} is not a bucket name")
    folder, writes = Path(place) / bucket, write and credentials is None
    if writes and len(parts) == 2:
        with contextlib.suppress(OSError):  # the first use reports a missing bucket
            folder.mkdir()
    # Remove files that killed uploaders left behind, since nothing else would ever remove them.
    for left in folder.rglob(".*.tmp") if writes else ():
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > _LEFT_AFTER:
                left.unlink()
    return FolderStore(folder, writes=writes)


STORES.register("folder", _open)
