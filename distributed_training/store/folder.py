"""A folder as a bucket: each object a file below it, for a disk that several machines mount.

``--r2.endpoint_url folder:///PLACE`` chooses it; buckets are the folders in that place. Who may
write is for the disk to say, so no keys are read.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from distributed_training.common.files import atomic_file
from distributed_training.config.settings import StoreSettings
from distributed_training.protocol.metadata import BucketCredentials

from .base import MOST_LISTED, STORES, ObjectInfo
from .errors import (
    AccessDeniedError,
    BucketMissingError,
    IntegrityError,
    ObjectMissingError,
    PreconditionError,
    StoreError,
    TransientError,
)
from .uplink import Section


class FolderStore:
    """The objects of one bucket, as files of ``folder``. An etag changes with each write."""

    def __init__(self, folder: Path, *, writes: bool = False) -> None:
        self._folder = folder
        self._writes = writes

    @property
    def bucket(self) -> str:
        return str(self._folder)

    def head(self, key: str) -> ObjectInfo | None:
        with self._errors(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path = self._path(key)
            return _info(key, path) if path.is_file() else None
        return None

    def get(self, key: str, *, limit: int) -> bytes | None:
        info = self.head(key)
        if info is None:
            return None
        if info.size > limit:
            raise IntegrityError(
                f"{self.bucket}/{key} has {info.size} bytes, more than the {limit} allowed, so it "
                "is not read"
            )
        return self.get_range(key, 0, info.size)

    def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
        with self._errors(key), self._path(key).open("rb") as file:
            info = self.head(key)
            if etag and (info is None or info.etag != etag):
                raise PreconditionError(f"{self.bucket}/{key}: the object changed meanwhile")
            file.seek(start)
            return file.read(length)

    def put(self, key: str, data: bytes | Section) -> str:
        if not self._writes:
            raise AccessDeniedError(f"write {self.bucket}/{key}: it was opened to read alone")
        path = self._path(key)
        with self._errors(key):
            self._folder.stat()  # or it would be made, beside a disk that is not mounted
        with self._errors(key), atomic_file(path) as file:
            if isinstance(data, Section):
                data.seek(0)
                shutil.copyfileobj(data, file, Section.BLOCK)
            else:
                file.write(data)
        with self._errors(key):
            return _info(key, path).etag

    def delete(self, key: str) -> None:
        with contextlib.suppress(ObjectMissingError), self._errors(key):
            self._path(key).unlink()

    def list_objects(self, prefix: str = "", *, most: int = MOST_LISTED) -> list[ObjectInfo]:
        with self._errors(prefix):
            self._folder.stat()
            found = []
            for path in self._folder.rglob("*"):
                key = path.relative_to(self._folder).as_posix()
                if key.startswith(prefix) and not path.name.endswith(".tmp") and path.is_file():
                    found.append(_info(key, path))
        if len(found) > most:
            raise StoreError(f"{self.bucket}/{prefix} lists more than {most} objects")
        return sorted(found, key=lambda info: info.key)

    def multipart(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _path(self, key: str) -> Path:
        if ".." in key.split("/") or key.startswith("/"):
            raise StoreError(f"{key!r:.200} is no key of {self.bucket}")
        return self._folder / key

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Raise the disk's errors as a store's."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            if not self._folder.is_dir():
                raise BucketMissingError(
                    f"bucket {self.bucket} does not exist, so nothing can be read or published "
                    "there: make this folder, or mount its disk"
                ) from None
            raise ObjectMissingError(f"{self.bucket}/{key}: no such object") from None
        except PermissionError as error:
            raise AccessDeniedError(f"{self.bucket}/{key}: {error.strerror}") from None
        except OSError as error:  # of a network disk, or the uplink's pause
            raise TransientError(f"{self.bucket}/{key}: {error.strerror or error}") from None


def _info(key: str, path: Path) -> ObjectInfo:
    status = path.stat()
    etag = f"{status.st_ino}-{status.st_mtime_ns}"  # of the object, as long as it is the same
    age = max(0.0, time.time() - status.st_mtime)
    return ObjectInfo(key, status.st_size, etag, status.st_mtime, age)


def _open(
    settings: StoreSettings,
    bucket: str,
    *,
    write: bool,
    credentials: BucketCredentials | None,
) -> FolderStore:
    place = Path(unquote(urlsplit(settings.endpoint_url or "").path))
    if not bucket or "/" in bucket or bucket.startswith("."):
        raise ValueError(f"{bucket!r:.80} is not a bucket name")
    return FolderStore(place / bucket, writes=write and credentials is None)


STORES.register("folder", _open)
