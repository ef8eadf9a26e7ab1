"""A round of the swarm, in a thread of its own: the loop never waits for a network."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from distributed_training.protocol.types import AllReduceError, AllReduceFault, RoundRequest
from distributed_training.swarm import HivemindSwarm

from . import events as ev

log = logging.getLogger(__name__)


class Averaging:
    """Each :meth:`start` is answered by exactly one ``Averaged`` or ``RoundFailed``."""

    def __init__(self, *, swarm: HivemindSwarm, post: Callable[[ev.Event], None]) -> None:
        self._swarm = swarm
        self._post = post
        self._cancelled = threading.Event()  # the round of the last start

    def start(self, request: RoundRequest) -> None:
        self._cancelled = threading.Event()
        arguments = (request, self._cancelled)
        threading.Thread(target=self._run, args=arguments, name="averaging", daemon=True).start()

    def cancel(self) -> None:
        self._cancelled.set()  # its thread may not have come to the swarm yet
        self._swarm.cancel()

    def _run(self, request: RoundRequest, cancelled: threading.Event) -> None:
        try:
            result = self._swarm.average(request, cancelled=cancelled)
        except AllReduceError as error:
            self._post(ev.RoundFailed(error.fault, error.detail))
        except Exception as error:  # a round must end whatever happens, or the miner waits for ever
            log.exception("The swarm failed with an unexpected error; please report it")
            self._post(ev.RoundFailed(AllReduceFault.SWARM_DOWN, repr(error)))
        else:
            self._post(ev.Averaged(result))
