"""Test that hostile calls to the bounded server count for nothing: no 5xx, no held connection."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed_training.chain import http_server as http_module
from tests.tools.chain_raw import call, connect, request, send, status, still_answers
from tests.tools.chain_world import (
    CALL,
    MAX_BODY,
    MINER,
    STRANGER,
    VALIDATOR,
    Bounds,
    World,
    sign,
    world,
)
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(90)
QUICK = Bounds(read_timeout=timedelta(milliseconds=400))
SOON = Bounds(read_timeout=timedelta(seconds=2))  # time for a request before it
LONG = 30.0  # seconds; what is not cut off stays as long as one waits


@pytest.fixture
def server(request: pytest.FixtureRequest):
    """A server with lenient bounds, or with the test's: most clients here are in time."""
    with world(getattr(request, "param", Bounds())) as made:
        yield made


def settings_of(chosen: Bounds) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", [chosen], indirect=True, ids=[""])


def closed_within(sock: socket.socket, seconds: float) -> bool:
    sock.settimeout(seconds)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@settings_of(QUICK)
def test_a_slow_body_is_cut_off(server: World) -> None:
    headers = sign(VALIDATOR, b"{}")
    with closing(connect(server)) as sock:
        sock.sendall(request(CALL, headers, b"{}")[:-1])
        assert closed_within(sock, LONG)
    assert server.refused("timeout") == 1
    assert server.calls == []


@settings_of(SOON)
def test_an_idle_connection_is_closed_and_is_no_offence(server: World) -> None:
    with closing(connect(server)) as sock:
        sock.sendall(call())
        assert status(sock.recv(65536)) == 200
        while not closed_within(sock, LONG):
            pass  # the rest of the answer
    assert not [reason for reason in server.server.counters() if reason == "refused.timeout"]
    wait_for(lambda: server.server.counters()["connections"] == 0)


@settings_of(QUICK)
def test_a_connection_opened_for_nothing_counts_against_its_address(server: World) -> None:
    with closing(connect(server)) as sock:
        assert closed_within(sock, LONG)
    assert server.refused("silent") == 1 and server.refused("timeout") == 0
    wait_for(lambda: server.server.counters()["connections"] == 0)


@pytest.mark.parametrize(
    ("raw", "codes"),
    [
        (b"\x00\x01\x02 garbage\r\n\r\n", {400}),
        (b"\r\n\r\n", {400}),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", {404}),
        (b"GET /call HTTP/1.1\r\nhost: x\r\n\r\n", {405}),
        (b"POST /call HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", {400}),
        (b"POST /call HTTP/1.1\r\nhost: x\r\ncontent-length: 1e3\r\n\r\n", {400}),
        (b"POST /call HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n", {413}),
        (b"POST /call HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}", {401}),
        (b"POST /call HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", {400, 431, 0}),
        (b"POST /call HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 400_000, {400, 431, 0}),
        (
            b"POST /call HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
            {401},
        ),
    ],
)
def test_malformed_and_oversized(server: World, raw: bytes, codes: set[int]) -> None:
    answer = send(server, raw)
    assert status(answer) in codes, answer
    assert b"Traceback" not in answer
    assert server.calls == []
    still_answers(server)


def server_cpu(made: World) -> float:
    """Return the CPU seconds of the server's thread so far, with the kernel's work for it."""
    thread = made.server._thread.native_id
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


@pytest.mark.skipif(sys.platform != "linux", reason="CPU time of one thread")
@pytest.mark.parametrize("named", [False, True])
def test_a_megabyte_of_one_byte_chunks_costs_next_to_nothing(server: World, named: bool) -> None:
    """It cost 0.4 s of CPU, 1.2 s under the name of a registered hotkey."""
    head = sign(VALIDATOR, b"") if named else {}
    raw = request(CALL, {**head, "transfer-encoding": "chunked"})
    raw = raw.replace(b"content-length: 0\r\n", b"") + b"1\r\nx\r\n" * 170_000 + b"0\r\n\r\n"
    before = server_cpu(server)
    assert status(send(server, raw)) in (411, 0)
    wait_for(lambda: server.refused("no_length") == 1)
    assert server.calls == []
    assert server_cpu(server) - before < 0.2


@settings_of(QUICK)
def test_a_drip_of_single_bytes_wakes_the_server_seldom(server: World, monkeypatch) -> None:
    looks: list[int] = []
    parse = http_module.Exchange._parse_received
    monkeypatch.setattr(
        http_module.Exchange, "_parse_received", lambda e: (looks.append(1), parse(e))[1]
    )
    with closing(connect(server)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = 0
        with suppress(OSError):
            while not closed_within(sock, 0.0001):
                for _ in range(20):  # each is a packet, however seldom this thread runs
                    sock.sendall(b"x")
                sent += 20
    assert server.refused("timeout") == 1
    # 2, 4, 8 ... 250 ms apart until the deadline of 400 ms.
    assert sent >= 3 * len(looks) and len(looks) <= 12
    still_answers(server)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"x" * (http_module.MAX_HEAD_BYTES + 1), "headers_too_large"),
        (b"POST / HTTP/1.1\r\n" + b"a:\r\n" * 80 + b"\r\n", "headers_too_large"),
        (b"POST / HTTP/1.1\r\nhost: x\n\nPOST / HTTP/1.1\r\n\r\n", "malformed"),
    ],
)
def test_a_head_is_bounded_before_it_is_parsed(
    server: World, monkeypatch, raw: bytes, reason: str
) -> None:
    received = http_module.h11.Connection.receive_data
    sizes: list[int] = []
    monkeypatch.setattr(
        http_module.h11.Connection,
        "receive_data",
        lambda connection, data: (sizes.append(data.count(b"\n")), received(connection, data))[1],
    )
    assert status(send(server, raw)) in (400, 431, 0)
    assert server.refused(reason) == 1
    assert all(lines <= http_module.MAX_HEAD_LINES for lines in sizes)


def test_bytes_after_a_request_are_not_read(server: World) -> None:
    """A pipelined request is not answered: at best the first one is."""
    assert status(send(server, call() + call())) in (400, 0)
    assert server.calls == []
    still_answers(server)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"a": NaN}',
        b'{"a": ' * 650,
        b"[" * 4000,
        b"\xff\xfe",
        b'{"a": "' + b"9" * 4000,
    ],
)
def test_signed_nonsense_is_no_event(server: World, body: bytes) -> None:
    headers = sign(VALIDATOR, body)
    answer = send(server, request(CALL, headers, body))
    if body == b"":
        assert status(answer) == 200  # an empty object
    else:
        assert status(answer) == 400
        assert server.calls == []


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_limit_of_a_body(server: World, beyond: int) -> None:
    body = b"{}".ljust(MAX_BODY + beyond)
    headers = sign(VALIDATOR, body)
    answer = status(send(server, request(CALL, headers, body)))
    assert answer in (413, 0) if beyond else answer == 200
    assert server.refused("too_large") == beyond and len(server.calls) == 1 - beyond


@pytest.mark.parametrize("name", ["X-Bittensor-Hotkey", "X-Bittensor-Nonce", "Content-Length"])
def test_a_header_given_twice(server: World, name: str) -> None:
    headers = sign(VALIDATOR, b"{}")
    raw = request(CALL, headers, b"{}")
    twice = {**{k.lower(): v for k, v in headers.items()}, "content-length": "3"}[name.lower()]
    raw = raw.replace(b"host: x\r\n", f"host: x\r\n{name}: {twice}\r\n".encode())
    assert status(send(server, raw)) == 400
    assert server.calls == []


_HEADER_NAMES = st.sampled_from(sorted(sign(STRANGER, b"") | {"content-type": "", "expect": ""}))
_VALUES = st.one_of(
    st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=255), max_size=140),
    st.sampled_from([VALIDATOR.ss58, MINER.ss58, "0x" + "00" * 64, "1", "ed25519", "NaN", "-1"]),
    st.integers().map(str),
    st.builds(lambda: str(time.time_ns())),
)


@pytest.fixture(scope="module")
def fuzzed():
    """One server for many examples; nobody is blocked, so that each request is looked at."""
    bounds = Bounds(max_connections_per_address=64, trusted=frozenset({"127.0.0.1"}))
    with world(bounds) as made:
        yield made


FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


@FUZZ
@given(
    changes=st.dictionaries(_HEADER_NAMES, st.none() | _VALUES, max_size=4),
    signed=st.booleans(),
    body=st.binary(max_size=200),
)
def test_fuzzed_headers(fuzzed: World, changes, signed: bool, body: bytes) -> None:
    """A outsider's signature under a validator's name, then headers changed at random."""
    headers: dict[str, str] = {}
    if signed:
        headers = sign(STRANGER, body) | {"X-Bittensor-Hotkey": VALIDATOR.ss58}
    for name, value in changes.items():
        if value is None:
            headers.pop(name, None)
        else:
            headers[name] = value
    lines = b"".join(f"{k}: {v}\r\n".encode("latin-1") for k, v in headers.items())
    head = f"POST /call HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n".encode()
    answer = send(fuzzed, head + lines + b"\r\n" + body)
    assert 400 <= status(answer) < 500, answer
    assert fuzzed.calls == []


@FUZZ
@given(raw=st.binary(max_size=300))
def test_fuzzed_bytes(fuzzed: World, raw: bytes) -> None:
    answer = send(fuzzed, raw)
    assert answer == b"" or 400 <= status(answer) < 500, answer
    assert fuzzed.calls == []
