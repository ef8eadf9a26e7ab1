"""Watches the global bucket from a thread of rank 0: which epoch is it in, and fetch it when told.

It only ever posts events; a bucket that does not answer, or a state that is refused, never stops
training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from distributed_training.miner.drift import TOLERANCE, Rows
from distributed_training.miner.state import (
    Event,
    GlobalEpochSeen,
    GlobalFetched,
    GlobalFetchFailed,
    WeightsCompared,
)

log = logging.getLogger(__name__)


class GlobalUnavailableError(RuntimeError):
    """The global state cannot be had now; the message says why."""


class GlobalReader(Protocol):
    """The global bucket, as the watch needs it. Both raise :class:`GlobalUnavailableError`."""

    def outer_step(self) -> int: ...
    def fetch(self, outer_step: int) -> Path:
        """Download the state of ``outer_step``, check it, return its folder."""

    def drift(self, outer_step: int, rows: Sequence[Rows]) -> float:
        """See :func:`~.drift.drift`."""


class GlobalWatch:
    """Compares and fetches in a thread of its own.

    ``interval``: between two looks at the bucket's root metadata. ``retry``: first wait after a
    failed fetch, doubled up to ``attempts`` times before the fetch is given up with an event.
    ``epoch_start``: our outer step and what its global weights are compared with; called in the
    watch's thread.
    """

    def __init__(
        self,
        *,
        reader: GlobalReader,
        post: Callable[[Event], None],
        interval: timedelta,
        retry: timedelta = timedelta(seconds=5),
        attempts: int = 3,
        epoch_start: Callable[[], tuple[int, Sequence[Rows]]] = lambda: (0, ()),
    ) -> None:
        self._reader = reader
        self._post = post
        self._interval = interval.total_seconds()
        self._retry = retry.total_seconds()
        self._attempts = attempts
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._target: int | None = None
        self._compare_weights: int | None = None
        self._epoch_start = epoch_start
        self._unavailable_since: float | None = None
        self._seen: int | None = None
        self._drift_unknown = False  # told already
        self._thread = threading.Thread(target=self._run, name="global-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def compare_soon(self) -> None:
        self._wake.set()

    def fetch(self, outer_step: int) -> None:
        """Fetch that epoch in the background; answered by GlobalFetched or GlobalFetchFailed."""
        self._target = outer_step
        self._wake.set()

    def compare_weights(self, outer_step: int) -> None:
        """Answered by WeightsCompared, unless the bucket cannot be read."""
        self._compare_weights = outer_step
        self._wake.set()

    def close(self, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Waits at most ``timeout`` for a request in flight; the thread is a daemon."""
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout.total_seconds())

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(self._interval)
            self._wake.clear()
            if self._closed.is_set():
                return
            target, self._target = self._target, None
            try:
                self._look(target)
            except Exception as error:  # this thread gone, a load would be waited for for ever
                log.exception("The watch of the global bucket failed in a way it should not")
                if target is not None:
                    self._post(GlobalFetchFailed(repr(error), time.monotonic()))

    def _look(self, target: int | None) -> None:
        if target is not None:
            self._compare_weights = None  # with an epoch's start that is about to be another
            self._fetch(target)
            return
        self._compare()
        compare, self._compare_weights = self._compare_weights, None
        if compare is not None:
            self._look_for_drift(compare)

    def _look_for_drift(self, outer_step: int) -> None:
        ours, rows = self._epoch_start()
        if not rows or ours != outer_step:
            return
        try:
            found = self._reader.drift(outer_step, rows)
        except GlobalUnavailableError as error:
            if self._compare_weights is None and self._seen in (None, outer_step):
                self._compare_weights = outer_step  # at the next look
            if not self._drift_unknown:
                log.warning("The global weights could not be compared with ours yet: %s", error)
            self._drift_unknown = True
            return
        self._drift_unknown = False
        if self._epoch_start()[0] != outer_step:  # a round was faster
            return
        same = found <= TOLERANCE
        if not same:
            log.warning(
                "Our weights of outer step %d are not the global ones (difference %.1e): the "
                "global state is taken as the epoch's start, what was trained since is kept",
                outer_step,
                found,
            )
        self._post(WeightsCompared(outer_step, same))

    def _compare(self) -> None:
        try:
            seen = self._reader.outer_step()
        except GlobalUnavailableError as error:
            if self._unavailable_since is None:
                self._unavailable_since = time.monotonic()
                log.warning("The global bucket does not answer (%s). Training goes on.", error)
            return
        if self._unavailable_since is not None:
            log.info(
                "The global bucket answers again after %.0f s",
                time.monotonic() - self._unavailable_since,
            )
            self._unavailable_since = None
        self._seen = seen
        self._post(GlobalEpochSeen(seen, time.monotonic()))

    def _fetch(self, outer_step: int) -> None:
        for attempt in range(self._attempts):
            try:
                folder = self._reader.fetch(outer_step)
            except GlobalUnavailableError as error:
                detail = str(error)
                last = attempt + 1 == self._attempts
                if not last and self._closed.wait(self._retry * 2**attempt):
                    return
            else:
                self._post(GlobalFetched(outer_step, folder))
                return
        self._post(GlobalFetchFailed(detail, time.monotonic()))
