"""A wall clock that tests can set: imported before the product, which may keep ``time.time``."""

from __future__ import annotations

import time

offset = 0.0  # seconds
true = time.time


def _set() -> float:
    return true() + offset


time.time = _set
