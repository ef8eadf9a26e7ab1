"""A chain without a network: the local subnet's ledger, read at once by whoever asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from distributed_training.chain.base import Chain, ChainError, ChainUnavailable, Neuron
from distributed_training.registry.ledger import Ledger


class MemoryLedger(Ledger):
    """``up`` False: writes fail, reads keep the last state. ``writes``: (kind, hotkey)."""

    def __init__(self, *, block: int = 1000) -> None:
        super().__init__(first_block=block)
        self.up = True
        self.writes: list[tuple[str, str]] = []

    def _own(self, kind: str, hotkey: str) -> Neuron:
        if not self.up:
            raise ChainError(f"{kind}: the chain does not answer")
        neuron = super()._own(kind, hotkey)
        self.writes.append((kind, hotkey))
        return neuron


class MemoryChain(Chain):
    """A :class:`~distributed_training.chain.base.Chain` whose state is a :class:`MemoryLedger`."""

    def __init__(self, *, hotkey: str, ledger: MemoryLedger | None = None) -> None:
        super().__init__()
        self.hotkey = hotkey
        self.ledger = ledger if ledger is not None else MemoryLedger()
        self._block = 0
        self._age = timedelta.max
        self._neurons: tuple[Neuron, ...] = ()
        self._commitments: dict[str, str] = {}
        self._reads = 0

    def _read(self) -> None:
        ledger = self.ledger
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

    def answered_by(self) -> str:
        return "memory"

    def endpoints(self) -> int:
        return 1

    def ask_another(self) -> None:
        return None

    def counters(self) -> Mapping[str, int]:
        return {"reads": self._reads}

    def clock(self) -> float | None:
        return None

    def age(self) -> timedelta:
        try:
            self._read()
        except ChainUnavailable:
            return timedelta.max
        return self._age

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
