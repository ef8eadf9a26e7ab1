"""Wait in tests for a state, with a deadline; tests wait in no other way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest


def wait_for(
    condition: Callable[[], Any], what: str = "it", seconds: float = 120, every: float = 0.02
) -> Any:
    """Return the first true value of ``condition()``, or fail the test after ``seconds``.

    ``what``: what the failure says was awaited. The deadline is generous, because it only decides
    how long a broken test takes. Slow conditions (of a browser, or of /proc) are checked less
    often, since they take time from what is awaited.
    """
    began = time.monotonic()
    deadline = began + seconds
    while not (value := condition()):
        now = time.monotonic()
        if now > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what}", pytrace=True)
        time.sleep(max(every, min(4 * (now - began), 0.25)))
        began = time.monotonic()
    return value
