"""A snapshot folder as the uploader sees it: complete or not, sound or not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from distributed_training.common.files import sha256_of
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import (
    MAX_CONFIG_BYTES,
    ConfigExtras,
    MetadataError,
    parse_config,
)
from distributed_training.protocol.types import Revision

from .contents import (
    PtFile,
    check_gradients,
    safetensors_entries,
    safetensors_not_finite,
)
from .errors import IntegrityError
from .uplink import Uplink


@dataclass(frozen=True)
class FileRecord:
    """A file as the rank that wrote it describes it in ``rank-r.done.json``."""

    name: str
    size: int
    sha256: str


def wait_complete(
    folder: Path,
    world_size: int,
    *,
    timeout: timedelta,
    uplink: Uplink,
    give_up: Callable[[], bool] = lambda: False,
) -> dict[str, FileRecord]:
    """All ranks' records once the last is there; the protocol's files, each exactly once.

    ``timeout`` covers the wait for all ranks; ``give_up`` ends it early, when a newer snapshot
    waits. Raises IntegrityError, StoppedError.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    files: dict[str, FileRecord] = {}
    for rank in range(world_size):
        path = folder / f"rank-{rank}.done.json"
        while not path.exists():
            if time.monotonic() > deadline:
                raise IntegrityError(
                    f"rank {rank} did not finish its files of the snapshot within "
                    f"{timeout.total_seconds():.0f} s, so it is not published: see that rank's log"
                )
            if give_up():
                raise IntegrityError(f"superseded by a newer snapshot before rank {rank} finished")
            uplink.sleep(0.1)
        for record in _read_done(path, rank, world_size):
            if record.name in files:
                raise IntegrityError(f"two ranks claim {record.name} of the snapshot")
            files[record.name] = record
    missing = [name for name in keys.data_files(world_size) if name not in files]
    if missing:
        raise IntegrityError(f"the snapshot lacks {', '.join(missing)}, so it is not published")
    return files


def _read_done(path: Path, rank: int, world_size: int) -> list[FileRecord]:
    try:
        raw = json.loads(path.read_text())
        records = [FileRecord(f["name"], int(f["size"]), f["sha256"]) for f in raw["files"]]
        if (raw["rank"], raw["world_size"]) != (rank, world_size):
            raise ValueError(f"it is of rank {raw['rank']} of {raw['world_size']}")
        if any("/" in r.name or r.name.startswith(".") for r in records):
            raise ValueError("a file's name is a path")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path.name} of the snapshot is unreadable: {error}") from None
    return records


def check_files(
    folder: Path, files: Mapping[str, FileRecord], revision: Revision
) -> tuple[ConfigExtras, str | None]:
    """Sizes, digests, schema; then ``(config.json's extras, what holds NaN or Inf)``.

    Raises IntegrityError for a snapshot that is not what its writers left.
    """
    for record in files.values():
        path = folder / record.name
        if not path.is_file() or path.stat().st_size != record.size:
            raise IntegrityError(f"{record.name} of the snapshot is missing or of another size")
        if sha256_of(path) != record.sha256:
            raise IntegrityError(f"{record.name} of the snapshot changed after it was written")
    extras = read_config(folder / keys.CONFIG)
    if extras.inner_step != revision.inner_step:
        raise IntegrityError(
            f"config.json is of inner step {extras.inner_step}, the snapshot of {revision.tag}"
        )
    model = folder / keys.MODEL
    shapes = {name: entry.shape for name, entry in safetensors_entries(model).items()}
    gradients = check_gradients(folder / keys.GRADIENTS, shapes)
    place = gradients.content["metadata"]
    if (place["outer_step"], place["inner_step"]) != (revision.outer_step, revision.inner_step):
        raise IntegrityError(
            f"gradients.pt is of step {place['outer_step']}.{place['inner_step']}, the snapshot "
            f"of {revision.tag}"
        )
    bad = safetensors_not_finite(model) or gradients.not_finite()
    for name in files:
        if bad is None and keys.parse_inner_optimizer(name):
            bad = PtFile(folder / name).not_finite()
    return extras, bad


def read_config(path: Path) -> ConfigExtras:
    """Raises IntegrityError."""
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise IntegrityError(f"config.json has {path.stat().st_size} bytes, far too many")
    try:
        return parse_config(path.read_bytes())[1]
    except MetadataError as error:
        raise IntegrityError(str(error)) from None
