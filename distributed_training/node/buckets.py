"""Buckets by their owners: this node's own, and those of others.

A miner's bucket is named by its uid, the validator's is the global one. Our own is opened with the
write keys and checked before anything depends on it. Its read credentials are committed to the
chain for everybody to see; the write keys never leave this machine. Other buckets are read with the
credentials that their owners committed. Such a bucket may be missing, slow, or hold anything at
all: every read names the most bytes it takes and ends within a time.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Protocol

from pydantic import SecretStr

from distributed_training.chain.base import Chain, Neuron
from distributed_training.config import ConfigError
from distributed_training.config.settings import StoreSettings
from distributed_training.node.failures import NetworkFailure
from distributed_training.protocol import keys, names
from distributed_training.protocol.metadata import (
    BucketCredentials,
    CommitmentError,
    build_commitment,
    parse_commitment,
)
from distributed_training.store.bucket_reader import check_read_key
from distributed_training.store.s3 import (
    BucketMissingError,
    ClockSkewError,
    DeadlineError,
    IntegrityError,
    ObjectInfo,
    ObjectMissingError,
    S3ObjectStore,
    StoreError,
)
from distributed_training.store.transfer import deadline_in, download, patient

BUCKET_CHECK = timedelta(seconds=30)  # the first answer of the store, with its retries


def open_own(settings: StoreSettings, bucket: str, *, write: bool = True) -> S3ObjectStore:
    """With the write keys, else the read keys. Raises ConfigError, naming what is not set."""
    try:
        return S3ObjectStore.from_settings(settings, bucket=bucket, write=write)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_own(store: S3ObjectStore, *, timeout: timedelta = BUCKET_CHECK) -> None:
    """That the bucket is there and the keys are good for it. Raises ConfigError, NetworkFailure.

    ``timeout`` covers the first answer of the store with its retries.
    """
    with _errors_of_a_start(store.bucket):
        patient(store, each=timeout).head(keys.ROOT_METADATA)
        # A missing bucket and a missing object look alike to HEAD; a listing tells them apart.
        store.list_multiparts()


def own_commitment(settings: StoreSettings, bucket: str) -> str:
    """:func:`commitment_text`, which stays on the chain for good. So the store is asked first
    whether these keys can read ``bucket`` and cannot write it. Raises ConfigError, NetworkFailure.
    """
    text = commitment_text(settings)
    with closing(open_own(settings, bucket, write=False)) as reader, _errors_of_a_start(bucket):
        check_read_key(reader, timeout=BUCKET_CHECK)
    return text


def commitment_text(settings: StoreSettings) -> str:
    """Our read credentials as the chain holds them. Raises ConfigError."""
    credentials = BucketCredentials(
        settings.account_id or "",
        _text(settings.read_access_key_id),
        _text(settings.read_secret_access_key),
    )
    try:
        return build_commitment(credentials)
    except CommitmentError as error:
        raise ConfigError(
            f"the read keys do not fit into a commitment ({error}), so nobody could read this "
            "bucket: correct R2_ACCOUNT_ID, R2_READ_ACCESS_KEY_ID, R2_READ_SECRET_ACCESS_KEY"
        ) from None


@contextmanager
def _errors_of_a_start(bucket: str) -> Iterator[None]:
    """A store's error ends the start with its line."""
    try:
        yield
    except BucketMissingError:
        raise ConfigError(
            f"bucket {bucket} does not exist, so nothing could be published: create it in the R2 "
            "dashboard with exactly this name"
        ) from None
    except StoreError as error:
        # A clock may be set, and a service come back, without anyone: pm2 tries again.
        passes = error.retryable or isinstance(error, (ClockSkewError, DeadlineError))
        raise (NetworkFailure if passes else ConfigError)(str(error)) from None


def _text(value: SecretStr | None) -> str:
    return value.get_secret_value() if value is not None else ""


# With 256 miners to look at, one whose bucket does not answer must not hold up the others.
PATIENCE = timedelta(seconds=10)
RANGE = 4 * 1024 * 1024  # bytes of one request of a read into memory


class Reader(Protocol):
    """One bucket to read: at an object store (:class:`BucketReader`), or a folder that is laid out
    like one (``scoring.folder``). All methods raise StoreError."""

    @property
    def name(self) -> str: ...

    def head(self, key: str) -> ObjectInfo | None:
        """None: there is no such object. Its ``age_seconds`` are by the store's clock."""
        ...

    def get(self, key: str, *, limit: int) -> bytes | None:
        """A small object whole; None if there is none. IntegrityError for more than ``limit``."""
        ...

    def read(self, key: str, *, limit: int) -> bytes | None:
        """A large object whole, into memory; None if there is none. IntegrityError for more than
        ``limit`` bytes, DeadlineError when it comes too slowly."""
        ...

    def download(self, key: str, path: Path, *, limit: int) -> None:
        """Into ``path``, complete or not at all. ObjectMissingError if there is no such object."""
        ...

    def open(self, key: str) -> IO[bytes]:
        """To seek and read in, without fetching more than is read. Close it. Reading raises
        StoreError too. ObjectMissingError if there is no such object."""
        ...


class BucketReader:
    """A :class:`Reader` at an object store. ``small`` covers a question with its retries, ``large``
    a whole file."""

    def __init__(
        self,
        store: S3ObjectStore,
        *,
        small: timedelta = timedelta(seconds=30),
        large: timedelta = timedelta(minutes=30),
    ) -> None:
        self._store = patient(store, each=small)
        self._once = store
        self._large = large

    @property
    def name(self) -> str:
        return self._store.bucket

    def head(self, key: str) -> ObjectInfo | None:
        return self._store.head(key)

    def get(self, key: str, *, limit: int) -> bytes | None:
        return self._store.get(key, limit=limit)

    def read(self, key: str, *, limit: int) -> bytes | None:
        info = self.head(key)
        if info is None:
            return None
        where = f"{self.name}/{key}"
        if info.size > limit:
            raise IntegrityError(
                f"{where} has {info.size} bytes, more than the {limit} allowed, so it is not read"
            )
        deadline = deadline_in(self._large)
        store = patient(self._once, until=deadline)
        content = io.BytesIO()
        while (start := content.tell()) < info.size:
            if time.monotonic() > deadline:
                seconds = self._large.total_seconds()
                raise DeadlineError(f"{where}: {start} of {info.size} bytes came in {seconds:g} s")
            piece = store.get_range(key, start, RANGE, etag=info.etag)
            if not piece:
                raise IntegrityError(f"{where}: {start} of {info.size} bytes came")
            content.write(piece)
        return content.getvalue()

    def download(self, key: str, path: Path, *, limit: int) -> None:
        deadline = deadline_in(self._large)
        try:
            download(self._once, key, path, limit=limit, deadline=deadline)
        except (IntegrityError, ObjectMissingError) as error:
            raise type(error)(f"{self.name}/{key}: {error}") from None
        except OSError as error:
            raise StoreError(f"{error.filename or path}: {error.strerror}") from None

    def open(self, key: str) -> IO[bytes]:
        info = self.head(key)
        if info is None:
            raise ObjectMissingError(f"{self.name}/{key} does not exist")
        return io.BufferedReader(_RemoteFile(self._store, info), buffer_size=64 * 1024)


class _RemoteFile(io.RawIOBase):
    """One version of an object as a file, read range by range."""

    def __init__(self, store: S3ObjectStore, info: ObjectInfo) -> None:
        super().__init__()
        self.name = info.key
        self._store = store
        self._info = info
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._info.size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), self._info.size - self._at)
        if count <= 0:
            return 0
        data = self._store.get_range(self._info.key, self._at, count, etag=self._info.etag)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


class NoBucket(StoreError):
    """A hotkey whose commitment names no bucket; the text says why."""


class PeerBuckets:
    """Opens miners' buckets. A client is slow to make, so one is kept for as long as a miner's
    credentials stay the same."""

    def __init__(
        self,
        settings: StoreSettings,
        chain: Chain,
        *,
        small: timedelta = PATIENCE,
        large: timedelta = timedelta(minutes=30),
    ) -> None:
        self._settings = settings
        self._chain = chain
        self._small = small
        self._large = large
        self._known: dict[str, tuple[BucketCredentials, BucketReader]] = {}

    def of_miner(self, neuron: Neuron) -> BucketReader:
        """Raises NoBucket, and ChainError as long as the chain has not answered."""
        bucket = names.miner_bucket(self._settings.global_model_name, neuron.uid)
        return self._open(bucket, neuron.hotkey)

    def of_master(self, hotkey: str) -> BucketReader:
        """The global bucket, by the master's commitment. Raises as :meth:`of_miner`."""
        return self._open(self._settings.global_model_name, hotkey)

    def _open(self, bucket: str, hotkey: str) -> BucketReader:
        try:
            credentials = parse_commitment(self._chain.commitment(hotkey) or "")
        except CommitmentError as error:
            raise NoBucket(f"hotkey {hotkey}: {error}") from None
        known = self._known.get(bucket)
        if known is not None and known[0] == credentials:
            return known[1]
        try:
            store = S3ObjectStore.of_peer(self._settings, bucket=bucket, credentials=credentials)
        except ValueError as error:
            raise NoBucket(f"hotkey {hotkey}: {error}") from None
        reader = BucketReader(store, small=self._small, large=self._large)
        self._known[bucket] = credentials, reader
        return reader
