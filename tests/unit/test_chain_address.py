from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from distributed_training.chain.address import AddressUnknown, external_ip
from distributed_training.config.chain import ChainSettings

pytestmark = pytest.mark.timeout(30)


@contextmanager
def service(text: str, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def test_what_was_given_is_not_asked_for() -> None:
    assert external_ip(replace(ChainSettings(), external_ip="9.8.7.6"), services=()) == "9.8.7.6"
    assert external_ip(replace(ChainSettings(), axon_ip="10.0.0.4"), services=()) == "10.0.0.4"


def test_the_first_sensible_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with (
        service("<html>", 200) as odd,
        service("1.1.1.1", 503) as down,
        service("192.168.1.4") as private,
        service("8.8.4.4\n") as good,
    ):
        asked = ["http://127.0.0.1:1", odd, down, private, good]
        assert external_ip(ChainSettings(), services=asked) == "8.8.4.4"
        with pytest.raises(AddressUnknown, match=r"--axon\.external_ip"):
            external_ip(ChainSettings(), services=asked[:-1])
