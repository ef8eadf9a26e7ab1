"""Streams that peers open, on a machine that has no descriptor left for a moment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2

from distributed_training.swarm.wire import Daemon, Stream
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _p2pd(connection: Stream) -> None:
    """Agrees to whatever it is asked."""
    await connection.receive_message(p2pd_pb2.Request())
    await connection.send_message(p2pd_pb2.Response(type=p2pd_pb2.Response.OK))


def test_streams_are_accepted_again_once_there_are_descriptors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        handled = asyncio.Event()
        control = socket.socket(socket.AF_UNIX)
        control.bind(str(tmp_path / "control"))
        control.listen()
        control.setblocking(False)

        async def answer() -> None:
            asked, _ = await loop.sock_accept(control)
            asked.setblocking(False)
            with asked:
                await _p2pd(Stream(asked, PeerID(b"")))

        async def handle(stream: Stream) -> None:
            assert stream.peer == PeerID(b"peer")
            handled.set()

        p2pd = asyncio.create_task(answer())
        path, peer = tmp_path / "parts", socket.socket(socket.AF_UNIX)
        peer.setblocking(False)
        with control, peer:
            async with Daemon(str(tmp_path / "control")).serve("parts", path, handle):
                await p2pd
                with no_descriptor_left():
                    await loop.sock_connect(peer, str(path))
                    told = lambda: "cannot be accepted" in caplog.text
                    await asyncio.to_thread(wait_for, told, "it is told")
                whose = p2pd_pb2.StreamInfo(peer=b"peer", addr=b"", proto="parts")
                await Stream(peer, PeerID(b"")).send_message(whose)
                async with asyncio.timeout(10):
                    await handled.wait()

    asyncio.run(run())
