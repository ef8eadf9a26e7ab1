"""Bodies of IsAlive and AllReduce, and the legacy signature's text."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.protocol import synapses
from distributed_training.protocol.types import RoundRequest

pytestmark = pytest.mark.timeout(60)


PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
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
        peers=(PEER, "12D3KooWHDMAeP3zKHrALtREoc2vfYQL7HhsMN7WBvft7hgBCRhK"),
    )
    body = json.loads(json.dumps(synapses.build_all_reduce(request)))
    assert body["completion"] is False
    assert synapses.parse_all_reduce(body, caller="5X", bounds=BOUNDS) == request
    assert synapses.answer_all_reduce({})["completion"] is False


def test_the_largest_group_fits_into_a_call_with_room() -> None:
    peers = ("16Uiu2HAmCf1EzHVLqgbJPjJxA5b9koWffsZ8nfsNczELoTCfyjfU",) * synapses.LARGEST_GROUP
    body = synapses.build_all_reduce(RoundRequest(caller="5X", peers=peers))
    assert synapses.parse_all_reduce(body, caller="5X", bounds=BOUNDS).peers == peers
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
    ],
)
def test_bad_all_reduce(body: dict) -> None:
    with pytest.raises(synapses.SynapseError):
        synapses.parse_all_reduce(body, caller="5X", bounds=BOUNDS)


@pytest.mark.parametrize("epoch", [-1, True, "3", 2.0])
def test_bad_epochs(epoch: object) -> None:
    with pytest.raises(synapses.SynapseError):
        synapses.parse_is_alive_reply({"completion": "True", "epoch": epoch})


@pytest.mark.parametrize(
    ("told", "understood"),
    [(PEER, PEER), ("", None), ("nonsense", None), (7, None), (PEER[:-1], None), ("2" * 52, None)],
)
def test_a_peer_id_is_told_to_who_asks(told: Any, understood: str | None) -> None:
    asked = synapses.answer_is_alive(synapses.build_is_alive(), epoch=4, peer_id=told)
    assert synapses.parse_is_alive_reply(asked).peer_id == understood
    assert "peer_id" not in synapses.answer_is_alive({"answer": None}, epoch=4, peer_id=told)
