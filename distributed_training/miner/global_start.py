"""The global bucket at the start: its keys from the chain, its present state onto the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from distributed_training.chain.base import Chain, ChainError
from distributed_training.config import Config
from distributed_training.miner.global_state import GlobalBucket
from distributed_training.miner.global_watch import GlobalUnavailableError
from distributed_training.protocol import names
from distributed_training.protocol.commitment import (
    BucketCredentials,
    CommitmentError,
    parse_commitment,
)
from distributed_training.store.remote_state import RemoteState
from distributed_training.store.s3 import S3ObjectStore

log = logging.getLogger(__name__)

_GLOBAL_RETRY = 1.0  # seconds between two looks for a global state that is not there yet
_FETCH_RETRY_LONGEST = 300.0  # seconds between two downloads of a state that is refused


class StopBeforeStart(RuntimeError):
    """A stop was asked for while the start waited."""


def open_global_bucket(
    config: Config, chain: Chain, folder: Path, wanted: Callable[[], bool]
) -> GlobalBucket:
    """Its read credentials stand in the master hotkey's commitment; waits for them.

    Raises StopBeforeStart. When they are refused later, the commitment is read again."""
    master = config.miner.master_ss58_address
    said = False
    text = ""

    def open_bucket() -> RemoteState:
        nonlocal text
        committed = chain.commitment(master) or ""
        remote = _remote_state(config, parse_commitment(committed))
        text = committed
        return remote

    def renew() -> RemoteState | None:
        try:
            if (chain.commitment(master) or "") == text:
                return None
            remote = open_bucket()
        except (CommitmentError, ChainError):
            return None
        log.info("The master hotkey committed other read keys: the global bucket is read with them")
        return remote

    while True:
        try:
            remote = open_bucket()
            break
        except CommitmentError as error:
            if not said:
                log.info("Waiting for the commitment of the master hotkey %s (%s)", master, error)
                said = True
        _pause(wanted)
    return GlobalBucket(remote=remote, run=names.RUN, folder=folder / "global", renew=renew)


def _remote_state(config: Config, credentials: BucketCredentials) -> RemoteState:
    store = S3ObjectStore.of_peer(
        config.store,
        bucket=config.store.global_model_name,
        account_id=credentials.account_id,
        access_key_id=credentials.access_key_id,
        secret_access_key=credentials.secret_access_key,
    )
    return RemoteState(
        store=store,
        deadline=config.store.file_deadline,
        concurrency=config.store.concurrency,
    )


def first_global_state(bucket: GlobalBucket, wanted: Callable[[], bool]) -> tuple[int, Path]:
    """The present epoch and the folder with its files; waits until there is one."""
    said, target, failures, not_before = "", -1, 0, 0.0
    while True:
        try:
            outer_step = bucket.outer_step()
            if outer_step != target:
                target, failures, not_before = outer_step, 0, 0.0
            if time.monotonic() >= not_before:
                try:
                    return outer_step, bucket.fetch(outer_step)
                finally:  # what is refused was downloaded whole, and every miner does that
                    wait = min(2.0 ** min(failures, 10), _FETCH_RETRY_LONGEST)
                    failures, not_before = failures + 1, time.monotonic() + wait
        except GlobalUnavailableError as error:
            if str(error) != said:
                log.info("Waiting for the global state: %s", error)
                said = str(error)
        _pause(wanted)


def _pause(wanted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _GLOBAL_RETRY
    while time.monotonic() < deadline:
        if not wanted():
            raise StopBeforeStart
        time.sleep(0.05)
