"""Test that no hostile client stops, fills or blocks a registry, and that others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import h11
import httpx
import psutil
import pytest
import uvicorn
from bittensor import http_auth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from distributed_training.chain.identity import Wallet
from distributed_training.common.backoff import Buckets
from distributed_training.common.connections import (
    MAX_HEAD_BYTES,
    MAX_HEAD_LINES,
    BoundedConnection,
    Bounds,
    normalize,
)
from distributed_training.registry.service import MAX_BODY, Limits
from tests.tools.chain_program import chain_program
from tests.tools.chain_raw import request, status
from tests.tools.chain_server_thread import FAST, RegistryServer
from tests.tools.chain_world import PEER, STRANGER, VALIDATOR
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(120)
CALL = "/commit"
BODY = b'{"text": "x"}'
QUICK = replace(FAST, read_timeout=timedelta(milliseconds=400))
LONG = 30.0  # seconds; a connection that is not cut off would outlast this


class World(RegistryServer):
    """A registry whose member PEER commits."""

    def start(self) -> World:
        super().start()
        self.registry.register(PEER.ss58)
        return self

    @property
    def bounds(self) -> Bounds:
        return self._service.bounds

    @property
    def held(self) -> int:
        return sum(map(len, self.bounds.held.values()))

    def count(self, name: str) -> int:
        return self._service.counters().get(name, 0)

    def refused(self, reason: str) -> int:
        return self.count(f"refused.{reason}")

    @property
    def calls(self) -> int:
        return self.count(f"written{CALL}")

    def connect(self, source: str = "127.0.0.1", timeout: float = LONG) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout, (source, 0))

    def send(self, raw: bytes, source: str = "127.0.0.1", *, ends: bool = False) -> bytes:
        """Send bytes and return the whole answer. ``ends``: close our side at once."""
        answer = b""
        with suppress(OSError), closing(self.connect(source)) as sock:
            with suppress(OSError):
                sock.sendall(raw)
            while True:
                if answer or ends:  # otherwise we would wait for a connection that is kept open
                    sock.shutdown(socket.SHUT_WR)
                if not (chunk := sock.recv(65536)):
                    break
                answer += chunk
        return answer

    def sign(self, wallet: Wallet, body: bytes = BODY) -> dict[str, str]:
        return http_auth.sign(
            wallet.hotkey,
            method="POST",
            path=CALL,
            body=body,
            receiver_ss58=self.charter.identity,
        )

    def call(self, wallet: Wallet = PEER) -> bytes:
        return request(CALL, self.sign(wallet), BODY)

    def still_answers(self) -> None:
        assert status(self.send(self.call())) == 200


@contextmanager
def world(limits: Limits = FAST) -> Iterator[World]:
    with World(limits=limits) as made:
        assert isinstance(made, World)
        yield made


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[World]:
    """Run a registry with the test's limits, or with lenient ones."""
    with world(getattr(request, "param", FAST)) as made:
        yield made


@pytest.fixture(scope="module")
def lenient() -> Iterator[World]:
    """Run one registry for all tests that change nothing."""
    with world() as made:
        yield made


def bounded(limits: Limits) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", [limits], indirect=True, ids=[""])


def closed_within(sock: socket.socket, seconds: float) -> bool:
    sock.settimeout(seconds)
    try:
        return sock.recv(65536) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@bounded(QUICK)
@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"", "silent"),
        (b"GET /state HTTP/1.1\r\nx: ", "timeout"),
        (b"POST /commit HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n", "unsigned"),
        (BODY, "timeout"),  # a signed head, and a body without its last byte
    ],
)
def test_slow_heads_and_bodies_are_cut_off(server: World, first: bytes, reason: str) -> None:
    if first is BODY:
        first = server.call()[:-1]
    began = time.monotonic()
    with closing(server.connect()) as sock, suppress(OSError):
        sock.sendall(first)
        while not closed_within(sock, 0.05) and time.monotonic() - began < LONG:
            if first.endswith(b"x: "):
                sock.sendall(b"y")  # single bytes do not extend the time
    assert time.monotonic() - began < LONG
    wait_for(lambda: server.refused(reason) == 1)
    assert server.calls == 0
    wait_for(lambda: server.held == 0)


@bounded(replace(QUICK, idle_timeout=timedelta(seconds=1)))
def test_an_idle_connection_is_closed_and_is_no_offence(server: World) -> None:
    with closing(server.connect()) as sock:
        sock.sendall(server.call())
        assert status(sock.recv(65536)) == 200
        while not closed_within(sock, LONG):
            pass  # the rest of the answer
    assert not server.refused("timeout") and not server.refused("silent")
    wait_for(lambda: server.held == 0)


@pytest.mark.parametrize(
    ("raw", "codes"),
    [
        (b"\x00\x01\x02 garbage\r\n\r\n", {400}),
        (b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n", {404}),
        (b"GET /commit HTTP/1.1\r\nhost: x\r\n\r\n", {404}),
        (b"POST /commit HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", {400}),
        (b"POST /commit HTTP/1.1\r\nhost: x\r\ncontent-length: 1e3\r\n\r\n", {400}),
        (b"POST /commit HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n", {413}),
        (b"POST /commit HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}", {401}),
        (b"POST /commit HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", {431, 0}),
        (b"POST /commit HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 400_000, {431, 0}),
        (b"POST / HTTP/1.1\r\n" + b"a:\r\n" * 80 + b"\r\n", {431, 0}),
        (b"POST / HTTP/1.1\r\nhost: x\n\nPOST / HTTP/1.1\r\n\r\n", {400, 0}),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", {200}),
    ],
)
def test_malformed_and_oversized(
    lenient: World, monkeypatch: pytest.MonkeyPatch, raw: bytes, codes: set[int]
) -> None:
    received = h11.Connection.receive_data
    parsed: list[bytes] = []
    monkeypatch.setattr(
        h11.Connection,
        "receive_data",
        lambda connection, data: (parsed.append(data), received(connection, data))[1],
    )
    before = lenient.calls
    answer = lenient.send(raw)
    assert status(answer) in codes, answer
    assert b"Traceback" not in answer
    assert all(len(head) <= MAX_HEAD_BYTES + 4 for head in parsed), "bounded before it is parsed"
    assert all(head.count(b"\n") <= MAX_HEAD_LINES + 2 for head in parsed)
    assert lenient.calls == before
    lenient.still_answers()


@pytest.mark.skipif(sys.platform != "linux", reason="CPU time of one thread")
@pytest.mark.parametrize("named", [False, True])
def test_a_megabyte_of_one_byte_chunks_costs_next_to_nothing(server: World, named: bool) -> None:
    """It once cost 0.4 s of CPU time, and 1.2 s in the name of a registered hotkey."""

    def cpu() -> float:
        thread = server._service._threads[0].native_id
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9

    head = server.sign(PEER, b"") if named else {}
    raw = request(CALL, {**head, "transfer-encoding": "chunked"})
    raw = raw.replace(b"content-length: 0\r\n", b"") + b"1\r\nx\r\n" * 170_000 + b"0\r\n\r\n"
    before = cpu()
    assert status(server.send(raw)) in (411, 0)
    wait_for(lambda: server.refused("no_length") == 1)
    assert server.calls == 0 and cpu() - before < 0.2


def test_a_pipelined_request_is_not_read(server: World) -> None:
    assert status(server.send(server.call() + server.call())) in (200, 400, 0)
    assert server.calls <= 1
    server.still_answers()


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_limit_of_a_body(server: World, beyond: int) -> None:
    body = BODY.ljust(MAX_BODY + beyond)
    answer = status(server.send(request(CALL, server.sign(PEER, body), body)))
    assert answer in (413, 0) if beyond else answer == 200
    assert server.refused("too_large") == beyond and server.calls == 1 - beyond


@pytest.mark.parametrize("name", ["X-Bittensor-Hotkey", "X-Bittensor-Nonce", "Content-Length"])
def test_a_header_given_twice(lenient: World, name: str) -> None:
    before, headers = lenient.calls, lenient.sign(PEER)
    raw = request(CALL, headers, BODY)
    twice = {**{k.lower(): v for k, v in headers.items()}, "content-length": "3"}[name.lower()]
    raw = raw.replace(b"host: x\r\n", f"host: x\r\n{name}: {twice}\r\n".encode())
    assert status(lenient.send(raw)) == 400 and lenient.calls == before


_VALUES = st.one_of(
    st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=255), max_size=140),
    st.sampled_from([VALIDATOR.ss58, PEER.ss58, "0x" + "00" * 64, "1", "ed25519", "NaN", "-1"]),
    st.integers().map(str),
    st.builds(lambda: str(time.time_ns())),
)
_NAMES = [f"X-Bittensor-{name}" for name in ("Hotkey", "Nonce", "Signature", "Version", "Receiver")]
FUZZ = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


@FUZZ
@given(
    changes=st.dictionaries(
        st.sampled_from([*_NAMES, "content-type", "expect"]), st.none() | _VALUES, max_size=4
    ),
    signed=st.booleans(),
    body=st.binary(max_size=200),
)
def test_fuzzed_headers(lenient: World, changes: Any, signed: bool, body: bytes) -> None:
    """Requests have an outsider's signature, a member's name, and headers changed at random."""
    headers: dict[str, str] = {}
    if signed:
        headers = lenient.sign(STRANGER, body) | {"X-Bittensor-Hotkey": PEER.ss58}
    for name, value in changes.items():
        if value is None:
            headers.pop(name, None)
        else:
            headers[name] = value
    lines = b"".join(f"{k}: {v}\r\n".encode("latin-1") for k, v in headers.items())
    head = f"POST /commit HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n".encode()
    before = lenient.calls
    answer = lenient.send(head + lines + b"\r\n" + body)
    assert 400 <= status(answer) < 500, answer
    assert lenient.calls == before


@FUZZ
@given(raw=st.binary(max_size=300))
def test_fuzzed_bytes(lenient: World, raw: bytes) -> None:
    answer = lenient.send(raw, ends=True)
    assert answer == b"" or 400 <= status(answer) < 500, answer


# --- many of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "reason"), [([5] * 8, "connections_of_address"), (range(16), "connections")]
)
def test_the_one_that_waits_longest_makes_room(sources: Any, reason: str) -> None:
    """This holds per address and in total, so a client that asks at once is answered."""
    limits = replace(FAST, max_connections=10, max_connections_per_address=4)
    with ExitStack() as stack, world(limits) as made:
        for number in sources:
            held = stack.enter_context(closing(made.connect(f"127.0.1.{number}")))
            with suppress(OSError):
                held.sendall(b"P")
        wait_for(lambda: made.refused(reason) >= 4)
        wait_for(lambda: made.held == (4 if reason == "connections_of_address" else 10))
        answer = made.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", f"127.0.1.{sources[0]}")
        assert status(answer) == 200
        stack.close()
        wait_for(lambda: not made.bounds.held and not made.bounds.waiting)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "clients", "addresses"),
    [
        (b"GET /state HTTP/1.1\r\nx: ", 1920, 60),
        (b"POST /access HTTP/1.1\r\ncontent-length: 200000\r\n\r\n", 1920, 60),
        (b"GET /state HTTP/1.1\r\nx: ", 2000, 1),
        # This client does not read the answer.
        (b"GET /state HTTP/1.1\r\nhost: x\r\n\r\n", 640, 64),
    ],
    ids=["heads", "bodies", "one address", "readers that do not read"],
)
def test_a_flood_is_cut_off_and_honest_clients_are_answered(
    tmp_path: Path, first: bytes, clients: int, addresses: int
) -> None:
    with RegistryServer(tmp_path) as filled:  # the list has 75 KB
        with filled.registry.change():
            for number in range(1, 250):
                filled.registry.register(f"5{number:047d}", uid=number)
                filled.registry.commit(f"5{number:047d}", "x" * 128)
    with chain_program(folder=tmp_path) as (url, process), ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        memory = psutil.Process(process.pid).memory_info().rss

        def answers() -> float:
            began = time.monotonic()
            assert httpx.get(url + "/health", trust_env=False, timeout=LONG).status_code == 200
            return time.monotonic() - began

        held = []
        for number in range(clients):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.bind((f"127.8.{number % addresses}.7", 0))
            with suppress(OSError):
                one.connect(("127.0.0.1", port))
                one.sendall(first)
                held.append(one)
        took = sorted(answers() for _ in range(9))
        assert took[4] < 1.0, took
        grown = psutil.Process(process.pid).memory_info().rss - memory
        assert grown < 150 * 2**20, grown

        def cut_off() -> bool:
            held[:] = [one for one in held if not closed_within(one, 0.01)]
            return not held

        if b"host" not in first:
            wait_for(cut_off, "all are cut off")


class SlowLine(asyncio.Transport):
    """A connection to a client that has read as long as ``unread`` falls."""

    def __init__(self, *unread: int) -> None:
        super().__init__()
        self.unread = deque(unread)
        self.cut = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.unread[0]

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.cut.set()


@pytest.mark.parametrize("answering", [False, True])
def test_a_client_of_a_slow_line_is_cut_only_when_it_stops_reading(answering: bool) -> None:
    """A long answer is complete for uvicorn before all of it has been sent."""

    class Connection(BoundedConnection):
        bounds = Bounds(patience=0.01, pace=20_000)  # 200 bytes per check

        def _late(self, before: int) -> None:
            line.unread.popleft()
            super()._late(before)

    async def read() -> list[int]:
        config = uvicorn.Config(lambda: None, log_config=None)
        config.load()
        connection = Connection(config, ServerState(), {})
        connection.connection_made(line)
        if answering:
            connection.pause_writing()
        else:
            connection.on_response_complete()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(line.cut.wait(), 30)
        return list(line.unread)

    line = SlowLine(900, 600, 300, 250, 0)
    assert asyncio.run(read()) == [250, 0]


def test_memory_for_strangers_is_bounded() -> None:
    now = [0.0]
    buckets = Buckets(rate=1.0, burst=2, capacity=100, clock=lambda: now[0])
    assert [buckets.draw("a") for _ in range(3)] == [True, True, False]
    now[0] = 1.0
    assert buckets.draw("a") and not buckets.draw("a")
    rng = random.Random(1)
    for _ in range(20_000):
        buckets.draw(f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}")
    assert len(buckets._levels) <= 100


def test_many_starts_and_calls_leave_nothing_behind() -> None:
    def live(calls: int) -> None:
        with world() as made:
            for _ in range(calls):
                made.still_answers()
                made.send(b"POST /commit HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")

    def left() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    live(1)
    before = left()
    for calls in (1, 10, 1):
        live(calls)
    wait_for(lambda: all(now <= then for now, then in zip(left(), before, strict=True)), "no more")


def test_an_address_is_one_client() -> None:
    assert normalize("::ffff:1.2.3.4") == "1.2.3.4"
    assert normalize("2001:db8:1:2::4") == "2001:db8:1:2::/64" != normalize("2001:db8:1:3::4")
