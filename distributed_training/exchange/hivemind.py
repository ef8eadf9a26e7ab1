"""Follow a network over hivemind: the rounds of :mod:`.store_rounds`, and an all-reduce in each.

Each member orders its *peer process* (:mod:`.hivemind_peer`) to average the decoded values of its
upload for a close. The validator takes part with zeros, and may publish the average as the update
instead of the merge of the uploads (:mod:`distributed_training.validator.average`). A member only
ever applies the file that the validator publishes. So if an all-reduce fails, hangs or is
falsified, only the average of one round is lost, never the round or another member.

This module does not need hivemind: only the peer process imports it.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed_training.chain.base import ChainError, Neuron
from distributed_training.common.processes import ChildProcess
from distributed_training.protocol import lines
from distributed_training.protocol.manifest import Manifest, State
from distributed_training.protocol.types import Schema
from distributed_training.store.base import Uplink

from .base import Close, Post
from .store_rounds import StoreRounds

log = logging.getLogger(__name__)

#: Causes of a refusal that say nothing against the values that a member averages.
NO_FAULT = frozenset({"late", "not-judged"})
HANGS = 15.0  # seconds that a peer process has to answer after the end of an order


class NoAllReduce(Exception):
    """Says why there is no all-reduce at a close."""


@dataclass(frozen=True)
class Settings:
    """The settings that a peer process starts with. Times are in seconds."""

    schema: Schema
    run_id: str
    identity: str  # path of the key file
    listen: str
    port: int
    address: str = ""  # full address to announce, without peer id; if empty, p2pd guesses it
    gather: float = 6.0  # time for matchmaking
    chunk: float = 20.0  # longest time without a byte from a peer


@dataclass(frozen=True)
class Ready:
    """The peer process listens. ``address``: where, as it sees it, ``/ip4/.../tcp/PORT/...``."""

    peer_id: str
    address: str


@dataclass(frozen=True)
class Order:
    """An order to average once."""

    serial: int
    at: float  # when it begins, in Unix seconds by this machine's clock
    ends: float  # when it must have ended, by the same clock
    members: tuple[tuple[str, str, int], ...]  # the others: peer id, address, uid
    leader: str  # peer id of the validator, which reduces nothing
    usual: float  # usual norm of an upload, from the last manifest
    upload: str = ""  # file whose values are averaged; empty: zeros with nearly no weight
    average: str = ""  # file to write the average into; empty if it is not kept

    @property
    def longest(self) -> float:
        """Largest norm, as in a merge: uploads are clipped to it, a longer average is refused."""
        return 2.0 * self.usual

    def scale(self, values: int) -> float:
        """Return the power of two that scales an upload to values of about 1, for float16.

        ``values``: how many values the upload has.
        """
        return 2.0 ** round(math.log2(math.sqrt(values) / self.usual))


@dataclass(frozen=True)
class Answer:
    """The result of an order."""

    serial: int
    # for each peer, in the group's order: its peer id, and how many values it reduced
    shares: tuple[tuple[str, int], ...] = ()
    failed: str = ""  # why there is no average


@dataclass(frozen=True)
class Membership:
    """The members who average, and when they do."""

    neurons: Callable[[], Sequence[Neuron]]  # as last read from the chain
    hotkey: str  # ours
    master: str  # the validator's hotkey
    average_after: float  # seconds after a close

    def build_order(
        self, close: Close | State, now: float, manifest: Manifest | None, **file: str
    ) -> Order:
        """Return the order for a close. A member that ``manifest`` refuses sits it out.

        ``now``: the time by the store's clock. ``manifest``: the last manifest. ``file``: the
        order's ``upload`` or ``average``. Raises NoAllReduce, ChainError.
        """
        merged = [each for each in manifest.merged if each.factor] if manifest else []
        if manifest is None or not merged:
            raise NoAllReduce("nothing was merged before, so the usual norm is not known")
        refused = {one.hotkey for one in manifest.refused if one.cause not in NO_FAULT}
        if self.hotkey in refused:
            raise NoAllReduce("the last upload of this member was refused")
        peers = [each for each in self.neurons() if each.peer and each.port]
        closed_at = close.closes_at + time.time() - now
        return Order(
            serial=close.serial,
            at=closed_at + self.average_after,
            ends=closed_at + close.grace,
            members=tuple(
                (each.peer, f"/ip{6 if ':' in each.ip else 4}/{each.ip}/tcp/{each.port}", each.uid)
                for each in peers
                if each.hotkey not in refused | {self.hotkey}
            ),
            leader="".join(each.peer for each in peers if each.hotkey == self.master),
            usual=statistics.median_low(one.norm * one.factor / one.share for one in merged),
            **file,
        )


def start_peer(
    settings: Settings,
    *,
    ready: Callable[[Ready], None],
    answered: Callable[[Answer], None],
    module: str = "distributed_training.exchange.hivemind_peer",
) -> ChildProcess:
    """Start a peer process, which carries out each :class:`Order` sent to it. Raises OSError.

    A thread calls ``ready`` after each start, and ``answered`` after each order unless the process
    ends or hangs meanwhile.
    """
    peer = ChildProcess(
        "The DHT peer",
        module,
        effect="rounds continue without its average, and uploads count as before",
        begin=lambda: peer.send(settings),
        receive=lambda one: ready(one) if isinstance(one, Ready) else answered(one),
    )
    peer.start()
    return peer


class HivemindRounds(StoreRounds):
    """Follows the network, and takes part in the all-reduce of each close that we upload for.

    Args:
        membership: Finds the other members.
        open_peer: Starts the peer process, given a schema and the function that gets its answers.
    """

    def __init__(
        self,
        *given: Any,
        membership: Membership,
        open_peer: Callable[[Schema, Callable[[Answer], None]], ChildProcess],
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self._membership, self._open_peer = membership, open_peer
        self._peer: ChildProcess | None = None
        self._ordered = 0  # serial of the close of the last order

    def start(self, post: Post, *, outer_step: int, schema: Schema) -> None:
        """Start the peer process too. Raises OSError."""
        self._peer = self._open_peer(schema, self._on_answer)
        super().start(post, outer_step=outer_step, schema=schema)

    def _send(self, close: Close, uplink: Uplink) -> None:
        """Order the all-reduce of the upload's values, even after a kill, and send the upload."""
        if close.serial and close.serial != self._ordered:  # progress is for no close
            self._ordered = close.serial
            try:
                self._order(close)
            except Exception:  # the upload counts even without an average
                log.exception("Unexpected error while ordering an all-reduce; please report it")
        super()._send(close, uplink)

    def _order(self, close: Close) -> None:
        assert self._peer is not None, "the exchange has started"
        manifest = self.manifest(close.outer_step)
        upload = self._uploads.path(close)
        try:
            order = self._membership.build_order(
                close, self.now(), manifest, upload=str(upload.absolute())
            )
        except (NoAllReduce, ChainError) as error:
            log.info("No all-reduce at this close: %s", error)
            return
        log.info("%s", lines.AVERAGING_START)
        log.info("%s: %d other peers are known", lines.ALL_REDUCE_START, len(order.members))
        self._peer.send(order)

    def _on_answer(self, answer: Answer) -> None:
        if answer.failed:
            log.warning(
                "%s: %s. Training continues, the upload counts as before, and the outer step is "
                "taken from the uploads if the validator has no average either",
                lines.all_reduce_failed(2),
                answer.failed,
            )
        else:
            log.info("%s: %d peers", lines.ALL_REDUCE_FINISH, len(answer.shares))

    def stop(self) -> None:
        if self._peer is not None:
            self._peer.close()
        super().stop()
