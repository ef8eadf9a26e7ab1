"""The rules of a chain, in memory: uids, stake, commitments, endpoints, weights, a block clock.

Limits are the public chain's. Its staking and its consensus are not: the founder gives stake and
permits, and a neuron's incentive is the mean of the validators' weights.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

from distributed_training.chain.base import ChainError, Neuron

MAX_UIDS = 256
MAX_COMMITMENT = 128  # bytes, as on the public chain
#: Blocks after its registration during which nobody takes a neuron's uid, as on the public chain.
IMMUNITY = 4096
MOST_LOSSES = 1000  # outer steps of which the held-out loss is kept
_DAY = 86400.0


def _plain_ip(text: str) -> str:
    """Raise ValueError unless ``text`` is an IP address without a zone.

    Validators make a URL of it, and programs print it.
    """
    try:
        ipaddress.ip_address("" if "%" in text else text)
    except ValueError:
        raise ValueError("this is no IP address") from None  # what was given is not repeated
    return text


Uid = Annotated[int, Field(ge=0, lt=4096)]
Port = Annotated[int, Field(ge=1, le=65535)]
Address = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_plain_ip)]
Amount = Annotated[float, Field(ge=0.0, le=1e12)]  # NaN neither
Step = Annotated[int, Field(ge=0, le=1e9)]
Losses = dict[int, tuple[float, float]]  # by outer step: nats per token, and when it was reported


@dataclass(frozen=True)
class Since:
    """The block at which a uid was given away, and the seconds since the epoch."""

    block: int
    at: float


class Slot(NamedTuple):
    """The facts that the chain keeps of one uid; a change replaces the slot."""

    neuron: Neuron
    since: Since
    commitment: str | None = None
    weights: dict[int, float] | None = None  # that it has given, as a validator
    earned: tuple[float, float] | None = None  # mean of a day, as of; see earned_by

    def earned_by(self, now: float) -> float:
        """Return the mean of the neuron's incentive over about a day, until ``now``.

        It decays exponentially.
        """
        mean, counted = self.earned or (0.0, now)
        kept = math.exp(-max(0.0, now - counted) / _DAY)
        return mean * kept + self.neuron.incentive * (1 - kept)


class Ledger:
    """Thread-safe. Writes raise ChainError when the chain does not accept them.

    Blocks pass by the clock, one every ``seconds_per_block`` (``math.inf``: only by
    :meth:`advance`). A wall clock that is set changes nothing.
    """

    def __init__(
        self,
        *,
        seconds_per_block: float = math.inf,
        first_block: int = 1000,
        most_uids: int = MAX_UIDS,
    ) -> None:
        self.seconds_per_block = seconds_per_block
        self.most_uids = most_uids
        self.slots: dict[int, Slot] = {}  # by uid
        self.losses: Losses = {}  # of the global model on held-out data
        self.version = 0  # of the state; each write adds one
        self._lock = threading.RLock()
        self._changing = False
        self._origin = (first_block, time.monotonic())

    # blocks

    @property
    def height(self) -> int:
        """Number of the current block."""
        block, since = self._origin
        return block + math.floor((time.monotonic() - since) / self.seconds_per_block)

    def advance(self, blocks: int = 1) -> None:
        """Let blocks pass at once; a negative number is a reorganization."""
        block, since = self._origin
        self._origin = (block + blocks, since)

    # changes

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Make one write, all of it or nothing; a write within a write is part of it."""
        with self._lock:
            if self._changing:
                yield
                return
            before = {"slots": {**self.slots}, "losses": self.losses, "version": self.version}
            self._changing = True
            try:
                with self._kept():
                    yield
                    self._score()
                    self.version += 1
            except BaseException:  # Ctrl-C too: half a change must not be served
                vars(self).update(before)
                raise
            finally:
                self._changing = False

    def _kept(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a write, which makes it last (:class:`.store.Registry`)."""
        return contextlib.nullcontext()

    def _find(self, hotkey: str) -> Slot | None:
        slots = self.slots.values()
        return next((slot for slot in slots if slot.neuron.hotkey == hotkey), None)

    def _own(self, kind: str, hotkey: str) -> Slot:
        slot = self._find(hotkey)
        if slot is None:
            raise ChainError(f"{kind}: hotkey {hotkey} is not registered")
        return slot

    def _put(self, slot: Slot) -> None:
        self.slots[slot.neuron.uid] = slot

    # writes

    def register(
        self,
        hotkey: str,
        *,
        uid: Uid | None = None,
        stake: Amount = 0.0,
        validator_permit: bool = False,
    ) -> int:
        """Give ``hotkey`` a uid: the one it has, the lowest free one, or the least earning one's.

        Returns it.

        A hotkey that is registered keeps its endpoint. A uid that is taken goes to the new hotkey,
        whose owner is thereby deregistered, as on the public chain.
        """
        with self._change():
            old = self._find(hotkey)
            if uid is None:
                uid = old.neuron.uid if old is not None else self._next_uid()
            if uid >= self.most_uids:
                raise ChainError(f"register: uids are 0 to {self.most_uids - 1} here")
            neuron = replace(
                old.neuron if old is not None else Neuron(uid=uid, hotkey=hotkey),
                uid=uid,
                stake=stake,
                validator_permit=validator_permit,
                last_update=self.height,
            )
            if old is not None and old.neuron.uid == uid:
                # A change of stake or permit is no new registration: the immunity goes on.
                self._put(old._replace(neuron=neuron))
                return uid
            for slot in (old, self.slots.get(uid)):
                if slot is not None:
                    self._remove(slot)
            # The commitment is the hotkey's and stays: others read its bucket by it.
            commitment = old.commitment if old is not None else None
            self._put(Slot(neuron, Since(self.height, time.time()), commitment))
            return uid

    def _next_uid(self) -> int:
        free = next((i for i in range(self.most_uids) if i not in self.slots), None)
        if free is not None:
            return free
        oldest = self.height - IMMUNITY
        candidates = [
            (slot.neuron.incentive, slot.since.block, uid)
            for uid, slot in self.slots.items()
            if not slot.neuron.validator_permit and slot.since.block <= oldest
        ]
        if not candidates:
            raise ChainError(
                f"register: all {self.most_uids} uids are taken by validators or by neurons "
                f"registered within {IMMUNITY} blocks: try again later"
            )
        # Of those that earn equally little the one that was there longest goes.
        return min(candidates)[2]

    def _remove(self, slot: Slot) -> None:
        uid = slot.neuron.uid
        del self.slots[uid]
        # Others' weights of this uid too: who gets it next has earned none of them.
        for voter in list(self.slots.values()):
            if voter.weights and uid in voter.weights:
                left = {of: weight for of, weight in voter.weights.items() if of != uid}
                self._put(voter._replace(weights=left))

    def deregister(self, hotkey: str) -> None:
        with self._change():
            self._remove(self._own("deregister", hotkey))

    def commit(self, hotkey: str, text: str) -> None:
        with self._change():
            slot = self._own("commit", hotkey)
            if len(text.encode()) > MAX_COMMITMENT:
                raise ChainError(f"commit: a commitment has at most {MAX_COMMITMENT} bytes")
            self._put(slot._replace(commitment=text))

    def serve(self, hotkey: str, ip: Address, port: Port) -> None:
        with self._change():
            slot = self._own("serve", hotkey)
            self._put(slot._replace(neuron=replace(slot.neuron, ip=ip, port=port)))

    def set_weights(self, hotkey: str, weights: Mapping[Uid, Amount]) -> None:
        with self._change():
            slot = self._own("weights", hotkey)
            if not slot.neuron.validator_permit:
                raise ChainError("weights: only a validator with a permit sets weights")
            # Else who gets that uid next would begin with weights it has not earned.
            unknown = sorted(set(weights) - set(self.slots))
            if unknown:
                raise ChainError(f"weights: no such uids: {unknown[:10]}")
            neuron = replace(slot.neuron, last_update=self.height)
            self._put(slot._replace(neuron=neuron, weights=dict(weights)))

    def report_loss(self, outer_step: Step, loss: Amount) -> None:
        """Note the global model's held-out loss. Outer steps above this one were taken back."""
        with self._change():
            # Bounded: all of them go into each page, and into the file with each report.
            oldest = outer_step - MOST_LOSSES
            kept = {
                step: known for step, known in self.losses.items() if oldest < step < outer_step
            }
            self.losses = {**kept, outer_step: (loss, time.time())}

    def _score(self) -> None:
        """Set incentive = mean of the validators' normalized weights, weighted by stake.

        Simpler than Yuma consensus (no clipping, no bonds), enough to see who is paid.
        """
        totals = dict.fromkeys(self.slots, 0.0)
        for slot in self.slots.values():
            weights = slot.weights or {}
            total = sum(weights.values())
            for uid, weight in weights.items():
                if uid in totals and total > 0:
                    totals[uid] += slot.neuron.stake * weight / total
        everything = sum(totals.values())
        now = time.time()
        for slot in list(self.slots.values()):
            neuron = slot.neuron
            share = totals[neuron.uid] / everything if everything > 0 else 0.0
            if share != neuron.incentive:
                # The mean up to now is of the old incentive; the new one counts from here.
                earned = (slot.earned_by(now), now)
                scored = replace(neuron, incentive=share, consensus=share)
                self._put(slot._replace(neuron=scored, earned=earned))
