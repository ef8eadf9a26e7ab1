"""Whether this hotkey is still ours alone: deregistered, moved to another uid, mined twice."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from .base import Chain, ChainUnavailable, find

log = logging.getLogger(__name__)

INTERVAL = timedelta(seconds=10)
# A reorganization can take back a registration for a moment: the same answer this often in a row.
CONFIRMATIONS = 2


class Change(enum.Enum):
    DEREGISTERED = "deregistered"  # exit status 3
    UID_CHANGED = "uid changed"  # another bucket: start again
    DOUBLE = "a second miner uses this hotkey"  # exit status 3


@dataclass(frozen=True)
class RegistrationEvent:
    change: Change
    uid: int | None  # now
    line: str  # for the operator


class RegistrationWatcher:
    """Looks at the last known state of the chain and reports each change once.

    A second miner with our hotkey shows itself by overwriting what we wrote: once the chain has
    shown our endpoint (or commitment), another one in its place was written by somebody else who
    holds the key. ``endpoint`` and ``commitment`` are what this miner writes; None: not watched.
    """

    def __init__(
        self,
        *,
        chain: Chain,
        hotkey: str,
        uid: int,
        on_event: Callable[[RegistrationEvent], None],
        endpoint: tuple[str, int] | None = None,
        commitment: str | None = None,
        interval: timedelta = INTERVAL,
    ) -> None:
        self._chain = chain
        self._hotkey = hotkey
        self._uid = uid
        self._on_event = on_event
        self._endpoint = endpoint
        self._commitment = commitment
        self._interval = interval.total_seconds()
        self._shown_endpoint = False
        self._shown_commitment = False
        self._reported: set[Change] = set()
        self._suspicion: tuple[Change, int | None] | None = None
        self._seen = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            event = self.check()
            if event is not None:
                log.error("%s", event.line)
                self._on_event(event)

    def check(self) -> RegistrationEvent | None:
        """One look. A change is reported when it was seen in ``CONFIRMATIONS`` looks in a row."""
        try:
            found = self._look()
        except ChainUnavailable:
            return None
        if found is None or found[0] in self._reported:
            self._suspicion, self._seen = None, 0
            return None
        self._seen = self._seen + 1 if found == self._suspicion else 1
        self._suspicion = found
        if self._seen < CONFIRMATIONS:
            return None
        change, uid = found
        if change is Change.UID_CHANGED:
            old, self._uid = self._uid, uid if uid is not None else self._uid
            line = (
                f"hotkey {self._hotkey} is uid {uid} now, no longer {old}: it publishes to another "
                "bucket from here on, so the miner starts again"
            )
        else:
            self._reported.add(change)
            line = self._line(change)
        self._suspicion, self._seen = None, 0
        return RegistrationEvent(change, uid, line)

    def _look(self) -> tuple[Change, int | None] | None:
        me = find(self._chain.neurons(), self._hotkey)
        if me is None:
            return Change.DEREGISTERED, None
        if me.uid != self._uid:
            return Change.UID_CHANGED, me.uid
        if self._endpoint is not None:
            if (me.ip, me.port) == self._endpoint:
                self._shown_endpoint = True
            elif self._shown_endpoint:
                return Change.DOUBLE, me.uid
        if self._commitment is not None:
            if self._chain.commitment(self._hotkey) == self._commitment:
                self._shown_commitment = True
            elif self._shown_commitment:
                return Change.DOUBLE, me.uid
        return None

    def _line(self, change: Change) -> str:
        if change is Change.DEREGISTERED:
            return (
                f"hotkey {self._hotkey} is no longer registered on the subnet, so it earns nothing "
                "and the miner stops: register it again with `btcli subnet register`"
            )
        return (
            f"another miner writes to the chain with hotkey {self._hotkey}, so validators see two "
            "miners in turn and pay neither: stop the other one, or give each its own "
            "--wallet.hotkey"
        )
