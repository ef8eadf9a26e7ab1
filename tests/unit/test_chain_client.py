"""The validator's calls over HTTP, both schemes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import httpx
import pytest

from distributed_training.chain.base import Neuron
from distributed_training.chain.client import MAX_REPLY_BYTES, SignedClient
from distributed_training.chain.identity import Wallet
from distributed_training.protocol import synapses
from distributed_training.protocol.types import RoundRequest
from tests.tools.chain_raw import trickle
from tests.tools.chain_world import (
    EPOCH,
    MINER,
    PEER,
    SECOND,
    STRANGER,
    VALIDATOR,
    World,
    answers,
    sign,
    world,
)

pytestmark = pytest.mark.timeout(60)
LONG = timedelta(seconds=30)  # all of them answer, however busy the machine is
REQUEST = RoundRequest(
    caller=VALIDATOR.ss58,
    timeout=timedelta(seconds=90),
    min_group_size=3,
    allreduce_timeout=timedelta(seconds=60),
)


@pytest.fixture
def server() -> Iterator[World]:
    with world() as made:
        yield made


def neuron(made: World, uid: int = 7, port: int | None = -1) -> Neuron:
    return Neuron(
        uid=uid, hotkey=MINER.ss58, ip="127.0.0.1", port=made.server.port if port == -1 else port
    )


def test_a_round_called_by_a_validator() -> None:
    client = SignedClient(wallet=VALIDATOR)
    with world() as server:
        reply = client.sweep_is_alive([neuron(server)], LONG)[7]
        assert reply is not None and reply.alive and reply.epoch == EPOCH
        stranger = SignedClient(wallet=STRANGER)
        assert stranger.sweep_all_reduce([neuron(server)], REQUEST) == {7: None}
        assert client.sweep_all_reduce([neuron(server)], REQUEST) == {7: ""}
        (event,) = server.events
        asked = (event.timeout, event.min_group_size, event.allreduce_timeout)
        assert asked == (REQUEST.timeout, 3, REQUEST.allreduce_timeout)
        assert event.caller == VALIDATOR.ss58
        again = client.sweep_all_reduce([neuron(server)], REQUEST)[7]
        assert again and again.startswith("round running")
        assert len(server.events) == 1


@pytest.mark.parametrize(("caller", "heard"), [(VALIDATOR, [3]), (SECOND, []), (PEER, [])])
def test_only_the_master_tells_its_outer_step(
    server: World, caller: Wallet, heard: list[int]
) -> None:
    client = SignedClient(wallet=caller)
    assert client.sweep_is_alive([neuron(server)], LONG, epoch=3)[7] is not None
    assert client.sweep_is_alive([neuron(server)], LONG)[7] is not None
    assert server.told == heard
    body = json.dumps(synapses.build_is_alive(4)).encode()
    legacy = sign("legacy", caller, "/IsAlive", body)  # which does not sign the body
    url = f"{server.url}/IsAlive"
    assert httpx.post(url, content=body, headers=legacy, trust_env=False).status_code == 200
    assert server.told == heard


@pytest.mark.parametrize(("caller", "asked"), [(VALIDATOR, 1), (SECOND, 0), (PEER, 0)])
def test_only_the_master_asks_for_a_model(server: World, caller: Wallet, asked: int) -> None:
    client = SignedClient(wallet=caller)
    assert client.sweep_is_alive([neuron(server)], LONG, epoch=3)[7] is not None
    assert server.asked == []
    assert client.sweep_is_alive([neuron(server)], LONG, model=True)[7] is not None
    body = json.dumps(synapses.build_is_alive(model=True)).encode()
    legacy = sign("legacy", caller, "/IsAlive", body)  # which does not sign the body
    url = f"{server.url}/IsAlive"
    assert httpx.post(url, content=body, headers=legacy, trust_env=False).status_code == 200
    assert len(server.asked) == asked


@pytest.mark.parametrize("more", [0, 1])
def test_a_reply_is_read_up_to_a_limit(more: int) -> None:
    body = json.dumps({"completion": "True"}).encode().ljust(MAX_REPLY_BYTES + more)
    with answers(lambda _: (200, body)) as port:
        miner = Neuron(uid=0, hotkey=MINER.ss58, ip="127.0.0.1", port=port)
        reply = SignedClient(wallet=VALIDATOR).sweep_is_alive([miner], LONG)[0]
    assert (reply is None) == bool(more)


@pytest.mark.slow
def test_a_sweep_does_not_wait_for_silent_miners(server: World) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent, trickle() as endless:
        asked = [
            neuron(server, uid=0),
            neuron(server, uid=1, port=silent.getsockname()[1]),
            neuron(server, uid=2, port=1),  # refused
            neuron(server, uid=3, port=None),  # not served
            neuron(server, uid=4),
            neuron(server, uid=5, port=endless),
        ]
        replies = SignedClient(wallet=VALIDATOR).sweep_is_alive(asked, timedelta(seconds=3))
    assert {uid for uid, reply in replies.items() if reply is not None} == {0, 4}
    assert set(replies) == {0, 1, 2, 3, 4, 5}
