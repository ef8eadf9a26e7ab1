"""The global bucket as a miner reads it: which epoch it is in, and that epoch's files.

The validator that owns the bucket publishes the global state there after each round: the model's
``config.json`` and ``model.safetensors`` and the ``outer_optimizer.pt``. Its read keys stand in
that validator's commitment on the chain. A start waits for both (:func:`open_global_bucket`,
:func:`first_global_state`); later :mod:`~.global_epoch` watches the bucket.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from distributed_training.chain.base import Chain, ChainError
from distributed_training.common.backoff import doubling
from distributed_training.config import Config
from distributed_training.protocol import keys, names
from distributed_training.protocol.commitment import (
    BucketCredentials,
    parse_commitment,
)
from distributed_training.store.errors import AccessDeniedError, StoreError
from distributed_training.store.remote_state import RemoteState
from distributed_training.store.s3 import S3ObjectStore

from .drift import TOLERANCE, NotComparable, Rows, drift

log = logging.getLogger(__name__)

_SAY_AGAIN = 300.0  # seconds between two lines of a start that waits
_LOOK_AGAIN = 1.0  # seconds between two looks for a global state that is not there yet
_FETCH_AGAIN = timedelta(seconds=1)  # a state that is refused: doubled by each refusal
_FETCH_AGAIN_LONGEST = timedelta(minutes=5)

_T = TypeVar("_T")


class GlobalUnavailableError(RuntimeError):
    """The global state cannot be had now; the message says why."""


class StopBeforeStart(RuntimeError):
    """A stop was asked for while the start waited."""


class GlobalBucket:
    """``folder`` keeps the states fetched, one ``epoch-N`` each: a restart need not download.

    ``moved``: whether its owner published other read keys, perhaps of another account, since;
    asked before each use, so it must not wait. ``renew`` is asked then, and when the read keys are
    refused: the bucket with the keys of now, None if they are the same or unusable. All methods
    raise :class:`GlobalUnavailableError` with a line that says why.
    """

    def __init__(
        self,
        *,
        remote: RemoteState,
        run: int,
        folder: Path,
        renew: Callable[[], RemoteState | None] = lambda: None,
        moved: Callable[[], bool] = lambda: False,
    ) -> None:
        self._remote = remote
        self._run = run
        self.run_seen: int | None = None  # of the bucket, when it was last looked at
        self._folder = folder
        self._renew = renew
        self._moved = moved

    def _read(self, operation: Callable[[RemoteState], _T]) -> _T:
        if self._moved():  # the old bucket may stay as it was for weeks
            self._remote = self._renew() or self._remote
        try:
            return operation(self._remote)
        except AccessDeniedError:
            renewed = self._renew()
            if renewed is None:
                raise
            self._remote = renewed
            return operation(renewed)

    def outer_step(self) -> int:
        """Of the root metadata, which its owner writes last."""
        try:
            metadata = self._read(lambda remote: remote.metadata())
        except StoreError as error:
            raise GlobalUnavailableError(str(error)) from None
        if metadata is None:
            raise GlobalUnavailableError("the global bucket is empty so far")
        self.run_seen = metadata.run
        if metadata.run != self._run:
            raise GlobalUnavailableError(
                f"the global bucket is of run {metadata.run}, this miner of run {self._run}: "
                "upgrade the miner"
            )
        return metadata.outer_step

    def fetch(self, outer_step: int) -> Path:
        """Folder of that epoch's config.json, model.safetensors and outer_optimizer.pt, checked."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            folder = self._read(lambda remote: remote.fetch(outer_step, self._folder))
        except (StoreError, OSError) as error:
            raise GlobalUnavailableError(str(error)) from None
        for left in (*self._folder.glob(".epoch-*"), *self._folder.glob(".old.epoch-*")):
            shutil.rmtree(left, ignore_errors=True)  # of fetches that were given up
        for old in self._folder.glob("epoch-*"):
            number = old.name.partition("-")[2]
            if number.isdigit() and int(number) < outer_step - 1:
                shutil.rmtree(old, ignore_errors=True)
        return folder

    def drift(self, outer_step: int, rows: Sequence[Rows]) -> float:
        """See :func:`~.drift.drift`; of the bucket's ``model.safetensors`` of that epoch."""
        try:
            key = keys.epoch_key(outer_step, keys.MODEL)
            size, read = self._read(lambda remote: remote.reader(key))
            found = drift(rows, read, size=size, seed=outer_step)
        except (StoreError, NotComparable) as error:
            raise GlobalUnavailableError(str(error)) from None
        if not found <= TOLERANCE:
            # Published anew under the same number, perhaps: what was fetched once is not that.
            shutil.rmtree(self._folder / keys.epoch_folder(outer_step), ignore_errors=True)
        return found

    def stop(self) -> None:
        """End a fetch under way; what was fetched stays for the next."""
        self._remote.stop()


def model_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a fetched state (checked when it was fetched)."""
    content: dict[str, Any] = json.loads((folder / keys.CONFIG).read_bytes())
    return content


# --- at the start -------------------------------------------------------------------------------


def open_global_bucket(
    config: Config, chain: Chain, folder: Path, wanted: Callable[[], bool]
) -> GlobalBucket:
    """Its read credentials stand in the master hotkey's commitment; waits for them.

    Raises StopBeforeStart. Another commitment of that hotkey later is followed."""
    master = config.miner.master_ss58_address
    waiting = _Waiting("if for long: is --neuron.master_ss58_address the subnet's?")
    text = ""

    def open_bucket() -> RemoteState:
        nonlocal text
        committed = chain.commitment(master) or ""
        remote = _remote_state(config, parse_commitment(committed))
        text = committed
        return remote

    def moved() -> bool:
        try:
            return (chain.commitment(master) or "") != text
        except ChainError:
            return False

    def renew() -> RemoteState | None:
        try:
            if not moved():
                return None
            remote = open_bucket()
        except (ValueError, ChainError):
            return None
        log.info("The master hotkey committed other read keys: the global bucket is read with them")
        return remote

    while True:
        try:
            remote = open_bucket()
            break
        except ValueError as error:  # no commitment, or of no account
            waiting.say(f"Waiting for the commitment of the master hotkey {master} ({error})")
        pause(wanted)
    return GlobalBucket(
        remote=remote, run=names.RUN, folder=folder / "global", renew=renew, moved=moved
    )


def _remote_state(config: Config, credentials: BucketCredentials) -> RemoteState:
    bucket = config.store.global_model_name
    return RemoteState(
        store=S3ObjectStore.of_peer(config.store, bucket=bucket, credentials=credentials),
        deadline=config.store.file_deadline,
        concurrency=config.store.concurrency,
    )


def first_global_state(bucket: GlobalBucket, wanted: Callable[[], bool]) -> tuple[int, Path]:
    """The present epoch and the folder with its files; waits until there is one."""
    waiting = _Waiting("if for long: this machine's network, or a new version of this miner?")
    target, failures, not_before = -1, 0, 0.0
    while True:
        try:
            outer_step = bucket.outer_step()
            if outer_step != target:
                target, failures, not_before = outer_step, 0, 0.0
            if time.monotonic() >= not_before:
                try:
                    return outer_step, bucket.fetch(outer_step)
                finally:  # what is refused was downloaded whole, and every miner does that
                    failures += 1
                    wait = doubling(failures, first=_FETCH_AGAIN, longest=_FETCH_AGAIN_LONGEST)
                    not_before = time.monotonic() + wait.total_seconds()
        except GlobalUnavailableError as error:
            waiting.say(f"Waiting for the global state: {error}")
        pause(wanted)


class _Waiting:
    """Says what a start waits for: when that changes, and every five minutes."""

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._said, self._said_at = "", 0.0

    def say(self, what: str) -> None:
        now = time.monotonic()
        if what != self._said or now - self._said_at >= _SAY_AGAIN:
            self._said, self._said_at = what, now
            log.warning("%s. Training cannot begin before; %s", what, self._advice)


def pause(wanted: Callable[[], bool]) -> None:
    """Before another try of the start. Raises StopBeforeStart when ``wanted`` turns False."""
    deadline = time.monotonic() + _LOOK_AGAIN
    while time.monotonic() < deadline:
        if not wanted():
            raise StopBeforeStart
        time.sleep(0.05)
