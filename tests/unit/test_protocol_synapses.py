"""Bodies of IsAlive and AllReduce, and the legacy signature's text."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.protocol import synapses
from distributed_training.protocol.keys import LONGEST_ADDRESS
from distributed_training.protocol.types import RoundRequest

pytestmark = pytest.mark.timeout(60)


PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
OTHER = "12D3KooWHDMAeP3zKHrALtREoc2vfYQL7HhsMN7WBvft7hgBCRhK"
ADDRESS = f"/ip4/203.0.113.7/tcp/8009/p2p/{PEER}"
BOUNDS = {
    "timeout": (5.0, 1800.0),
    "min_group_size": (2.0, 256.0),
    "request_timeout": (1.0, 120.0),
    "allreduce_timeout": (5.0, 1800.0),
    "next_chunk_timeout": (1.0, 300.0),
    "min_matchmaking_time": (0.5, 300.0),
}


def test_all_reduce_round_trip() -> None:
    request = RoundRequest(
        caller="5X",
        timeout=timedelta(seconds=60),
        min_group_size=3,
        request_timeout=timedelta(seconds=3),
        allreduce_timeout=timedelta(seconds=50),
        next_chunk_timeout=timedelta(seconds=10),
        min_matchmaking_time=timedelta(seconds=2),
        peers=(PEER, OTHER),
        addresses=(f"/ip4/203.0.113.7/tcp/8009/p2p/{PEER}", f"/dns4/a.example/tcp/1/p2p/{OTHER}"),
    )
    body = json.loads(json.dumps(synapses.build_all_reduce(request)))
    assert body["completion"] is False
    assert synapses.parse_all_reduce(body, caller="5X", bounds=BOUNDS) == request
    assert synapses.answer_all_reduce({})["completion"] is False


def test_the_largest_group_fits_into_a_call_with_room() -> None:
    longest = "16Uiu2HAmCf1EzHVLqgbJPjJxA5b9koWffsZ8nfsNczELoTCfyjfU"
    peers = (longest,) * synapses.LARGEST_GROUP
    address = f"/dns4/{'a' * 200}/tcp/65535/p2p/{longest}"
    address = address.replace("a" * (len(address) - LONGEST_ADDRESS), "", 1)
    addresses = (address,) * synapses.ADDRESSES_EACH * synapses.LARGEST_GROUP
    request = RoundRequest("5X", synapses.ALL_REDUCE_TIMEOUT, peers=peers, addresses=addresses)
    body = synapses.build_all_reduce(request)
    assert synapses.parse_all_reduce(body, caller="5X", bounds=BOUNDS) == request
    with pytest.raises(synapses.SynapseError):
        more = {**body, "addresses": [*addresses, address]}
        synapses.parse_all_reduce(more, caller="5X", bounds=BOUNDS)
    assert len(json.dumps(body)) < synapses.MAX_BODY_BYTES * 2 / 3


def test_absent_values_mean_configured_ones() -> None:
    request = synapses.parse_all_reduce({"min_group_size": None}, caller="5X", bounds=BOUNDS)
    assert request == RoundRequest("5X")


numbers = st.one_of(st.integers(-(10**9), 10**9), st.floats(-1e12, 1e12))


@given(size=st.integers(-(10**9), 10**9), seconds=numbers, header=numbers)
def test_every_value_is_clamped(size: int, seconds: float, header: float) -> None:
    body = {"min_group_size": size, "allreduce_timeout": seconds, "min_matchmaking_time": seconds}
    request = synapses.parse_all_reduce(body, caller="5X", bounds=BOUNDS, timeout=header)
    assert 2 <= request.min_group_size <= 256
    for name in ("timeout", "allreduce_timeout", "min_matchmaking_time"):
        low, high = BOUNDS[name]
        assert low <= getattr(request, name).total_seconds() <= high


@pytest.mark.parametrize(
    "body",
    [
        {"min_group_size": "3"},
        {"min_group_size": 2.5},
        {"min_group_size": True},
        {"timeout": float("nan")},
        {"request_timeout": float("inf")},
        {"next_chunk_timeout": [1]},
        {"timeout": 10**400},
        {"peers": PEER},
        {"peers": [PEER, 7]},
        {"peers": ["../../etc/passwd"]},
        {"addresses": [ADDRESS]},  # of nobody who takes part
        {"peers": [PEER], "addresses": ADDRESS},
        {"peers": [PEER], "addresses": [7]},
        {"peers": [PEER], "addresses": [PEER]},
    ],
)
def test_bad_all_reduce(body: dict) -> None:
    with pytest.raises(synapses.SynapseError):
        synapses.parse_all_reduce(body, caller="5X", bounds=BOUNDS)


@pytest.mark.parametrize("epoch", [-1, True, "3", 2.0, 10**15])
def test_bad_epochs(epoch: object) -> None:
    with pytest.raises(synapses.SynapseError):
        synapses.parse_is_alive_reply({"completion": "True", "epoch": epoch})


@pytest.mark.parametrize(
    ("told", "understood"),
    [(PEER, PEER), ("", None), ("nonsense", None), (7, None), (PEER[:-1], None), ("2" * 52, None)],
)
def test_a_peer_id_is_sent_to_a_caller_that_asks(told: Any, understood: str | None) -> None:
    asked = synapses.answer_is_alive(synapses.build_is_alive(), epoch=4, peer_id=told)
    assert synapses.parse_is_alive_reply(asked).peer_id == understood
    assert "peer_id" not in synapses.answer_is_alive({"answer": None}, epoch=4, peer_id=told)


def test_caller_that_asks_for_nothing_gets_the_public_miners_answer() -> None:
    told: dict[str, Any] = {"peer_id": PEER, "addresses": [ADDRESS], "run_id": "abc"}
    for body in ({"answer": None}, {"answer": None, "completion": "", "epoch": 3}):
        answer = json.dumps(synapses.answer_is_alive(body, epoch=4, **told))
        assert answer == '{"answer": null, "completion": "True", "epoch": 4}'
    asked = synapses.answer_is_alive(synapses.build_is_alive(7), epoch=4, **told)
    assert synapses.parse_is_alive_reply(asked) == synapses.IsAliveReply(
        True, 4, PEER, (ADDRESS,), "abc"
    )


def test_the_public_addresses_of_a_peer_come_first_and_two_of_them() -> None:
    hosts = ("ip4/127.0.0.1", "ip4/172.17.0.1", "ip4/8.8.8.8", "dns/a.b")
    addresses = [f"/{host}/tcp/8009/p2p/{PEER}" for host in hosts]
    asked = synapses.answer_is_alive(
        {"addresses": None}, epoch=4, peer_id=PEER, addresses=addresses
    )
    assert asked["addresses"] == addresses[2:]


@pytest.mark.parametrize(
    "address",
    [
        7,
        ADDRESS[1:],
        ADDRESS.replace(PEER, "QmYyQSo1"),
        ADDRESS.replace("8009", "65536"),
        ADDRESS.replace("8009", "0"),
        ADDRESS.replace("203.0.113.7", "256.0.0.1"),
        ADDRESS.replace("203.0.113.7", "::1"),
        ADDRESS.replace("tcp", "udp"),
        ADDRESS.replace("ip4", "unix"),
        ADDRESS.replace("ip4/203.0.113.7", "dns/a b"),
        ADDRESS.replace("ip4/203.0.113.7", f"dns/{'a' * 200}"),
        f"{ADDRESS}/p2p-circuit/p2p/{PEER}",
        f"{ADDRESS}\n",
        ADDRESS.replace(PEER, OTHER),
    ],
)
def test_a_wrong_or_foreign_address_counts_as_missing(address: Any) -> None:
    body = {"completion": "True", "epoch": 3, "peer_id": PEER, "addresses": [address, ADDRESS]}
    assert synapses.parse_is_alive_reply(body).addresses == (ADDRESS,)
    assert not synapses.parse_is_alive_reply({**body, "peer_id": None}).addresses


@pytest.mark.parametrize("run_id", [None, "", 7, "x" * 65, ["x"], "a\nb", "ä"])
def test_a_malformed_run_id_counts_as_missing(run_id: Any) -> None:
    body = {"completion": "True", "epoch": 3, "run_id": run_id}
    assert synapses.parse_is_alive_reply(body).run_id is None


@given(epoch=st.one_of(st.none(), st.integers(), st.booleans(), st.text(), st.floats()))
def test_a_callers_outer_step_is_a_number_or_unknown(epoch: Any) -> None:
    number = type(epoch) is int and 0 <= epoch < 10**15
    assert synapses.caller_epoch({"epoch": epoch}) == (epoch if number else None)
