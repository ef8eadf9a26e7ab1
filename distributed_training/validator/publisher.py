"""The global state and its bucket: every outer step as a folder, the root metadata last."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from distributed_training.common.files import atomic_file, sync_folder
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import (
    MAX_CONFIG_BYTES,
    MAX_METADATA_BYTES,
    ConfigExtras,
    Metadata,
    MetadataError,
    parse_config,
)
from distributed_training.protocol.payload import Schema
from distributed_training.protocol.types import PublicationReport, Revision
from distributed_training.training.model import CONFIG_EXTRAS, parameter_schema
from distributed_training.training.outer import (
    OuterOptimizerState,
    load_outer_optimizer,
    save_outer_optimizer,
)
from distributed_training.validator.buckets import Bucket, BucketError
from distributed_training.validator.model import load_weights

log = logging.getLogger(__name__)

# Local folders of the global state that are kept: the current outer step's and the one before,
# which is still scored for half a period.
KEPT_EPOCHS = 2


class GlobalStateError(RuntimeError):
    """The global bucket holds something that cannot be gone on from. The text says what to do."""


@dataclass(frozen=True)
class GlobalState:
    """The network's model between two rounds. Tensors are float32 on the CPU, in schema order, and
    never changed in place."""

    model_config: Mapping[str, Any]
    schema: Schema
    outer_step: int
    weights: list[Tensor]
    momentum: list[Tensor] | None
    learning_rate: float
    mu: float
    last_allreduce_block: int

    def after(self, weights: list[Tensor], momentum: list[Tensor], *, block: int) -> GlobalState:
        return replace(
            self,
            outer_step=self.outer_step + 1,
            weights=weights,
            momentum=momentum,
            last_allreduce_block=block,
        )


def model_bytes(schema: Schema) -> int:
    """Most bytes of a float32 ``model.safetensors`` (tied weights may be in it twice)."""
    tensors = sum(4 * math.prod(shape) + 256 + len(name) for name, shape in schema)
    return 2 * tensors + 1024 * 1024


class GlobalPublisher:
    """Writes the global bucket, and reads it back at a start.

    ``folder``: local copies, ``epoch-N/`` each. ``peer_id``: of our averager, asked at each write,
    since a restarted averager has a new one. ``keep_epochs``: outer steps left in the bucket; the
    present one and the one before are always left.
    """

    def __init__(
        self,
        *,
        bucket: Bucket,
        folder: Path,
        run: int,
        peer_id: Callable[[], str],
        keep_epochs: int = 3,
    ) -> None:
        self._bucket = bucket
        self._folder = folder
        self._run = run
        self._peer_id = peer_id
        self._keep_epochs = max(KEPT_EPOCHS, keep_epochs)

    def load(self) -> GlobalState | None:
        """The state the bucket holds, None if it is empty.

        Raises GlobalStateError for a state that is damaged or of another run, BucketError when the
        bucket does not answer.
        """
        root = self._root()
        if root is None:
            return None
        try:
            return self._read(root.outer_step)
        except ValueError as error:
            raise _unusable(root.outer_step, error) from None

    def model_config(self) -> dict[str, Any] | None:
        """The model of the state the bucket holds, None if it is empty. Raises as :meth:`load`."""
        root = self._root()
        if root is None:
            return None
        try:
            return self._config(root.outer_step)[0]
        except ValueError as error:
            raise _unusable(root.outer_step, error) from None

    def publish(self, state: GlobalState) -> PublicationReport:
        """Local files, data, ``epoch-N/metadata.json``, root. Readers see the old state or the new.

        A bucket that fails is a report with ``ok=False`` and the reason; the root is then unchanged
        unless writing it was what failed.
        """
        began = time.monotonic()
        revision = Revision(self._run, state.outer_step, 0)
        folder = self._write(state)
        metadata = Metadata.of(revision, self._peer_id()).to_json()
        sent, reason = 0, ""
        try:
            for name in keys.GLOBAL_DATA_FILES:
                self._bucket.upload(keys.epoch_key(state.outer_step, name), folder / name)
                sent += (folder / name).stat().st_size
            self._bucket.put(keys.epoch_key(state.outer_step, keys.METADATA), metadata)
            self._bucket.put(keys.ROOT_METADATA, metadata)
        except BucketError as error:
            reason = str(error)
        if not reason:
            self._prune(state.outer_step)
        return PublicationReport(
            revision=revision,
            ok=not reason,
            seconds=time.monotonic() - began,
            bytes_sent=sent,
            reason=reason,
            finished_at=time.time(),
        )

    def announce(self, outer_step: int) -> None:
        """Write this process's peer id into the root metadata; nothing else changes."""
        revision = Revision(self._run, outer_step, 0)
        self._bucket.put(keys.ROOT_METADATA, Metadata.of(revision, self._peer_id()).to_json())

    def weights(self, outer_step: int, schema: Schema) -> list[Tensor]:
        """Global weights of an outer step, from the local copy or the bucket.

        Raises BucketError, ValueError.
        """
        path = self._folder / keys.epoch_folder(outer_step) / keys.MODEL
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            key = keys.epoch_key(outer_step, keys.MODEL)
            self._bucket.download(key, path, limit=model_bytes(schema))
        return load_weights(path, schema)

    def _root(self) -> Metadata | None:
        data = self._bucket.get(keys.ROOT_METADATA, limit=MAX_METADATA_BYTES)
        if data is None:
            return None
        try:
            root = Metadata.parse(data)
        except MetadataError as error:
            raise GlobalStateError(
                f"the global bucket's metadata.json is damaged ({error}), so it is not known where "
                "training stands: restore it, or empty the bucket to start anew"
            ) from None
        if root.run != self._run:
            raise GlobalStateError(
                f"the global bucket is of run {root.run} and this validator of run {self._run}, so "
                "it must not be written: name another bucket with --neuron.global_model_name"
            )
        return root

    def _config(self, outer_step: int) -> tuple[dict[str, Any], ConfigExtras]:
        """Raises ValueError (MetadataError is one)."""
        data = self._bucket.get(keys.epoch_key(outer_step, keys.CONFIG), limit=MAX_CONFIG_BYTES)
        if data is None:
            raise ValueError(f"{keys.epoch_key(outer_step, keys.CONFIG)} is missing")
        config, extras = parse_config(data)
        return {k: v for k, v in config.items() if k not in CONFIG_EXTRAS}, extras

    def _read(self, outer_step: int) -> GlobalState:
        model_config, extras = self._config(outer_step)
        schema = parameter_schema(model_config)
        folder = self._folder / keys.epoch_folder(outer_step)
        folder.mkdir(parents=True, exist_ok=True)
        limit = model_bytes(schema)
        for name in (keys.MODEL, keys.OUTER_OPTIMIZER):
            self._bucket.download(keys.epoch_key(outer_step, name), folder / name, limit=limit)
        outer = load_outer_optimizer(folder / keys.OUTER_OPTIMIZER, schema)
        momentum = None if outer.momentum is None else [t.clone() for t in outer.momentum]
        return GlobalState(
            model_config=model_config,
            schema=schema,
            outer_step=outer_step,
            weights=load_weights(folder / keys.MODEL, schema),
            momentum=momentum,
            learning_rate=outer.learning_rate,
            mu=outer.mu,
            last_allreduce_block=extras.last_allreduce_block or 0,
        )

    def _write(self, state: GlobalState) -> Path:
        folder = self._folder / keys.epoch_folder(state.outer_step)
        folder.mkdir(parents=True, exist_ok=True)
        extras = ConfigExtras((), 0, state.last_allreduce_block)
        with atomic_file(folder / keys.CONFIG) as file:
            file.write(extras.merge_into(state.model_config))
        names = [name for name, _ in state.schema]
        temporary = folder / f".{keys.MODEL}.tmp"
        tensors = dict(zip(names, state.weights, strict=True))
        save_file(tensors, temporary, metadata=keys.SAFETENSORS_METADATA)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(folder / keys.MODEL)
        sync_folder(folder)
        save_outer_optimizer(
            folder / keys.OUTER_OPTIMIZER,
            OuterOptimizerState(state.momentum, state.learning_rate, state.mu, state.outer_step),
        )
        return folder

    def _prune(self, outer_step: int) -> None:
        try:
            self._bucket.prune(newest=outer_step, keep=self._keep_epochs)
        except BucketError as error:
            log.warning("Old outer steps stay in the global bucket for now: %s", error)
        for path in self._folder.glob("epoch-*"):
            number = path.name.removeprefix("epoch-")
            if number.isdigit() and int(number) <= outer_step - KEPT_EPOCHS:
                shutil.rmtree(path, ignore_errors=True)


def _unusable(outer_step: int, error: Exception) -> GlobalStateError:
    return GlobalStateError(
        f"outer step {outer_step} in the global bucket cannot be used ({error}): restore its "
        "files, or empty the bucket to start anew"
    )
