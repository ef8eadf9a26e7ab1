"""Retries with jittered exponential back-off and one deadline.

Outside botocore on purpose: its retry quota is shared by all threads of a client, so a five-second
outage met by several parts at once exhausts it and ends the upload.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from .errors import DeadlineError, StoreError
from .uplink import Uplink

Result = TypeVar("Result")

FIRST_WAIT = 0.25
LONGEST_WAIT = 15.0


def retrying(
    what: str, attempt: Callable[[], Result], *, deadline: float, uplink: Uplink | None = None
) -> Result:
    """``attempt()`` until it succeeds, fails for good, or ``deadline`` (time.monotonic()) is over.

    Only errors marked retryable are tried again. Raises DeadlineError naming ``what`` and the last
    error. Time spent paused does not count as an attempt but does count against the deadline.
    """
    uplink = uplink or Uplink()
    wait = FIRST_WAIT
    while True:
        uplink.wait_open()
        try:
            return attempt()
        except StoreError as error:
            if not error.retryable:
                raise
            if uplink.paused or uplink.stopped:
                continue
            pause = random.uniform(wait / 2, wait)
            if time.monotonic() + pause > deadline:
                raise DeadlineError(f"{what}: no success in the time allowed ({error})") from None
        uplink.sleep(pause)
        wait = min(wait * 2, LONGEST_WAIT)


def deadline_in(duration: timedelta) -> float:
    return time.monotonic() + duration.total_seconds()
