"""Retries with jittered exponential back-off and one deadline.

Outside botocore on purpose: its retry quota is shared by all threads of a client, so a five-second
outage met by several parts at once exhausts it and ends the upload.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from distributed_training.common.backoff import Backoff

from .errors import DeadlineError, StoreError
from .uplink import Uplink

Result = TypeVar("Result")

FIRST_WAIT = timedelta(seconds=0.25)
LONGEST_WAIT = timedelta(seconds=15)


def retrying(
    what: str, attempt: Callable[[], Result], *, deadline: float, uplink: Uplink | None = None
) -> Result:
    """``attempt()`` until it succeeds, fails for good, or ``deadline`` (time.monotonic()) is over.

    Only errors marked retryable are tried again. Raises DeadlineError naming ``what`` and the last
    error. Time spent paused does not count as an attempt but does count against the deadline.
    """
    uplink = uplink or Uplink()
    waits = Backoff(first=FIRST_WAIT, longest=LONGEST_WAIT)
    while True:
        uplink.wait_open()
        try:
            return attempt()
        except StoreError as error:
            if not error.retryable:
                raise
            if uplink.paused or uplink.stopped:
                continue
            pause = waits.failed().total_seconds()
            if time.monotonic() + pause > deadline:
                raise DeadlineError(f"{what}: no success in the time allowed ({error})") from None
        uplink.sleep(pause)


def deadline_in(duration: timedelta) -> float:
    return time.monotonic() + duration.total_seconds()
