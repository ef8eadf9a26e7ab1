"""Test which orders a member gives to its peer process, and how the peer carries them out."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from bittensor_core import verify

from distributed_training.chain.base import ChainUnavailable, Neuron
from distributed_training.common.backoff import Clocks
from distributed_training.exchange import opening, own_uploads
from distributed_training.exchange.hivemind import (
    Answer,
    HivemindRounds,
    Membership,
    Order,
    Ready,
)
from distributed_training.exchange.own_uploads import OwnUploads
from distributed_training.protocol.average_file import Average, write_average
from distributed_training.protocol.manifest import Averaging, Master
from distributed_training.protocol.types import Base
from distributed_training.store.base import Uplink
from distributed_training.store.errors import StoppedError
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.outer_steps import RUN_ID
from tests.tools.store_network import MASTER, MEMBER, UID, Leader, Miner, Time, merged, refused
from tests.tools.waiting import wait_for

PEERS = {"a": "Qm" + "a" * 44, "b": "Qm" + "b" * 44}
NEURONS = [
    Neuron(1, "A" * 48, ip="192.0.2.1", port=8009, peer=PEERS["a"]),
    Neuron(2, "B", ip="2001:db8::1", port=8010, peer=PEERS["b"]),
    Neuron(3, "C", ip="192.0.2.3", port=8011),  # this one runs no peer
    Neuron(UID, MEMBER, ip="192.0.2.4", port=8009, peer="Qm" + "c" * 44),
]


class Peer:
    """Stand for the peer process, and keep the orders it gets."""

    def __init__(self) -> None:
        self.orders: list[Order] = []

    def send(self, order: Order) -> None:
        self.orders.append(order)

    def close(self) -> None: ...


class World:
    def __init__(self, folder: Path) -> None:
        self.time, self.folder = Time(), folder
        self.store = MemoryObjectStore("global", clock=self.time.store)
        self.leader = Leader(self.store, self.time)
        self.peer, self.neurons = Peer(), NEURONS
        self.start()

    def start(self) -> None:
        """Begin again, as a new process does."""
        self.rounds = HivemindRounds(
            self.store,
            self.folder,
            master=Master(RUN_ID, MASTER.ss58_address, verify),
            uploads=OwnUploads(self.store, self.folder / "uploads", UID),
            clocks=Clocks(self.time.steady, self.time.unix),
            membership=Membership(lambda: self.neurons, MEMBER, "B", 10.0),
            open_peer=lambda schema, answered: pytest.fail("it starts no peer"),
        )
        self.rounds._peer = self.peer  # type: ignore[assignment]
        self.rounds._post = lambda event: None
        self.look()

    def look(self) -> None:
        self.rounds._held = len(self.leader.chain) - 1
        self.rounds._next_look = -math.inf
        self.rounds.turn()
        state = self.rounds._state
        assert state is not None
        self.rounds._chain.link(self.rounds._held, state)

    def send(self) -> list[Order]:
        self.look()
        close = self.leader.close
        path = self.rounds._uploads.path(close)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"values")
        self.rounds._send(close, Uplink())
        return self.peer.orders


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_first_close_has_no_norm_to_go_by_and_no_all_reduce(world: World) -> None:
    assert not world.send()
    world.leader.take_outer_step()
    (order,) = world.send()
    assert order.usual == 1.0
    assert order.members == (
        (PEERS["a"], "/ip4/192.0.2.1/tcp/8009", 1),
        (PEERS["b"], "/ip6/2001:db8::1/tcp/8010", 2),
    )
    assert order.leader == PEERS["b"] and not order.average
    assert order.ends - order.at == pytest.approx(world.leader.close.grace - 10.0)
    assert order.upload.endswith(f"1.{order.serial}.safetensors")


def test_a_sending_that_a_kill_ended_is_ordered_again_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.leader.take_outer_step()
    with monkeypatch.context() as patch:
        patch.setattr(own_uploads, "upload", Mock(side_effect=StoppedError()))
        world.send()
    (first,) = world.peer.orders
    world.start()
    world.look()
    wait_for(lambda: len(world.peer.orders) == 2, "the order of the new process")
    assert world.peer.orders[1].upload == first.upload
    world.send()
    assert len(world.peer.orders) == 2


@pytest.mark.parametrize("cause", ["worse", "damaged", "late", "not-judged"])
def test_who_was_refused_for_the_upload_sits_the_next_one_out(world: World, cause: str) -> None:
    ours = refused(cause, "e" * 64)
    world.leader.take_outer_step(refused=(ours,))
    assert len(world.send()) == (cause in ("late", "not-judged"))
    others = replace(world.leader.chain[1], refused=(replace(ours, hotkey="A" * 48),))
    order = world.rounds._membership.build_order(world.leader.close, 0.0, others)
    assert len(order.members) == 1 + (cause in ("late", "not-judged"))


def test_a_chain_that_does_not_answer_costs_one_average(world: World) -> None:
    world.leader.take_outer_step()

    def fail() -> Any:
        raise ChainUnavailable("away")

    world.rounds._membership = replace(world.rounds._membership, neurons=fail)
    assert not world.send()


def test_a_failed_all_reduce_is_a_line(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.rounds._on_answer(Answer(2, failed="could not find a group"))
    assert "All Reduce Failed At Checkpoint 2: could not find a group" in caplog.text


@pytest.mark.parametrize(
    ("source", "participants", "base"),
    [
        ("average", (UID,), Base.MERGED),
        ("average", (UID + 1,), Base.KEPT),
        ("merge", (UID,), Base.KEPT),
    ],
)
def test_a_participants_upload_counts_as_merged_after_an_average(
    tmp_path: Path, source: Any, participants: tuple[int, ...], base: Base
) -> None:
    time = Time()
    store = MemoryObjectStore("global", clock=time.store)
    leader, miner = Leader(store, time), Miner(store, tmp_path, time)
    close = leader.close
    miner.upload(close)
    time.passed += 601
    miner.turn()
    averaging = Averaging(source, "", participants)
    manifest = leader.build_manifest(
        b"update", {}, merged=(merged(0, "f" * 64),), averaging=averaging, serial=close.serial
    )
    assert miner.rounds._uploads.find_fate(manifest).base is base


def test_an_average_is_read_as_it_was_written_and_nothing_else(tmp_path: Path) -> None:
    schema = (("w", (3, 4)), ("b", (5,)))
    tensors = [torch.randn(3, 4), torch.randn(5)]
    path = tmp_path / "average"
    write_average(path, ["w", "b"], tensors, 2.0**7)
    read = Average(path, schema)
    assert torch.equal(read.rows(0, 1, 3), tensors[0][1:3].half().float() / 2**7)
    assert torch.equal(read.rows(1, 0, 1), tensors[1].half().float().view(1, 5) / 2**7)
    whole = path.read_bytes()
    for bad in (b"", whole[:-1], whole + b"x", whole.replace(b'"scale":"7"', b'"scale":"x"')):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r".+"):
            Average(path, schema)
    path.write_bytes(whole)
    for other in ((("w", (3, 4)),), (("w", (4, 3)), ("b", (5,))), (("w", (3, 4)), ("c", (5,)))):
        with pytest.raises(ValueError, match=r".+"):
            Average(path, other)


@pytest.mark.parametrize("usual", [1e-9, 3e-5, 1.0, 7e6])
def test_values_of_the_usual_size_fill_float16(usual: float) -> None:
    order = Order(1, 0.0, 1.0, (), "", usual)
    values = 1_000_000
    size = usual / math.sqrt(values) * order.scale(values)
    assert 0.5 < size < 2 and math.log2(order.scale(values)).is_integer()


@pytest.mark.parametrize("size", [1.0, 3.0])
def test_an_upload_is_averaged_as_a_merge_would_clip_it(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed_training.exchange import hivemind_peer

    schema = (("w", (3, 4)), ("b", (4,)))
    file = SimpleNamespace(decode=lambda name, shape: torch.full(shape, size))
    monkeypatch.setattr(hivemind_peer.UpdateFile, "reopen", lambda path, schema: file)
    tensors = [torch.zeros(shape) for _, shape in schema]
    averager = SimpleNamespace(get_tensors=lambda: nullcontext(tensors))
    own: Any = SimpleNamespace(_settings=SimpleNamespace(schema=schema), _averager=averager)
    # The usual norm is 4.0, which is the norm of 16 ones.
    hivemind_peer.Peer._fill(own, Order(1, 0.0, 1.0, (), "", 4.0, upload="upload"), 8.0)
    for tensor in tensors:
        assert torch.allclose(tensor, torch.full(tensor.shape, 8.0 * min(size, 2.0)))


@pytest.mark.parametrize("is_open", [True, False])
def test_a_port_that_cannot_be_reached_is_named_at_the_start(
    is_open: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    announced: list[Any] = []
    monkeypatch.setattr(opening, "announce", lambda member, *place: announced.append(place))
    config: Any = SimpleNamespace(swarm=SimpleNamespace(dht_ip="127.0.0.1", dht_external_port=0))
    with socket.socket() as server:
        # Bind the port in both cases, so that no other program can use it meanwhile.
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        if is_open:
            server.listen()
        ready = Ready(PEERS["a"], f"/ip4/0.0.0.0/tcp/{port}/p2p/{PEERS['a']}")
        opening.announce_peer(config, cast(Any, None), ready)
    # It is announced anyway, because others may reach it.
    assert announced == [("127.0.0.1", port, PEERS["a"])]
    assert (f"open TCP port {port}" in caplog.text) is not is_open


def test_addresses_that_do_not_answer_are_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed_training.exchange import hivemind_peer

    async def connect(*place: Any) -> None:
        tried.append(place)
        await asyncio.sleep(3600)

    tried: list[Any] = []
    client = SimpleNamespace(connect=connect)
    node = SimpleNamespace(p2p=SimpleNamespace(_client=client))
    members = [(PEERS["a"], f"/ip4/192.0.2.1/tcp/{n}", n) for n in range(1, 51)]
    monkeypatch.setattr(hivemind_peer, "_MEET", 0.2)
    began = time.monotonic()
    asyncio.run(hivemind_peer._meet(None, node, members))
    assert len(tried) == 50 and time.monotonic() - began < 5


def test_an_all_reduce_ends_with_the_grace_of_its_close() -> None:
    from hivemind.averaging.allreduce import AllreduceException

    from distributed_training.exchange import hivemind_peer

    class Slow(hivemind_peer.Averager):
        def __init__(self) -> None:
            self._order = Order(1, 0.0, time.time() + 0.05, (), "", 4.0)
            self._parent_pid = 0  # hivemind's destructor reads it

        async def _reduce(self, *_: Any) -> Any:
            await asyncio.sleep(3600)

    group: Any = SimpleNamespace(peer_ids=[])
    # With hivemind's own time limit nobody would retrieve the exception, so that asyncio would log
    # an ERROR in each round.
    with pytest.raises(AllreduceException, match="not ended when the close's grace ended"):
        asyncio.run(Slow()._aggregate_with_group(group, 0))


def test_a_failed_average_is_no_stack_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    from hivemind.averaging import averager
    from hivemind.utils import logging as hivemind_logging

    from distributed_training.exchange import hivemind_peer

    try:
        hivemind_peer._own_the_log()
        of_hivemind = logging.getLogger("hivemind")
        assert of_hivemind.propagate
        assert hivemind_logging._default_handler not in of_hivemind.handlers
        averager.logger.exception(RuntimeError("the answer says this"))
        logging.getLogger("hivemind.dht").warning("a line of its own")
        assert {*caplog.messages} == {"a line of its own"}
    finally:
        averager.logger.setLevel(logging.NOTSET)
        hivemind_logging.use_hivemind_log_handler("in_hivemind")
