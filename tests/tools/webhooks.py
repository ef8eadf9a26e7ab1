"""A stand-in of the services that a webhook may be of: each checks a message as the real one does.

The forms: docs.ntfy.sh/publish, docs.slack.dev (incoming webhooks), discord.com/developers/docs
(execute webhook), core.telegram.org/bots/api#sendmessage.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from distributed_training.common import webhook

#: What a real URL is in place of https://HOST, by the service.
PATHS = {
    "ntfy": "/my-topic",
    "Slack": "/services/T000/B000/secretsecret",
    "Discord": "/api/webhooks/123/secretsecret",
    "Telegram": "/bot123:secretsecret/sendMessage?chat_id=-100123",
    "JSON": "/hook?key=secretsecret",
}


class Webhooks:
    """The messages that came in, as ``(service, text)``, and how the next requests are answered.

    ``manner``: ``""`` as the service does, a status, ``hang``, ``drip``, ``elsewhere`` (a redirect)
    or ``nonsense``. ``extra``: further headers.
    """

    def __init__(self) -> None:
        self.taken: list[tuple[str, str]] = []
        self.asked = 0  # requests
        self.manner: str | int = ""
        self.extra: dict[str, str] = {}
        self.body = b""
        self.over = threading.Event()
        self.port = 0

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self.port}{PATHS[service]}"


def judge(service: str, path: str, kind: str, body: bytes, title: str) -> tuple[int, bytes, str]:
    """Return status and body as the service answers, and the text that a person then sees."""
    if service == "ntfy":
        known = path == "/my-topic" and 0 < len(body) <= 4096 and title.isascii()
        return (200, b'{"event":"message"}', body.decode()) if known else (400, b"{}", "")
    try:
        content = json.loads(body) if kind.startswith("application/json") else {}
    except ValueError:
        content = {}
    if service == "Slack":
        text = content.get("text", "")
        return (200, b"ok", text) if text else (400, b"no_text", "")
    if service == "Discord":
        text = content.get("content", "")
        right = 0 < len(text) <= 2000 and content["allowed_mentions"] == {"parse": []}
        return (204, b"", text) if right else (400, b'{"code": 50035}', "")
    if service == "Telegram":
        text = content.get("text", "")
        right = 0 < len(text.encode("utf-16-le")) / 2 <= 4096 and content["chat_id"] == "-100123"
        return (200, b'{"ok":true}', text) if right else (400, b'{"ok":false}', "")
    return (
        (200, b"", content["text"])
        if set(content) == {"title", "text", "bad", "time"}
        else (400, b"", "")
    )


@contextmanager
def webhooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhooks]:
    """Serve all services on 127.0.0.1, which then count as their hosts."""
    world = Webhooks()

    def service_of(url: str) -> str:
        path = urlsplit(url).path
        return next(name for name, wanted in PATHS.items() if path == urlsplit(wanted).path)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            world.asked += 1
            body = self.rfile.read(int(self.headers["content-length"]))
            if world.manner in ("hang", "drip"):
                while not world.over.wait(0.05) and world.manner in ("hang", "drip"):
                    if world.manner == "drip":
                        self.wfile.write(b"H")
                return
            if world.manner == "nonsense":
                self.wfile.write(b"\0\xff" * 50)
                return
            path = urlsplit(self.path).path
            kind, title = self.headers.get("content-type", ""), self.headers.get("title", "")
            service = service_of(self.path)
            if service == "Telegram" and parse_qs(urlsplit(self.path).query):
                status, answer, text = 400, b"", ""  # ours has all of it in the body
            else:
                status, answer, text = judge(service, path, kind, body, title)
            if world.manner:
                status = 302 if world.manner == "elsewhere" else int(world.manner)
                answer = world.body
            elif 200 <= status < 300:
                world.taken.append((service, text))
            self.send_response(status)
            for name, value in world.extra.items():
                self.send_header(name, value)
            if status == 302:
                self.send_header("location", world.url("JSON"))
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(webhook, "service_of", service_of)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        world.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield world
        finally:
            world.over.set()
            server.shutdown()
            thread.join()


def wait_for(world: Webhooks, count: int, *, seconds: float = 10.0) -> list[str]:
    """Return the texts once ``count`` came in, or what came in until then."""
    deadline = time.monotonic() + seconds
    while len(world.taken) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return [text for _, text in world.taken]
