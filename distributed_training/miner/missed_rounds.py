"""Name the cause of each outer step that the network took without this miner."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta

from distributed_training.protocol.types import AllReduceFault

from . import events as ev
from .events import MinerState, Mode
from .round import ignores_calls

log = logging.getLogger(__name__)

_ANSWER = 60.0  # seconds that the store has for one, see global_state.py


class MissedRounds:
    """Log one WARNING for each outer step that the network took without this miner.

    The cause is the last call's: there was none, it came when there was no pseudo-gradient,
    or its round failed here. ``published_within``: from a call until its outer step is published
    and was looked for; an older call is of another round. ``clock_fault``: see :class:`Reporter`.
    ``listens_at``: since when calls can reach this miner (monotonic), ``started``: since when it
    starts (Unix time). ``interval``: between two looks at the global bucket. Subscribes to the
    event stream.
    """

    def __init__(
        self,
        *,
        outer_step: int,
        published_within: timedelta,
        clock_fault: Callable[[], str] = str,
        listens_at: float = -math.inf,
        started: float = 0.0,
        interval: timedelta = timedelta.max,
    ) -> None:
        self._clock_fault = clock_fault
        self._known = outer_step  # the highest that was ours, or was logged
        self._within = published_within.total_seconds()
        self._listens_at, self._started = listens_at, started
        self._gap = 2 * interval.total_seconds() + _ANSWER  # longer is an outage
        self._seen_at = math.inf  # the global bucket, last
        self._outage = -math.inf, 0.0  # when the last one ended, and its seconds
        self._called_at = -math.inf
        self._cause = ""  # why the last call led to no outer step

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        # At every event: a roll-back must not make an outer step of ours a missed one.
        self._known = max(self._known, state.outer_step)
        match event:
            # A call during a round is that round's, again.
            case ev.AllReduceCalled(at=at) if state.mode is not Mode.AVERAGING:
                self._called_at, self._cause = at, "its round here has not ended"
                if not ignores_calls(state):
                    return
                self._cause = (
                    f"it was called while it was {state.mode.value}, and had no pseudo-gradient of "
                    "that outer step; nothing needs to be done"
                )
            case ev.RoundFailed(fault=AllReduceFault.NO_GROUP) if state.mode is Mode.AVERAGING:
                why = self._clock_fault() or (
                    "see whether other machines reach its --dht.port (python -m "
                    "distributed_training doctor)"
                )
                self._cause = f"it was called and found no group: {why}"
            case ev.RoundFailed(fault=fault) if state.mode is Mode.AVERAGING:
                self._cause = (
                    f"it was called and the round failed here ({fault.value}): the lines of that "
                    "round and hivemind.log have more"
                )
            case ev.OuterStepEnded(committed=committed, detail=detail):
                self._cause = f"a rank could not apply the average ({detail})"
                if committed:
                    self._called_at = -math.inf
            # Nothing else is asked of the bucket while a state is fetched, which may take hours.
            case ev.GlobalFetched() | ev.GlobalFetchFailed():
                self._seen_at = math.inf
            case ev.GlobalEpochSeen(at=at):
                if at - self._seen_at > self._gap:
                    self._outage = at, at - self._seen_at
                self._seen_at = at
        if not isinstance(event, ev.GlobalEpochSeen) or event.outer_step <= self._known:
            return
        # In a round the step may be our own, which the validator published before us.
        if state.mode is Mode.AVERAGING:
            return
        seen, at = event.outer_step, event.at
        ended, away = self._outage
        cause = (
            "the validator did not call it: see whether other machines reach its --axon.port "
            "(python -m distributed_training doctor), and whether --axon.external_ip is right"
        )
        if at - self._called_at < self._within:
            cause = self._cause
        elif at - self._listens_at < self._within:
            since = time.strftime("%H:%M:%S", time.localtime(self._started))
            cause = f"this miner was starting (since {since}), so no call reached it: nothing to do"
        elif at - ended < self._within:
            cause = (
                f"no call came, and the store did not answer this machine for {away:.0f} s "
                "either: see its network"
            )
        first, self._known = self._known + 1, seen
        log.warning(
            "The network took outer step %s without this miner: %s. The global state is loaded; "
            "uploads of the outer step before count for half a round period more",
            seen if seen == first else f"{first} to {seen}",
            cause,
        )
