"""A snapshot folder as the uploader reads it: complete, of one revision and finite, or refused.

The writers name in ``rank-r.done.json`` what is not finite, so nothing is read twice. The uploader
is a small process beside training, and importing torch or numpy there would cost more memory than
all the rest of it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints, TypeAdapter

from distributed_training.protocol import keys
from distributed_training.protocol.metadata import (
    MAX_CONFIG_BYTES,
    ConfigExtras,
    MetadataError,
    parse_config,
)
from distributed_training.protocol.types import Revision

from .s3 import IntegrityError, Uplink

_MOST_DONE_BYTES = 1024 * 1024


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
    timeout: timedelta,
    uplink: Uplink,
    give_up: Callable[[], bool] = lambda: False,
) -> dict[str, FileRecord]:
    """Wait for all ranks' records; return the protocol's files, each exactly once.

    ``timeout`` covers the wait for all ranks; ``give_up`` ends it early, when a newer snapshot
    waits. Raises IntegrityError, StoppedError.
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
        files |= {record.name: record for record in _read_done(path)}
    missing = [name for name in keys.data_files(world_size) if name not in files]
    if missing:
        raise IntegrityError(f"the snapshot lacks {', '.join(missing)}, so it is not uploaded")
    return files


def _read_done(path: Path) -> tuple[FileRecord, ...]:
    try:
        done = _DONE.validate_json(path.read_bytes()[:_MOST_DONE_BYTES])
    except ValueError:  # an earlier version named no tensors: nobody knows whether they are finite
        raise IntegrityError(
            f"{path.name} of the snapshot cannot be read: the next snapshot takes its place"
        ) from None
    if done.error is not None:
        rank = path.name.partition(".")[0]
        raise IntegrityError(f"{rank} could not write its files of the snapshot: {done.error}")
    return done.files


def check_files(
    folder: Path, files: Mapping[str, FileRecord], revision: Revision
) -> tuple[ConfigExtras, str | None]:
    """Check sizes; return ``(config.json's extras, what holds NaN or Inf)``.

    The ranks looked for NaN and Inf while the tensors were in their memory, and each part of an
    upload is held against the store's MD5: so no tensor is read here. Raises IntegrityError for a
    snapshot that is not what its writers left.
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
    bad = (f"{r.not_finite!r:.80} of {r.name}" for r in files.values() if r.not_finite)
    return extras, next(bad, None)


def read_config(path: Path) -> ConfigExtras:
    """Read the extras of ``config.json``. Raises IntegrityError."""
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise IntegrityError(f"config.json has {path.stat().st_size} bytes, far too many")
    try:
        return parse_config(path.read_bytes())[1]
    except MetadataError as error:
        raise IntegrityError(str(error)) from None


# --- old ones -------------------------------------------------------------------------------------


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
        if old or (unused_for is not None and _unused(path) > unused_for.total_seconds()):
            shutil.rmtree(path, ignore_errors=True)


def _chain_block(snapshot: Path) -> int | None:
    """Return the chain's block of a snapshot; None if the folder is not named as one.

    A miner that was killed goes back to lower steps, never to lower blocks.
    """
    parts = snapshot.name.split(".")
    return int(parts[2]) if len(parts) == 3 and all(p.isdigit() for p in parts) else None


def _unused(folder: Path) -> float:
    """Return the seconds since the last write in ``folder``; 0 if it is being deleted."""
    try:
        written = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return 0.0
    return time.time() - written
