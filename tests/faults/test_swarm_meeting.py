"""Peers that find each other over real p2pd, and the obstacles to it.

Nothing that an initial peer does or fails to do stops a start: the peer then has no other peer,
names the cause in one line, and joins once the cause is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht import protocol
from hivemind.dht.node import DHTNode

from distributed_training.exchange.sn38.swarm import HivemindSwarm
from distributed_training.protocol.types import AllReduceError, AllReduceFault, AllReduceResult
from tests.tools.swarm_world import (
    REQUEST,
    SMALL,
    Rounds,
    assert_good_round,
    everybody,
    joined,
    open_swarm,
    open_swarms,
    processes,
)
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("forked_hosts")]

SOMEBODY = "12D3KooWHDMAeP3zKHrALtREoc2vfYQL7HhsMN7WBvft7hgBCRhK"


class Skewed:
    """An initial peer whose clock is ``ahead`` (seconds) of ours."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.maddrs: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._node = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)

    async def _start(self) -> DHTNode:
        node = await DHTNode.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        self.maddrs = [str(address) for address in await node.get_visible_maddrs()]
        return node

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._node.shutdown(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture(scope="module")
def skewed() -> Iterator[Skewed]:
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(Skewed()) as made:
        patch.setattr(protocol, "get_dht_time", lambda: time.time() + made.ahead)
        yield made


@contextlib.contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """Yield a port that accepts, and says ``answer`` or nothing at all."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    if answer is not None:
                        held[-1].sendall(answer)
                        held[-1].close()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, *range(3, 9)))]
)
def test_nothing_in_the_way_of_joining_stops_a_start(
    tmp_path: Path, skewed: Skewed, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    draw = random.Random(seed)
    with listener(None) as silent, listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as other:
        kinds: dict[str, tuple[str, str]] = {
            f"/ip4/127.0.0.1/tcp/9/p2p/{SOMEBODY}": ("away", "can be reached"),
            f"/dns4/no-such-name.invalid/tcp/80/p2p/{SOMEBODY}": ("away", "can be reached"),
            f"/ip4/127.0.0.1/tcp/{silent}/p2p/{SOMEBODY}": ("silent", "no handshake"),
            f"/ip4/127.0.0.1/tcp/{other}/p2p/{SOMEBODY}": ("silent", "no handshake"),
            skewed.maddrs[0].rpartition("/")[0] + f"/{SOMEBODY}": ("silent", "no handshake"),
            f"/ip4/127.0.0.1/udp/9/quic/p2p/{SOMEBODY}": ("silent", "no handshake"),
        }
        chosen = draw.sample(sorted(kinds), draw.choice([1, 2]))
        skewed.ahead = draw.choice([-600, -5, 5, 40])
        if clock := seed % 2 == 0:
            chosen.append(skewed.maddrs[0])
        expected = (
            f"clock is {abs(skewed.ahead):.0f} s {'behind' if skewed.ahead > 0 else 'ahead of'}"
            if clock
            else max(kinds[address] for address in chosen)[1]
        )
        with contextlib.closing(open_swarm(tmp_path, SMALL, chosen)) as swarm:
            assert swarm.alive() and not joined(swarm._keeper)
            (line,) = [m for m in caplog.messages if "this peer joins no round" in m]
            assert expected in line
            if clock:
                assert "timedatectl" in line
                request = replace(REQUEST, timeout=REQUEST.timeout and REQUEST.timeout / 2)
                with pytest.raises(AllReduceError, match="timedatectl") as raised:
                    swarm.average(request)
                assert raised.value.fault is AllReduceFault.NO_GROUP
                skewed.ahead = 0.0
                wait_for(lambda: joined(swarm._keeper), "the swarm is joined", seconds=60)


def met(book: Path) -> set[str]:
    """Peers in an address book."""
    addresses = json.loads(book.read_text())["addresses"] if book.is_file() else []
    return {address.rpartition("/")[2] for address in addresses}


def replaced(swarm: HivemindSwarm, **settings: Any) -> None:
    """Start its process again, with an empty address book of libp2p, and other settings."""
    swarm._keeper._settings = replace(swarm._keeper._settings, **settings)
    before = processes(swarm)["host"].pid
    swarm.restart()
    assert processes(swarm)["host"].pid != before


def test_peers_that_met_find_each_other_wherever_the_initial_peer_is(tmp_path: Path) -> None:
    """Though libp2p has forgotten all addresses: after a long outage, or a restart of both."""
    with open_swarms(tmp_path, 3, SMALL) as swarms:
        moved, *others = swarms
        assert_good_round(*swarms)
        for i, swarm in enumerate(swarms):
            book = tmp_path / str(i) / "swarm" / "peers.json"
            known = {each.peer_id for each in swarms} - {swarm.peer_id}
            wait_for(lambda book=book, known=known: met(book) == known, "both are in the book")
        # To another address. The others know the old one, as their network's file has it.
        moved._keeper._port = 0
        replaced(moved, dht_port=0)
        assert moved.visible_maddrs[0] not in others[0]._keeper._settings.initial_peers
        assert_good_round(*swarms)
        # And away.
        moved.close()
        for swarm in others:
            replaced(swarm)
        assert_good_round(*others)


@pytest.mark.parametrize("named", [True, False])
def test_a_round_meets_the_peers_whose_addresses_the_call_has(tmp_path: Path, named: bool) -> None:
    """Two that know nobody; addresses of peers that the call does not name are not used."""
    with contextlib.ExitStack() as stack:
        opened = (open_swarm(tmp_path / name, SMALL) for name in ("0", "1"))
        pair = [stack.enter_context(contextlib.closing(swarm)) for swarm in opened]
        addresses = [m for swarm in pair for m in swarm.visible_maddrs[:2]]
        addresses.insert(0, f"/ip4/127.0.0.1/tcp/9/p2p/{SOMEBODY}")
        ids = tuple(swarm.peer_id for swarm in pair)
        short = replace(REQUEST, timeout=timedelta(seconds=4))
        request = replace(
            everybody(pair, 25) if named else short,
            peers=(*ids, SOMEBODY) if named else (),
            addresses=tuple(addresses),
        )
        outcomes = Rounds(*pair, request=request).join().values()
        if named:
            assert all(isinstance(each, AllReduceResult) for each in outcomes), outcomes
        else:
            assert {getattr(each, "fault", None) for each in outcomes} == {AllReduceFault.NO_GROUP}


def test_a_peer_is_reached_by_name(tmp_path: Path) -> None:
    with contextlib.closing(open_swarm(tmp_path / "0", SMALL)) as first:
        for kind in ("dns4", "dns"):
            name = first.visible_maddrs[0].replace("/ip4/127.0.0.1", f"/{kind}/localhost")
            with contextlib.closing(open_swarm(tmp_path / kind, SMALL, [name])) as other:
                assert joined(other._keeper), kind
