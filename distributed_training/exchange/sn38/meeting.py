"""Meet other peers: at a start, when nobody is known any more, and before a round.

p2pd is started without peers, and connected from here to the initial peers and to peers that were
met before. So an obstacle to one of them (it is away, it hangs, the line loses large packets, a
clock is wrong) costs no start: the obstacle is logged, and the peer is tried again.

libp2p forgets the addresses of a peer half an hour after it lost it; the address book
(:mod:`.address_book`) does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS

from distributed_training.protocol.keys import addressed_peer
from distributed_training.protocol.synapses import ADDRESSES_EACH

from .address_book import AddressBook
from .bounds import Known
from .supervisor import RoundOrder, any_reachable
from .wire import NONSENSE, Daemon

_PROBE_TIMEOUT = 3.0  # seconds for a port to open
_MEET_TIMEOUT = 10.0  # seconds for connection, handshake and first answer
_LOOK_AROUND = 3.0  # seconds for finding more peers through the first
_BEFORE_A_ROUND = 3.0  # seconds before a round for meeting the peers that the call names
_ASKED_AT_ONCE = 16  # peers that are not connected any more


class Kind(enum.IntEnum):
    """Obstacles to joining; the line names the greatest of several."""

    NOTHING = 0
    AWAY = 1
    SILENT = 2
    CLOCK = 3


@dataclass(frozen=True, order=True)
class Obstacle:
    """A reason why a peer was not met. ``text``: for an operator, the beginning of a sentence."""

    kind: Kind = Kind.NOTHING
    text: str = ""


class Meeting:
    """Connects a DHT node to other peers.

    ``known`` learns the initial peers and the peers in ``book``, which are served first.
    """

    def __init__(
        self,
        node: DHTNode,
        daemon: Daemon,
        *,
        initial_peers: Sequence[str],
        book: AddressBook,
        known: Known,
    ) -> None:
        self._node = node
        self._daemon = daemon
        self._initial = self._by_peer(initial_peers)
        self._book = book
        self._tasks: set[asyncio.Task[Any]] = set()  # nobody waits for their end
        known.add(self._by_peer([*initial_peers, *book.addresses()]))

    def _by_peer(self, addresses: Iterable[str]) -> dict[PeerID, list[str]]:
        found: dict[PeerID, list[str]] = {}
        for address in addresses:
            peer = PeerID.from_base58(address.rpartition("/")[2])
            if peer != self._node.peer_id:
                found.setdefault(peer, []).append(address)
        return found

    @property
    def alone(self) -> bool:
        """True while the DHT node knows nobody."""
        return not self._node.protocol.routing_table.uid_to_peer_id

    async def rejoin(self) -> Obstacle:
        """Tell the initial peers that we are here; join if nobody is known.

        A peer that was started again knows nobody. Returns the obstacle to rounds.
        """
        if self.alone:
            return await self.join()
        connected = await self._connected()
        # The table forgets a peer when a call fails, and nobody calls between rounds.
        lost = set(self._node.protocol.routing_table.peer_id_to_uid) - connected
        for peer in itertools.islice(lost, _ASKED_AT_ONCE):
            self._begin(self._node.protocol.call_ping(peer))
        met = [await task for task in self._meet_all(self._initial, connected)]
        clocks = [each for each in met if each.kind is Kind.CLOCK]
        return clocks[0] if clocks and Obstacle() not in met else Obstacle()

    async def join(self) -> Obstacle:
        """Meet the initial peers and the peers in the book, until the first answers."""
        obstacles = []
        initial = itertools.chain.from_iterable(self._initial.values())
        candidates = self._by_peer([*self._book.addresses(), *initial])
        waiting = self._meet_all(candidates, await self._connected())
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            obstacles += [task.result() for task in done]
            if Obstacle() in obstacles:
                looking = self._begin(self._node.find_nearest_nodes([self._node.node_id]))
                await asyncio.wait([looking], timeout=_LOOK_AROUND)
                return Obstacle()
        found = max(obstacles, default=Obstacle())
        if found.kind is Kind.AWAY:
            which = "initial peers" if self._initial else "peers that were met before"
            return Obstacle(Kind.AWAY, f"None of the {which} can be reached")
        return found

    async def before_round(self, order: RoundOrder) -> None:
        """Meet the peers whose addresses the call has and that are not connected; takes seconds."""
        most = ADDRESSES_EACH * len(order.peers)
        called = [a for a in order.addresses[:most] if addressed_peer(a) in order.peers]
        connected, table = await self._connected(), self._node.protocol.routing_table
        missing = {
            peer: places
            for peer, places in self._by_peer(called).items()
            if peer not in connected or peer not in table
        }
        if waiting := self._meet_all(missing, connected):
            await asyncio.wait(waiting, timeout=_BEFORE_A_ROUND)

    async def _connected(self) -> set[PeerID]:
        with contextlib.suppress(OSError, EOFError, P2PDaemonError):
            return {info.peer_id for info in await self._node.p2p.list_peers()}
        return set()

    def remember(self, peers: Iterable[str]) -> None:
        """Write the addresses of ``peers``, which are connected, into the book; soon."""
        self._begin(self._remember([p for p in peers if p != str(self._node.peer_id)]))

    async def _remember(self, peers: Sequence[str]) -> None:
        met: dict[str, list[str]] = {}
        for peer in peers:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_PROBE_TIMEOUT):
                    met[peer] = await self._daemon.addresses(PeerID.from_base58(peer))
        await asyncio.to_thread(self._book.add, met)

    # --- one peer ------------------------------------------------------------------------------

    def _begin(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _meet_all(
        self, peers: Mapping[PeerID, list[str]], connected: set[PeerID]
    ) -> set[asyncio.Task[Obstacle]]:
        return {
            self._begin(self._connect(peer, places, peer in connected))
            for peer, places in peers.items()
        }

    async def _connect(self, peer: PeerID, addresses: list[str], connected: bool) -> Obstacle:
        """Connect to a peer and enter it into the table. Return the obstacle."""
        place, protocol = addresses[0].rpartition("/p2p/")[0], self._node.protocol
        try:
            async with asyncio.timeout(_MEET_TIMEOUT):
                if not connected:
                    # p2pd asks a port that was closed ever less often.
                    if not await any_reachable(addresses, timeout=_PROBE_TIMEOUT):
                        return Obstacle(Kind.AWAY)
                    await self._daemon.connect(peer, addresses)
                began = get_dht_time()
                ping = dht_pb2.PingRequest(peer=protocol.node_info)
                answer = await protocol.get_stub(peer).rpc_ping(ping, timeout=_MEET_TIMEOUT)
                ended = get_dht_time()
                # A peer that is no DHT node has no entry.
                node_id = DHTID.from_bytes(answer.peer.node_id) if answer.peer.node_id else None
        # Addresses and answers are others': p2pd's and hivemind's libraries raise much.
        except (OSError, TimeoutError, P2PDaemonError, P2PHandlerError, *NONSENSE) as error:
            why = str(error) or f"nothing in {_MEET_TIMEOUT:.0f} s"
            return Obstacle(
                Kind.SILENT,
                f"{place} opens its port and completes no handshake ({why[:200]}): it hangs, is "
                "another peer than the address says, or the line loses large packets (its MTU)",
            )
        ahead = max(began - answer.dht_time, 0) - max(answer.dht_time - ended, 0)
        if answer.dht_time and abs(ahead) > MAX_DHT_TIME_DISCREPANCY_SECONDS:
            return Obstacle(
                Kind.CLOCK,
                f"This machine's clock is {abs(ahead):.0f} s "
                f"{'ahead of' if ahead > 0 else 'behind'} that of {place}, and peers meet within "
                f"{MAX_DHT_TIME_DISCREPANCY_SECONDS} s: "
                "compare with `timedatectl`, and let it set the time (`timedatectl set-ntp true`)",
            )
        if node_id is not None:
            await protocol.update_routing_table(node_id, peer)
        return Obstacle()
