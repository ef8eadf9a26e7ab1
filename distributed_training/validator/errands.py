"""Ask stores and the chain in threads, so that a slow answer does not delay the validator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, TypeVar

from distributed_training.node.start import StopNow

_Result = TypeVar("_Result")
_AT_ONCE = 16  # tasks at a time, since a container may not allow hundreds of threads
_LOOK = 0.2  # seconds between two checks for a stop


def begun(task: Callable[[], _Result]) -> Future[_Result]:
    """Run ``task()`` in its own thread, which does not keep the program from ending."""
    done: Future[_Result] = Future()

    def work() -> None:
        try:
            done.set_result(task())
        except BaseException as error:  # noqa: BLE001 - the waiting caller raises it
            done.set_exception(error)

    # Do not use a pool, since Python waits for a pool's threads before it exits.
    threading.Thread(target=work, name="asking", daemon=True).start()
    return done


def unless_stopped(task: Callable[[], _Result], *, stop: threading.Event) -> _Result:
    """Return the result of ``task()``. Raises its error, or StopNow soon after ``stop`` is set."""
    future = begun(task)
    while wait([future], timeout=_LOOK).not_done:
        if stop.is_set():
            raise StopNow
    return future.result()


class Errands:
    """Run tasks by uid, several at a time, so that a silent task does not delay the others."""

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[Future[Any], float]] = {}  # uid -> task, and when it began
        self._ended = set[int]()
        #: True while the first result of some uid may still come: its task is queued, or runs
        #: and has not been silent for too long.
        self.unheard = False

    def silent(self, patience: float) -> set[int]:
        """Return the uids whose task has run for ``patience`` seconds without ending."""
        late = time.monotonic() - patience
        return {uid for uid, (_, since) in self._under_way.items() if since <= late}

    def run(
        self,
        task: Callable[[int], _Result],
        uids: Sequence[int],
        *,
        within: float,
        patience: float,
        stop: threading.Event,
        at_once: int = _AT_ONCE,
    ) -> dict[int, _Result | BaseException]:
        """Start ``task`` for ``uids``, in their order; return the results or errors by uid.

        Args:
            task: The function that is called with each uid, in its own thread.
            uids: The uids. If a uid's task is still running, it is not started again.
            within: Seconds to wait. A later call returns the result of a task that ends later.
            patience: Seconds after which a task counts as silent, and another may take its place.
            stop: Set when the program is to end.
            at_once: The most tasks at a time, not counting silent ones.

        Raises:
            StopNow: Soon after ``stop`` is set.
        """
        until = time.monotonic() + within
        queue = [uid for uid in uids if uid not in self._under_way]
        found: dict[int, _Result | BaseException] = {}
        while True:
            for uid, (future, _) in [*self._under_way.items()]:
                if future.done():
                    found[uid] = future.exception() or future.result()
                    del self._under_way[uid]
                    self._ended.add(uid)
            heard = self._under_way.keys() - self.silent(patience)
            room = max(0, at_once - len(heard))
            for uid in queue[:room]:
                self._under_way[uid] = begun(partial(task, uid)), time.monotonic()
            heard |= {*queue[:room]}
            del queue[:room]
            if not heard or time.monotonic() > until:
                self.unheard = bool((heard | {*queue}) - self._ended)
                return found
            if stop.is_set():
                raise StopNow
            futures = [self._under_way[uid][0] for uid in heard]
            wait(futures, timeout=_LOOK, return_when=FIRST_COMPLETED)
