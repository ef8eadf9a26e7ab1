"""Stand in front of a founder's services on loopback: ``front.py CERTIFICATE IP:PORT=LOCAL...``.

Whoever connects to IP:PORT is passed on to port LOCAL; the last way speaks TLS, as the Caddy of
``ops/Caddyfile`` does for the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
import sys
from pathlib import Path


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


async def _open(way: str, tls: ssl.SSLContext | None) -> None:
    place, _, local = way.partition("=")
    ip, _, port = place.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", int(local))
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))

    await asyncio.start_server(serve, ip, int(port), ssl=tls)


async def main() -> None:
    certificate, *ways = sys.argv[1:]
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, Path(certificate).with_suffix(".key"))
    for way in ways:
        await _open(way, tls if way == ways[-1] else None)
    print("READY", flush=True)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


if __name__ == "__main__":
    asyncio.run(main())
