"""Watches the global bucket from a thread of rank 0: which epoch is it in, and fetch it when told.

It only ever posts events; a bucket that does not answer, or a state that is refused, never stops
training.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from distributed_training.common.backoff import doubling

from . import events as ev
from .drift import TOLERANCE, Rows
from .global_bucket import GlobalBucket, GlobalUnavailableError

log = logging.getLogger(__name__)

_ATTEMPTS = 3  # at a fetch, before it is given up with an event
_SHORT = 30.0  # seconds: a fetch that failed later has used its time, and what waits for it goes on
_LONGEST_WAIT = timedelta(minutes=1)  # between two of them


class GlobalEpoch:
    """Compares and fetches in a thread of its own.

    ``interval``: between two looks at the bucket's root metadata. ``retry``: first wait after a
    failed fetch, doubled by each further one. ``epoch_start``: our outer step and what its global
    weights are compared with; called in this thread.
    """

    def __init__(
        self,
        *,
        bucket: GlobalBucket,
        post: Callable[[ev.Event], None],
        interval: timedelta,
        epoch_start: Callable[[], tuple[int, Sequence[Rows]]],
        retry: timedelta = timedelta(seconds=5),
    ) -> None:
        self._bucket = bucket
        self._post = post
        self._interval = interval.total_seconds()
        self._epoch_start = epoch_start
        self._retry = retry
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._target: int | None = None  # to fetch
        self._fetched: Path | None = None
        self._compare_weights: int | None = None  # the outer step to compare
        self._unavailable_since: float | None = None
        self._seen: int | None = None
        self._drift_unknown = False  # told already
        self._thread = threading.Thread(target=self._run, name="global-epoch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def compare_soon(self) -> None:
        """Answered by GlobalEpochSeen, unless the bucket cannot be read."""
        self._wake.set()

    def fetch(self, outer_step: int) -> None:
        """Fetch that epoch in the background; answered by GlobalFetched or GlobalFetchFailed."""
        self._target = outer_step
        self._wake.set()

    def discard_fetched(self) -> None:
        """What was fetched last does not fit this model: what comes next is fetched anew."""
        if self._fetched is not None:
            shutil.rmtree(self._fetched, ignore_errors=True)

    def compare_weights(self, outer_step: int) -> None:
        """Answered by WeightsCompared, unless the bucket cannot be read."""
        self._compare_weights = outer_step
        self._wake.set()

    def close(self, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Ends a download; waits at most ``timeout`` for a request in flight."""
        self._closed.set()
        self._wake.set()
        self._bucket.stop()
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
                log.exception("Unexpected error while reading the global bucket; please report it")
                if target is not None:
                    self._post(ev.GlobalFetchFailed(repr(error), time.monotonic()))

    def _look(self, target: int | None) -> None:
        if target is not None:
            self._compare_weights = None  # with an epoch's start that is about to be another
            self._fetch(target)
            return
        self._compare_epochs()
        compare, self._compare_weights = self._compare_weights, None
        if compare is not None:
            self._look_for_drift(compare)

    def _compare_epochs(self) -> None:
        try:
            seen = self._bucket.outer_step()
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
        self._post(ev.GlobalEpochSeen(seen, time.monotonic()))

    def _look_for_drift(self, outer_step: int) -> None:
        ours, rows = self._epoch_start()
        if not rows or ours != outer_step:
            return
        try:
            found = self._bucket.drift(outer_step, rows)
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
        self._post(ev.WeightsCompared(outer_step, same))

    def _fetch(self, outer_step: int) -> None:
        began = time.monotonic()
        for failures in range(1, _ATTEMPTS + 1):
            try:
                self._fetched = self._bucket.fetch(outer_step)
            except GlobalUnavailableError as error:
                detail = str(error)
            else:
                self._post(ev.GlobalFetched(self._fetched))
                return
            wait = doubling(failures, first=self._retry, longest=_LONGEST_WAIT)
            if time.monotonic() - began > _SHORT:
                break
            if failures < _ATTEMPTS and self._closed.wait(wait.total_seconds()):
                return
        self._post(ev.GlobalFetchFailed(detail, time.monotonic()))
