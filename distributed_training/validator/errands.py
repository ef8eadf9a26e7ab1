"""Ask stores and the chain, each in a thread, so that none of them keeps the validator waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, TypeVar

from distributed_training.node.start import StopNow

_Result = TypeVar("_Result")
_AT_ONCE = 16  # at once, since a container may have no room for hundreds of threads
_LOOK = 0.2  # seconds between two looks at a stop


def begun(task: Callable[[], _Result]) -> Future[_Result]:
    """Run ``task()`` in a thread of its own, which does not keep the program from ending."""
    done: Future[_Result] = Future()

    def work() -> None:
        try:
            done.set_result(task())
        except BaseException as error:  # noqa: BLE001 - the caller that waits raises it
            done.set_exception(error)

    # Use no pool, since Python waits for a pool's threads before it ends.
    threading.Thread(target=work, name="asking", daemon=True).start()
    return done


def unless_stopped(task: Callable[[], _Result], *, stop: threading.Event) -> _Result:
    """Return ``task()``. Raises its error, or Stopped soon after ``stop`` is set."""
    future = begun(task)
    while wait([future], timeout=_LOOK).not_done:
        if stop.is_set():
            raise StopNow
    return future.result()


class Errands:
    """Tasks by uid, several at a time, of which a silent one delays no other."""

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[Future[Any], float]] = {}  # key -> task, and when it began
        self._ended = set[int]()
        #: Whether there is a task that has neither ended once nor been silent for too long.
        self.unheard = False

    def silent(self, patience: float) -> set[int]:
        """Return the uids whose task began ``patience`` seconds ago and has not ended."""
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
        """Begin ``task`` for ``uids``, in their order; return the results or errors by uid.

        Args:
            task: Is called in a thread of its own.
            uids: Those whose task is still under way are not begun again.
            within: Seconds to wait. A task that ends later is in the result of a later call.
            patience: Seconds after which a task is silent: it gives its place to another one.
            stop: Set when the program is to end.
            at_once: The most tasks at a time, apart from silent ones.

        Raises:
            Stopped: Soon after ``stop`` is set.
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
