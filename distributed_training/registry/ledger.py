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
from copy import copy
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import AfterValidator, Field

from distributed_training.chain.base import ChainError, Neuron, find

MAX_UIDS = 256
MAX_COMMITMENT = 128  # bytes, as on the public chain
#: Blocks after its registration during which nobody takes a neuron's uid, as on the public chain.
IMMUNITY = 4096
MOST_LOSSES = 1000  # outer steps of which the held-out loss is kept
_DAY = 86400.0
_PARTS = ("entries", "commitments", "weights", "since", "earned", "losses", "version")


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
        self.entries: dict[int, Neuron] = {}
        self.commitments: dict[str, str] = {}  # by hotkey
        self.weights: dict[int, dict[int, float]] = {}  # of each validator
        self.since: dict[int, Since] = {}
        self.earned: dict[int, tuple[float, float]] = {}  # mean of a day, as of; see earned_by
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
            # Shallow copies suffice, because no entry is changed in place: each is replaced.
            before = {part: copy(getattr(self, part)) for part in _PARTS}
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
        """Give ``hotkey`` a uid: the one it has, the lowest free one, or the least earning one's.

        Returns it.

        A hotkey that is registered keeps its endpoint. A uid that is taken goes to the new hotkey,
        whose owner is thereby deregistered, as on the public chain.
        """
        with self._change():
            old = find(list(self.entries.values()), hotkey)
            if uid is None:
                uid = old.uid if old is not None else self._next_uid()
            if uid >= self.most_uids:
                raise ChainError(f"register: uids are 0 to {self.most_uids - 1} here")
            if old is not None and old.uid != uid:
                # The commitment is the hotkey's and stays: others read its bucket by it.
                self._remove(old.uid, commitment=False)
            taken = self.entries.get(uid)
            if taken is not None and taken.hotkey != hotkey:
                self._remove(uid)
            # A change of stake or permit is no new registration: the immunity goes on.
            if uid not in self.since:
                self.since[uid] = Since(self.height, time.time())
            self.entries[uid] = replace(
                old or Neuron(uid=uid, hotkey=hotkey),
                uid=uid,
                stake=stake,
                validator_permit=validator_permit,
                last_update=self.height,
            )
            return uid

    def _next_uid(self) -> int:
        free = next((i for i in range(self.most_uids) if i not in self.entries), None)
        if free is not None:
            return free
        oldest = self.height - IMMUNITY
        candidates = [
            (n.incentive, self.since[n.uid].block, n.uid)
            for n in self.entries.values()
            if not n.validator_permit and self.since[n.uid].block <= oldest
        ]
        if not candidates:
            raise ChainError(
                f"register: all {self.most_uids} uids are taken by validators or by neurons "
                f"registered within {IMMUNITY} blocks: try again later"
            )
        # Of those that earn equally little the one that was there longest goes.
        return min(candidates)[2]

    def _remove(self, uid: int, *, commitment: bool = True) -> None:
        neuron = self.entries.pop(uid)
        # Others' weights of this uid too: who gets it next has earned none of them.
        self.weights = {
            voter: {of: weight for of, weight in row.items() if of != uid}
            for voter, row in self.weights.items()
            if voter != uid
        }
        self.since.pop(uid, None)
        self.earned.pop(uid, None)
        if commitment:
            self.commitments.pop(neuron.hotkey, None)

    def deregister(self, hotkey: str) -> None:
        with self._change():
            self._remove(self._own("deregister", hotkey).uid)

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
            # Else who gets that uid next would begin with weights it has not earned.
            unknown = sorted(set(weights) - set(self.entries))
            if unknown:
                raise ChainError(f"weights: no such uids: {unknown[:10]}")
            self.weights[neuron.uid] = dict(weights)
            self.entries[neuron.uid] = replace(neuron, last_update=self.height)

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
        totals = dict.fromkeys(self.entries, 0.0)
        for voter, row in self.weights.items():
            total = sum(row.values())
            for uid, weight in row.items():
                if voter in self.entries and uid in totals and total > 0:
                    totals[uid] += self.entries[voter].stake * weight / total
        everything = sum(totals.values())
        for uid, neuron in self.entries.items():
            share = totals[uid] / everything if everything > 0 else 0.0
            if share != neuron.incentive:
                now = time.time()
                # The mean up to now is of the old incentive; the new one counts from here.
                self.earned[uid] = (self.earned_by(neuron, now), now)
                self.entries[uid] = replace(neuron, incentive=share, consensus=share)

    def earned_by(self, neuron: Neuron, now: float) -> float:
        """Return the mean of the neuron's incentive over about a day, until ``now``.

        It decays exponentially.
        """
        mean, counted = self.earned.get(neuron.uid, (0.0, now))
        kept = math.exp(-max(0.0, now - counted) / _DAY)
        return mean * kept + neuron.incentive * (1 - kept)
