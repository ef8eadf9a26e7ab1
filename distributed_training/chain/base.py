"""What the rest of the miner knows about a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol


class ChainError(RuntimeError):
    """A read or write that the chain refused or that did not get through. Worth trying again."""


class ChainUnavailable(ChainError):
    """Nothing is known yet: the chain has not answered once since the start."""


@dataclass(frozen=True)
class Neuron:
    """One uid of the subnet, as last read.

    ``stake`` is in units of the subnet's token (not rao); incentive, trust, consensus are 0..1;
    ``emission`` is per tempo, in the subnet's token; ``last_update`` is a block number.
    """

    uid: int
    hotkey: str  # ss58
    ip: str = "0.0.0.0"
    port: int | None = None  # None: no endpoint is served
    stake: float = 0.0
    validator_permit: bool = False
    incentive: float = 0.0
    trust: float = 0.0
    consensus: float = 0.0
    emission: float = 0.0
    last_update: int = 0


class Chain(Protocol):
    """One subnet of a chain, seen by one hotkey.

    Reads answer at once from the last known state and never touch the network; :meth:`age` says
    how old that state is. They raise :class:`ChainUnavailable` as long as there is none. Writes
    block until the chain has accepted or refused them or their deadline has passed, and raise
    :class:`ChainError`; call them from a thread that may wait.
    """

    def wait_ready(self, timeout: timedelta) -> bool:
        """Wait for the first state; False when there is none after ``timeout``."""
        ...

    def block(self) -> int:
        """Number of the current block; never decreases, also when the chain reorganizes."""
        ...

    def neurons(self) -> Sequence[Neuron]:
        """All neurons by uid. The same object is returned until there is a newer state."""
        ...

    def uid(self, hotkey: str) -> int | None:
        """None: not registered."""
        ...

    def commitment(self, hotkey: str) -> str | None:
        """Text last committed by ``hotkey``; None when there is none."""
        ...

    def reads(self) -> int:
        """How often neurons and commitments were read since the start, also when nothing had
        changed: two looks between which it did not grow saw the same answer of the chain."""
        ...

    def counters(self) -> Mapping[str, int]:
        """What only grows, by name: ``reads``, ``failures`` (of a node, a connection lost or an
        answer that did not come), ``connections`` (made, so one more than reconnects),
        ``went_back`` (looks that showed a lower block than before: a reorganization or a node
        behind), ``writes`` and ``writes_failed``. What never happened may be left out."""
        ...

    def age(self) -> timedelta:
        """Time since the chain was last read successfully; ``timedelta.max`` when it never was."""
        ...

    def clock(self) -> float | None:
        """What the chain's clock shows, in seconds since the epoch: the time of the newest block
        and what passed since that was asked for. So it is behind by up to a block's time. None:
        not known."""
        ...

    def commit(self, text: str) -> None:
        """Write our commitment. Raises ChainError."""
        ...

    def serve(self, ip: str, port: int) -> None:
        """Write our endpoint. Raises ChainError."""
        ...

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Write weights by uid; they need not sum to one. Raises ChainError."""
        ...

    def close(self) -> None:
        """Stop the threads of this chain. Idempotent."""
        ...


def find(neurons: Sequence[Neuron], hotkey: str) -> Neuron | None:
    return next((n for n in neurons if n.hotkey == hotkey), None)


def wait_ready(chain: Chain, timeout: timedelta) -> None:
    """Raises ChainUnavailable with an operator's line when the chain does not answer in time."""
    if not chain.wait_ready(timeout):
        raise ChainUnavailable(
            f"the chain did not answer within {timeout.total_seconds():.0f} s, so it is not known "
            "who is registered and nothing can begin: check the network, or name another node with "
            "--subtensor.chain_endpoint"
        )
