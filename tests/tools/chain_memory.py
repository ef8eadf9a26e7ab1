"""A chain without a network, whose members are in a ledger in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from distributed_training.chain.base import Chain, ChainError, Neuron
from distributed_training.protocol.network_report import NetworkReport
from distributed_training.registry.store import TABLES, Charter, Registry


class MemoryLedger(Registry):
    """A ledger in memory. If ``up`` is False, writes fail. ``writes``: kind and hotkey of each."""

    def __init__(self) -> None:
        db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        db.executescript(TABLES)
        super().__init__(db, Charter("memory", "", 256, "open"))
        self.up = True
        self.writes: list[tuple[str, str]] = []
        self.weights: dict[int, dict[int, float]] = {}  # by uid of the validator

    def register(
        self, hotkey: str, *, uid: int | None = None, validator_permit: bool = False
    ) -> int:
        """Register a hotkey, with a permit as the leader; it gets ``uid`` even if that is taken."""
        if validator_permit:
            self.charter = replace(self.charter, master=hotkey)
        with self.change():
            for left in (uid, self.uid_of(hotkey)) if uid is not None else ():
                self._remove(left)
            return super().register(hotkey, uid=uid)

    def deregister(self, hotkey: str) -> None:
        with self.change():
            self._remove(self._own("deregister", hotkey))

    def set_weights(self, hotkey: str, weights: Mapping[int, float]) -> None:
        """Store a validator's weights, as a chain does that pays by them."""
        with self.change():
            if hotkey != self.charter.master:
                raise ChainError("weights: only a validator with a permit sets weights")
            self.weights[self._own("weights", hotkey)] = dict(weights)

    def save(self) -> bytes:
        """Return the whole state, for :meth:`restore`."""
        return self._db.serialize()

    def restore(self, state: bytes) -> None:
        self._db.deserialize(state)
        self.view = self._read_view()

    def clear(self) -> None:
        """Deregister everybody."""
        with self.change():
            self._db.execute("DELETE FROM members")

    @property
    def neurons(self) -> tuple[Neuron, ...]:
        return self.view.neurons

    @property
    def commitments(self) -> Mapping[str, str]:
        """The committed texts by hotkey, read-only."""
        members = self.view.members
        texts = {m.neuron.hotkey: m.commitment for m in members if m.commitment is not None}
        return MappingProxyType(texts)

    def _own(self, kind: str, hotkey: str) -> int:
        if not self.up:
            raise ChainError(f"{kind}: the chain does not answer")
        uid = super()._own(kind, hotkey)
        self.writes.append((kind, hotkey))
        return uid


class MemoryChain(Chain):
    """A chain that reads its state from a :class:`MemoryLedger` at each call."""

    def __init__(self, *, hotkey: str, ledger: MemoryLedger | None = None, **terms: Any) -> None:
        super().__init__(own=hotkey, **terms)
        self.hotkey = hotkey
        self._reading = False
        self.ledger = ledger if ledger is not None else MemoryLedger()

    def _read(self) -> None:
        ledger = self.ledger
        if ledger.up and not self._reading:  # a reader may call this chain in on_read
            self._reading = True
            with suppress(ChainError):  # the list lacks the master
                self._saw(ledger.neurons, dict(ledger.commitments))
            self._reading = False

    def _check(self) -> None:
        self._read()
        super()._check()

    def wait_ready(self, timeout: timedelta) -> bool:
        self._read()
        return super().wait_ready(timedelta(0))

    def age(self) -> timedelta:
        self._read()
        return super().age()

    def commit(self, text: str) -> None:
        self.ledger.commit(self.hotkey, text)

    def serve(self, ip: str, port: int, peer: str = "") -> None:
        self.ledger.serve(self.hotkey, ip, port, peer)

    def set_weights(self, weights: Mapping[int, float]) -> None:
        self.ledger.set_weights(self.hotkey, weights)

    def report(self, report: NetworkReport) -> None:
        self.ledger.report(report)

    def close(self) -> None:
        return None
