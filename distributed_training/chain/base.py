"""Define the chain as the rest of the program sees it, and keep its last known state.

A chain is reached over a network and may be down for hours while training continues. So readers get
the last known state, at once and from memory, and a thread of the chain keeps it up to date.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from distributed_training.common.files import read_state, write_state
from distributed_training.protocol.network_report import NetworkReport

log = logging.getLogger(__name__)


class ChainError(RuntimeError):
    """A read or write was refused by the chain, or did not get through. It may be retried."""


class ChainUnavailable(ChainError):
    """The chain has not answered since the start, so nothing is known yet."""


@dataclass(frozen=True)
class Neuron:
    """One uid of the subnet, as last read. ``incentive``: its share of the chain's payments."""

    uid: int
    hotkey: str  # ss58
    ip: str = "0.0.0.0"
    port: int | None = None  # None if it serves no endpoint
    validator_permit: bool = False
    incentive: float = 0.0
    # id of its DHT peer at ip and port; empty if it has none, or if the chain does not store ids
    peer: str = ""


def find(neurons: Sequence[Neuron], hotkey: str) -> Neuron | None:
    return next((n for n in neurons if n.hotkey == hotkey), None)


#: Age from which a kept state is not used at a start.
OLDEST = timedelta(hours=24)


@dataclass(frozen=True)
class ChainState:
    """The last state of a chain, kept for a start while no endpoint answers.

    ``at``: when it was read, in seconds since the epoch. ``chain``: the chain and the subnet.
    """

    chain: str
    at: float
    neurons: tuple[Neuron, ...]
    commitments: dict[str, str]

    def save(self, path: Path) -> None:
        """Replace ``path``. A failure is only logged, since only a start in an outage needs it."""
        lost = (
            "a start while the chain is down would wait for it; free disk space at "
            "--neuron.run_folder"
        )
        write_state(path, self, durable=False, lost=lost)

    @classmethod
    def load(cls, path: Path, *, chain: str, hotkey: str) -> ChainState | None:
        """Read ``path``.

        Returns None if the file is missing, damaged, of another chain, without ``hotkey``, or older
        than :data:`OLDEST` by this machine's clock.
        """
        state = read_state(path, cls, lost="this start waits for the chain")
        if state is None or state.chain != chain or find(state.neurons, hotkey) is None:
            return None
        # A state from the future was written while a clock was ahead, so its age is unknown.
        return state if 0 <= time.time() - state.at < OLDEST.total_seconds() else None


class Chain(abc.ABC):
    """One network's members, seen by one hotkey: the last known state, and writes.

    Reads answer at once from the last known state and never use the network; :meth:`age` returns
    how old that state is. They raise :class:`ChainUnavailable` as long as there is no state. Writes
    block until the chain has accepted or refused them, or until their deadline has passed, and
    raise :class:`ChainError`; call them from a thread that may wait. A thread of the subclass keeps
    the state up to date with :meth:`_saw`.

    ``own``: our hotkey. ``master``: a hotkey that every true list of the members has; None: not
    known. ``monotonic``: the clock for ages, in seconds.
    """

    def __init__(
        self,
        *,
        own: str = "",
        master: str | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._expected = master if master != own else None  # a master registers itself
        self._monotonic = monotonic
        self._ready = threading.Event()
        self._counts: Counter[str] = Counter()
        self._read_at: float | None = None
        self._neurons: tuple[Neuron, ...] = ()
        self._commitments: dict[str, str] | None = None
        #: Why the chain cannot be used now; empty if it can be used, if it was not asked yet, or if
        #: the reason is unknown.
        self.trouble = ""
        #: Called after each read, in the reading thread; it must not wait.
        self.on_read: Callable[[], None] = lambda: None

    def _saw(
        self,
        neurons: tuple[Neuron, ...],
        commitments: dict[str, str] | None,
    ) -> None:
        """Replace the state with a new one that was read from the chain.

        ``neurons``: all neurons, by uid. ``commitments``: the texts by hotkey; None: they could not
        be read. If the list cannot be the network's, the state stays and ChainError is raised.
        """
        if self._expected is not None and find(neurons, self._expected) is None:
            raise ChainError(f"its list of members lacks the master hotkey {self._expected}")
        # To readers the same object means that there is no news, so keep it if nothing has changed.
        if neurons != self._neurons:
            self._neurons = neurons
        if commitments is not None:
            self._commitments = commitments
        self._read_at = self._monotonic()
        self._counts["reads"] += 1
        self._ready.set()
        self.on_read()

    def state(self, chain: str) -> ChainState | None:
        """Return the state for a later start; None if it was not read completely yet."""
        if not self._counts["reads"] or self._commitments is None:
            return None
        # Use the time of the read, not the current time: a saved state must not look newer than it
        # is after it was loaded again.
        at = time.time() - self.age().total_seconds()
        return ChainState(chain, at, self._neurons, dict(self._commitments))

    def recall(self, state: ChainState) -> None:
        """Use the saved ``state`` until the chain answers."""
        if self._ready.is_set():
            return
        # Use the wall clock only here, since it may be changed while the miner runs.
        self._read_at = self._monotonic() - (time.time() - state.at)
        self._commitments = dict(state.commitments)
        self._neurons = state.neurons
        self._ready.set()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._counts["writes"] += 1
        try:
            yield
        except ChainError:
            self._counts["writes_failed"] += 1
            raise

    def wait_ready(self, timeout: timedelta) -> bool:
        """Wait for the first state; return False if there is none after ``timeout``."""
        return self._ready.wait(timeout.total_seconds())

    def _check(self) -> None:
        if not self._ready.is_set():
            raise ChainUnavailable("the chain has not answered yet")

    def neurons(self) -> Sequence[Neuron]:
        """Return all neurons, by uid: the same object until the list has changed."""
        self._check()
        return self._neurons

    def uid(self, hotkey: str) -> int | None:
        """Return the uid of a hotkey; None if it is not registered."""
        neuron = find(self.neurons(), hotkey)
        return neuron.uid if neuron is not None else None

    def expelled(self, hotkey: str) -> bool:
        """Return whether the founder has expelled ``hotkey``; False if the chain cannot expel."""
        return False

    def commitment(self, hotkey: str) -> str | None:
        """Return the text last committed by ``hotkey``.

        Returns None if there is no text, or if it does not have the network's form. Raises
        ChainUnavailable even if only the commitments could not be read yet.
        """
        self._check()
        if self._commitments is None:
            raise ChainUnavailable("the commitments of the subnet could not be read yet")
        return self._commitments.get(hotkey)

    def counters(self) -> Mapping[str, int]:
        """Return the counters, which only grow, by name; counters that are 0 may be left out.

        ``reads`` and ``failures`` (reads that failed); ``writes`` and ``writes_failed``.
        """
        return dict(self._counts)

    def age(self) -> timedelta:
        """Return the time since the last successful read; ``timedelta.max`` if there was none."""
        read_at = self._read_at
        if read_at is None:
            return timedelta.max
        return timedelta(seconds=max(0.0, self._monotonic() - read_at))

    def join(self) -> int | None:
        """Ask the chain for a uid for our hotkey; return the uid, or None if the chain gives none.

        It blocks. A refusal is logged.
        """
        return None

    @abc.abstractmethod
    def commit(self, text: str) -> None:
        """Write our commitment. Raises ChainError."""

    @abc.abstractmethod
    def serve(self, ip: str, port: int, peer: str = "") -> None:
        """Write our endpoint, and the id of the DHT peer there if there is one.

        Raises ChainError.
        """

    @abc.abstractmethod
    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Write weights by uid, if the chain pays according to them. Raises ChainError.

        They need not sum to one.
        """

    def report(self, report: NetworkReport) -> None:  # noqa: B027 - not on every chain
        """Publish the report of the founder's validator about its network. Raises ChainError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the threads of this chain. Idempotent."""
