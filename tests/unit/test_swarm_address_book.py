"""The address book, addresses of a call, and possible answers of met peers."""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2

from distributed_training.exchange.sn38 import address_book, meeting
from distributed_training.exchange.sn38.address_book import AddressBook
from distributed_training.exchange.sn38.bounds import Known
from distributed_training.exchange.sn38.meeting import Meeting, Obstacle
from distributed_training.exchange.sn38.wire import StreamError
from distributed_training.protocol.keys import addressed_peer
from tests.tools.swarm_world import ORDER

pytestmark = pytest.mark.timeout(60)

IDS = [str(PeerID(bytes([0x12, 32]) + bytes([n]) * 32)) for n in range(200)]
HOSTS = ("ip4/10.0.0.1", "ip4/127.0.0.1", "ip4/8.8.8.8", "ip6/2001:db8::1", "dns4/a.example.org")
NONSENSE = ("", "/", "/p2p/", "/ip4/1.2.3.4/tcp/9", "/ip4/300.2.3.4/tcp/9/p2p/", "/unix/tmp/x/p2p/")


def drawn(draw: random.Random, peer: str) -> str:
    if draw.random() < 0.3:
        return draw.choice(NONSENSE) + draw.choice([peer, draw.choice(IDS), "x" * 5000])
    whose = peer if draw.random() < 0.8 else draw.choice(IDS)
    return f"/{draw.choice(HOSTS)}/tcp/{draw.choice([0, 80, 8009, 99999])}/p2p/{whose}"


@pytest.mark.parametrize("seed", range(6))
def test_the_address_book_is_bounded_and_holds_full_addresses(tmp_path: Path, seed: int) -> None:
    draw, path = random.Random(seed), tmp_path / "swarm" / "peers.json"
    book = AddressBook(path, "run")
    for _ in range(draw.choice([3, 12])):
        peers = draw.sample(IDS, draw.choice([1, 16, 150]))
        book.add(
            {peer: [drawn(draw, peer) for _ in range(draw.choice([0, 1, 9]))] for peer in peers}
        )
    held = book.addresses()
    assert all(map(addressed_peer, held))
    by_peer = {addressed_peer(each) for each in held}
    assert len(by_peer) <= address_book._MOST_PEERS
    assert len(held) <= len(by_peer) * address_book._ADDRESSES_EACH
    if held:
        assert path.stat().st_size < 256 * 1024
        assert AddressBook(path, "run").addresses() == held, "over a restart"
        assert not AddressBook(path, "another").addresses(), "of another run"


def test_a_peer_that_was_met_at_a_new_address_is_remembered_there(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "peers.json", "run")
    for port in (1, 2):
        far, near = (f"/ip4/{ip}/tcp/{port}/p2p/{IDS[0]}" for ip in ("8.8.8.8", "127.0.0.1"))
        book.add({IDS[0]: [near, far]})
        assert book.addresses() == [far, near], "the one that is reached from everywhere first"
    book.add({IDS[0]: []})
    assert book.addresses() == [far, near], "nothing new is known"


def test_a_book_that_cannot_be_written_costs_no_round(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    book = AddressBook(tmp_path / "file" / "peers.json", "run")
    book.add({IDS[0]: [f"/ip4/8.8.8.8/tcp/1/p2p/{IDS[0]}"]})
    assert book.addresses()


@pytest.mark.parametrize("seed", range(60))
def test_only_few_addresses_of_a_call_and_only_of_named_peers_are_used(
    tmp_path: Path, seed: int
) -> None:
    draw, own = random.Random(seed), PeerID.from_base58(IDS[0])
    named = draw.sample(IDS, draw.choice([0, 2, 16, 64]))
    addresses = [drawn(draw, draw.choice(IDS)) for _ in range(draw.choice([0, 5, 500]))]
    order = replace(ORDER, peers=named, addresses=addresses)
    asked: dict[str, list[str]] = {}

    async def nobody() -> list[Any]:
        return []

    async def meet(peer: PeerID, addresses: list[str], connected: bool) -> Obstacle:
        asked[str(peer)] = addresses
        return Obstacle()

    async def run() -> None:
        table = SimpleNamespace(uid_to_peer_id={}, __contains__=lambda _: False)
        node: Any = SimpleNamespace(
            peer_id=own,
            p2p=SimpleNamespace(list_peers=nobody),
            protocol=SimpleNamespace(routing_table=table),
        )
        book, daemon = AddressBook(tmp_path / "peers.json", "run"), SimpleNamespace()
        own_meeting: Any = Meeting(node, daemon, initial_peers=[], book=book, known=Known())  # type: ignore[arg-type]
        own_meeting._connect = meet
        await own_meeting.before_round(order)

    asyncio.run(run())
    assert set(asked) <= set(named) - {str(own)}
    assert sum(map(len, asked.values())) <= 2 * len(named)
    assert all(addressed_peer(each) == peer for peer, places in asked.items() for each in places)


@pytest.mark.parametrize("seed", range(60))
def test_any_answer_of_a_peer_is_named_or_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """An initial peer is somebody else's program; it may answer anything, or nothing."""
    draw, added = random.Random(seed), []

    async def any_reachable(*_: Any, timeout: float) -> bool:
        return draw.random() < 0.9

    monkeypatch.setattr(meeting, "any_reachable", any_reachable)
    monkeypatch.setattr(meeting, "_MEET_TIMEOUT", 0.01)
    times = [0.0, time.time(), time.time() + 9, time.time() - 9, math.inf, -math.inf, math.nan]

    async def connect(*_: Any) -> None:
        if draw.random() < 0.2:
            raise draw.choice([StreamError("refused"), ValueError("no address"), OSError(24, "x")])

    async def rpc_ping(*_: Any, timeout: float) -> Any:
        if draw.random() < 0.2:
            await asyncio.sleep(9)
        if draw.random() < 0.2:
            raise draw.choice([P2PHandlerError("a" * 9000), P2PDaemonError("reset"), TypeError()])
        node_id = draw.randbytes(draw.choice([0, 20, 20, 21, 4000]))
        answer = dht_pb2.PingResponse(dht_time=draw.choice(times))
        answer.peer.node_id = node_id
        return answer

    async def update(node_id: Any, peer: PeerID) -> None:
        added.append(node_id)

    async def run() -> Obstacle:
        protocol = SimpleNamespace(
            node_info=dht_pb2.NodeInfo(),
            get_stub=lambda _: SimpleNamespace(rpc_ping=rpc_ping),
            update_routing_table=update,
        )
        node: Any = SimpleNamespace(peer_id=PeerID.from_base58(IDS[0]), protocol=protocol)
        book, daemon = AddressBook(tmp_path / "peers.json", "run"), SimpleNamespace(connect=connect)
        own: Any = Meeting(node, daemon, initial_peers=[], book=book, known=Known())  # type: ignore[arg-type]
        address = f"/ip4/127.0.0.1/tcp/9/p2p/{IDS[1]}"
        return await own._connect(PeerID.from_base58(IDS[1]), [address], draw.random() < 0.3)

    obstacle = asyncio.run(run())
    assert not (obstacle.kind and added)
    assert len(obstacle.text) < 600
