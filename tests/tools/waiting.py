"""The one way in which tests wait: for a state, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest


def wait_for(
    condition: Callable[[], Any], what: str = "it", seconds: float = 120, every: float = 0.02
) -> Any:
    """The first true value of ``condition()``; fails naming ``what`` when ``seconds`` are over.

    The deadline is generous: it only decides how long a broken test takes. Looks that take long
    (a browser's, one through /proc) come less often: what is waited for needs the cores.
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
