"""Floods at the bounded server: refused clients, served ones, and the memory for outsiders."""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from distributed_training.chain.http_server import Admission, Buckets
from tests.tools.chain_raw import call, connect, send, status, still_answers
from tests.tools.chain_world import VALIDATOR, Bounds, World, running, world
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(90)


JUNK = b"POST /call HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


def test_sender_of_junk_is_closed_at_once_until_it_is_forgiven(caplog) -> None:
    caplog.set_level(logging.WARNING)
    made = World()
    now = [time.monotonic()]
    made.server.admission._clock = lambda: now[0]
    with running(made):
        wait_for(
            lambda: (send(made, JUNK, "127.0.0.9", 0.1), made.refused("connection_blocked"))[1]
        )
        known = made.server.counters()
        for _ in range(5):
            assert send(made, JUNK, "127.0.0.9", 0.1) == b""
        # Nothing of what they sent was read.
        after = made.server.counters()
        assert after["refused.connection_blocked"] == known["refused.connection_blocked"] + 5
        assert after["refused.unsigned"] == known["refused.unsigned"]
        # Others are not shut out, and the log is not a way to fill a disk.
        still_answers(made)
        assert len([m for m in caplog.messages if "127.0.0.9" in m]) == 1
        now[0] += 61
        wait_for(lambda: status(send(made, JUNK, "127.0.0.9", 0.1)) == 401)


def call_from(made: World, source: str) -> int:
    return status(send(made, call(VALIDATOR), source, 0.3))


def test_connections_are_capped_for_each_address_and_for_all() -> None:
    bounds = Bounds(max_connections=10, max_connections_per_address=4)
    with world(bounds) as made:
        held = []

        def open_from(source: str) -> None:
            # A refused one is reset while it connects or soon after, or never gets an answer. A
            # silent one would not be seen at all for a while.
            with suppress(ConnectionError, TimeoutError):
                sock = connect(made, source, 0.3)
                held.append(sock)
                sock.sendall(b"P")

        for _ in range(8):
            open_from("127.0.0.5")
        wait_for(lambda: made.refused("connections_of_address") == 4)
        for i in range(7):
            open_from(f"127.0.1.{i}")
        wait_for(lambda: made.refused("connections") >= 1)
        assert made.server.counters()["connections"] == 10
        for sock in held:
            sock.close()
        wait_for(lambda: made.server.counters()["connections"] == 0)


def test_memory_for_strangers_is_bounded() -> None:
    now = [0.0]
    buckets = Buckets(rate=1.0, burst=2, capacity=100, clock=lambda: now[0])
    assert [buckets.draw("a") for _ in range(3)] == [True, True, False]
    now[0] = 1.0
    assert buckets.draw("a") and not buckets.draw("a")
    limits = {"max_connections": 10, "max_connections_per_address": 2, "requests_per_address": 1}
    admission = Admission(trusted=frozenset(), **limits, clock=lambda: now[0])
    rng = random.Random(1)
    for _ in range(20_000):
        address = f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}"
        admission.strike(address)
        if admission.connect(address):
            admission.disconnect(address)
        now[0] += 0.01
    for buckets in (admission._requests, admission._strikes):
        assert len(buckets._levels) <= 4096
    assert len(admission._blocked) <= 4096
    assert not admission._open and admission.connections == 0


def test_many_starts_and_calls_leave_nothing_behind() -> None:
    def live(calls: int) -> None:
        with world() as made:
            for _ in range(calls):
                assert call_from(made, "127.0.0.1") == 200
                send(made, JUNK, "127.0.0.9", 0.1)

    def left() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    live(1)
    before = left()
    for calls in (1, 20, 1, 1, 1):
        live(calls)
    wait_for(lambda: all(now <= then for now, then in zip(left(), before, strict=True)), "no more")
