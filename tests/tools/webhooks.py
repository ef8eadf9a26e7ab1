"""Run a service on 127.0.0.1 to which apprise sends a miner's messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Webhooks:
    """The received messages, as ``title: text``, and how the next requests are answered.

    ``manner``: ``""`` as a service does, a status, ``hang``, ``drip``, ``elsewhere`` (a redirect)
    or ``nonsense``.
    """

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.asked = 0  # requests
        self.manner: str | int = ""
        self.over = threading.Event()
        self.url = ""


@contextmanager
def webhooks() -> Iterator[Webhooks]:
    world = Webhooks()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            world.asked += 1
            content = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if world.manner in ("hang", "drip"):
                while not world.over.wait(0.05) and world.manner in ("hang", "drip"):
                    if world.manner == "drip":
                        self.wfile.write(b"H")
                return
            if world.manner == "nonsense":
                self.wfile.write(b"\0\xff" * 50)
                return
            status = 302 if world.manner == "elsewhere" else int(world.manner or 200)
            if status == 200:
                world.taken.append(f"{content['title']}: {content['message']}")
            self.send_response(status)
            if status == 302:
                self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        world.url = f"json://127.0.0.1:{server.server_address[1]}/secretsecret"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield world
        finally:
            world.over.set()
            server.shutdown()
            thread.join()
