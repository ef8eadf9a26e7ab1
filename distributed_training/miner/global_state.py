"""The global bucket as a miner reads it: which epoch it is in, and that epoch's files."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from distributed_training.miner.drift import TOLERANCE, NotComparable, Rows, drift
from distributed_training.miner.global_watch import GlobalUnavailableError
from distributed_training.protocol import keys
from distributed_training.store.errors import AccessDeniedError, StoreError
from distributed_training.store.remote_state import RemoteState

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class GlobalBucket:
    """``folder`` keeps the states fetched, one ``epoch-N`` each: a restart need not download.

    ``renew`` is asked when the read keys are refused: the bucket with the keys that its owner
    publishes now, None if they are the same. All methods raise :class:`GlobalUnavailableError` with
    a line that says why.
    """

    def __init__(
        self,
        *,
        remote: RemoteState,
        run: int,
        folder: Path,
        renew: Callable[[], RemoteState | None] = lambda: None,
    ) -> None:
        self._remote = remote
        self._run = run
        self._folder = folder
        self._renew = renew

    def _read(self, operation: Callable[[RemoteState], _T]) -> _T:
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
            read = self._read(lambda remote: remote.reader(key))
            found = drift(rows, read, seed=outer_step)
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
