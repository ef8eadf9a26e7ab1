"""Open buckets: this node's own bucket, and those of other members.

A miner's bucket is named after its uid; the validator's is the global bucket. Our own bucket is
opened with the write keys, and checked before anything depends on it. Its read credentials are
committed to the chain for everybody to see; the write keys never leave this machine. Other buckets
are read with the credentials that their owners have committed (``store.bucket_reader``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

from pydantic import SecretStr

from distributed_training.chain.base import Chain, ChainError, Neuron
from distributed_training.chain.registry import Busy, RefusedWrite, RegistryChain
from distributed_training.config import Config, ConfigError
from distributed_training.config.settings import StoreSettings
from distributed_training.node.start import NetworkFailure
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import (
    BucketCredentials,
    CommitmentError,
    build_commitment,
    parse_commitment,
)
from distributed_training.store.base import ObjectStore
from distributed_training.store.bucket_reader import BucketReader, check_read_key
from distributed_training.store.errors import (
    BucketMissingError,
    CertificateError,
    ClockSkewError,
    DeadlineError,
    NotGrantedError,
    RefusedError,
    StoreError,
    TransientError,
)
from distributed_training.store.opening import open_store
from distributed_training.store.presigned import AccessStore
from distributed_training.store.transfer import Retry

log = logging.getLogger(__name__)

BUCKET_CHECK = timedelta(seconds=30)  # time limit for the store's first answer, with retries


def open_own(settings: StoreSettings, bucket: str, *, write: bool = True) -> ObjectStore:
    """Open a bucket with the write keys, or with the read keys if ``write`` is False.

    Raises ConfigError if a key is missing.
    """
    try:
        return open_store(settings, bucket, write=write)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_own(store: ObjectStore, *, timeout: timedelta = BUCKET_CHECK) -> None:
    """Check that the bucket exists and that the keys are accepted.

    ``timeout``: time limit for the store's first answer, including retries.

    Raises ConfigError, NetworkFailure.
    """
    with _errors_of_a_start(store.bucket):
        Retry(each=timeout)(store.head, keys.STATE)
        # HEAD gives the same answer for a missing bucket and a missing object; a listing does not.
        store.list_objects(keys.STATE)


def own_commitment(settings: StoreSettings, bucket: str) -> str:
    """Check the read keys of ``bucket`` and return their :func:`commitment_text`.

    The text stays on the chain forever. So the store is asked first whether these keys can read the
    bucket, and cannot write to it. Raises ConfigError, NetworkFailure.
    """
    text = commitment_text(settings)
    with closing(open_own(settings, bucket, write=False)) as reader, _errors_of_a_start(bucket):
        # With a published key that can write, anybody could replace our uploads.
        check_read_key(reader, timeout=BUCKET_CHECK)
    return text


def check_as_member(settings: StoreSettings, chain: Chain, hotkey: str, bucket: str) -> str:
    """Check both keys of our bucket; return its commitment, as :func:`own_commitment` does.

    If the chain already shows these keys, an earlier start has checked them; then this start does
    not wait for a store that is unavailable. Raises ConfigError, NetworkFailure.
    """
    if settings.bucket_name not in (None, bucket):
        log.warning(
            "R2_BUCKET_NAME is %s, but uploads go to %s, where other members look for them: "
            "correct it in .env, so that your scripts look there too",
            settings.bucket_name,
            bucket,
        )
    try:
        with closing(open_own(settings, bucket)) as store:
            check_own(store)
        return own_commitment(settings, bucket)
    except NetworkFailure as error:
        commitment = commitment_text(settings)
        try:
            shown = chain.commitment(hotkey)
        except ChainError:  # only the list of members has been read so far, not the commitments
            shown = None
        if shown != commitment:
            raise
        log.warning(
            "Bucket %s does not answer (%s): starting without checking it; uploads are retried "
            "until it answers",
            bucket,
            error,
        )
        return commitment


def commitment_text(settings: StoreSettings) -> str:
    """Return our read credentials in the form that the chain stores. Raises ConfigError."""
    credentials = BucketCredentials(
        settings.account_id or "",
        _text(settings.read_access_key_id),
        _text(settings.read_secret_access_key),
    )
    try:
        return build_commitment(credentials, any_length=settings.endpoint_url is not None)
    except CommitmentError as error:
        raise ConfigError(
            f"the read keys do not fit into a commitment ({error}), so nobody could read this "
            "bucket: correct R2_ACCOUNT_ID, R2_READ_ACCESS_KEY_ID, R2_READ_SECRET_ACCESS_KEY"
        ) from None


@contextmanager
def _errors_of_a_start(bucket: str) -> Iterator[None]:
    """Turn an error of the store into one that ends the start, with a line for the operator."""
    try:
        yield
    except BucketMissingError:
        raise ConfigError(
            f"bucket {bucket} does not exist, so nothing could be uploaded: create it in the R2 "
            "dashboard with exactly this name"
        ) from None
    except StoreError as error:
        # These faults may pass on their own (the clock is set, a service comes back), so pm2 tries
        # again.
        passing = (CertificateError, ClockSkewError, DeadlineError, RefusedError)
        passes = error.retryable or isinstance(error, passing)
        raise (NetworkFailure if passes else ConfigError)(str(error)) from None


def _text(value: SecretStr | None) -> str:
    return value.get_secret_value() if value is not None else ""


def open_by_registry(settings: StoreSettings, chain: Chain, *, private: bool) -> AccessStore:
    """Open the global bucket as a member, with URLs that the registry hands out.

    ``private``: the value of chain.private, True if all machines are in one private network. Raises
    ConfigError.
    """
    if not isinstance(chain, RegistryChain):
        raise ConfigError(
            "exchange = 'store' in a network whose chain is not a registry, so nobody would hand "
            "out URLs for the store: ask its founder"
        )

    def ask(request: Mapping[str, Any]) -> Any:
        try:
            return chain.access(request)
        except Busy as error:
            raise TransientError(str(error)) from None
        except RefusedWrite as error:
            raise RefusedError(str(error)) from None
        except ChainError as error:
            raise NotGrantedError(str(error)) from None

    bucket = settings.global_model_name
    try:
        return AccessStore(ask, bucket=bucket, settings=settings, private=private)
    except ValueError as error:
        raise ConfigError(str(error)) from None


class MasterBucket:
    """The global bucket, opened for each access with the read key that the master has committed."""

    def __init__(self, config: Config, chain: Chain) -> None:
        self._peers = PeerBuckets(config.store, chain, small=BUCKET_CHECK)
        self._master = config.miner.master_ss58_address
        self.bucket = config.store.global_model_name

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:  # provides every method of an ObjectStore
        try:
            return getattr(self._peers.of_master(self._master).store, name)
        except ChainError as error:
            raise TransientError(f"{self.bucket}: {error}") from None


def open_as_member(config: Config, chain: Chain) -> ObjectStore:
    """Open the global bucket of a store network for reading. Raises ConfigError."""
    if config.has_bucket:
        return cast(ObjectStore, MasterBucket(config, chain))
    return open_by_registry(config.store, chain, private=config.chain.private)


# Among 256 miners, one whose bucket does not answer must not delay the others.
PATIENCE = timedelta(seconds=10)


class NoBucket(StoreError):
    """The hotkey's commitment names no usable bucket; the text says why."""


@dataclass
class PeerBuckets:
    """Opens other members' buckets.

    Creating a client is slow, so a bucket's client is kept as long as the owner's credentials stay
    the same.
    """

    settings: StoreSettings
    chain: Chain
    small: timedelta = PATIENCE
    large: timedelta = timedelta(minutes=30)
    _known: dict[str, tuple[BucketCredentials, BucketReader]] = field(default_factory=dict)

    def of_miner(self, neuron: Neuron) -> BucketReader:
        """Open a miner's bucket.

        Raises NoBucket, and ChainError while the chain has not answered yet.
        """
        bucket = keys.miner_bucket(self.settings.global_model_name, neuron.uid)
        return self._open(bucket, neuron.hotkey)

    def of_master(self, hotkey: str) -> BucketReader:
        """Open the global bucket with the credentials that the master has committed.

        Raises the same errors as :meth:`of_miner`.
        """
        return self._open(self.settings.global_model_name, hotkey)

    def _open(self, bucket: str, hotkey: str) -> BucketReader:
        try:
            any_length = self.settings.endpoint_url is not None
            text = self.chain.commitment(hotkey) or ""
            credentials = parse_commitment(text, any_length=any_length)
        except CommitmentError as error:
            raise NoBucket(f"hotkey {hotkey}: {error}") from None
        known = self._known.get(bucket)
        # New credentials may mean that the owner has moved to another bucket; the old client would
        # still read the abandoned one.
        if known is not None and known[0] == credentials:
            return known[1]
        try:
            store = open_store(self.settings, bucket, credentials=credentials)
        except ValueError as error:
            raise NoBucket(f"hotkey {hotkey}: {error}") from None
        reader = BucketReader(store, small=self.small, large=self.large)
        self._known[bucket] = credentials, reader
        return reader
