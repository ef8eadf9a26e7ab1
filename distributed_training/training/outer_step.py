"""Take DiLoCo's outer step over FSDP shards: write the upload, then apply the published update.

In DiLoCo (Douillard et al. 2023, arXiv 2311.08105) each member trains without the others for many
*inner steps*. The movement of its weights, epoch start - current, is then taken as a gradient: the
*pseudo-gradient*. At each close a member writes one upload: its pseudo-gradient plus its
*residual*, which is what encoding earlier uploads lost. Later it applies one published update to
the epoch-start weights. All members apply the same bytes, so their epoch starts are bit-identical;
comparing the digest with the manifest's confirms that before the vote. Training done during the
exchange is kept on top of the update; :class:`~distributed_training.protocol.types.Base` says where
it counts from.

This order makes it safe: first the upload is written, then a checkpoint with the weights that the
upload was written from, and only when the checkpoint is complete is the upload sent. So the store
never has an upload that the checkpoint does not know. The upload's file stays on disk until a
checkpoint of a later outer step is complete: after a restart or a roll-back the same update is
applied again.

All new tensors are computed while the old ones stay in use. Then either all of them are replaced at
once, or none.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distributed_training.common.files import sync_folder, write_json
from distributed_training.protocol.types import Base, OuterStepError, Sign, Update
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    digest_rows_of,
    digest_weights,
    finish,
    write_rows,
)

from .collectives import ParameterShard, RowStream, enter_thread, fill_host
from .copies import BackgroundWrite, BoundaryCopies
from .outer_rule import OuterRule
from .sharding import read_rows

_AT_ONCE = 1 << 22  # number of values that are encoded at once


#: How long rank 0 waits for the other ranks' parts of an upload.
PARTS_TIMEOUT = timedelta(minutes=10)


class UploadHandle(BackgroundWrite):
    """A job in which this rank writes an upload; rank 0's job ends once the file is at ``path``."""

    def __init__(self, path: Path, header: Header) -> None:
        super().__init__("upload")
        self.path, self.header = path, header
        self.hold_seconds = 0.0  # seconds for which training paused
        self._cancelled = False

    def cancel(self) -> None:
        """Stop writing, unless it is done. Returns when the thread has ended."""
        self._cancelled = True
        self.join()

    def check(self) -> None:
        """Raise RuntimeError after :meth:`cancel`; the writing thread calls this now and then."""
        if self._cancelled:
            raise RuntimeError("the upload was cancelled")

    def wait_for_parts(self, parts: Path, ranks: int) -> None:
        """Wait until all ``ranks`` that hold one copy have their parts ready.

        Raises TimeoutError, or RuntimeError if a rank failed or after :meth:`cancel`.
        """
        deadline = time.monotonic() + PARTS_TIMEOUT.total_seconds()
        # Poll for files instead of asking the ranks, since a thread's collectives would mix with
        # those of training.
        for rank in range(ranks):
            ready = _ready_file(parts, rank)
            while not ready.exists():
                self.check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not write its part of the upload in time")
                time.sleep(0.01)
            if (error := json.loads(ready.read_text())["error"]) is not None:
                raise RuntimeError(f"rank {rank} could not write its part of the upload: {error}")


@dataclass(frozen=True)
class _Movement:
    """The rows of this rank from which an upload is computed; they are never changed."""

    start: Sequence[Tensor]
    weights: Sequence[Tensor]
    residual: Sequence[Tensor] | None
    rule: OuterRule

    def rows(self, index: int, first: int = 0, stop: int | None = None) -> Tensor:
        """Compute rows of one parameter as a new tensor, bit-identical each time."""
        rows = self.start[index][first:stop] - self.weights[index][first:stop]
        if self.residual is None:
            return rows
        residual = self.residual[index][first:stop]
        if self.rule.feedback != 1:
            residual = residual * self.rule.feedback
        return rows.add_(residual)

    def sent(self, rows: Tensor) -> Tensor:
        """Return the part that is sent of ``rows``, a result of :meth:`rows` as a matrix."""
        return rows if self.rule.select is None else self.rule.select(rows)


@dataclass(frozen=True)
class _Prepared:
    """The rows of this rank that a commit swaps in, and the values that go with them."""

    weights: list[Tensor]
    present: list[Tensor]  # the weights plus the training done since the upload
    epoch_id: str
    outer_step: int
    start: str  # digest of the weights, in hex
    residual: list[Tensor] | None
    uploaded_steps: int  # inner steps that count for the previous outer step
    dropped: str


class OuterStep:
    """Owns one rank's epoch-start weights, its residual and the weights of its last upload.

    All are in host memory. Neither the list ``residual`` nor a tensor in it is ever changed in
    place.

    Args:
        shards: This rank's rows of every parameter.
        stream: Sends rows between the ranks.
        rule: Says which part of the movement is sent, and what share of the residual the next
            upload takes.
        drop_overlap: Whether late training loses its component along the update.
    """

    #: Lists of tensors in the state that change only with ``epoch_id``.
    of_epoch: ClassVar = ("epoch_start", "residual")

    def __init__(
        self,
        *,
        shards: Sequence[ParameterShard],
        stream: RowStream,
        rule: OuterRule,
        drop_overlap: bool,
    ) -> None:
        self.rule = rule
        self.epoch_start: list[Tensor] | None = None
        self.epoch_id = ""  # names the epoch-start weights and residual in checkpoints
        self._shards = shards
        self._stream = stream
        self._written: list[Tensor] | None = None  # the weights that the upload was written from
        self._prepared: _Prepared | None = None
        self._drop_overlap = drop_overlap
        self._schema = [(shard.name, shard.shape) for shard in self._shards]
        self._vectors = [i for i, shard in enumerate(self._shards) if shard.is_one_row]
        self.residual: list[Tensor] | None = None  # None until an upload has lost something
        self.start = ""  # digest of the epoch-start weights, in hex
        self.serial: int | None = None  # number of the close for which ``_written`` was uploaded
        self.dropped = ""  # describes what the last commit dropped; empty if it dropped nothing
        self._written_steps = 0  # inner steps in ``_written``

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch_id": self.epoch_id,
            "epoch_start": self.epoch_start,
            "epoch_digest": self.start,
            "residual": self.residual,
            "written": self._written,
            "written_serial": -1 if self.serial is None else self.serial,
            "written_steps": self._written_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch_id, self.epoch_start = str(state["epoch_id"]), state["epoch_start"]
        self.start, self.residual = str(state["epoch_digest"]), state["residual"]
        serial = int(state["written_serial"])
        self._written, self.serial = state["written"], None if serial < 0 else serial
        self._written_steps = int(state["written_steps"])
        self.roll_back()

    def current(self) -> list[Tensor]:
        """Copy this rank's rows of the current weights to host memory."""
        pairs = [(s.local, torch.empty(s.local.shape, dtype=torch.float32)) for s in self._shards]
        fill_host(pairs)
        return [taken for _, taken in pairs]

    def begin_epoch(self) -> None:
        """Make the current weights the epoch start, with no residual. Collective."""
        self.epoch_start = self.current()
        self._prepared = self._written = None
        self.epoch_id = self._new_epoch_id()
        self.residual, self.serial = None, None
        self.start = self._stream.from_rank_0(self._digest(self.epoch_start or []))

    def roll_back(self) -> None:
        """Forget what :meth:`prepare_update` computed."""
        # Keep the weights that the upload was written from, since the update may come again.
        self._prepared = None

    def _new_epoch_id(self) -> str:
        # Use a random name, not the step number: after a roll-back the same number stands for other
        # weights, and a checkpoint must not refer to the wrong ones.
        return self._stream.from_rank_0(secrets.token_hex(8))

    # --- the upload ----------------------------------------------------------------------------

    def write_upload(
        self, header: Header | None, path: Path | None, sign: Sign | None, copies: BoundaryCopies
    ) -> UploadHandle:
        """Write epoch start - ``copies.weights`` + residual. See ``HeldWeights.write_upload``."""
        problem = None
        header, path = self._stream.from_rank_0((header, path))
        assert header is not None and path is not None
        header = replace(header, start=self.start)
        file = UpdateLayout.of(self._schema, header)
        if self._stream.rank == 0:
            try:
                _make_room(path, file.size)
            except OSError as error:
                problem = f"{path} cannot be written: {error}"
        self._stream.raise_if_any(problem, OSError)  # no rank writes before all ranks agree
        moved = _Movement(self.epoch_start or [], copies.weights, self.residual, self.rule)
        # Do this here, not in the thread, whose collectives would mix with those of training.
        rows = self._stream.run_on_all(
            lambda: [moved.rows(index).flatten() for index in self._vectors]
        )
        wholes = dict(zip(self._vectors, self._stream.whole(rows), strict=True))
        # From here on no rank fails, so either all of them know this upload, or none. A progress
        # upload belongs to no close, so no outer step follows from it.
        if header.serial:
            self._written, self.serial = copies.weights, header.serial
            self._written_steps = header.inner_steps
        handle = UploadHandle(path, header)
        # The thread keeps the copies alive, so that a checkpoint at this boundary can share them.
        copies.writers.append(handle.ended)
        handle.start(partial(self._write, moved, wholes, copies, file, sign))
        return handle

    def _write(
        self,
        moved: _Movement,
        wholes: Mapping[int, Tensor],
        copies: BoundaryCopies,
        file: UpdateLayout,
        sign: Sign | None,
        handle: UploadHandle,
    ) -> None:
        """Write this rank's rows; rank 0 signs the file once all ranks have. Runs in a thread.

        ``wholes``: whole parameters, keyed by the parameter's index. Raises TimeoutError, OSError,
        ValueError (NaN or Inf), RuntimeError (another rank failed).
        """
        enter_thread(self._shards[0].local.device, background=True)
        layout, path = self._stream.layout, handle.path
        if not layout.on_node_0:
            return  # this rank's counterpart on the first copy writes the same rows
        parts = _parts(path)
        try:
            copies.wait()
            for index, first, rows in self._rows_of_upload(moved, wholes):
                handle.check()
                write_rows(parts / path.name, file, index, first, moved.sent(rows))
            write_json(_ready_file(parts, layout.shard), {"error": None})
            if layout.rank == 0:
                handle.wait_for_parts(parts, layout.shards)
                assert sign is not None
                finish(parts / path.name, file, sign)
                os.replace(parts / path.name, path)
                sync_folder(path.parent)
        except BaseException as error:  # report any error, since rank 0 waits for this rank
            with contextlib.suppress(OSError):
                why = f"{type(error).__name__}: {error}"
                write_json(_ready_file(parts, layout.shard), {"error": why})
            raise
        finally:
            if layout.rank == 0:
                shutil.rmtree(parts, ignore_errors=True)

    def _rows_of_upload(
        self, moved: _Movement, wholes: Mapping[int, Tensor]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the rows that this rank writes, with the parameter's index and the first row."""
        for index, shard in enumerate(self._shards):
            if index in wholes:
                if self._stream.rank == 0:
                    yield index, 0, wholes[index].view(1, -1)
                continue
            step = max(1, _AT_ONCE // math.prod(shard.shape[1:]))
            for first in range(0, shard.stop - shard.start, step):
                rows = moved.rows(index, first, first + step)
                yield index, shard.start + first, rows.flatten(1)

    # --- the update ----------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_update(self, update: Update | None, *, inner_step: int) -> None:
        """Compute the next epoch start and the current weights on top of it. Collective.

        Nothing is swapped in yet; see ``HeldWeights.prepare_update``. ``update`` is rank 0's, and
        ``inner_step`` is the current inner step.
        """
        self.roll_back()
        header = None if update is None else self._header_of(update.own_upload)
        update, header = self._stream.from_rank_0((update, header))
        assert update is not None and self.epoch_start is not None
        # Our upload was written from ``_written``, unless a roll-back has lost those weights.
        of_ours = None if header is None else (header.start, header.serial)
        known = self._written is not None and of_ours == (self.start, self.serial)
        merged = update.base is Base.MERGED and header is not None

        def read() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
            """Return the next epoch start, the base of late training, and the residual."""
            weights = self._next_start(update)
            if update.base is Base.KEPT:
                return weights, self.epoch_start or [], []
            # If the weights that the upload was written from are lost, all training that is not in
            # the upload goes into the residual.
            written = self._written if known else self.current()
            return weights, written or [], self._rest(written, update.own_upload) if merged else []

        weights, base, residual = self._stream.run_on_all(read, OuterStepError)
        for rows in (*weights, *residual):
            # Send them to the ranks on other machines, which have no files.
            self._stream.replicate(rows)
        problem, digest = None, self._digest(weights)
        if self._stream.rank == 0 and digest != update.weights:
            problem = (
                f"the weights of outer step {update.outer_step} have the digest {digest:.16} here, "
                f"but {update.weights:.16} in its manifest, so it is not applied"
            )
        self._stream.raise_if_any(problem, OuterStepError)
        # This takes a new tensor for each parameter, so a single rank may run out of memory.
        present = self._stream.run_on_all(
            lambda: [now.sub_(b) for now, b in zip(self.current(), base, strict=True)],
            OuterStepError,
        )
        kept = update.base is Base.KEPT
        if kept or (self._drop_overlap and merged and known):
            self._without_overlap(present, weights)
        for late, new in zip(present, weights, strict=True):
            late.add_(new)
        uploaded, dropped = self._written_steps if known else inner_step, ""
        if kept:
            uploaded, residual = 0, self.residual or []
            if inner_step:
                dropped = f"what lies along the update, of {inner_step} inner steps that missed it"
        elif not merged:
            dropped = f"the {uploaded} inner steps of the {update.base.value} upload"
            if not known:
                dropped = f"all {uploaded} inner steps since the outer step before"
        self._prepared = _Prepared(
            weights,
            present,
            self._new_epoch_id(),
            update.outer_step,
            update.weights,
            residual or None,
            uploaded,
            dropped,
        )

    def _without_overlap(self, late: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Remove from ``late`` the component along the update, which leads to ``weights``.

        Collective. Inner steps that were taken while the update was on its way, or that missed it,
        have already moved the weights partly in the direction of the update. Adding both would move
        them there twice. For each parameter with the update u (new weights - epoch start) and the
        late training l, l becomes l - max(0, <l, u> / <u, u>) u (docs/performance.md).
        """
        each = list(zip(late, weights, self.epoch_start or [], strict=True))

        def products() -> list[float]:
            found = []
            for rows, new, start in each:
                way = (new - start).flatten()
                found += [float(rows.flatten() @ way), float(way @ way)]
            return found

        summed = self._stream.sum(self._stream.run_on_all(products, OuterStepError))
        shares = [a / max(s, 1e-30) for a, s in zip(summed[::2], summed[1::2], strict=True)]

        def subtract() -> None:
            for (rows, new, start), share in zip(each, shares, strict=True):
                if share > 0:
                    rows.sub_(new - start, alpha=share)

        self._stream.run_on_all(subtract, OuterStepError)

    @torch.no_grad()
    def commit(self) -> tuple[int, int]:
        """Replace weights and residual with the ones that :meth:`prepare_update` computed.

        Local to the rank; it cannot fail half-way. After a SIGKILL the checkpoint decides.

        Returns:
            The outer step, and the number of inner steps that belong to the previous one.
        """
        prepared = self._prepared
        if prepared is None:
            raise RuntimeError("an outer step was committed that had not been prepared")
        # Use no collective from here on: the vote is over, so the other ranks would not learn of a
        # rank that fails now.
        for shard, new in zip(self._shards, prepared.present, strict=True):
            shard.local.copy_(new)
        self.epoch_start, self.epoch_id = prepared.weights, prepared.epoch_id
        self.start, self.residual = prepared.start, prepared.residual
        self.dropped = prepared.dropped
        self._written = self.serial = self._prepared = None
        return prepared.outer_step, prepared.uploaded_steps

    def _header_of(self, own_upload: Path | None) -> Header | None:
        """Return the header of our upload, or None if there is no complete file of it."""
        try:
            return UpdateFile.reopen(own_upload, self._schema).header if own_upload else None
        except (ValueError, OSError):
            return None

    def _next_start(self, update: Update) -> list[Tensor]:
        """Read this rank's rows of the weights that ``update`` leads to."""
        if not self._stream.layout.on_node_0:
            return [shard.empty_rows() for shard in self._shards]
        if update.whole:
            try:
                with safe_open(update.path, "pt") as file:
                    return [read_rows(file, s.name, s) for s in self._shards]
            except SafetensorError as error:
                raise ValueError(f"{update.path.name} cannot be read: {error}") from None
        opened = UpdateFile.reopen(update.path, self._schema)
        each = enumerate(self.epoch_start or [])
        return [start - self._decode(opened, index) for index, start in each]

    def _rest(self, written: Sequence[Tensor] | None, own_upload: Path | None) -> list[Tensor]:
        """Return this rank's rows of the intended upload minus what its file contains."""
        if own_upload is None or not self._stream.layout.on_node_0:
            return [shard.empty_rows() for shard in self._shards]
        opened = UpdateFile.reopen(own_upload, self._schema)
        moved = _Movement(self.epoch_start or [], written or [], self.residual, self.rule)
        indices = range(len(self._shards))
        return [moved.rows(index).sub_(self._decode(opened, index)) for index in indices]

    def _decode(self, file: UpdateFile, index: int) -> Tensor:
        """Return this rank's rows of one parameter in ``file``."""
        shard = self._shards[index]
        if index in self._vectors:  # the parameter is one row of the file
            return file.rows(index, 0, 1).view(shard.shape)[shard.start : shard.stop]
        return file.rows(index, shard.start, shard.stop).view(-1, *shard.shape[1:])

    def _digest(self, weights: Sequence[Tensor]) -> str:
        """Return the digest of whole weights, given this rank's rows of them. Collective."""
        wholes = self._stream.whole([weights[index].flatten() for index in self._vectors])
        vectors = dict(zip(self._vectors, wholes, strict=True))
        # Fail on all ranks alike: a rank that cannot start a thread must not leave the others in
        # the next collective.
        digests = self._stream.run_on_all(
            lambda: digest_rows_of(
                vectors[index].view(1, -1) if index in vectors else rows.flatten(1)
                for index, rows in enumerate(weights)
            )
        )
        of_ranks = self._stream.of_copy(digests)
        return digest_weights(
            digests[index] if index in vectors else b"".join(each[index] for each in of_ranks)
            for index in range(len(digests))
        )


def _parts(path: Path) -> Path:
    """Return the folder in which the ranks write the file that ends up at ``path``."""
    return path.with_suffix(".parts")


def _ready_file(parts: Path, rank: int) -> Path:
    return parts / f"rank-{rank}.ready.json"


def _make_room(path: Path, size: int) -> None:
    """Create the file for ``path`` and reserve its full size. Raises OSError, as on a full disk."""
    for left in path.parent.glob("*.parts"):  # left by a process that was killed
        shutil.rmtree(left)
    parts = _parts(path)
    parts.mkdir(parents=True)
    try:
        with open(parts / path.name, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        shutil.rmtree(parts, ignore_errors=True)
        raise
