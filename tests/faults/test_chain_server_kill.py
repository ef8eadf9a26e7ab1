"""A server killed right after it answered: what it accepted is refused by the next one."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import pytest

from distributed_training.common.ports import free_ports
from tests.tools.chain_world import SETTINGS, VALIDATOR, World, sign
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(90)


def serve(folder: Path, port: int, out: Connection) -> None:
    made = World(replace(SETTINGS, axon_port=port), folder)
    made.server.start()
    out.send(made.server.port)
    signal.pause()


@contextmanager
def server(folder: Path, port: int) -> Iterator[tuple[int, int]]:
    """Its port and process id; killed at the end."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=serve, args=(folder, port, theirs))
    process.start()
    try:
        assert ours.poll(60)
        assert process.pid is not None
        yield ours.recv(), process.pid
    finally:
        process.kill()
        process.join(10)


def test_a_replay_after_sigkill_is_refused(tmp_path: Path) -> None:
    calls = (("btauth", "/AllReduce"), ("legacy", "/IsAlive"))

    def call(port: int, route: str, headers: dict[str, str]) -> int:
        url = f"http://127.0.0.1:{port}{route}"
        reply = httpx.post(url, content=b"{}", headers=headers, trust_env=False, verify=False)
        return reply.status_code

    (port,) = free_ports(1)
    with server(tmp_path, port) as (_, pid):
        # As far ahead as a caller's clock may be: fresh for as long as possible.
        nonce = time.time_ns() + 3 * 10**9
        sent = [
            (route, sign(scheme, VALIDATOR, route, b"{}", nonce=nonce + number))
            for number, (scheme, route) in enumerate(calls)
        ]
        assert [call(port, *each) for each in sent] == [200, 200]
        os.kill(pid, signal.SIGKILL)
    with server(tmp_path, port):
        assert [call(port, *each) for each in sent] == [401, 401]
        # Who signs after the start is heard as soon as the allowed difference of clocks has passed.
        for scheme, route in calls:
            wait_for(
                lambda s=scheme, r=route: call(port, r, sign(s, VALIDATOR, r, b"{}")) == 200,
                "it hears",
                every=0.5,  # a 20th refusal would block this address
            )
        assert [call(port, *each) for each in sent] == [401, 401]
