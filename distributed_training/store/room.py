"""Say whether files fit on the disk, in words for an operator."""

from __future__ import annotations

from pathlib import Path

from distributed_training.common.files import free_bytes
from distributed_training.common.memory import DISK_RESERVE


def describe_shortage(folder: Path, needed: int) -> str | None:
    """Return None if ``needed`` bytes fit and ``DISK_RESERVE`` stays free, else how many are free.

    Raises OSError.
    """
    free = free_bytes(folder)
    if free is None or free >= needed + DISK_RESERVE:
        return None
    return (
        f"needs {size_text(needed)} in {folder}, only {size_text(free)} are free "
        f"({size_text(DISK_RESERVE)} stay in reserve)"
    )


def describe_full_disk(folder: Path, needed: int) -> str | None:
    """Return None if an upload of ``needed`` bytes fits, else a line with the reason.

    ``folder`` need not exist yet.
    """
    place = folder
    try:
        # Before the first upload there is no such folder, and disk_usage() would raise.
        while not place.exists() and place != place.parent:
            place = place.parent
        shortage = describe_shortage(place, needed)
    except OSError as error:  # a network disk that is away
        return (
            f"UPLOAD BLOCKED: the disk of {folder} does not answer ({error.strerror or error}), so "
            "no upload can be written. Training continues without uploads: bring the disk back "
            "or move --neuron.run_folder"
        )
    if shortage is None:
        return None
    return (
        f"UPLOAD BLOCKED: an upload {shortage}. Training continues without uploads: free the "
        "disk or move --neuron.run_folder"
    )


def size_text(count: float) -> str:
    """Return a number of bytes as an operator reads it: ``12.4 GB``, ``0.3 MB``."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
