"""Retries with jittered exponential back-off and one deadline.

Outside botocore on purpose: its retry quota is shared by all threads of a client, so a five-second
outage met by several parts at once exhausts it and ends the upload.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from distributed_training.common.backoff import Backoff

from .errors import DeadlineError, StoreError
from .s3 import S3ObjectStore
from .uplink import Uplink

Result = TypeVar("Result")

FIRST_WAIT = timedelta(seconds=0.25)
LONGEST_WAIT = timedelta(seconds=15)


def patient(
    store: S3ObjectStore,
    *,
    until: float = math.inf,
    each: timedelta = timedelta.max,
    uplink: Uplink | None = None,
) -> S3ObjectStore:
    """``store`` with each operation tried again until it succeeds or fails for good.

    ``until``: ``time.monotonic()`` at which the last operation must be done; ``each``: how long one
    may take. Only errors marked retryable are tried again; DeadlineError holds the last of them.
    Time spent paused does not count as an attempt but does count against the deadline.
    """
    return cast(S3ObjectStore, _Patient(store, until, each, uplink or Uplink()))


class _Patient:
    def __init__(self, store: S3ObjectStore, until: float, each: timedelta, uplink: Uplink) -> None:
        self._store = store
        self._until = until
        self._each = each
        self._uplink = uplink

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def operation(*arguments: Any, **options: Any) -> Any:
            deadline = min(self._until, deadline_in(self._each))
            return _retrying(lambda: found(*arguments, **options), deadline, self._uplink)

        return operation


def _retrying(attempt: Callable[[], Result], deadline: float, uplink: Uplink) -> Result:
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
                raise DeadlineError(f"{error}: no success in the time allowed") from None
        uplink.sleep(pause)


def deadline_in(duration: timedelta) -> float:
    return time.monotonic() + duration.total_seconds()
