"""Test who may call the signed server, over HTTP, for both schemes."""

from __future__ import annotations

import errno
import json
import logging
import math
import shutil
import socket
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from distributed_training.chain import auth, http_server
from distributed_training.chain.http_server import STRIKES, Admission, TrustedAddresses
from distributed_training.chain.identity import Wallet
from distributed_training.chain.server import LEAST_STAKE
from distributed_training.common import ports
from distributed_training.config.types import ConfigError
from tests.tools.chain_world import (
    EPOCH,
    MINER,
    PEER,
    SECOND,
    SETTINGS,
    STRANGER,
    VALIDATOR,
    VECTORS,
    World,
    running,
    sign,
    world,
)

pytestmark = pytest.mark.timeout(60)
SCHEMES = ("btauth", "legacy")
ALIVE = b'{"answer": null, "completion": "", "epoch": null}'
REDUCE = b'{"completion": false, "min_group_size": 32, "allreduce_timeout": 795.0}'
SECOND_NS = 10**9
#: Signed by bittensor 11.3 (btauth) and from the facts page (legacy), each with the server's clock
#: and what must become of it. They stay: whatever signs or verifies, their fate is the same.
REQUESTS = json.loads((Path(__file__).parents[1] / "vectors" / "signed_requests.json").read_text())


@pytest.fixture
def server():
    with world() as made:
        yield made


def post(made: World, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
    # verify=False: no TLS here, and loading certificates takes longer than the call.
    return httpx.post(made.url + path, content=body, headers=headers, trust_env=False, verify=False)


def call(
    made: World, wallet: Wallet, path: str = "/AllReduce", scheme: str = "btauth", **signed: Any
) -> httpx.Response:
    body = {"/AllReduce": REDUCE, "/IsAlive": ALIVE}[path]
    return post(made, path, body, sign(scheme, wallet, path, body, **signed))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_second_call_of_the_round_is_answered_with_its_state(server: World, scheme: str) -> None:
    for caller in (VALIDATOR, SECOND):
        reply = call(server, caller, scheme=scheme)
        assert reply.status_code == 200
    answer = reply.json()["answer"]
    assert VALIDATOR.ss58 in answer and answer.endswith(": accepted")
    assert len(server.events) == server.server.counters()["repeated.AllReduce"] == 1
    server.server.round_ended()
    call(server, SECOND, scheme=scheme)
    assert [event.caller for event in server.events] == [VALIDATOR.ss58, SECOND.ss58]


def _refused(server: World, reply: httpx.Response, status: int, reason: str) -> None:
    assert reply.status_code == status
    assert reply.json().keys() == {"message"} and "Traceback" not in reply.text
    assert server.refused(reason) == 1
    assert server.events == []


def test_the_least_stake_is_enough(server: World) -> None:
    less = math.nextafter(LEAST_STAKE, 0.0)
    server.ledger.register(SECOND.ss58, stake=less, validator_permit=True)
    _refused(server, call(server, SECOND), 403, "low_stake")
    server.ledger.register(SECOND.ss58, stake=LEAST_STAKE, validator_permit=True)
    assert call(server, SECOND).status_code == 200
    assert [event.caller for event in server.events] == [SECOND.ss58]


def test_the_end_of_a_round_is_not_lost_to_a_call_that_comes_with_it(server: World) -> None:
    """The loop ends rounds in its own thread, while the server decides about a call."""
    ending = threading.Thread(target=server.server.round_ended)

    def amid_the_call() -> bool:
        if ending.ident is None:
            ending.start()
            ending.join(1)  # without a lock it has its way, and the call's round is never ended
        return True

    server.due = amid_the_call
    assert call(server, VALIDATOR).status_code == 200
    ending.join(10)
    assert not ending.is_alive()
    assert call(server, SECOND).json()["answer"] is None, "no round runs"
    assert [event.caller for event in server.events] == [VALIDATOR.ss58, SECOND.ss58]


def test_junk_from_a_validators_address_blocks_nobody() -> None:
    trusted = TrustedAddresses()
    trusted.set_endpoints(["1.2.3.4"])
    admission = Admission(
        trusted=trusted,
        max_connections=100,
        max_connections_per_address=10,
        requests_per_address=1000.0,
    )

    def junk(address: str) -> None:
        for _ in range(5 * STRIKES):
            if admission.connect(address):
                admission.disconnect(address)
            admission.strike(address)

    junk("1.2.3.4")
    assert admission.connect("1.2.3.4") and not admission.refused
    # Nor is it held against the address when the validator has moved to another.
    trusted.set_endpoints([])
    assert admission.connect("1.2.3.4")
    junk("5.6.7.8")
    assert not admission.connect("5.6.7.8") and admission.refused["connection_blocked"]
    trusted.add("5.6.7.8")  # a validator's call was verified from there
    assert admission.connect("5.6.7.8")


def test_a_timeout_that_nobody_signed_keeps_no_call_fresh(server: World) -> None:
    nonce = time.time_ns() - 20 * SECOND_NS
    reply = call(server, VALIDATOR, scheme="legacy", nonce=nonce, timeout=1e9)
    _refused(server, reply, 401, "stale")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replay_is_refused_also_after_a_restart(tmp_path: Path, scheme: str) -> None:
    headers = sign(scheme, VALIDATOR, "/AllReduce", REDUCE, timeout=840.0)
    with world(folder=tmp_path) as first:
        assert post(first, "/AllReduce", REDUCE, headers).status_code == 200
        assert post(first, "/AllReduce", REDUCE, headers).status_code == 401
        assert first.refused("replay") == 1
    with world(folder=tmp_path) as second:
        _refused(second, post(second, "/AllReduce", REDUCE, headers), 401, "replay")
        assert call(second, VALIDATOR, scheme=scheme).status_code == 200


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replay_is_refused_also_after_a_kill(tmp_path: Path, scheme: str) -> None:
    # As far ahead as a caller's clock may be: fresh for as long as possible.
    nonce = time.time_ns() + 3 * SECOND_NS
    headers = sign(scheme, VALIDATOR, "/AllReduce", REDUCE, nonce=nonce)
    with world(folder=tmp_path / "run") as first:
        assert post(first, "/AllReduce", REDUCE, headers).status_code == 200
        shutil.copytree(tmp_path / "run", tmp_path / "killed")  # as a SIGKILL leaves it
    with world(folder=tmp_path / "killed") as second:
        _refused(second, post(second, "/AllReduce", REDUCE, headers), 401, "replay")
        # Who signs after the start is heard as soon as the allowed difference of clocks has passed.
        second.later = SETTINGS.clock_skew.total_seconds() + 1
        second.offset = round(second.later * SECOND_NS)
        nonce = time.time_ns() + second.offset
        assert call(second, VALIDATOR, scheme=scheme, nonce=nonce).status_code == 200
        assert post(second, "/AllReduce", REDUCE, headers).status_code == 401
        assert second.refused("replay") == 2


@pytest.mark.parametrize("given, read", [("0", 0.0), ("-1", None), ("nan", None), ("x", None)])
def test_the_timeout_header_of_a_legacy_call(given: str, read: float | None) -> None:
    headers = sign("legacy", VALIDATOR, "/AllReduce", b"") | {"timeout": given}
    with nullcontext() if read is not None else pytest.raises(auth.Refused, match="malformed"):
        assert auth.read_claim(headers, SCHEMES).header_timeout == read


def test_a_refused_caller_is_logged_once_a_minute(
    server: World, caplog: pytest.LogCaptureFixture
) -> None:
    for claimed in (PEER.ss58, "", STRANGER.ss58, PEER.ss58, ""):
        headers = {"x-bittensor-hotkey": claimed}
        head = http_server.Head("POST", "/IsAlive", headers, True, "192.0.2.1")
        server.server.refused(auth.Refusal.NO_PERMIT, head, "192.0.2.1")
    assert caplog.messages == [
        f"Refused a call from {who}192.0.2.1: validator permit is missing [no_permit]"
        for who in (f"{PEER.ss58} at ", "", f"{STRANGER.ss58} at ")
    ]


@pytest.mark.parametrize("body, seconds", [({}, None), ({"timeout": 60}, 60.0)])
def test_a_legacy_call_without_a_timeout_header_has_the_bodys(
    server: World, body: dict[str, float], seconds: float | None
) -> None:
    headers = sign("legacy", VALIDATOR, "/AllReduce", b"")
    del headers["timeout"]
    assert post(server, "/AllReduce", json.dumps(body).encode(), headers).status_code == 200
    (event,) = server.events
    assert event.timeout == (None if seconds is None else timedelta(seconds=seconds))


def send(made: World, recorded: dict[str, Any]) -> httpx.Response:
    made.offset = recorded["now"] - time.time_ns()
    return post(made, recorded["path"], recorded["body"].encode(), recorded["headers"])


@pytest.mark.parametrize("recorded", REQUESTS, ids=lambda r: f"{r['scheme']}: {r['name']}")
def test_recorded_requests(server: World, recorded: dict[str, Any]) -> None:
    reply = send(server, recorded)
    if recorded["reason"]:
        _refused(server, reply, recorded["status"], recorded["reason"])
        return
    assert reply.status_code == 200, reply.text
    assert send(server, recorded).status_code == 401 and server.refused("replay") == 1
    assert len(server.events) == (recorded["path"] == "/AllReduce")


@pytest.mark.parametrize("request_", VECTORS["requests"], ids=lambda r: r["path"])
def test_recorded_requests_of_a_real_dendrite(server: World, request_) -> None:
    headers = {k: v for k, v in request_["headers"].items() if k not in ("Host", "Content-Length")}
    body = request_["body"].encode()
    recorded = int(headers["bt_header_dendrite_nonce"])
    server.offset = recorded + SECOND_NS - time.time_ns()  # one second after it was signed
    assert VECTORS["miner_hotkey"] == MINER.ss58
    reply = post(server, request_["path"], body, headers)
    assert reply.status_code == 200, reply.text
    if request_["path"] == "/AllReduce":
        (event,) = server.events
        assert event.timeout is not None and event.timeout.total_seconds() == 840
        assert event.allreduce_timeout is not None
        assert event.allreduce_timeout.total_seconds() == 795
        assert event.min_group_size == 32
    else:
        assert reply.json() == {"answer": None, "completion": "True", "epoch": EPOCH}
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["bt_header_axon_status_code"] == "200"
    assert post(server, request_["path"], body, headers).status_code == 401
    assert server.refused("replay") == 1
    server.offset += 60 * SECOND_NS
    assert post(server, request_["path"], body, headers).status_code == 401
    assert server.refused("stale") == 1
    assert len(server.events) == (request_["path"] == "/AllReduce")


def test_repeated_is_alive_calls_are_logged_once_a_minute(server: World, caplog) -> None:
    caplog.set_level(logging.INFO, logger="distributed_training.chain.server")

    def ask(wallet: Wallet, times: int) -> None:
        for _ in range(times):
            nonce = time.time_ns() + server.offset
            assert call(server, wallet, "/IsAlive", nonce=nonce).status_code == 200

    uid = {wallet.ss58: server.chain.uid(wallet.ss58) for wallet in (PEER, VALIDATOR)}
    ask(PEER, 5)
    ask(VALIDATOR, 2)
    server.later, server.offset = 61.0, 61 * SECOND_NS
    ask(PEER, 2)
    assert caplog.messages == [
        f"Responded to be Active: uid {uid[caller.ss58]} asked whether this miner runs ({calls} "
        "since the last such line)"
        for caller, calls in [(PEER, "1 time"), (VALIDATOR, "1 time"), (PEER, "5 times")]
    ]
    assert server.server.counters()["accepted.IsAlive"] == 9


def test_a_slow_disk_does_not_hold_up_the_calls(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_INTERVAL", 0.01)
    syncing, done = threading.Event(), threading.Event()
    made = World(folder=tmp_path)
    with running(made):

        def slow(path: object, content: object, **_: object) -> None:
            syncing.set()
            assert done.wait(30)

        monkeypatch.setattr(auth, "write_state", slow)
        try:
            assert call(made, PEER, "/IsAlive").status_code == 200 and syncing.wait(30)
            assert call(made, PEER, "/IsAlive").status_code == 200
        finally:
            done.set()


def test_the_master_is_heard_before_the_chain_answers() -> None:
    made = World()
    made.ledger.up = False
    with running(made):
        _refused(made, call(made, PEER, "/IsAlive"), 403, "unknown_hotkey")
        assert call(made, VALIDATOR).status_code == 200


def test_one_hotkey_may_not_flood() -> None:
    with world(replace(SETTINGS, requests_per_hotkey=0.5)) as made:  # a burst of three
        answers = [call(made, PEER, "/IsAlive").status_code for _ in range(5)]
        assert answers == [200, 200, 200, 429, 429]
        # Junk in the name of a validator does not use up what the validator may send.
        for _ in range(5):
            headers = sign("btauth", STRANGER, "/IsAlive", ALIVE)
            headers["X-Bittensor-Hotkey"] = VALIDATOR.ss58
            assert post(made, "/IsAlive", ALIVE, headers).status_code == 401
        assert call(made, VALIDATOR, "/IsAlive").status_code == 200


@pytest.mark.parametrize(
    ("scheme", "caller", "refused"),
    [
        ("legacy", VALIDATOR, [False]),
        ("legacy", SECOND, [False, None]),
        ("btauth", VALIDATOR, []),
        ("btauth", SECOND, [False, None]),
    ],
)
@pytest.mark.parametrize("due", [False, None, True])
def test_only_the_master_calls_a_round_that_is_not_due(
    server: World, scheme: str, caller: Wallet, refused: list[bool | None], due: bool | None
) -> None:
    server.due = due
    reply = call(server, caller, scheme=scheme)
    if due in refused:
        _refused(server, reply, 403, "not_due")
    else:
        assert reply.status_code == 200 and len(server.events) == 1


@pytest.mark.parametrize(
    ("scheme", "status", "reason"), [("btauth", 401, "signature"), ("legacy", 403, "not_due")]
)
def test_an_is_alive_turned_into_an_all_reduce_starts_nothing(
    server: World, scheme: str, status: int, reason: str
) -> None:
    """Somebody between validator and miner may send the signed headers elsewhere."""
    server.due = False
    headers = sign(scheme, VALIDATOR, "/IsAlive", ALIVE)
    _refused(server, post(server, "/AllReduce", ALIVE, headers), status, reason)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("hour", [3600, -3600])
def test_a_clock_set_by_an_hour_changes_no_round(server: World, scheme: str, hour: int) -> None:
    """While the clock is wrong calls are stale or in the future; nothing else depends on it."""
    assert call(server, VALIDATOR, scheme=scheme).status_code == 200
    server.offset = hour * SECOND_NS
    assert call(server, SECOND, scheme=scheme).status_code == 401
    assert server.refused("stale" if hour > 0 else "future") == 1
    server.offset = 0
    reply = call(server, SECOND, scheme=scheme)
    assert reply.status_code == 200 and "round running for 0 s" in reply.json()["answer"]
    assert len(server.events) == 1


@pytest.mark.parametrize("clock", [900, -3600])
def test_a_round_nobody_ends_is_over_in_time_by_any_clock(server: World, clock: int) -> None:
    call(server, VALIDATOR)
    server.offset, server.later = clock * SECOND_NS, 900.0
    nonce = time.time_ns() + server.offset
    assert call(server, VALIDATOR, nonce=nonce).json()["answer"] is None
    assert len(server.events) == 2


def test_a_port_in_use_is_one_line(server: World) -> None:
    with pytest.raises(ConfigError, match=r"--axon\.port") as caught:
        http_server.bind(ip="127.0.0.1", port=server.server.port)
    assert "\n" not in str(caught.value)


def test_where_ipv6_is_off_every_address_is_every_one_of_ipv4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listen(address: str, port: int, *, backlog: int) -> socket.socket:
        if ":" in address:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return ports.listen(address, port, backlog=backlog)

    monkeypatch.setattr(http_server, "listen", listen)
    with http_server.bind(ip="[::]", port=0) as bound:
        assert bound.getsockname()[0] == "0.0.0.0"
    with pytest.raises(ConfigError, match=r"cannot listen on ::1 port 0 \(Cannot assign requested"):
        http_server.bind(ip="::1", port=0)
