"""A small HTTP proxy in front of the real server: enforces R2's rules, injects and logs faults.

These rules of R2 are enforced by no server that we could run: all parts of an upload but the last,
have one size, which is checked at Complete (400 InvalidPart); checksum trailers are refused (401
Unauthorized); a key is written at most once a second (429).
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

DROP = -1  # a fault: close the connection in the middle of the body
STALL = -2  # a fault: read a part of the body, then neither read on nor close the connection
CHUNK = 64 * 1024


@dataclass(frozen=True)
class Call:
    """One request, which a fault gets. ``what``: put, part, complete, create, ..."""

    method: str
    bucket: str
    key: str
    what: str
    number: int  # of a part
    count: int  # how many requests of this kind came before it, over all keys


@dataclass
class Shim:
    """``fault(call)``: returns None to forward, a status to answer, DROP or STALL; may sleep."""

    upstream: str
    fault: Callable[[Call], int | None] = lambda call: None
    write_interval: float = 0.0
    certificate: Path | None = None
    log: list[Call] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.sizes: dict[str, dict[int, int]] = {}
        self.written: dict[str, float] = {}
        shim = self

        class Handler(_Handler):
            owner = shim

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.certificate.with_suffix(".key"))
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        serve = self.server.serve_forever
        self.thread = threading.Thread(target=serve, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def endpoint(self) -> str:
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://127.0.0.1:{self.server.server_address[1]}"

    def count(self, what: str) -> int:
        with self.lock:
            return sum(call.what == what for call in self.log)

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def __enter__(self) -> Shim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_certificate(folder: Path, subject: str = "IP:127.0.0.1") -> Path:
    """Create a self-signed certificate for an address or a name, with its key next to it."""
    path = folder / "shim.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={subject.partition(':')[2]}", "-addext", f"subjectAltName={subject}"),
            *("-keyout", str(path.with_suffix(".key")), "-out", str(path)),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return path


_CODES = {401: "Unauthorized", 403: "AccessDenied", 429: "SlowDown", 400: "InvalidPart"}
_CODES |= {500: "InternalError", 503: "ServiceUnavailable", 404: "NoSuchUpload"}


class _Handler(BaseHTTPRequestHandler):
    owner: Shim
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._handle()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _call(self) -> Call:
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        _, bucket, *rest = url.path.split("/", 2)
        key = rest[0] if rest else ""
        number = int(query.get("partNumber", ["0"])[0])
        what = self.command.lower()
        if number:
            what = "part"
        elif self.command == "POST":
            what = "create" if "uploads" in query else "complete"
        elif self.command == "DELETE" and "uploadId" in query:
            what = "abort"
        self.upload_id = query.get("uploadId", [""])[0]
        with self.owner.lock:
            count = sum(c.what == what for c in self.owner.log)
            call = Call(self.command, bucket, key, what, number, count)
            self.owner.log.append(call)
        return call

    def _handle(self) -> None:
        call = self._call()
        length = int(self.headers.get("Content-Length") or 0)
        trailer = self.headers.get("x-amz-trailer") or "aws-chunked" in (
            self.headers.get("Content-Encoding") or ""
        )
        status = 401 if trailer else self._rules(call, length)
        if status is None:
            status = self.owner.fault(call)
        if status in (DROP, STALL):
            self.rfile.read(min(length // 2, CHUNK * 8))
            self.close_connection = True
            if status == STALL:
                self.owner.closing.wait(60)
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if status is not None:
            self._drain(length, bool(trailer))
            self._refuse(call, status)
            return
        self._forward(call, length)

    def _drain(self, length: int, close: bool) -> None:
        if close:
            self.close_connection = True
            return
        while length > 0:
            length -= len(self.rfile.read(min(length, CHUNK))) or length

    def _rules(self, call: Call, length: int) -> int | None:
        shim = self.owner
        with shim.lock:
            if call.what == "part":
                shim.sizes.setdefault(self.upload_id, {})[call.number] = length
            if call.what == "complete":
                sizes = [s for _, s in sorted(shim.sizes.get(self.upload_id, {}).items())]
                if len(set(sizes[:-1])) > 1 or (len(sizes) > 1 and sizes[-1] > sizes[0]):
                    return 400
            if call.what in ("put", "complete") and shim.write_interval:
                now = time.monotonic()
                if now - shim.written.get(call.key, 0.0) < shim.write_interval:
                    return 429
                shim.written[call.key] = now
        return None

    def _refuse(self, call: Call, status: int) -> None:
        code = _CODES.get(status, "Error")
        with self.owner.lock:
            self.owner.refusals.append(f"{call.what} {status}")
        body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _forward(self, call: Call, length: int) -> None:
        target = urlsplit(self.owner.upstream)
        upstream = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                upstream.putheader(name, value)  # the host is part of the signature
        upstream.endheaders()
        while length > 0:
            piece = self.rfile.read(min(length, CHUNK))
            if not piece:
                upstream.close()
                return
            upstream.send(piece)
            length -= len(piece)
        answer = upstream.getresponse()
        body = b"" if self.command == "HEAD" else answer.read()
        upstream.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if not re.fullmatch(r"(?i)transfer-encoding|connection|content-length|date", name):
                self.send_header(name, value)
        size = answer.getheader("Content-Length") if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(size or 0))
        self.end_headers()
        self.wfile.write(body)
