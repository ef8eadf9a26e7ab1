"""The rules and the state of a small chain: the only fake chain of this project.

Registrations, commitments, endpoints, weights and a block clock, with the public chain's limits. A
local subnet serves it over HTTP (:mod:`.chain_server`); tests put it behind the SDK's own seam or
use it directly. It lives as long as its process, as a local subnet does.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Annotated, Any

from pydantic import Field

from distributed_training.chain.base import ChainError, Neuron, find

MAX_COMMITMENT = 128  # bytes, as on the public chain
MAX_UIDS = 256

# What a write over HTTP is held against (:mod:`.chain_server`).
Uid = Annotated[int, Field(ge=0, lt=MAX_UIDS)]
Port = Annotated[int, Field(ge=1, le=65535)]
Address = Annotated[str, Field(min_length=1, max_length=64)]
Amount = Annotated[float, Field(ge=0.0, le=1e12)]  # NaN neither


class Ledger:
    """Thread-safe. Writes raise ChainError when the chain does not accept them.

    Blocks pass by the clock, one every ``seconds_per_block`` (``math.inf``: only by
    :meth:`advance`). A wall clock that is set changes nothing.
    """

    def __init__(self, *, seconds_per_block: float = math.inf, first_block: int = 1000) -> None:
        self.seconds_per_block = seconds_per_block
        self.entries: dict[int, Neuron] = {}
        self.commitments: dict[str, str] = {}  # by hotkey
        self.weights: dict[int, dict[int, float]] = {}  # of each validator
        self.version = 0  # lets clients tell a late answer
        self._lock = threading.RLock()
        self._origin = (first_block, time.monotonic())

    # blocks

    @property
    def height(self) -> int:
        """Number of the current block."""
        block, since = self._origin
        return block + int((time.monotonic() - since) / self.seconds_per_block)

    def advance(self, blocks: int = 1) -> None:
        """Let blocks pass at once; a negative number is a reorganization."""
        block, since = self._origin
        self._origin = (block + blocks, since)

    def snapshot(self) -> dict[str, Any]:
        """All of the state, as JSON has it."""
        with self._lock:
            return {
                "block": self.height,
                "time": time.time(),
                "version": self.version,
                "neurons": [asdict(self.entries[uid]) for uid in sorted(self.entries)],
                "commitments": dict(self.commitments),
                "weights": {str(uid): dict(row) for uid, row in self.weights.items()},
            }

    @contextmanager
    def _change(self) -> Iterator[None]:
        """What is refused is refused before anything has changed."""
        with self._lock:
            yield
            self._score()
            self.version += 1

    def _own(self, kind: str, hotkey: str) -> Neuron:
        neuron = find(list(self.entries.values()), hotkey)
        if neuron is None:
            raise ChainError(f"{kind}: hotkey {hotkey} is not registered")
        return neuron

    # writes

    def register(
        self,
        hotkey: str,
        *,
        uid: Uid | None = None,
        stake: Amount = 0.0,
        validator_permit: bool = False,
    ) -> int:
        """Give ``hotkey`` a uid: the one it has, or the lowest free one. Returns it.

        A hotkey that is registered keeps its endpoint. A uid that is taken goes to the new hotkey,
        whose owner is thereby deregistered, as on the public chain.
        """
        with self._change():
            old = find(list(self.entries.values()), hotkey)
            if uid is None:
                free = (i for i in range(MAX_UIDS) if i not in self.entries)
                uid = old.uid if old is not None else next(free, None)
            if uid is None:
                raise ChainError("register: all uids are taken: choose one")
            if old is None or old.uid != uid:
                self.weights.pop(uid, None)
            if old is not None:
                del self.entries[old.uid]
            self.entries[uid] = replace(
                old or Neuron(uid=uid, hotkey=hotkey),
                uid=uid,
                stake=stake,
                validator_permit=validator_permit,
                last_update=self.height,
            )
            return uid

    def deregister(self, hotkey: str) -> None:
        with self._change():
            uid = self._own("deregister", hotkey).uid
            del self.entries[uid]
            self.weights.pop(uid, None)

    def commit(self, hotkey: str, text: str) -> None:
        with self._change():
            self._own("commit", hotkey)
            if len(text.encode()) > MAX_COMMITMENT:
                raise ChainError(f"commit: a commitment has at most {MAX_COMMITMENT} bytes")
            self.commitments[hotkey] = text

    def serve(self, hotkey: str, ip: Address, port: Port) -> None:
        with self._change():
            neuron = self._own("serve", hotkey)
            self.entries[neuron.uid] = replace(neuron, ip=ip, port=port)

    def set_weights(self, hotkey: str, weights: Mapping[Uid, Amount]) -> None:
        with self._change():
            neuron = self._own("weights", hotkey)
            if not neuron.validator_permit:
                raise ChainError("weights: only a validator with a permit sets weights")
            unknown = sorted(set(weights) - set(self.entries))
            if unknown:
                raise ChainError(f"weights: no such uids: {unknown}")
            self.weights[neuron.uid] = dict(weights)
            self.entries[neuron.uid] = replace(neuron, last_update=self.height)

    def _score(self) -> None:
        """Incentive = mean of the validators' normalized weights, weighted by stake.

        Simpler than Yuma consensus (no clipping, no bonds), enough to see who is paid.
        """
        totals = dict.fromkeys(self.entries, 0.0)
        for voter, row in self.weights.items():
            total = sum(row.values())
            for uid, weight in row.items():
                if voter in self.entries and uid in totals and total > 0:
                    totals[uid] += self.entries[voter].stake * weight / total
        everything = sum(totals.values())
        for uid, neuron in self.entries.items():
            share = totals[uid] / everything if everything > 0 else 0.0
            self.entries[uid] = replace(neuron, incentive=share, consensus=share)
