"""Durations and sizes as operators write them. Standard library only."""

from __future__ import annotations

import re
from datetime import timedelta

_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", 1)}


def parse_duration(text: str) -> timedelta:
    """``90``, ``90s``, ``15m``, ``2h``, ``1d``; without a unit: seconds. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s|m|h|d)?\s*", text)
    if match is None:
        raise ValueError("a duration such as 90, 90s, 15m or 2h")
    try:
        return timedelta(seconds=float(match[1]) * _SECONDS[match[2] or ""])
    except OverflowError:
        raise ValueError("a duration that a clock can hold") from None


def parse_bytes(text: str) -> int:
    """``2147483648``, ``2GiB``, ``500 MB``; decimal and binary units differ. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]I?)?B?\s*", text.upper())
    if match is None:
        raise ValueError("a size such as 2147483648, 2GiB or 500MB")
    try:
        return int(float(match[1]) * _BYTES[match[2] or ""])
    except OverflowError:
        raise ValueError("a size that a disk can hold") from None
