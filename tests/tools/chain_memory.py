"""A chain without a network: the local subnet's ledger, read at once by whoever asks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType

from distributed_training.chain.base import Chain, ChainError, Neuron
from distributed_training.registry.ledger import Ledger, Slot


class MemoryLedger(Ledger):
    """``up`` False: writes fail, reads keep the last state. ``writes``: (kind, hotkey)."""

    def __init__(self, *, block: int = 1000) -> None:
        super().__init__(first_block=block)
        self.up = True
        self.writes: list[tuple[str, str]] = []

    @property
    def neurons(self) -> tuple[Neuron, ...]:
        return tuple(slot.neuron for _, slot in sorted(self.slots.items()))

    @property
    def commitments(self) -> Mapping[str, str]:
        """The texts by hotkey, which nobody changes here."""
        slots = list(self.slots.values())
        texts = {s.neuron.hotkey: s.commitment for s in slots if s.commitment is not None}
        return MappingProxyType(texts)

    def _own(self, kind: str, hotkey: str) -> Slot:
        if not self.up:
            raise ChainError(f"{kind}: the chain does not answer")
        slot = super()._own(kind, hotkey)
        self.writes.append((kind, hotkey))
        return slot


class MemoryChain(Chain):
    """A chain whose state is a :class:`MemoryLedger`, which each question reads."""

    def __init__(self, *, hotkey: str, ledger: MemoryLedger | None = None) -> None:
        super().__init__()
        self.hotkey = hotkey
        self.ledger = ledger if ledger is not None else MemoryLedger()
        self._answered_by = "memory"

    def _read(self) -> None:
        ledger = self.ledger
        if ledger.up:
            self._saw_neurons(ledger.neurons)
            self._saw_commitments(dict(ledger.commitments))
            self._saw_block(ledger.height)

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

    def serve(self, ip: str, port: int) -> None:
        self.ledger.serve(self.hotkey, ip, port)

    def set_weights(self, weights: Mapping[int, float]) -> None:
        self.ledger.set_weights(self.hotkey, weights)

    def report_loss(self, outer_step: int, loss: float) -> None:
        self.ledger.report_loss(outer_step, loss)

    def close(self) -> None:
        return None
