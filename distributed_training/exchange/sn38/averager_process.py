"""Run the swarm process, which owns p2pd, the DHT node and the averager.

    python -m distributed_training.exchange.sn38.averager_process DESCRIPTOR

Rank 0 starts it. DESCRIPTOR is this process's end of a socket: commands come in and answers leave
as lines of JSON (:mod:`.supervisor`). Standard output and error are hivemind's log. It leads a
process group of its own, with p2pd in it, and ends that group when rank 0 is gone or when it cannot
continue itself.

The averager is wire-compatible with the public network. hivemind's own is a process next to the
DHT's process, with pipes and shared-memory futures between them. Here DHT node, matchmaking and
all-reduce share one event loop: there is one process to watch, and what changes from round to round
(group size, timeouts) is an argument. Matchmaking is hivemind's; the all-reduce is ours
(:mod:`.all_reduce`), on the same wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks for typing's in annotations

import torch
from cryptography.exceptions import UnsupportedAlgorithm
from google.protobuf.message import DecodeError
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.averager import compute_schema_hash
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.matchmaking import Matchmaking, MatchmakingException
from hivemind.compression import Float16Compression, NoCompression
from hivemind.dht import node as hivemind_node
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from torch import Tensor

from distributed_training.common.backoff import Backoff
from distributed_training.common.kinds import import_inherited_plugins
from distributed_training.common.processes import write_stacks_on_signal
from distributed_training.protocol.synapses import LARGEST_GROUP

from . import wire
from .address_book import AddressBook
from .all_reduce import FLOAT_BYTES, AllReduce, Group, GroupFailed, Terms
from .bounds import (
    MOST_MESSAGE_BYTES,
    BoundedP2P,
    DHTProtocol,
    Known,
    RecordValidator,
    receive_bounded,
)
from .meeting import Kind, Meeting, Obstacle
from .supervisor import (
    Average,
    Beat,
    Cancel,
    Ended,
    Failed,
    Found,
    HostConfig,
    Joined,
    Message,
    Ready,
    RoundOrder,
    describe_end,
    from_line,
    map_tensors,
    to_line,
)
from .wire import Daemon, Stream

log = logging.getLogger(__name__)

#: By ``round.compression``. hivemind's 8-bit quantizations are not among them: they
#: fail on parts of few values, which load balancing makes, and such a part is lost for the round.
COMPRESSIONS = {
    "none": NoCompression.compression_type,
    "float16": Float16Compression.compression_type,
    "4bit": wire.FOUR_BITS,
}
_SEARCH_PAUSE = 0.5  # seconds between two searches, when one failed
# Between two looks into the DHT for peers.
_FIRST_LOOKUP_WAIT, _LONGEST_LOOKUP_WAIT = timedelta(seconds=0.1), timedelta(seconds=1)
_FIRST_PART_TIMEOUT = 45.0  # seconds for the beginning of a stream that a called peer opened
_UNCALLED_TIMEOUT = 10.0  # the same if the call named nobody, for the peers that come
_JOIN_REQUEST_TIMEOUT = 5.0  # seconds for the one message that asks us to lead
_STREAMS_EACH = 2  # of one peer at once; one is enough, but for one that broke a moment ago
_MORE_STREAMS = 8  # in all, than the group has peers
_MOST_STREAMS = LARGEST_GROUP + _MORE_STREAMS

#: Where more of the values have no average, the round is not good: this peer would go another way
#: than the rest of its group. A reducer averages at most 2/n of the values.
_MOST_KEPT_LOCAL = 0.5
_WIDEST_RANGE = 1e4  # of bandwidths in a group: a linear program of a wider one is ill-conditioned

_HEARD_BY_FOLLOWER = 5.0  # seconds a follower has to take our last word
_LAST_AVERAGES = 2.0  # seconds for peers to take their last averages, when we end


# The name is part of the calls' names on the wire (protocol page, section 1).
class DTGradAverager(ServicerBase):
    """A full peer of the swarm: finds groups, averages ``tensors`` with them in place.

    ``node``: of the DHT through which peers find each other. ``known``: learns who was called, and
    who took part. Use it inside :meth:`serving`, for one round at a time.
    """

    def __init__(
        self, node: DHTNode, config: HostConfig, tensors: Sequence[Tensor], known: Known
    ) -> None:
        self._node = node
        self._known = known
        self._config = config
        self._tensors = tensors
        self._schema_hash = compute_schema_hash(tensors)
        if config.compression == "4bit":  # so that no other compression finds a place in a group
            self._schema_hash += b"4bit"
        self.daemon = Daemon(node.p2p.daemon_listen_maddr["unix"])
        self._parts_protocol = self._get_handle_name(config.prefix, "rpc_aggregate_part")
        self._join_protocol = self._get_handle_name(config.prefix, "rpc_join_group")
        self._admitted: frozenset[str] = frozenset()  # by the call; empty: any peer
        self._streams: Counter[tuple[str, PeerID]] = Counter()  # by protocol
        self._matchmaking: _Admitting | None = None  # while a group is looked for
        self._others = ""  # who of the call cannot be in our group, and why
        self._all_reduce: AllReduce | None = None
        self._search_over = asyncio.Event()  # and the group's all-reduce is there, if one was found
        self._search_over.set()
        self._serving: set[asyncio.Task[Any]] = set()  # streams of peers in this round

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Let peers call us inside this context."""
        sockets, serve = Path(self._config.sockets), self.daemon.serve
        most = 2 * _MOST_STREAMS
        async with (
            serve(self._join_protocol, sockets / "join.sock", self._lead, most=most),
            serve(self._parts_protocol, sockets / "parts.sock", self._serve, most=most),
        ):
            yield
            if self._serving:  # slower peers still take their averages
                await asyncio.wait(self._serving, timeout=_LAST_AVERAGES)

    # --- a round -------------------------------------------------------------------------------

    async def average(self, order: RoundOrder, on_found: Callable[[], None]) -> Average | Failed:
        """Find a group and average with it, by ``order``'s deadlines. Cancel it to end it early.

        ``on_found`` is called once a group is found. From then on, unless Average is answered,
        the tensors' values are not defined.
        """
        values = sum(t.numel() for t in self._tensors)
        serving: set[asyncio.Task[Any]] = set()
        started = time.monotonic()
        found: float | None = None
        averaged = False
        try:
            async with asyncio.timeout(order.timeout):
                info = await self._find_group(order)
                found = time.monotonic()
                on_found()
                terms = Terms(
                    weight=order.weight,
                    part_values=self._config.part_size // FLOAT_BYTES,
                    compression=COMPRESSIONS[self._config.compression],
                    chunk_timeout=order.next_chunk_timeout,
                    timeout=min(order.allreduce_timeout, order.timeout - (found - started)),
                    usual_rms=order.usual_norm / math.sqrt(max(1, values)),
                )
                async with asyncio.timeout(order.allreduce_timeout):
                    all_reduce = self._all_reduce = AllReduce(
                        await _group_of(info, values),
                        self._node.peer_id,
                        tensors=self._tensors,
                        terms=terms,
                        open_stream=partial(self.daemon.open_stream, protocol=self._parts_protocol),
                    )
                    self._serving = serving
                    self._search_over.set()
                    await all_reduce.run()
            averaged = True
        except TimeoutError:
            if found:
                return Failed("TIMEOUT", causes=self._causes())
            return Failed("NO_GROUP", self._others)
        except GroupFailed as error:
            return Failed("PEER_FAILED", str(error), self._causes())
        finally:
            if not averaged:
                for task in serving:  # they would keep writing into the tensors
                    task.cancel()
            self._search_over.set()
            causes, self._all_reduce = self._causes(), None
            self._admitted = frozenset()
        kept_local = (all_reduce.kept_local + all_reduce.reducer.kept_local) / max(1, values)
        if kept_local > _MOST_KEPT_LOCAL:
            fault = "TIMEOUT" if all_reduce.out_of_time else "PEER_FAILED"
            return Failed(fault, f"{kept_local:.0%} of the values have no average", causes)
        seen = all_reduce.reducer.scale
        return Average(
            peers=[str(peer) for peer in info.peer_ids],
            causes=causes,
            kept_local=kept_local,
            usual_norm=None if seen is None else seen.usual * math.sqrt(values),
            matchmaking=found - started,
            transfer=time.monotonic() - found,
        )

    def _causes(self) -> dict[str, str]:
        """Return why peers were left out of the round under way, by peer id."""
        causes = self._all_reduce.causes if self._all_reduce is not None else {}
        return {str(peer): cause for peer, cause in causes.items()}

    async def _find_group(self, order: RoundOrder) -> GroupInfo:
        """Find a group for the round. Raises TimeoutError."""
        config = self._config
        self._admitted = frozenset(order.peers)
        self._known.add(map(PeerID.from_base58, order.peers))
        self._others = ""
        # A peer that sends parts before we know of our group waits for this.
        self._search_over.clear()
        about_us = [order.bandwidth, AveragingMode.NODE.value, MSGPackSerializer.dumps(0)]
        now = get_dht_time()
        search = _Search(
            scheduled_time=now + order.min_matchmaking_time,
            deadline=now + order.timeout,
            data_for_gather=MSGPackSerializer.dumps(about_us),
        )
        self._matchmaking = _Admitting(
            self._node.p2p,
            self._schema_hash,
            _Dht(self._node),
            servicer_type=type(self),
            prefix=config.prefix,
            target_group_size=None,
            min_group_size=order.min_group_size,
            min_matchmaking_time=order.min_matchmaking_time,
            request_timeout=order.request_timeout,
            client_mode=False,
            admitted=self._admitted,
            on_other=self._note_other,
        )
        try:
            while True:
                try:
                    group = await self._matchmaking.look_for_group(search)
                except _SEARCH_FAILURES as error:
                    log.warning("The search for a group failed and is repeated: %r", error)
                    await asyncio.sleep(_SEARCH_PAUSE)
                    continue
                if group is None:
                    raise TimeoutError
                # Who follows learns the members only now: the leader chose them.
                if not self._matchmaking.admits(*group.peer_ids):
                    raise GroupFailed("its leader let in who was not called")
                if not order.min_group_size <= len(set(group.peer_ids)) == len(group.peer_ids):
                    raise GroupFailed("its leader named too few peers, or one of them twice")
                self._known.add(group.peer_ids)
                return group
        finally:
            self._matchmaking = None

    def _note_other(self, peer: PeerID) -> None:
        """Note that ``peer`` and this one cannot be in one group."""
        if not self._others:
            self._others = (
                f"peer {peer} has another model or another round.compression than ours, "
                f"{self._config.compression!r}: all peers of a network need the same"
            )
            log.warning("A peer is refused: %s", self._others)

    # --- calls of other peers ------------------------------------------------------------------

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Answer a peer that asks us to lead its group."""
        if self._matchmaking is None:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
            return
        async for message in self._matchmaking.rpc_join_group(request, context):
            yield message
        # hivemind closes the stream when we return, p2pd then resets it, and a reset may overtake
        # the last message: the follower would never hear that its group begins. It closes the
        # stream itself when it has heard it, which ends this wait.
        await asyncio.sleep(_HEARD_BY_FOLLOWER)

    async def _lead(self, stream: Stream) -> None:
        """Serve a stream on which a peer asks us to lead its group, as hivemind's P2P would."""
        with self._place("join", stream.peer) as place:
            if not place or self._matchmaking is None:
                refusal = averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
                await stream.send(*wire.framed(refusal.SerializeToString()))
                return
            async with asyncio.timeout(_JOIN_REQUEST_TIMEOUT):
                request = await wire.receive_short(stream, averaging_pb2.JoinRequest)
            context = P2PContext(self._join_protocol, self._node.peer_id, stream.peer)
            answering = asyncio.create_task(self._answer(stream, request, context))
            # The stream ends before this many bytes: the peer has sent its one message.
            gone = asyncio.create_task(stream.receive(len(wire.END) + 1))
            try:
                await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (answering, gone):
                    task.cancel()
                # To the end: matchmaking counts a follower until its call has ended.
                await asyncio.gather(answering, gone, return_exceptions=True)

    async def _answer(
        self, stream: Stream, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> None:
        answers: Any = self.rpc_join_group(request, context)
        async with contextlib.aclosing(answers) as messages:
            async for message in messages:
                await stream.send(*wire.framed(message.SerializeToString()))

    async def _serve(self, stream: Stream) -> None:
        """Serve a stream on which a peer sends its parts of our share."""
        with self._place("parts", stream.peer) as place:
            all_reduce = first = None
            if place:
                called = str(stream.peer) in self._admitted
                async with asyncio.timeout(_FIRST_PART_TIMEOUT if called else _UNCALLED_TIMEOUT):
                    await self._search_over.wait()  # it may know of our group before we do
                all_reduce = self._all_reduce
            # Not read before we know that it is of our group: it may be anybody's.
            if all_reduce is not None and stream.peer in all_reduce.group.peers:
                async with asyncio.timeout(_FIRST_PART_TIMEOUT):
                    first = await wire.begin(stream, part_bytes=all_reduce.part_bytes)
            if all_reduce is None or first is None or first.group_id != all_reduce.group.id:
                await stream.send(wire.encode_code(averaging_pb2.BAD_GROUP_ID))
                return
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            await all_reduce.serve(stream, first)

    @contextlib.contextmanager
    def _place(self, kind: str, peer: PeerID) -> Iterator[bool]:
        """Yield whether a stream of the peer is served; inside, it is counted if it is."""
        key = (kind, peer)
        taken = sum(count for (of, _), count in self._streams.items() if of == kind)
        searching = not self._search_over.is_set()
        anybody = searching and not self._admitted
        if self._all_reduce is not None:
            due, size = peer in self._all_reduce.group.peers, len(self._all_reduce.group.peers)
        else:
            due = searching and str(peer) in self._admitted
            size = LARGEST_GROUP if anybody else len(self._admitted) + 1
        room = taken < size + _MORE_STREAMS and self._streams[key] < _STREAMS_EACH
        # The first stream of a peer that is due finds room, however many others are open.
        if not ((due and not self._streams[key]) or (room and (due or anybody))):
            yield False
            return
        self._streams[key] += 1
        try:
            yield True
        finally:
            self._streams[key] -= 1
            self._streams += Counter()  # drops counts of zero


#: Errors of hivemind's matchmaking when peers or p2pd misbehave; a new search may succeed.
_SEARCH_FAILURES = (
    MatchmakingException,
    AssertionError,
    asyncio.InvalidStateError,
    P2PHandlerError,
    P2PDaemonError,
    ConnectionError,  # a stream that the peer at its other end closed
)


@dataclass(frozen=True)
class _Search:
    """The fields that matchmaking reads of hivemind's ``StepControl``. Times are the DHT's."""

    scheduled_time: float
    deadline: float
    data_for_gather: bytes

    def get_timeout(self) -> float:
        return max(0.0, self.deadline - get_dht_time())


class _Admitting(Matchmaking):
    """Groups of the peers that the call names.

    Everybody who knows the network's file finds the others in the DHT, and libp2p proves who a peer
    is. ``admitted``: ids of the peers that may join the group; empty: all may. ``on_other``: called
    with each peer that has another schema.
    """

    _servicer_type: Any  # hivemind asks it for stubs of a leader

    def __init__(
        self,
        *args: Any,
        admitted: frozenset[str],
        on_other: Callable[[PeerID], None],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.admitted = admitted
        self._on_other = on_other
        # Through us: hivemind keeps it to itself why a leader refused us.
        self._servicer, self._servicer_type = self._servicer_type, self

    def get_stub(self, p2p: P2P, leader: PeerID, *, namespace: str) -> Any:
        """Return hivemind's stub, whose answers are checked."""
        stub = self._servicer.get_stub(p2p, leader, namespace=namespace)
        ask = stub.rpc_join_group

        async def look(stream: Any) -> AsyncIterator[Any]:
            async with contextlib.aclosing(stream) as messages:
                async for message in messages:
                    if message.code == averaging_pb2.BAD_SCHEMA_HASH:
                        self._on_other(leader)
                    yield message

        async def join(request: averaging_pb2.JoinRequest) -> AsyncIterator[Any]:
            return look(await ask(request))

        stub.rpc_join_group = join
        return stub

    def admits(self, *peers: PeerID) -> bool:
        """Return whether all of them, or we ourselves, were called."""
        return not self.admitted or all(
            str(peer) in self.admitted for peer in peers if peer != self.peer_id
        )

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        return await super()._request_join_group(leader) if self.admits(leader) else None

    def _check_reasons_to_reject(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> averaging_pb2.MessageFromLeader | None:
        if not self.admits(context.remote_id):
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
        reason = super()._check_reasons_to_reject(request, context)
        if reason is not None and reason.code == averaging_pb2.BAD_SCHEMA_HASH:
            self._on_other(context.remote_id)
        return reason


class _Dht:
    """The methods that matchmaking needs of hivemind's ``DHT``, by the node in this process."""

    def __init__(self, node: DHTNode) -> None:
        self.peer_id = node.peer_id
        self._node = node
        self._next_get = 0.0
        self._backoff = Backoff(first=_FIRST_LOOKUP_WAIT, longest=_LONGEST_LOOKUP_WAIT)

    async def get(self, key: Any, *, latest: bool, return_future: bool) -> Any:
        # Matchmaking asks again at once, as fast as it is answered, for as long as it searches.
        await asyncio.sleep(self._next_get - time.monotonic())
        self._next_get = time.monotonic() + self._backoff.failed().total_seconds()
        return await self._node.get(key, latest=latest)

    def store(
        self, *, key: Any, subkey: Any, value: Any, expiration_time: float, return_future: bool
    ) -> Any:
        self._backoff.succeeded()  # matchmaking declares us again
        return self._node.store(key, value, expiration_time, subkey=subkey)


async def _group_of(info: GroupInfo, values: int) -> Group:
    """Return the group with each peer's share of the ``values``. Raises GroupFailed."""
    bandwidths: list[float | None] = []  # Mbit/s
    auxiliaries = set()
    for peer, gathered in zip(info.peer_ids, info.gathered, strict=True):
        # Who states nonsense averages nothing for others: it costs itself its share, and the group
        # nothing.
        bandwidths.append(0.0)
        try:
            bandwidth, mode, _ = MSGPackSerializer.loads(gathered)
            if AveragingMode(mode) is not AveragingMode.CLIENT and (
                bandwidth is None or 0 <= float(bandwidth) < math.inf
            ):
                bandwidths[-1] = bandwidth
                if AveragingMode(mode) is AveragingMode.AUX:
                    auxiliaries.add(peer)
        except Exception as error:  # noqa: BLE001 - a peer may state anything; msgpack reads it
            log.warning("What a peer tells of itself cannot be used: %r", error)
    try:
        # A linear program: tenths of a second for large groups.
        fractions = await asyncio.to_thread(shares_of, values, bandwidths)
    except wire.NONSENSE as error:
        raise GroupFailed(f"what its peers told cannot be used: {error!r}") from None
    return Group(
        id=info.group_id,
        peers=info.peer_ids,
        fractions=fractions,
        auxiliaries=frozenset(auxiliaries),
    )


def shares_of(values: int, bandwidths: Sequence[float | None]) -> tuple[int, ...]:
    """Return how many of the ``values`` each peer averages, by the Mbit/s that it states.

    They are hivemind's, and so the same at a stock peer. But no peer gets more than 2 of n shares,
    and extremes would make the result depend on the machine. Where they are like that, all that
    state at least half the median get equal shares: they are more than half of the peers. A stock
    peer in such a group computes another partition and falls out of the round.
    """
    stated = [bandwidth for bandwidth in bandwidths if bandwidth]
    if not stated or max(stated) <= _WIDEST_RANGE * min(stated):
        shares = load_balance_peers(values, bandwidths, 0)
        if max(shares) <= math.ceil(2 * values / len(bandwidths)):
            return shares
    log.warning("The bandwidths that peers state (%s Mbit/s) are not used", bandwidths)
    least = statistics.median_low(stated or [0.0]) / 2
    equal = [None if each is None or each >= least > 0 else 0.0 for each in bandwidths]
    return load_balance_peers(values, equal, 0)


# --- the process ----------------------------------------------------------------------------------

BEAT = 2.0  # seconds between two signs of life
_LOOK_AFTER_PARENT = 1.0
_STAY_CONNECTED = 10.0
_AGAIN_FIRST, _AGAIN_LONGEST = timedelta(seconds=2), timedelta(minutes=2)
_ASK_AGAIN = 5.0  # seconds after which a peer that did not answer is asked again
_DAEMON_TIMEOUT = 10.0  # seconds p2pd may take to say who it is
_LEAVE_TIMEOUT = 3.0  # seconds for leaving the DHT


def set_aside_damaged(identity: Path) -> None:
    """Rename an identity file that no p2pd starts with.

    hivemind writes the file in place, so a kill meanwhile damages it. Under a new identity the
    miner is another peer, and announces that.
    """
    try:
        PeerID.from_identity(identity.read_bytes())
    except FileNotFoundError:
        return  # it will be made
    except (ValueError, TypeError, DecodeError, UnsupportedAlgorithm):
        identity.replace(identity.with_suffix(".damaged"))
        log.warning("%s is damaged and set aside: this peer gets a new id", identity)


class HostFailed(RuntimeError):
    """The swarm process cannot continue; the text has the reason."""


class Host:
    """One DHT node and one averager for the life of the process."""

    def __init__(
        self, config: HostConfig, orders: asyncio.StreamReader, answers: asyncio.StreamWriter
    ) -> None:
        self._config = config
        self._orders = orders
        self._answers = answers
        self._cancelled: float = -1  # the newest round that is not wanted any more
        self._number = -1
        self._round: asyncio.Task[Average | Failed] | None = None
        self._obstacle = Obstacle()  # to joining the swarm
        self._meeting: Meeting

    def send(self, message: Message) -> None:
        self._answers.write(to_line(message))

    async def run(self) -> None:
        """Run until :class:`~.supervisor.Close`, or rank 0 is gone.

        Raises HostFailed and hivemind's errors.
        """
        node = await self._start_node()
        tensors = map_tensors(self._config.tensors, self._config.shapes)
        os.close(self._config.tensors)  # the mapping stays
        averager = DTGradAverager(node, self._config, tensors, node.p2p.known)
        book = AddressBook(Path(self._config.identity).with_name("peers.json"), self._config.prefix)
        self._meeting = Meeting(
            node,
            averager.daemon,
            initial_peers=self._config.initial_peers,
            book=book,
            known=node.p2p.known,
        )
        async with averager.serving():
            self._send_obstacle(await self._meeting.join())
            addresses = [str(address) for address in await node.get_visible_maddrs()]
            # Inside: a peer that hears of us at once finds our calls registered.
            self.send(Ready(str(node.peer_id), addresses))
            parts = (
                self._run_orders(averager),
                self._watch_daemon(node),
                self._watch_parent(),
                self._stay_connected(self._meeting),
            )
            tasks = [asyncio.create_task(part) for part in parts]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            except HostFailed as error:
                # Before this context ends: its tasks may wait for answers through a dead p2pd.
                self.send(Ended(str(error)))
                raise
            finally:
                for task in tasks:
                    task.cancel()
        with contextlib.suppress(OSError, TimeoutError, P2PDaemonError):
            async with asyncio.timeout(_LEAVE_TIMEOUT):
                await node.shutdown()

    async def _start_node(self) -> DHTNode:
        config = self._config
        set_aside_damaged(Path(config.identity))
        # p2pd's sockets, otherwise in /tmp for anybody to connect to, and left there by a kill.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{config.sockets}/"
        P2P.receive_raw_data = staticmethod(receive_bounded)
        hivemind_node.DHTProtocol = DHTProtocol
        p2p = await BoundedP2P.create(
            host_maddrs=config.listen,
            announce_maddrs=config.announce or None,
            identity_path=config.identity,
            startup_timeout=config.start_timeout,
            persistent_conn_max_msg_size=MOST_MESSAGE_BYTES,
        )
        return await DHTNode.create(
            p2p,
            record_validator=RecordValidator(config.prefix, config.round_timeout),
            # Asked again every five seconds, not ever less often: a peer whose swarm process was
            # started again is to be found for the next round.
            blacklist_time=_ASK_AGAIN,
            backoff_rate=1.0,
        )

    async def _run_orders(self, averager: DTGradAverager) -> None:
        async for line in self._orders:
            match from_line(line):
                case RoundOrder() as order:
                    self._number = order.number
                    self._round = asyncio.create_task(self._run_round(averager, order))
                    self._round.add_done_callback(self._send_outcome)
                    # The cancel may have come first: several threads of rank 0 send.
                    if order.number <= self._cancelled:
                        self._round.cancel()
                case Cancel(number):
                    self._cancelled = max(self._cancelled, number)
                    if self._round is not None and self._number <= number:
                        self._round.cancel()
                case _:  # Close
                    return

    async def _run_round(self, averager: DTGradAverager, order: RoundOrder) -> Average | Failed:
        began = time.monotonic()
        await self._meeting.before_round(order)
        left = order.timeout - (time.monotonic() - began)
        result = await averager.average(replace(order, timeout=left), partial(self.send, Found()))
        match result:
            case Average(peers):
                self._meeting.remember(peers)
            case Failed("NO_GROUP", "") if self._obstacle.kind:
                return Failed("NO_GROUP", self._obstacle.text)
        return result

    def _send_obstacle(self, obstacle: Obstacle) -> None:
        if obstacle.kind is not self._obstacle.kind:
            self.send(Joined(obstacle.text))
        self._obstacle = obstacle

    def _send_outcome(self, task: asyncio.Task[Average | Failed]) -> None:
        if task.cancelled():
            if self._number <= self._cancelled:  # or else this process ends
                self.send(Failed("CANCELLED"))
        elif (error := task.exception()) is not None:
            log.error("The round failed with an error that was not expected", exc_info=error)
            self.send(Failed("SWARM_DOWN", f"{type(error).__name__}: {error}"[:500]))
        else:
            self.send(task.result())

    async def _watch_daemon(self, node: DHTNode) -> None:
        """Raise HostFailed when p2pd ends or hangs; until then send signs of life."""
        p2p = node.p2p
        ended = asyncio.create_task(p2p._child.wait())
        while not ended.done():
            try:
                async with asyncio.timeout(_DAEMON_TIMEOUT):
                    await p2p._client.identify()
            except (OSError, EOFError, TimeoutError) as error:
                await asyncio.wait([ended], timeout=1.0)  # one that ends closes its socket first
                if not ended.done():
                    raise HostFailed(f"p2pd does not answer ({error!r})") from None
                break
            p2p.forget_cancelled()
            # After p2pd has answered: rank 0 takes silence for a hang and ends both.
            self.send(Beat(len(node.protocol.routing_table.uid_to_peer_id)))
            await asyncio.wait([ended], timeout=BEAT)
        raise HostFailed(f"p2pd {describe_end(ended.result())}")

    async def _stay_connected(self, meeting: Meeting) -> None:
        """Join again whenever nobody is known; less and less often while that fails."""
        backoff = Backoff(first=_AGAIN_FIRST, longest=_AGAIN_LONGEST)
        while True:
            if not self._obstacle.kind:
                backoff.succeeded()
                await asyncio.sleep(_STAY_CONNECTED)
            else:
                again = time.monotonic() + backoff.failed().total_seconds()
                # Others may find us meanwhile.
                while time.monotonic() < again and (
                    meeting.alone or self._obstacle.kind is Kind.CLOCK
                ):
                    await asyncio.sleep(_LOOK_AFTER_PARENT)
            self._send_obstacle(await meeting.rejoin())

    async def _watch_parent(self) -> None:
        """Wait until rank 0 is gone."""
        # Nobody but this process knows of p2pd, which would hold the port for good.
        while os.getppid() == self._config.parent:
            await asyncio.sleep(_LOOK_AFTER_PARENT)


async def serve(config: HostConfig, connection: socket.socket) -> None:
    asyncio.get_running_loop().set_exception_handler(_log_problem)
    orders, answers = await asyncio.open_connection(sock=connection)
    try:
        await Host(config, orders, answers).run()
    except HostFailed as error:
        why = str(error)
    except Exception as error:  # any error of hivemind: rank 0 starts another process
        log.exception("The swarm process ends")
        why = f"{type(error).__name__}: {error}"
    else:
        return
    with contextlib.suppress(OSError):
        answers.write(to_line(Ended(why)))
        # This process is killed next: bytes that were not sent by then are lost.
        await answers.drain()


def _log_problem(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # hivemind's matchmaking drops a waiting task with each look into the DHT.
    if not context["message"].startswith("Task was destroyed"):
        loop.default_exception_handler(context)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is rank 0's to act on
    write_stacks_on_signal()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # Training needs the cores; sums of parts are short.
    torch.set_num_threads(1)
    import_inherited_plugins()
    connection = socket.socket(fileno=int(sys.argv[1]))
    config = _first_line(connection)
    try:
        asyncio.run(serve(config, connection))
    finally:
        shutil.rmtree(config.sockets, ignore_errors=True)
        # p2pd, and all else that hivemind started: only this group's leader knows of them.
        os.killpg(os.getpgrp(), signal.SIGKILL)
    return 0


def _first_line(connection: socket.socket) -> HostConfig:
    """Read the configuration, with the tensors' descriptor as numbered here.

    Raises SystemExit if rank 0 is gone.
    """
    received, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    line = b""
    while received and not line.endswith(b"\n"):
        received = connection.recv(1)
        line += received
    if not received:
        raise SystemExit(0)
    config = from_line(line)
    assert isinstance(config, HostConfig)
    return replace(config, tensors=descriptors[0])


if __name__ == "__main__":
    sys.exit(main())
