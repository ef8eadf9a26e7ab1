"""Run Caddy with ``ops/Caddyfile``, which adds TLS to a registry on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distributed_training.common.ports import free_ports
from tests.tools.waiting import wait_for

CADDY = shutil.which("caddy", path=str(Path(sys.executable).parent)) or shutil.which("caddy")
CADDYFILE = Path(__file__).parents[2] / "ops/Caddyfile"
_OPTIONS = "{\n\tadmin off\n\tskip_install_trust\n\tauto_https disable_redirects\n}\n"


@contextmanager
def caddy(port: int, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the URL of the proxy for ``port``, and the certificate of its authority."""
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


def _shakes_hands(port: int, authority: Path) -> bool:
    """Return whether the certificate exists, which is created after the port is open."""
    context = ssl.create_default_context(cafile=str(authority))
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as raw:
        context.wrap_socket(raw, server_hostname="localhost").close()
        return True
    return False
