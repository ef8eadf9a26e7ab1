"""Bound the cost of peers: calls and bytes of the DHT, its values, its table of peers.

Any client that reaches the swarm's port is served, since a newcomer has to be. libp2p's identities
are free, so a bound for each peer holds nobody off. Here peers that we *know* (initial peers, peers
that a call named, peers of earlier rounds) have a budget of their own, and all others share two.
One is for clients that have asked little, so a flood by untrusted clients slows down no round and
no newcomer outside the flood.

p2pd delivers a call as bytes (at most ``MOST_MESSAGE_BYTES``). It is paid for before it is parsed:
a peer that is a little too fast waits, as the stock peers' searches do, and one that is far too
fast is refused.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import Message
from hivemind.dht import protocol
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS

from distributed_training.protocol.keys import LONGEST_PEER_ID

#: Longest call or answer, in bytes. p2pd refuses longer ones: from outside, and ours.
MOST_MESSAGE_BYTES = 64 * 1024
_BYTES_A_CALL = 4096  # this many bytes cost as much as one call
_LONGEST_WAIT = 1.0  # seconds; a caller of hivemind's gives up after three
# Calls a second, and at once. A call takes about a millisecond of the loop that rounds run on.
_KNOWN, _UNKNOWN = (100.0, 400.0), (10.0, 40.0)
_HALF_OF_UNKNOWN = (50.0, 100.0)  # of all together: clients that ask little, and the others
_MODEST = 0.75  # share of the account that is left: a new identity makes ten calls as modest
_MOST_HELD = 16 << 20  # bytes of calls that wait to be refused
_MOST_REMEMBERED = 1024  # peers whose calls are counted, and peers that are known
_CONNECTIONS = {"connLo": 128, "connHi": 256, "connGrace": "20s"}  # p2pd's, when it closes some

_MOST_KEYS = 16  # in one call; hivemind asks for few more than one
_MOST_NODES = 512  # in the table; hivemind's grows with each id that anybody makes up
_LONGEST_VALUE = 16  # bytes; a declaration of matchmaking has one, and a priority nine
_MOST_ENTRIES = 256  # of one key, one for each peer; half of them for peers that we do not know
_LARGEST_DICTIONARY = 16 * 1024  # bytes: 300 entries; unpacked, each may become several objects


class Refused(RuntimeError):
    """The call is not served: its peer, or all unknown peers together, asked too much."""


class Known:
    """The peers that are served first: the 1,024 that were added last."""

    def __init__(self) -> None:
        self._peers: OrderedDict[PeerID, None] = OrderedDict()

    def add(self, peers: Iterable[PeerID]) -> None:
        for peer in peers:
            self._peers[peer] = None
            self._peers.move_to_end(peer)
        while len(self._peers) > _MOST_REMEMBERED:
            self._peers.popitem(last=False)

    def __contains__(self, peer: PeerID) -> bool:
        return peer in self._peers


class _Account:
    """Calls that may be made: ``burst`` at once, ``rate`` a second over time."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self.left, self._at = burst, now

    def wait(self, cost: float, now: float) -> float:
        """Return the seconds until ``cost`` may be spent."""
        self.left = min(self._burst, self.left + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (cost - self.left) / self._rate)

    @property
    def modest(self) -> bool:
        """True while its owner asks for little; as of the last :meth:`wait`."""
        return self.left >= _MODEST * self._burst


class Budget:
    """Accounts for calls, of each peer and of all unknown peers. ``clock``: in seconds."""

    def __init__(self, known: Known, clock: Callable[[], float] = time.monotonic) -> None:
        self._known = known
        self._clock = clock
        self._unknown = {modest: _Account(*_HALF_OF_UNKNOWN, clock()) for modest in (False, True)}
        self._accounts: OrderedDict[tuple[PeerID, bool], _Account] = OrderedDict()

    def spend(self, peer: PeerID, size: int) -> float:
        """Pay for a call of ``size`` bytes. Return how many seconds it has to wait first.

        Raises Refused when that is too long.
        """
        now, known = self._clock(), peer in self._known
        cost = 1 + size / _BYTES_A_CALL
        account = self._accounts.get((peer, known))
        if account is None:
            account = _Account(*(_KNOWN if known else _UNKNOWN), now)
        self._accounts[peer, known] = account
        self._accounts.move_to_end((peer, known))
        if len(self._accounts) > _MOST_REMEMBERED:
            self._accounts.popitem(last=False)
        wait = account.wait(cost, now)
        accounts = [account]
        if not known:
            accounts.append(self._unknown[account.modest])
            wait = max(wait, accounts[1].wait(cost, now))
        if wait > _LONGEST_WAIT:
            # Else a peer that keeps asking would soon count as modest. Without a debt.
            account.left = min(account.left, max(0.0, account.left - cost))
            raise Refused("too many calls")
        for each in accounts:
            each.left -= cost
        return wait


class BoundedP2P(P2P):  # type: ignore[misc]  # hivemind has no types
    """hivemind's P2P, whose unary calls are paid for before they are parsed."""

    def __init__(self) -> None:
        super().__init__()
        self.known = Known()
        self._budget = Budget(self.known)
        self._held = 0  # bytes of calls that wait to be refused

    @staticmethod
    def _make_process_args(*args: Any, **options: Any) -> list[str]:
        # A relay would carry gigabytes for anybody.
        options |= _CONNECTIONS | {"relayService": False}
        arguments: list[str] = P2P._make_process_args(*args, **options)
        return arguments

    async def _add_protobuf_unary_handler(
        self,
        handle_name: str,
        handler: Callable[[Message, P2PContext], Any],
        input_protobuf_type: type[Message],
        balanced: bool = False,
    ) -> None:
        async def answer(data: bytes, peer: PeerID) -> bytes:
            try:
                await asyncio.sleep(await self._paid(peer, len(data)))
                request = input_protobuf_type.FromString(data)
                context = P2PContext(handle_name, self.peer_id, peer)
                response: Message = await handler(request, context)
                return response.SerializeToString()
            except asyncio.CancelledError:
                # hivemind forgets an answered call, and keeps one that was cancelled for good.
                raise Refused("cancelled") from None

        await self._client.add_unary_handler(handle_name, answer, balanced=balanced)

    async def _paid(self, peer: PeerID, size: int) -> float:
        """Return how long a call has to wait. Raises Refused, later: who waits asks less."""
        try:
            return self._budget.spend(peer, size)
        except Refused:
            held = size + _BYTES_A_CALL
            if self._held + held <= _MOST_HELD:
                self._held += held
                try:
                    # Not all at once: the callers would come back as a wave.
                    await asyncio.sleep(random.uniform(1, 2) * _LONGEST_WAIT)
                finally:
                    self._held -= held
            raise

    def forget_cancelled(self) -> None:
        """Forget calls that were cancelled before they began, which hivemind keeps for good."""
        tasks = self._client.control._handler_tasks
        for call in [call for call, task in tasks.items() if task.done()]:
            del tasks[call]


async def receive_bounded(reader: asyncio.StreamReader) -> bytes:
    """Receive a message of hivemind's framing, if it is short. It replaces hivemind's own."""
    length = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), "big")
    if length > MOST_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    return await reader.readexactly(length)


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Accepts only averagers' declarations: small, short-lived, each under its peer id.

    ``prefix``: the averager's keys begin with it (protocol page, section 1). ``longest``: seconds
    for which a value may be kept.
    """

    def __init__(self, prefix: str, longest: float) -> None:
        names = (f"{prefix}.0b", f"{prefix}.all_averagers")
        self._keys = {DHTID.generate(source=name).to_bytes() for name in names}
        self._longest = longest + MAX_DHT_TIME_DISCREPANCY_SECONDS

    def validate(self, record: DHTRecord) -> bool:
        now, subkey = get_dht_time(), record.subkey
        return (
            record.key in self._keys
            and isinstance(record.value, bytes)
            and len(record.value) <= _LONGEST_VALUE
            # Also if a clock is wrong: hivemind itself drops expired values.
            and record.expiration_time <= now + self._longest
            # A packed peer id: a multihash as bytes of at most 255.
            and 4 < len(subkey) <= LONGEST_PEER_ID
            and subkey[0] == 0xC4
            and subkey[1] == len(subkey) - 2
            and subkey[2] in (0x00, 0x12)
            and subkey[3] == len(subkey) - 4
        )


class Storage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """hivemind's storage, bounded in entries of a key; keys and sizes are the validator's."""

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        if self.entries(key) >= _MOST_ENTRIES and subkey not in self.get(key).value:
            return False
        stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        for each in (self, self.data[key].value if key in self.data else None):
            # Each renewal leaves an entry in the heap, until that would have expired.
            if isinstance(each, (Storage, DictionaryDHTValue)):
                heap = each.expiration_heap
                if len(heap) > 2 * len(each.data) + _MOST_ENTRIES:
                    heap[:] = each.key_to_heap.values()
                    heapq.heapify(heap)
        return stored

    def entries(self, key: DHTID) -> int:
        """Return how many subkeys the key has."""
        found = self.get(key)
        return len(found.value) if found and isinstance(found.value, DictionaryDHTValue) else 0


class _Serializer(MSGPackSerializer):  # type: ignore[misc]  # hivemind has no types
    """hivemind's serializer, for dictionaries that are not too large to unpack."""

    @classmethod
    def loads(cls, buf: bytes) -> object:
        if len(buf) > _LARGEST_DICTIONARY:
            raise Refused(f"a value of {len(buf)} bytes")
        value: object = super().loads(buf)
        return value


# The name is part of the calls' names on the wire.
class DHTProtocol(protocol.DHTProtocol):  # type: ignore[misc]  # hivemind has no types
    """hivemind's part of a DHT node that answers calls, bounded. Its P2P is a BoundedP2P."""

    serializer = _Serializer
    p2p: BoundedP2P
    storage: Storage
    cache: Storage

    @classmethod
    async def create(cls, p2p: BoundedP2P, *args: Any, **kwargs: Any) -> DHTProtocol:
        self: DHTProtocol = await super().create(p2p, *args, **kwargs)
        self.storage, self.cache = Storage(), Storage()
        return self

    async def rpc_store(
        self, request: dht_pb2.StoreRequest, context: P2PContext
    ) -> dht_pb2.StoreResponse:
        if len(request.keys) > _MOST_KEYS:
            raise Refused(f"{len(request.keys)} keys")
        if request.peer.node_id:
            await self.rpc_ping(dht_pb2.PingRequest(peer=request.peer), context)
        columns = (request.keys, request.subkeys, request.values, request.expiration_time)
        stored = [
            self._store(context.remote_id, self.cache if cached else self.storage, *record)
            for *record, cached in zip(*columns, request.in_cache, strict=True)
        ]
        return dht_pb2.StoreResponse(store_ok=stored, peer=self.node_info)

    def _store(
        self,
        peer: PeerID,
        storage: Storage,
        key: bytes,
        subkey: bytes,
        value: bytes,
        expiration: float,
    ) -> bool:
        """Store a record of ``peer``, if it may. Return whether."""
        known = peer in self.p2p.known
        if subkey == self.IS_DICTIONARY:
            if not known:  # it may repeat its own declaration, and nothing of others
                return False
            entries = self.serializer.loads(value)
            if not isinstance(entries, DictionaryDHTValue):
                return False
            if not self._validate_dictionary(key, entries):
                return False
            place = DHTID.from_bytes(key)
            stored = [storage.store_subkey(place, name, *entry) for name, entry in entries.items()]
            return all(stored)
        # Nothing without a subkey: it would replace everybody's declarations.
        if not self._validate_record(key, subkey, value, expiration):
            return False
        place, name = DHTID.from_bytes(key), self.serializer.loads(subkey)
        if not known:
            if name != peer.to_bytes():
                return False
            found = storage.get(place)
            full = storage.entries(place) >= _MOST_ENTRIES // 2
            if full and name not in found.value:
                return False
        return storage.store_subkey(place, name, value, expiration)

    async def rpc_find(
        self, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        if len(request.keys) > _MOST_KEYS:
            raise Refused(f"{len(request.keys)} keys")
        return await super().rpc_find(request, context)

    async def call_find(self, peer: PeerID, keys: Iterable[DHTID]) -> Any:
        found = await super().call_find(peer, keys)
        if not found:
            return found
        return {
            key: (value, dict(itertools.islice(neighbors.items(), self.bucket_size)))
            for key, (value, neighbors) in found.items()
        }

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        table = self.routing_table
        if node_id == self.node_id:
            return
        if responded and node_id is not None and node_id not in table:
            # One place for each peer: a peer that starts again makes up another node id.
            previous = table.get(peer_id=peer_id)
            if previous is not None and table.get(node_id=previous) == peer_id:
                del table[previous]
            if len(table.uid_to_peer_id) >= _MOST_NODES and peer_id not in self.p2p.known:
                return
        # hivemind packs all that is stored for each newcomer; here all is declared again in
        # seconds. It looks at the storage before it waits for anything.
        kept, self.storage = self.storage, Storage()
        try:
            await super().update_routing_table(node_id, peer_id, responded)
        finally:
            self.storage = kept
