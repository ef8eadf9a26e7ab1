"""Bytes of one's own, as a client or a server that keeps no rule sends them."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from distributed_training.chain.identity import Wallet
from tests.tools.chain_world import CALL, PEER, World, sign


def connect(made: World, source: str = "127.0.0.1", timeout: float = 30.0) -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", made.server.port), timeout=timeout, source_address=(source, 0)
    )


def send(made: World, raw: bytes, source: str = "127.0.0.1", timeout: float = 30.0) -> bytes:
    """Everything the server says before it closes; nothing when it does not let us in: resets the
    connection."""
    try:
        sock = connect(made, source, timeout)
    except (ConnectionResetError, TimeoutError):
        return b""
    sock.settimeout(30)
    with closing(sock):
        with suppress(OSError):
            sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):
            while chunk := sock.recv(65536):
                answer += chunk
        return answer


def request(path: str, headers: dict[str, str], body: bytes = b"", method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def call(wallet: Wallet = PEER) -> bytes:
    return request(CALL, sign(wallet, b"{}"), b"{}")


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def still_answers(made: World) -> None:
    assert status(send(made, call())) == 200


@contextmanager
def trickle() -> Iterator[int]:
    """The port of a server whose answer's head comes byte by byte and never ends."""
    ended = threading.Event()

    def drip(accepted: socket.socket) -> None:
        with accepted, suppress(OSError):
            for byte in itertools.chain(b"HTTP/1.1 200 OK\r\n", itertools.cycle(b"x")):
                accepted.send(bytes([byte]))
                if ended.wait(0.02):
                    return

    def serve(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = server.accept()
                threading.Thread(target=drip, args=(accepted,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            ended.set()
            server.shutdown(socket.SHUT_RDWR)
