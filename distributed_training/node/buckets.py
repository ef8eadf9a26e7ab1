"""A node's own bucket: opened with the write keys, checked before anything depends on it, and the
read credentials that let others look into it.

A miner's bucket is named by its uid, the validator's is the global one. The read credentials are
committed to the chain for everybody to see; the write keys never leave this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

from pydantic import SecretStr

from distributed_training.config import ConfigError
from distributed_training.config.store import StoreSettings
from distributed_training.node.failures import NetworkFailure
from distributed_training.protocol import keys
from distributed_training.protocol.commitment import (
    BucketCredentials,
    CommitmentError,
    build_commitment,
)
from distributed_training.store.errors import (
    BucketMissingError,
    ClockSkewError,
    DeadlineError,
    StoreError,
)
from distributed_training.store.read_key import check_read_key
from distributed_training.store.retry import patient
from distributed_training.store.s3 import S3ObjectStore

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
