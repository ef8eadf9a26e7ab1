"""Rules that an upload must pass before anything is sent.

A validator resets the score of a miner whose upload it cannot use, and a reset ranks below a
harmful gradient. So no upload is better than a bad one.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

DISK_RESERVE = 1_000_000_000  # bytes that stay free whatever is written


def upload_gate(
    *,
    blocks: Sequence[int],
    not_finite: str | None = None,
    preview_delta: float | None = None,
    block_on_preview: bool = False,
) -> str | None:
    """Return the line that forbids this upload with its reason, or None.

    ``blocks``: the block list to be uploaded. ``not_finite``: the name of a part that holds NaN or
    Inf. ``preview_delta``: loss after minus before applying the gradient's own decode to held-out
    data, in nats; None if not measured.
    """
    if not_finite:
        return (
            f"⚠️  UPLOAD BLOCKED: NaN or Inf in {not_finite}. Validators will reject this! "
            "If it comes again, lower --neuron.learning_rate or go back to a checkpoint"
        )
    if not blocks:
        return (
            "⚠️  UPLOAD BLOCKED: the block list is empty. Validators will reject this! "
            "Waiting until a block was trained since the last upload"
        )
    if block_on_preview:
        return preview_warning(preview_delta)
    return None


def preview_warning(preview_delta: float | None) -> str | None:
    """Word a gradient that would not help whoever applies it, or return None."""
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
        "batches instead of lowering it; with --neuron.block_on_preview it is not uploaded"
    )


def disk_allows(folder: Path, needed: int) -> str | None:
    """Return None if ``needed`` bytes fit beside ``DISK_RESERVE``, else a line with the reason.

    ``folder`` need not exist yet.
    """
    place = folder
    try:
        # Before the first snapshot there is no such folder, and disk_usage() would raise.
        while not place.exists() and place != place.parent:
            place = place.parent
        free = shutil.disk_usage(place).free
    except OSError as error:  # a network disk that is away
        return (
            f"UPLOAD BLOCKED: the disk of {folder} does not answer ({error.strerror or error}), so "
            "no snapshot can be written. Training goes on without uploads: bring the disk back or "
            "move --neuron.run_folder"
        )
    if free >= needed + DISK_RESERVE:
        return None
    return (
        f"UPLOAD BLOCKED: a snapshot needs {size_text(needed)} in {folder}, only "
        f"{size_text(free)} are free ({size_text(DISK_RESERVE)} stay in reserve). Training goes on "
        "unpublished: free the disk or move --neuron.run_folder"
    )


def size_text(count: float) -> str:
    """Return a number of bytes as an operator reads it: ``12.4 GB``, ``0.3 MB``."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
