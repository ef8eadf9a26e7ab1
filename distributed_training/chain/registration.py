"""Watch that this hotkey is still registered, and that the chain shows our writes.

A deregistration stops training, so one broken chain node must not be able to report it. A list of
neurons that is empty, or lacks the subnet's master hotkey, counts as no answer. "Not there" is
believed when it lasted :data:`MISSING_FOR` and two endpoints said it, where two are known.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import Field

from distributed_training.common.backoff import Throttle
from distributed_training.common.files import read_state, write_state

from .base import Chain, ChainUnavailable, Neuron, find

log = logging.getLogger(__name__)

INTERVAL = timedelta(seconds=10)
# A reorganization can take back a registration for a moment; reads of the chain, in a row.
CONFIRMATIONS = 2
REWRITE_EVERY = 600.0  # seconds: two miners with one hotkey would write in turn without end
#: From the first read without our hotkey until a deregistration is believed.
MISSING_FOR = timedelta(minutes=30)
#: The same where only one endpoint answered all that time.
MISSING_FOR_ALONE = timedelta(hours=2)
ASK_ANOTHER = timedelta(minutes=2)  # between two questions to another endpoint


class Change(enum.Enum):
    """A change of our registration that ends this run of the miner."""

    DEREGISTERED = "deregistered"  # the next start waits for the registration
    EXPELLED = "expelled"  # the same, until the founder lets it in again
    UID_CHANGED = "uid changed"  # another bucket: start again


@dataclass(frozen=True)
class RegistrationEvent:
    """A confirmed change of our registration."""

    change: Change
    line: str  # for the operator


def believable(neurons: Sequence[Neuron], master: str | None) -> bool:
    """Return whether a list of neurons may be the subnet's: it has some, ``master`` among them."""
    return find(neurons, master) is not None if master else bool(neurons)


@dataclass(frozen=True)
class Belief:
    """The conditions under which the chain is believed not to show our hotkey.

    ``master``: a hotkey that every true list of the subnet's neurons has. ``missing_for``: see
    :data:`MISSING_FOR`. ``remedy``: the command that gives a hotkey a uid, for the operator.
    """

    master: str | None = None
    missing_for: timedelta = MISSING_FOR
    remedy: str = "btcli subnet register"


@dataclass(frozen=True)
class WatcherCallbacks:
    """Called in the watcher's thread.

    ``on_event`` gets each change, once. ``on_lost`` gets the name of a value that a reorganization
    took back, to write it again. ``on_read`` is called after each read of the chain.
    """

    on_event: Callable[[RegistrationEvent], None]
    on_lost: Callable[[str], None] = lambda name: None
    on_read: Callable[[], None] = lambda: None


class _Missing:
    """Reads of the chain, in a row, that did not show our hotkey."""

    def __init__(
        self, *, chain: Chain, hotkey: str, belief: Belief, clock: Callable[[], float]
    ) -> None:
        self._chain = chain
        self._hotkey = hotkey
        self._belief = belief
        self._clock = clock
        self._throttle = Throttle(ASK_ANOTHER.total_seconds(), clock=clock)
        self._refused = False  # whether a list was refused since the last believed one
        self._since: float | None = None
        self._answered: set[str] = set()

    def refuse(self) -> None:
        """Count a list that cannot be the subnet's as no answer."""
        if not self._refused:
            self._refused = True
            log.warning(
                "The chain node %s shows no neurons, or not the master hotkey %s, so its list is "
                "not used: training continues, and another endpoint is asked; if this lasts, see "
                "--subtensor.chain_endpoint and the file's chain.master_hotkey",
                self._chain.answered_by(),
                self._belief.master,
            )
        self._ask_another()

    def found(self) -> None:
        """End the row: the chain shows our hotkey."""
        self._refused = False
        if self._since is not None:
            log.info("%s shows hotkey %s again", self._chain.answered_by(), self._hotkey)
        self._since, self._answered = None, set()

    def lost(self) -> bool:
        """Count one more read. Return whether the deregistration is believed by now."""
        now, answered_by = self._clock(), self._chain.answered_by()
        self._refused = False
        if self._since is None:
            self._since = now
            log.warning(
                "The chain node %s does not show hotkey %s any more: training continues, another "
                "endpoint is asked, and training stops if this lasts %.0f minutes",
                answered_by,
                self._hotkey,
                self._belief.missing_for.total_seconds() / 60,
            )
        self._answered.add(answered_by)
        self._ask_another()
        lasted = timedelta(seconds=now - self._since)
        # A single endpoint is believed in the end: the others may be gone for good.
        wanted = 1 if lasted >= MISSING_FOR_ALONE else min(2, self._chain.endpoints())
        return lasted >= self._belief.missing_for and len(self._answered) >= wanted

    def _ask_another(self) -> None:
        if self._throttle():
            self._chain.ask_another()


@dataclass
class RegistrationRecord:
    """The uid this run folder's miner had, and how long it has waited to be registered again.

    ``waited``: seconds in which the chain answered and did not show the hotkey. They are counted,
    not computed from two dates, since a machine may start with a wrong clock.
    """

    hotkey: str = ""
    uid: int = -1
    waited: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @classmethod
    def load(cls, path: Path) -> RegistrationRecord:
        """Read ``path``; a file that is missing or damaged gives the record of no hotkey."""
        lost = "a miner that lost its registration would not wait for it at this start"
        return read_state(path, cls, lost=lost) or cls()

    def save(self, path: Path) -> None:
        """Write ``path``. A failure is logged: a later start would wait from the beginning."""
        lost = (
            "the next start does not know how long a lost registration was waited for; free the "
            "disk of --neuron.run_folder"
        )
        write_state(path, self, lost=lost)


#: The result of one read: a change, our uid now, or the name of a lost write.
_Suspicion = Change | int | str


class RegistrationWatcher:
    """Looks at the last known state of the chain and reports each change once.

    ``ours``: the values that this miner writes, an ``endpoint`` (address and port), a
    ``commitment`` or both; they may change. A value that the chain has shown and shows no longer
    was taken back by a reorganization, or overwritten. It is written again, at most once in
    :data:`REWRITE_EVERY`.
    """

    def __init__(
        self,
        *,
        chain: Chain,
        hotkey: str,
        uid: int,
        ours: Mapping[str, object],
        callbacks: WatcherCallbacks,
        belief: Belief,
        interval: timedelta = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chain = chain
        self._hotkey = hotkey
        self._uid = uid
        self._ours = ours
        self._callbacks = callbacks
        self._belief = belief
        self._missing = _Missing(chain=chain, hotkey=hotkey, belief=belief, clock=clock)
        self._clock = clock
        self._shown: dict[str, object] = {}  # our values that the chain has shown
        self._rewritten: dict[str, float] = {}  # by name: when it was lost last
        self._interval = interval.total_seconds()
        self._reported: set[Change] = set()
        self._suspicion: _Suspicion | None = None
        self._seen = 0
        self._reads = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it. Idempotent."""
        self._stop.set()
        # on_event runs in this thread and may close its watcher: no thread can join itself.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            event = self.check()
            if event is not None:  # its line is the reason of the end, which the launcher logs
                self._callbacks.on_event(event)

    def closed(self, within: timedelta) -> bool:
        """Wait ``within`` for :meth:`close`; return whether it came."""
        return self._stop.wait(within.total_seconds())

    def check(self) -> RegistrationEvent | None:
        """Compare the chain with ours once; return a confirmed change.

        A change is reported when ``CONFIRMATIONS`` reads of the chain in a row showed it; a call
        between two reads sees nothing new.
        """
        reads = self._chain.reads()
        # The same answer once more confirms nothing.
        if reads == self._reads:
            return None
        self._reads = reads
        if reads:
            self._callbacks.on_read()
        try:
            found = self._compare()
        except ChainUnavailable:
            return None
        if found is None or found in self._reported:
            self._suspicion, self._seen = None, 0
            return None
        self._seen = self._seen + 1 if found == self._suspicion else 1
        self._suspicion = found
        if self._seen < CONFIRMATIONS:
            return None
        self._suspicion, self._seen = None, 0
        if isinstance(found, str):
            log.warning(
                "The chain does not show our %s any more (a reorganization, a new registration, or "
                "a second miner with this hotkey): writing it again. If it comes back and you run "
                "no second one, somebody has this key: move to another hotkey",
                found,
            )
            self._rewritten[found] = self._clock()
            self._callbacks.on_lost(found)
            return None
        if isinstance(found, int):
            old, self._uid = self._uid, found
            line = (
                f"hotkey {self._hotkey} is uid {found} now, no longer {old}: it uploads to another "
                "bucket from here on, so the miner starts again"
            )
            return RegistrationEvent(Change.UID_CHANGED, line)
        self._reported.add(found)
        if found is Change.EXPELLED:
            line = (
                f"the founder expelled hotkey {self._hotkey} from this network, so it earns "
                "nothing and training stops; its weights are kept: ask the founder, who can let it "
                "in again with `dt-registry expel --again`"
            )
        else:
            line = (
                f"hotkey {self._hotkey} is no longer registered on the subnet, so it earns nothing "
                "and training stops; its weights are kept: register it again with "
                f"`{self._belief.remedy}`, and the miner continues by itself"
            )
        return RegistrationEvent(found, line)

    def _compare(self) -> _Suspicion | None:
        neurons = self._chain.neurons()
        me = find(neurons, self._hotkey)
        if me is None:
            if not believable(neurons, self._belief.master):
                self._missing.refuse()
                return None
            if self._chain.expelled(self._hotkey):
                return Change.EXPELLED
            return Change.DEREGISTERED if self._missing.lost() else None
        self._missing.found()
        if me.uid != self._uid:
            return me.uid
        shown = {
            "endpoint": (me.ip, me.port) if me.port is not None else None,
            "commitment": self._chain.commitment(self._hotkey),
        }
        for name, ours in self._ours.items():
            if shown[name] == ours:
                self._shown[name] = ours
            elif self._shown.get(name) == ours:
                # Not compared with its earlier value: a value that we changed is on its way.
                since = self._clock() - self._rewritten.get(name, -math.inf)
                if since >= REWRITE_EVERY:
                    return name
        return None
