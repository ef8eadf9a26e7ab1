from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from distributed_training.chain.identity import AddressUnknown, external_ip
from distributed_training.config.settings import ChainSettings

pytestmark = pytest.mark.timeout(30)


@contextmanager
def service(*texts: str, status: int = 200, endless: bool = False) -> Iterator[str]:
    """Answers with ``texts`` in turn, the last one for ever; ``endless``: never to the end."""
    answers = list(texts)
    stop = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write((answers.pop(0) if len(answers) > 1 else answers[0]).encode())
            while endless and not stop.wait(0.1):
                try:
                    self.wfile.write(b" ")
                except OSError:
                    return

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def test_what_was_given_is_not_asked_for() -> None:
    assert external_ip(replace(ChainSettings(), external_ip="9.8.7.6"), services=()) == "9.8.7.6"


def test_a_private_listening_address_is_only_a_local_subnets() -> None:
    private = replace(ChainSettings(), axon_ip="10.0.0.4")
    local = replace(private, registry_url="http://127.0.0.1:1")
    assert external_ip(local, services=()) == "10.0.0.4"
    assert external_ip(replace(ChainSettings(), axon_ip="9.9.9.9"), services=()) == "9.9.9.9"
    with service("8.8.4.4") as good:
        assert external_ip(private, services=[good]) == "8.8.4.4"


def test_two_answers_have_to_agree() -> None:
    with (
        service("<html>") as odd,
        service("1.1.1.1", status=503) as down,
        service("192.168.1.4") as private,
        service("6.6.6.6") as wrong,
        service("8.8.4.4\n") as good,
        service("8.8.4.4") as other,
    ):
        bad = ["http://127.0.0.1:1", odd, down, private]
        assert external_ip(ChainSettings(), services=[*bad, wrong, good, other]) == "8.8.4.4"
        # One that answers is asked again; one that changes its mind is not believed.
        assert external_ip(ChainSettings(), services=[*bad, good]) == "8.8.4.4"
        with service("6.6.6.6", "7.7.7.7") as unsure:
            with pytest.raises(AddressUnknown, match=r"6\.6\.6\.6, 7\.7.*--axon\.external_ip"):
                external_ip(ChainSettings(), services=[*bad, unsure])
        with pytest.raises(AddressUnknown, match=r"--axon\.external_ip"):
            external_ip(ChainSettings(), services=bad)


def test_the_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is not the one that validators reach."""
    with service("6.6.6.6") as proxy, service("8.8.4.4") as good:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert external_ip(ChainSettings(), services=[good]) == "8.8.4.4"


def test_an_answer_is_bounded_in_size_and_time() -> None:
    with (
        service("8.8.4.4" + " " * 10**6) as large,
        service("8.8.4.4", endless=True) as slow,
        service("9.9.9.9") as good,
    ):
        began = time.monotonic()
        asked = [large, slow, good]
        timeout = timedelta(seconds=1)
        assert external_ip(ChainSettings(), services=asked, timeout=timeout) == "9.9.9.9"
        assert time.monotonic() - began < 15
