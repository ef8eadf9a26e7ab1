"""The one way in which tests wait: for a state, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


def wait_for(
    condition: Callable[[], object], what: str, seconds: float = 30, every: float = 0.02
) -> None:
    """Return once ``condition()`` holds; fail naming ``what`` when it does not within ``seconds``.

    The deadline is generous: it only decides how long a broken test takes.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what}", pytrace=True)
        time.sleep(every)
