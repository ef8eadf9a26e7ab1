"""Peers that cost the DHT node calls, values, places in its table, or streams."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer as Packed

from distributed_training.exchange.sn38 import bounds
from distributed_training.exchange.sn38.averager_process import DTGradAverager
from distributed_training.exchange.sn38.bounds import (
    MOST_MESSAGE_BYTES,
    Budget,
    DHTProtocol,
    Known,
    RecordValidator,
    Refused,
    receive_bounded,
)

pytestmark = pytest.mark.timeout(60)

PREFIX, LONGEST = "run_grad_averager", 840.0
OURS = [DHTID.generate(source=f"{PREFIX}.{name}") for name in ("0b", "all_averagers")]


def peer(number: int) -> PeerID:
    return PeerID(bytes([0x12, 32]) + number.to_bytes(32, "big"))


async def made(*friends: PeerID) -> Any:
    """A node's protocol, without a network; it knows ``friends``."""
    validator, known = RecordValidator(PREFIX, LONGEST), Known()
    known.add(friends)
    p2p: Any = SimpleNamespace(known=known, peer_id=peer(0))
    return await DHTProtocol.create(
        p2p, DHTID.generate(), 20, 5, 5, 3.0, client_mode=True, record_validator=validator
    )


async def store(node: Any, sender: PeerID, *records: tuple[bytes, bytes, bytes, float]) -> Any:
    """Return the answer to a store of (key, subkey, value, expiration); None: it is refused."""
    keys, subkeys, values, expirations = zip(*records, strict=True)
    request = dht_pb2.StoreRequest(
        keys=keys,
        subkeys=subkeys,
        values=values,
        expiration_time=expirations,
        in_cache=[random.random() < 0.5 for _ in keys],
    )
    try:
        answer = await node.rpc_store(request, P2PContext("", peer(0), sender))
    except (Refused, ValueError, TypeError, AssertionError):  # hivemind answers with an error
        return None
    return list(answer.store_ok)


def drawn_record(draw: random.Random, sender: PeerID) -> tuple[bytes, bytes, bytes, float]:
    key = draw.choice([*OURS, DHTID.generate()]).to_bytes()
    if draw.random() < 0.05:
        key = draw.randbytes(draw.choice([0, 19, 21, 4000]))
    now = time.time()
    expiry = draw.choice([now + 30, now + 800, now + 900, now - 9, 4e10, math.inf, math.nan])
    value = draw.choice([Packed.dumps(True), draw.randbytes(draw.choice([0, 16, 17, 5000]))])
    subkey = draw.choice(
        [
            Packed.dumps(sender.to_bytes()),
            Packed.dumps(peer(draw.randrange(10**9)).to_bytes()),
            Packed.dumps(None),
            Packed.dumps("a" * draw.randrange(60)),
            draw.randbytes(draw.randrange(60)),
            b"",
        ]
    )
    if not subkey:
        entries = DictionaryDHTValue()
        names = [peer(draw.randrange(10**9)).to_bytes() for _ in range(draw.choice([0, 1, 40]))]
        odd: Any = draw.choice([None, 7, "name", draw.randbytes(3000)])
        for name in draw.choice([names, [*names, draw.randbytes(20)], [odd]]):
            entries.store(name, draw.choice([b"\xc3", b"v" * 40]), draw.choice([now + 30, 4e10]))
        value = Packed.dumps(entries)
    return key, subkey, value, expiry


@pytest.mark.parametrize("seed", range(3))
def test_stored_dht_entries_are_of_the_run_small_short_lived_and_bounded(seed: int) -> None:
    async def run() -> None:
        draw, friends = random.Random(seed), [peer(number) for number in range(1, 9)]
        node = await made(*friends)
        for _ in range(600):
            unknown = peer(draw.randrange(100, 1000))
            sender = draw.choice([unknown, unknown, unknown, draw.choice(friends)])
            records = [drawn_record(draw, sender) for _ in range(draw.choice([1, 1, 3, 16, 40]))]
            await store(node, sender, *records)
        for storage in (node.storage, node.cache):
            assert set(storage.data) <= set(OURS)
            assert len(storage.expiration_heap) <= 2 * len(storage.data) + bounds._MOST_ENTRIES
            for held in storage.data.values():
                entries = held.value
                assert isinstance(entries, DictionaryDHTValue)
                assert len(entries.data) <= bounds._MOST_ENTRIES
                assert len(entries.expiration_heap) <= 3 * bounds._MOST_ENTRIES
                for name, (value, expiration) in entries.data.items():
                    assert PeerID(name) and len(value) <= 16
                    assert expiration <= time.time() + LONGEST + 3
        # Whoever was called is found by all, in one answer that hivemind can send.
        declared = (OURS[0].to_bytes(), Packed.dumps(friends[0].to_bytes()), b"\xc3")
        answered = await store(node, friends[0], (*declared, time.time() + LONGEST))
        request = dht_pb2.FindRequest(keys=[OURS[0].to_bytes()])
        found = await node.rpc_find(request, P2PContext("", peer(0), peer(5000)))
        assert found.ByteSize() < MOST_MESSAGE_BYTES
        assert answered == [True] or len(node.storage.data[OURS[0]].value) == bounds._MOST_ENTRIES

    asyncio.run(run())


def test_untrusted_clients_declare_only_themselves_and_leave_room_for_the_called() -> None:
    async def run() -> None:
        node, soon, key = await made(peer(1)), time.time() + 60, OURS[0].to_bytes()

        def own(number: int, name: int) -> tuple[bytes, bytes, bytes, float]:
            return key, Packed.dumps(peer(name).to_bytes()), b"\xc3", soon

        assert await store(node, peer(2), own(2, 2)) == [True]
        assert await store(node, peer(2), own(2, 1)) == [False], "not another"
        entries = DictionaryDHTValue()
        entries.store(peer(9).to_bytes(), b"\xc3", soon)
        whole = (key, b"", Packed.dumps(entries), soon)
        assert await store(node, peer(2), whole) == [False], "nor others at once"
        assert await store(node, peer(1), whole) == [True]
        node.storage, node.cache = bounds.Storage(), bounds.Storage()
        flood = [await store(node, peer(n), own(n, n)) for n in range(10, 1000)]
        assert sum(answer == [True] for answer in flood) == bounds._MOST_ENTRIES  # of two storages
        assert await store(node, peer(1), own(1, 1)) == [True]

    asyncio.run(run())


def test_a_dictionary_that_is_too_large_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        node = await made(peer(1))
        monkeypatch.setattr(DictionaryDHTValue, "unpackb", lambda *_: pytest.fail("unpacked"))
        large = Packed.dumps(b"x" * 20_000)
        assert await store(node, peer(1), (OURS[0].to_bytes(), b"", large, 4e10)) is None

    asyncio.run(run())


def test_the_table_of_peers_is_bounded_and_takes_known_peers() -> None:
    """Anybody can claim a node id: a peer has one place, and none is sent stored values."""

    async def run() -> None:
        node = await made(peer(1))
        declared = (OURS[0].to_bytes(), Packed.dumps(peer(1).to_bytes()), b"\xc3")
        await store(node, peer(1), (*declared, time.time() + 60))
        sent: list[Any] = []

        async def call(*about: Any, **more: Any) -> None:
            sent.append(about)

        node.call_store = node.call_ping = call
        for number in range(3000):
            await node.update_routing_table(DHTID.generate(), peer(10 + number % 1500))
        await node.update_routing_table(node.node_id, peer(2))
        table = node.routing_table
        assert len(table.uid_to_peer_id) <= bounds._MOST_NODES
        assert len(set(table.uid_to_peer_id.values())) == len(table.uid_to_peer_id)
        await node.update_routing_table(DHTID.generate(), peer(1))
        assert peer(1) in table
        assert not any(len(about) > 1 for about in sent), "stored values"
        assert OURS[0] in node.storage or OURS[0] in node.cache

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(6))
def test_a_flood_of_identities_takes_nothing_from_known_peers(seed: int) -> None:
    """Simulated time: a known peer at 20 calls a second is never refused, and hardly waits."""
    draw, now = random.Random(seed), 0.0
    known = Known()
    known.add([peer(1)])
    budget = Budget(known, clock=lambda: now)
    served = 0
    identities = draw.choice([1, 30, 5000])
    for step in range(4000):
        now += 0.005
        if step % 10 == 0:
            assert budget.spend(peer(1), draw.randrange(2000)) == 0
        try:
            waits = budget.spend(peer(2 + draw.randrange(identities)), draw.randrange(65536))
        except Refused:
            continue
        assert waits <= bounds._LONGEST_WAIT
        served += 1
    rate, burst = (2 * each for each in bounds._HALF_OF_UNKNOWN)
    assert served <= burst + rate * (now + bounds._LONGEST_WAIT)
    if identities == 1:
        rate, burst = bounds._UNKNOWN
        assert served <= burst + rate * (now + bounds._LONGEST_WAIT)
    assert len(budget._accounts) <= bounds._MOST_REMEMBERED


@pytest.mark.parametrize("seed", range(6))
def test_a_flood_does_not_slow_down_a_newcomer_that_asks_little(seed: int) -> None:
    """Simulated time: greedy identities ask again as soon as they may, the newcomer 9 a second."""
    draw, now = random.Random(seed), 0.0
    budget = Budget(Known(), clock=lambda: now)
    (greedy, calls_each), came = draw.choice([(1, 200), (8, 100), (30, 20)]), 4.0
    asks = [(draw.random(), 2 + i) for i in range(greedy) for _ in range(calls_each)]
    asks.append((came, 1))
    heapq.heapify(asks)
    served = 0
    while asks[0][0] < 30:
        now, who = heapq.heappop(asks)
        size = draw.randrange(100 if who == 1 else 65536)
        try:
            answered = budget.spend(peer(who), size)
            served += 1
            if who == 1:
                assert answered <= 0.1
                answered += 0.11
        except Refused:
            assert who != 1
            answered = draw.uniform(1, 2) * bounds._LONGEST_WAIT
        heapq.heappush(asks, (now + answered + 0.001, who))
    rate, burst = (2 * each for each in bounds._HALF_OF_UNKNOWN)
    assert served <= burst + rate * (30 + bounds._LONGEST_WAIT)


def test_a_peer_that_asks_as_fast_as_it_is_answered_is_slowed_down_not_refused() -> None:
    """The search of hivemind's own matchmaking asks like this."""
    now, calls = 0.0, 0
    budget = Budget(Known(), clock=lambda: now)
    while now < 60:
        now += 0.005 + budget.spend(peer(1), 100)
        calls += 1
    assert calls > 300


def test_too_many_keys_are_refused() -> None:
    async def run() -> None:
        node = await made()
        keys = [DHTID.generate().to_bytes() for _ in range(17)]
        for count in (16, 17):
            request = dht_pb2.FindRequest(keys=keys[:count])
            asked = node.rpc_find(request, P2PContext("", peer(0), peer(2)))
            if count > 16:
                with pytest.raises(Refused):
                    await asked
            else:
                assert len((await asked).results) == count

    asyncio.run(run())


def test_a_long_message_is_not_received() -> None:
    async def run() -> None:
        for length in (0, MOST_MESSAGE_BYTES, MOST_MESSAGE_BYTES + 1, 1 << 62):
            reader = asyncio.StreamReader()
            reader.feed_data(length.to_bytes(8, "big") + bytes(min(length, MOST_MESSAGE_BYTES)))
            if length <= MOST_MESSAGE_BYTES:
                assert await receive_bounded(reader) == bytes(length)
            else:
                with pytest.raises(ConnectionError):
                    await receive_bounded(reader)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("when", ["no round", "called", "anybody", "in the transfer"])
def test_streams_are_bounded_for_each_peer_and_in_all(when: str, seed: int) -> None:
    async def run() -> None:
        draw = random.Random(seed)
        size = draw.choice([2, 3, 16, 64])
        members = [peer(number) for number in range(size)]
        averager: Any = DTGradAverager.__new__(DTGradAverager)
        averager._streams = Counter()
        averager._search_over = asyncio.Event()
        averager._admitted = frozenset(map(str, members)) if when != "anybody" else frozenset()
        averager._all_reduce = None
        if when in ("no round", "in the transfer"):
            averager._search_over.set()
        if when == "no round":
            averager._admitted = frozenset()
        if when == "in the transfer":
            averager._all_reduce = SimpleNamespace(group=SimpleNamespace(peers=members))
        held: list[tuple[PeerID, Any]] = []
        for _ in range(600):
            if held and draw.random() < 0.2:
                _, place = held.pop(draw.randrange(len(held)))
                place.__exit__(None, None, None)
            whose = peer(draw.choice([draw.randrange(size), draw.randrange(1000, 1400)]))
            place = averager._place("parts", whose)
            mine = sum(who == whose for who, _ in held)
            if not place.__enter__():
                place.__exit__(None, None, None)
                if whose in members and when in ("called", "in the transfer"):
                    assert mine, "a peer of the round always has one"
                continue
            held.append((whose, place))
            assert mine < 2
            if when != "anybody":
                assert when != "no round" and whose in members
            most = (65 if when == "anybody" else 2 * size) + 8
            assert len(held) <= most
        for _, place in held:
            place.__exit__(None, None, None)
        assert not averager._streams

    asyncio.run(run())


def test_refused_peer_hears_later_and_takes_little_memory_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that is refused at once would ask again at once."""
    waits: list[float] = []
    p2p = bounds.BoundedP2P()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        assert p2p._held <= bounds._MOST_HELD
        await asyncio.Event().wait()

    async def flood() -> None:
        monkeypatch.setattr(bounds.asyncio, "sleep", sleep)
        calls = [asyncio.ensure_future(p2p._paid(peer(0), 60_000)) for _ in range(400)]
        done, waiting = await asyncio.wait(calls, timeout=0.1)
        assert 200 < len(waiting) == len(waits) < 300  # of calls that hold 16 MiB
        assert 1 <= min(waits) < 1.2 and 1.8 < max(waits) <= 2 and p2p._held  # no wave
        for call in waiting:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert not p2p._held and all(isinstance(c.exception(), Refused | None) for c in done)

    asyncio.run(flood())
