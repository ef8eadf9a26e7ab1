"""A chain in memory, for tests of everything that needs one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from .base import ChainError, ChainUnavailable, Neuron

COMMITMENT_BYTES = 128  # the chain's own limit


class MemoryLedger:
    """What the neurons of one subnet share: registrations, commitments, endpoints, blocks."""

    def __init__(self, *, block: int = 1000) -> None:
        self.lock = threading.RLock()
        self.height = block
        self.up = True  # False: writes fail, reads keep the last state
        self.entries: dict[int, Neuron] = {}
        self.commitments: dict[str, str] = {}
        self.weights: dict[int, dict[int, float]] = {}
        self.writes: list[tuple[str, str]] = []  # (kind, hotkey), oldest first

    def register(
        self,
        hotkey: str,
        *,
        uid: int | None = None,
        stake: float = 0.0,
        validator_permit: bool = False,
    ) -> int:
        """Give ``hotkey`` a uid (the lowest free one); a uid given and taken changes its owner."""
        with self.lock:
            self.deregister(hotkey)
            if uid is None:
                uid = next(i for i in range(len(self.entries) + 1) if i not in self.entries)
            self.entries[uid] = Neuron(
                uid=uid,
                hotkey=hotkey,
                stake=stake,
                validator_permit=validator_permit,
                last_update=self.height,
            )
            return uid

    def deregister(self, hotkey: str) -> None:
        with self.lock:
            self.entries = {u: n for u, n in self.entries.items() if n.hotkey != hotkey}

    def advance(self, blocks: int = 1) -> None:
        with self.lock:
            self.height += blocks


class MemoryChain:
    """A :class:`~.base.Chain` whose state is a :class:`MemoryLedger`; see there for faults."""

    def __init__(self, *, hotkey: str, ledger: MemoryLedger | None = None) -> None:
        self.hotkey = hotkey
        self.ledger = ledger if ledger is not None else MemoryLedger()
        self._block = 0
        self._age = timedelta.max
        self._neurons: tuple[Neuron, ...] = ()
        self._commitments: dict[str, str] = {}
        self._reads = 0

    def _read(self) -> None:
        ledger = self.ledger
        with ledger.lock:
            if ledger.up:
                self._block = max(self._block, ledger.height)
                neurons = tuple(ledger.entries[uid] for uid in sorted(ledger.entries))
                if neurons != self._neurons:
                    self._neurons = neurons
                self._commitments = dict(ledger.commitments)
                self._age = timedelta(0)
                self._reads += 1
        if self._age == timedelta.max:
            raise ChainUnavailable("the chain has not answered yet")

    def wait_ready(self, timeout: timedelta) -> bool:
        try:
            self._read()
        except ChainUnavailable:
            return False
        return True

    def block(self) -> int:
        self._read()
        return self._block

    def neurons(self) -> Sequence[Neuron]:
        self._read()
        return self._neurons

    def uid(self, hotkey: str) -> int | None:
        return next((n.uid for n in self.neurons() if n.hotkey == hotkey), None)

    def commitment(self, hotkey: str) -> str | None:
        self._read()
        return self._commitments.get(hotkey)

    def reads(self) -> int:
        return self._reads

    def counters(self) -> Mapping[str, int]:
        return {"reads": self._reads}

    def age(self) -> timedelta:
        try:
            self._read()
        except ChainUnavailable:
            return timedelta.max
        return self._age

    def _own(self, kind: str) -> Neuron:
        """Our entry, with the ledger locked by the caller."""
        if not self.ledger.up:
            raise ChainError(f"{kind}: the chain does not answer")
        neuron = next((n for n in self.ledger.entries.values() if n.hotkey == self.hotkey), None)
        if neuron is None:
            raise ChainError(f"{kind}: hotkey {self.hotkey} is not registered")
        self.ledger.writes.append((kind, self.hotkey))
        return neuron

    def commit(self, text: str) -> None:
        if len(text.encode()) > COMMITMENT_BYTES:
            raise ChainError(f"commit: a commitment has at most {COMMITMENT_BYTES} bytes")
        with self.ledger.lock:
            self._own("commit")
            self.ledger.commitments[self.hotkey] = text

    def serve(self, ip: str, port: int) -> None:
        with self.ledger.lock:
            neuron = self._own("serve")
            self.ledger.entries[neuron.uid] = replace(neuron, ip=ip, port=port)

    def set_weights(self, weights: Mapping[int, float]) -> None:
        with self.ledger.lock:
            neuron = self._own("weights")
            if not neuron.validator_permit:
                raise ChainError("weights: this hotkey has no validator permit")
            self.ledger.weights[neuron.uid] = dict(weights)
            self.ledger.entries[neuron.uid] = replace(neuron, last_update=self.ledger.height)

    def close(self) -> None:
        return None
