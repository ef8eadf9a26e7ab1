"""A machine whose only way out is a thin network link to some ports of this one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from testbed.namespaces import Machine, ip

_PIECE = 4096  # bytes that wait for their turn together


class ThinLink(Machine):
    """``rate``: bytes a second each way, which may change."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "127.0.0.1")
        self.rate = math.inf
        self.moved = [0, 0]  # bytes out and in
        self._free = [0.0, 0.0]  # when the link has sent what it was given, out and in

    async def serve(self, listening: list[socket.socket], stop: asyncio.Event) -> None:
        servers = [await asyncio.start_server(self._carry, sock=each) for each in listening]
        await stop.wait()
        for server in servers:
            server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            port = writer.get_extra_info("sockname")[1]
            theirs = await asyncio.open_connection("127.0.0.1", port)
            out, back = self._pump(reader, theirs[1], 0), self._pump(theirs[0], writer, 1)
            await asyncio.gather(out, back)
        writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int
    ) -> None:
        try:
            while data := await reader.read(_PIECE):
                now = asyncio.get_running_loop().time()
                self._free[way] = max(now, self._free[way]) + len(data) / self.rate
                self.moved[way] += len(data)
                await asyncio.sleep(self._free[way] - now)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


@contextmanager
def thin_link(*ports: int) -> Iterator[ThinLink]:
    """Yield a machine that reaches ``ports`` of ours at its own loopback interface.

    Skips the test, with the reason, where namespaces cannot be made.
    """
    link, stop = ThinLink(f"dt{os.getpid() % 100000}thin"), asyncio.Event()
    runner = asyncio.Runner()
    thread = threading.Thread(target=lambda: runner.run(link.serve(listening, stop)), daemon=True)
    try:
        try:
            ip("netns", "add", link.name)
            ip("-n", link.name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        with link.inside():  # a socket stays where it was made
            listening = [socket.create_server(("127.0.0.1", port)) for port in ports]
        thread.start()
        yield link
    finally:
        if thread.is_alive():
            runner.get_loop().call_soon_threadsafe(stop.set)
            thread.join(10)
        runner.close()
        subprocess.run(["ip", "netns", "del", link.name], capture_output=True, check=False)
