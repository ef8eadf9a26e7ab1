"""Bytes of one's own to a signed server, as a client that keeps no rule sends them."""

from __future__ import annotations

import http.client
import socket
from contextlib import closing

from tests.tools.chain_world import PEER, World, sign


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
        try:
            sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError, OSError):
            pass
        answer = b""
        try:
            while chunk := sock.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass
        return answer


def request(path: str, headers: dict[str, str], body: bytes = b"", method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def still_answers(made: World) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", made.server.port, timeout=30)
    connection.request("POST", "/IsAlive", b"{}", sign("btauth", PEER, "/IsAlive", b"{}"))
    assert connection.getresponse().status == 200
    connection.close()
