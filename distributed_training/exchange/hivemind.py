"""Follow a network over hivemind: the rounds of :mod:`.store_rounds`, and an all-reduce in each.

Each member orders its *peer process* (:mod:`.hivemind_peer`) to average the values that its upload
for a close decodes to. The validator takes part with zeros, and may publish the average as the
update instead of the merge of the uploads (:mod:`distributed_training.validator.average`). A member
only ever applies the file that the validator publishes. So an all-reduce that fails, hangs or is
falsified costs the average of one round, never the round or another member.

This module needs no hivemind: only the peer process imports it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.chain.base import ChainError, Neuron
from distributed_training.common.processes import ChildProcess
from distributed_training.protocol import lines
from distributed_training.protocol.manifest import Manifest, State
from distributed_training.protocol.types import Schema

from .base import Close, Post
from .store_rounds import StoreRounds

log = logging.getLogger(__name__)

#: Causes of a refusal that are no fault of what a member averages.
NO_FAULT = frozenset({"late", "not-judged"})
_HANGS = 15.0  # seconds after the end of an order in which a peer process must answer
_FAILURES = 2  # in a row, after which a peer process is started again: it may have lost all peers
Addresses = tuple[tuple[str, tuple[str, ...]], ...]  # of members, by peer id


@dataclass(frozen=True)
class Settings:
    """Hold the settings with which a peer process starts. Times are in seconds."""

    schema: Schema
    run_id: str
    identity: str  # path of the key file
    listen: str
    port: int
    address: str = ""  # full, to announce, without peer id; empty: p2pd's own guess
    witness: bool = False  # it is the validator's
    gather: float = 6.0  # of matchmaking
    chunk: float = 20.0  # without a byte of a peer
    longest: float = 600.0  # of a transfer


@dataclass(frozen=True)
class Ready:
    """The peer process listens."""

    peer_id: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Order:
    """Average once."""

    serial: int
    at: float  # Unix seconds, by this machine's clock
    ends: float  # the same
    members: Addresses  # the others
    witnesses: tuple[str, ...]  # peer ids that reduce nothing
    usual: float  # norm of an upload, by the last manifest
    upload: str = ""  # file whose values are averaged; empty: zeros
    average: str = ""  # file to write the average into; empty: it is not kept

    def scale(self, values: int) -> float:
        """Return the power of two that brings ``values`` of an upload to about 1, for float16."""
        return 2.0 ** round(math.log2(math.sqrt(values) / self.usual))


@dataclass(frozen=True)
class Answer:
    """The result of an order."""

    serial: int
    # Peer id and reduced values of each peer, in their order
    shares: tuple[tuple[str, int], ...] = ()
    failed: str = ""  # why there is no average
    seconds: float = 0.0


def usual_norm(manifest: Manifest | None) -> float | None:
    """Return the median norm of the uploads that a manifest has merged; None: it has none."""
    named = manifest.merged if manifest else ()
    merged = [one.norm * one.factor / one.share for one in named if one.factor]
    return statistics.median_low(merged) if merged else None


def left_out(manifest: Manifest) -> set[str]:
    """Return the hotkeys whose uploads the manifest has refused: they sit the next one out."""
    return {one.hotkey for one in manifest.refused if one.cause not in NO_FAULT}


def find_partners(neurons: Sequence[Neuron], manifest: Manifest, *, own: str) -> Addresses:
    """Return who may take part in an all-reduce, as the chain has it, without the hotkey ``own``.

    A member whose upload the last manifest has refused is left out.
    """
    without = left_out(manifest) | {own}
    return tuple(
        (one.peer, (f"/ip{6 if ':' in one.ip else 4}/{one.ip}/tcp/{one.port}/p2p/{one.peer}",))
        for one in neurons
        if one.peer and one.port and one.hotkey not in without
    )


@dataclass(frozen=True)
class Membership:
    """The members who average, and the time at which they do."""

    neurons: Callable[[], Sequence[Neuron]]  # as last read
    hotkey: str  # ours
    master: str  # the validator's hotkey
    average_after: float  # seconds after a close

    def build_order(
        self, close: Close | State, now: float, manifest: Manifest | None, **file: str
    ) -> Order | None:
        """Return the order for a close; None: the network has merged nothing to go by yet.

        ``now``: by the store's clock. ``file``: ``upload`` or ``average``. Raises ChainError.
        """
        usual = usual_norm(manifest)
        if manifest is None or usual is None:
            return None
        neurons, closed_at = self.neurons(), close.closes_at + time.time() - now
        return Order(
            serial=close.serial,
            at=closed_at + self.average_after,
            ends=closed_at + close.grace,
            members=find_partners(neurons, manifest, own=self.hotkey),
            witnesses=tuple(one.peer for one in neurons if one.hotkey == self.master),
            usual=usual,
            **file,
        )


class PeerProcess(ChildProcess):
    """Keeps a peer process running, and passes orders to it.

    ``ready`` is called after each start, ``answered`` once for each order, from threads.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        ready: Callable[[Ready], None],
        answered: Callable[[Answer], None],
        module: str = "distributed_training.exchange.hivemind_peer",
    ) -> None:
        super().__init__(
            "The DHT peer",
            module,
            effect="rounds go on without its average, and uploads count as before",
            begin=self._on_start,
            receive=self._on_message,
        )
        self._settings, self._ready, self._answered = settings, ready, answered
        self._order: Order | None = None  # until it is answered
        self._failures = 0

    def order(self, order: Order) -> None:
        """Have the values of an upload averaged; an order that is not answered yet has failed."""
        self._fail(self._order, "another close has come")
        with self.lock:
            self._order = order
            self.send(order)
        left = max(0.0, order.ends - time.time()) + _HANGS
        watch = threading.Timer(left, self._fail, (order, "it hangs"))
        watch.daemon = True
        watch.start()

    def _on_start(self) -> None:
        self.send(self._settings)
        self._fail(self._order, "the DHT peer ended", kill=False)

    def _fail(self, order: Order | None, why: str, *, kill: bool = True) -> None:
        """Answer an order that the process leaves unanswered, and start the process again."""
        if order is None or self._order is not order or self._closing.is_set():
            return
        self._on_message(Answer(order.serial, failed=why))
        if kill:
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Ready):
            self._ready(message)
        elif self._order and message.serial == self._order.serial:
            self._order = None
            self._answered(message)
            self._failures = self._failures + 1 if message.failed else 0
            if self._failures >= _FAILURES:
                self._failures = 0
                self._kill()


class HivemindRounds(StoreRounds):
    """Follow the network, and take part in the all-reduce of each close that we upload for.

    Args:
        membership: Finds the others.
        settings: Returns those of the peer process, for the model's schema.
        ready: Called each time that the peer process listens.
    """

    def __init__(
        self,
        *given: Any,
        membership: Membership,
        settings: Callable[[Schema], Settings],
        ready: Callable[[Ready], None],
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self._membership, self._settings, self._ready = membership, settings, ready
        self._peer: PeerProcess | None = None

    def start(self, post: Post, *, outer_step: int, schema: Schema) -> None:
        """Start the peer process too. Raises OSError."""
        self._peer = PeerProcess(
            self._settings(schema), ready=self._ready, answered=self._on_answer
        )
        self._peer.start()
        super().start(post, outer_step=outer_step, schema=schema)

    def send(self, close: Close, path: Path) -> None:
        """Send the upload, and order the all-reduce of the values that it decodes to."""
        super().send(close, path)
        if not close.serial:  # it is for no close
            return
        manifest, who = self.manifest(close.outer_step), self._membership
        if manifest is not None and who.hotkey in left_out(manifest):
            log.warning("No all-reduce at this close: the last upload of this miner was refused")
            return
        try:
            order = who.build_order(close, self.now(), manifest, upload=str(path.absolute()))
        except ChainError as error:
            log.warning("No all-reduce at this close: %s", error)
            return
        if self._peer is None or order is None:
            log.info("No all-reduce at this close: the network has merged nothing to go by yet")
            return
        log.info("%s", lines.AVERAGING_START)
        log.info("%s: %d other peers are known", lines.ALL_REDUCE_START, len(order.members))
        self._peer.order(order)

    def _on_answer(self, answer: Answer) -> None:
        if answer.failed:
            log.warning(
                "%s: %s. Training continues, the upload counts as before, and the outer step is "
                "taken from the uploads if the validator has no average either",
                lines.all_reduce_failed(2),
                answer.failed,
            )
        else:
            log.info(
                "%s: %d peers in %.1f s",
                lines.ALL_REDUCE_FINISH,
                len(answer.shares),
                answer.seconds,
            )

    def stop(self) -> None:
        if self._peer is not None:
            self._peer.close()
        super().stop()
