"""Check a snapshot folder before its upload, and delete old ones after it.

A validator resets the score of a miner whose upload it cannot use, and a reset ranks below a
harmful gradient. So no upload is better than a bad one. A snapshot is complete, of one revision and
finite, and its block list is not empty, or it is refused.

The writers name in ``rank-r.done.json`` the tensors that are not finite, so nothing is read twice.
The uploader is a small process that runs during training: importing torch or numpy there would cost
more memory than everything else in it.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints, TypeAdapter

from distributed_training.common.files import free_bytes
from distributed_training.common.memory import DISK_RESERVE
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import (
    MAX_CONFIG_BYTES,
    ConfigExtras,
    MetadataError,
    parse_config,
)
from distributed_training.protocol.types import Revision

from .errors import IntegrityError, StoreError
from .uplink import Uplink

_MOST_DONE_BYTES = 1024 * 1024
NO_BLOCKS = (
    "⚠️  UPLOAD BLOCKED: the block list is empty. Validators will reject this! "
    "Waiting until a block was trained since the last upload"
)


@dataclass(frozen=True)
class FileRecord:
    """A file as the rank that wrote it describes it in ``rank-r.done.json``."""

    name: Annotated[str, StringConstraints(pattern=r"^[^./][^/]*$")]  # no path
    size: int
    not_finite: str | None  # what in it holds NaN or Inf


@dataclass(frozen=True)
class _Done:
    files: tuple[FileRecord, ...] = ()
    error: str | None = None  # of a rank that could not write them


_DONE = TypeAdapter(_Done)


def wait_complete(
    folder: Path,
    world_size: int,
    *,
    content: keys.Parts = "all",
    timeout: timedelta,
    uplink: Uplink,
    give_up: Callable[[], bool] = lambda: False,
) -> dict[str, FileRecord]:
    """Wait for all ranks' records; return the protocol's files, each exactly once.

    ``content``: what there must be at least. ``timeout`` covers the wait for all ranks; ``give_up``
    ends it early, when a newer snapshot waits. Raises IntegrityError, StoppedError.
    """
    # Not by the uplink's clock: ranks write on while a round pauses the uplink.
    deadline = time.monotonic() + timeout.total_seconds()
    files: dict[str, FileRecord] = {}
    for rank in range(world_size):
        path = folder / f"rank-{rank}.done.json"
        while not path.exists():
            if time.monotonic() > deadline:
                raise IntegrityError(
                    f"rank {rank} did not finish its files of the snapshot within "
                    f"{timeout.total_seconds():.0f} s, so it is not uploaded: see that rank's log"
                )
            if give_up():
                raise IntegrityError(f"superseded by a newer snapshot before rank {rank} finished")
            uplink.sleep(0.1)
        try:
            done = _DONE.validate_json(path.read_bytes()[:_MOST_DONE_BYTES])
        except ValueError:  # an earlier version named no tensors: are they finite?
            raise IntegrityError(
                f"{path.name} of the snapshot cannot be read: the next snapshot takes its place"
            ) from None
        if done.error is not None:
            raise IntegrityError(
                f"rank-{rank} could not write its files of the snapshot: {done.error}"
            )
        files |= {record.name: record for record in done.files}
    missing = [name for name in keys.data_files(world_size, content) if name not in files]
    if missing:
        raise IntegrityError(f"the snapshot lacks {', '.join(missing)}, so it is not uploaded")
    return files


def check_files(folder: Path, files: Mapping[str, FileRecord], revision: Revision) -> None:
    """Check sizes, the revision, and the rules of an upload.

    The ranks looked for NaN and Inf while the tensors were in their memory, and each part of an
    upload is held against the store's MD5: so no tensor is read here. Raises IntegrityError for a
    snapshot that is not what its writers left, StoreError for one that validators would reject.
    """
    for record in files.values():
        path = folder / record.name
        if not path.is_file() or path.stat().st_size != record.size:
            raise IntegrityError(f"{record.name} of the snapshot is missing or of another size")
    extras = read_config(folder / keys.CONFIG)
    if extras.inner_step != revision.inner_step:
        raise IntegrityError(
            f"config.json is of inner step {extras.inner_step}, the snapshot of {revision.tag}"
        )
    for record in files.values():
        if record.not_finite:
            raise StoreError(
                f"⚠️  UPLOAD BLOCKED: NaN or Inf in {record.not_finite!r:.80} of {record.name}. "
                "Validators will reject this! If it comes again, go back to a checkpoint, or ask "
                "the network's founder for a lower training.learning_rate"
            )
    if not extras.block_list:
        raise StoreError(NO_BLOCKS)


def read_config(path: Path) -> ConfigExtras:
    """Read the extras of ``config.json``. Raises IntegrityError."""
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise IntegrityError(f"config.json has {path.stat().st_size} bytes, far too many")
    try:
        return parse_config(path.read_bytes())[1]
    except MetadataError as error:
        raise IntegrityError(str(error)) from None


def preview_warning(preview_delta: float | None) -> str | None:
    """Describe a gradient that would not help whoever applies it, or return None.

    ``preview_delta``: loss after minus before applying the gradient's own decode to held-out data,
    in nats; None if not measured.
    """
    # Not ``>= 0`` below: NaN, the worst of all, must be warned of too.
    if preview_delta is None or preview_delta < 0:
        return None
    change = (
        f"changes the loss by {preview_delta:+.4f}"
        if math.isfinite(preview_delta)
        else ("makes the loss NaN or Inf")
    )
    return (
        f"⚠️  UPLOAD DOUBTFUL: this gradient, decoded as a validator would, {change} on held "
        "batches instead of lowering it"
    )


# --- the disk -------------------------------------------------------------------------------------


def describe_shortage(folder: Path, needed: int, *, older: int = 0) -> str | None:
    """Return None if ``needed`` bytes fit and ``DISK_RESERVE`` stays free, else how many are free.

    ``older``: bytes there that can be deleted for them. Raises OSError.
    """
    free = free_bytes(folder)
    if free is None or free + older >= needed + DISK_RESERVE:
        return None
    return (
        f"needs {size_text(needed)} in {folder}, only {size_text(free + older)} are free"
        f"{' without the older states' if older else ''} "
        f"({size_text(DISK_RESERVE)} stay in reserve)"
    )


def describe_full_disk(folder: Path, needed: int) -> str | None:
    """Return None if a snapshot of ``needed`` bytes fits, else a line with the reason.

    ``folder`` need not exist yet.
    """
    place = folder
    try:
        # Before the first snapshot there is no such folder, and disk_usage() would raise.
        while not place.exists() and place != place.parent:
            place = place.parent
        shortage = describe_shortage(place, needed)
    except OSError as error:  # a network disk that is away
        return (
            f"UPLOAD BLOCKED: the disk of {folder} does not answer ({error.strerror or error}), so "
            "no snapshot can be written. Training continues without uploads: bring the disk back "
            "or move --neuron.run_folder"
        )
    if shortage is None:
        return None
    return (
        f"UPLOAD BLOCKED: a snapshot {shortage}. Training continues without uploads: free the "
        "disk or move --neuron.run_folder"
    )


def size_text(count: float) -> str:
    """Return a number of bytes as an operator reads it: ``12.4 GB``, ``0.3 MB``."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def prune_snapshots(
    folder: Path,
    *,
    before: Path | None = None,
    unused_for: timedelta | None = None,
    spare: Collection[Path] = (),
) -> None:
    """Delete local snapshots (``<outer>.<inner>.<block>``) that nothing will upload.

    Those taken at an earlier chain block than the snapshot ``before``, and those in which nothing
    was written for ``unused_for``: left by a miner that was killed, or by a disk that was full.
    """
    newest = None if before is None else _chain_block(before)
    spared = {path.resolve() for path in spare}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        block = _chain_block(path)
        if block is None or not path.is_dir() or path.resolve() in spared:
            continue
        # Earlier, not other: a snapshot of a later block may be under way in the ranks.
        old = newest is not None and block < newest
        if not old and unused_for is not None:
            with contextlib.suppress(OSError):  # it is being deleted
                written = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
                old = time.time() - written > unused_for.total_seconds()
        if old:
            shutil.rmtree(path, ignore_errors=True)


def _chain_block(snapshot: Path) -> int | None:
    """Return the chain's block of a snapshot; None if the folder is not named as one.

    A miner that was killed goes back to lower steps, never to lower blocks.
    """
    parts = snapshot.name.split(".")
    return int(parts[2]) if len(parts) == 3 and all(p.isdigit() for p in parts) else None
