"""TLS in front of a registry on loopback: Caddy with ``ops/Caddyfile``, or Python's own ssl."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from distributed_training.common.ports import free_ports
from tests.tools.store_shim import make_certificate
from tests.tools.waiting import wait_for

CADDY = shutil.which("caddy", path=str(Path(sys.executable).parent)) or shutil.which("caddy")
CADDYFILE = Path(__file__).parents[2] / "ops/Caddyfile"
_OPTIONS = "{\n\tadmin off\n\tskip_install_trust\n\tauto_https disable_redirects\n}\n"


@contextmanager
def caddy(port: int, folder: Path) -> Iterator[tuple[str, Path]]:
    """The URL in front of ``port``, and the authority's certificate."""
    (front,) = free_ports(1)
    text = CADDYFILE.read_text()
    for ours, here in (
        ("registry.example.org {", f"https://localhost:{front} {{"),
        (":8100", f":{port}"),
    ):
        assert text.count(ours) == 1
        text = text.replace(ours, here)
    config = folder / "Caddyfile"
    config.write_text(_OPTIONS + text)
    authority = folder / "caddy/pki/authorities/local/root.crt"
    command = [CADDY or "caddy", "run", "--config", str(config), "--adapter", "caddyfile"]
    environment = {**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "caddy.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        wait_for(lambda: "serving initial configuration" in (folder / "caddy.log").read_text())
        wait_for(authority.exists)
        wait_for(lambda: _shakes_hands(front, authority))
        yield f"https://localhost:{front}", authority
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def python(port: int, folder: Path) -> Iterator[tuple[str, Path]]:
    """Start such a proxy in this process, which adds to ``X-Forwarded-For`` as many proxies do."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            claimed = self.headers.get("x-forwarded-for")
            del self.headers["x-forwarded-for"]
            caller = self.client_address[0]
            self.headers["X-Forwarded-For"] = f"{claimed}, {caller}" if claimed else caller
            behind = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            behind.request(self.command, self.path, body or None, dict(self.headers.items()))
            answer = behind.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            behind.close()

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority = make_certificate(folder, "DNS:localhost")
    context.load_cert_chain(authority, authority.with_suffix(".key"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"https://localhost:{server.server_port}", authority
    finally:
        server.shutdown()
        server.server_close()


def _shakes_hands(port: int, authority: Path) -> bool:
    """Return whether there is a certificate already: it is made after the port is open."""
    context = ssl.create_default_context(cafile=str(authority))
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as raw:
        context.wrap_socket(raw, server_hostname="localhost").close()
        return True
    return False
