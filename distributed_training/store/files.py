"""Durable small files, and room on the disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

_CHUNK = 4 * 1024 * 1024
DISK_RESERVE = 1_000_000_000  # bytes that stay free whatever is written


def write_durably(path: Path, data: bytes) -> None:
    """Temporary name, sync, rename, sync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename is None:  # write and sync do not say where
            error.filename = str(path)
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    write_durably(path, json.dumps(content, indent=2, sort_keys=True).encode())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def disk_allows(folder: Path, needed: int, *, reserve: int = DISK_RESERVE) -> str | None:
    """None if ``needed`` bytes fit beside ``reserve``, else the line that says why not.

    ``folder`` need not exist yet.
    """
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free >= needed + reserve:
        return None
    return (
        f"UPLOAD BLOCKED: a snapshot needs {_gb(needed)} in {folder}, only {_gb(free)} are free "
        f"({_gb(reserve)} stay in reserve). Training goes on unpublished: free the disk or "
        "move --neuron.run_folder"
    )


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_problem(error: OSError) -> str:
    """One line: what the disk said, where, and what to do about a full one."""
    line = f"{error.filename or 'the disk'}: {error.strerror or error}"
    if not is_full(error):
        return line
    return (
        f"{line}. This revision is not published and training goes on: free the disk or "
        "move --neuron.run_folder"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
