"""A stand-in for Hugging Face on 127.0.0.1: lists of files, and ranges of them from another host.

It answers what ``huggingface_hub.HfFileSystem`` asks for.

The other host is a second port: as at the hub, a ``/resolve/`` URL leads there.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

DATASET = "some/dataset"


class QuietServer(ThreadingHTTPServer):
    """A stand-in's server: many clients at once, and those that give up are part of the tests."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        del request, client_address


@dataclass(frozen=True)
class Fault:
    """Name what happens to one request instead of a good answer.

    ``status`` with ``retry_after``; or ``cut`` the body in the middle; or ``drip`` it out over that
    many seconds; or send ``body`` as it is; or ``hang`` up without an answer.
    """

    status: int = 200
    retry_after: str | None = None
    cut: bool = False
    drip: float = 0.0
    body: bytes | None = None
    hang_up: bool = False


COMMIT = "c0ffee00" * 5


@dataclass
class Hub:
    """Serves ``folder`` as the dataset ``DATASET`` at ``COMMIT``. Use as a context manager.

    ``limit``: requests in ``window`` seconds, after which it answers 429. ``script``: faults of the
    next ranges, in order; None is a good answer. ``decide`` chooses one by a file's name instead.
    ``error_rate``: share of ranges that fail. ``whole``: it knows no ranges.
    """

    folder: Path
    latency: float = 0.0
    limit: int = 10**9
    window: float = 1.0
    page: int = 1000  # entries of a list
    commit: str = COMMIT
    error_rate: float = 0.0
    whole: bool = False
    script: list[Fault | None] = field(default_factory=list)
    decide: Callable[[str], Fault | None] | None = None  # by a file's name
    #: Of each request: "hub" or "files", path, range, and whether a token came with it.
    requests: list[tuple[str, str, str, bool]] = field(default_factory=list)

    def __enter__(self) -> Hub:
        self._lock, self._times = threading.Lock(), deque[float]()
        self._random = random.Random(7)
        self._stack = ExitStack()
        self.url = self._serve(self._answer_hub)
        self.files = self._serve(self._answer_files)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def ranges(self) -> list[str]:
        """Return the names of the files of which ranges were asked for, in order."""
        return [path for at, path, _, _ in self.requests if at == "files"]

    def _serve(self, answer: Callable[[Any], None]) -> str:
        latency = self.latency

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                try:
                    time.sleep(latency)
                    answer(self)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        server = QuietServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        self._stack.callback(thread.join, 10)
        self._stack.callback(server.server_close)
        self._stack.callback(server.shutdown)
        return f"http://127.0.0.1:{server.server_address[1]}"

    def _note(self, at: str, path: str, handler: Any) -> None:
        token = "Authorization" in handler.headers
        self.requests.append((at, path, handler.headers.get("Range", ""), token))

    def _too_many(self) -> float | None:
        """Return for how many seconds the limit is used up."""
        with self._lock:
            now = time.monotonic()
            while self._times and now - self._times[0] > self.window:
                self._times.popleft()
            if len(self._times) >= self.limit:
                return self.window - (now - self._times[0])
            self._times.append(now)
            return None

    def _answer_hub(self, handler: Any) -> None:
        parts = urlsplit(handler.path)
        path = unquote(parts.path)
        self._note("hub", path, handler)
        if (left := self._too_many()) is not None:
            limits = {"RateLimit": f'"resolvers";r=0;t={int(left)}'}
            return _send(handler, 429, b'{"error": "too many requests"}', limits)
        api, resolved = f"/api/datasets/{DATASET}", f"/datasets/{DATASET}/resolve/{self.commit}/"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{self.commit}"):
            known = {"id": DATASET, "sha": self.commit, "siblings": [], "tags": []}
            return _send(handler, 200, json.dumps(known).encode())
        if path.startswith(f"{api}/tree/{self.commit}"):
            below = path.removeprefix(f"{api}/tree/{self.commit}").strip("/")
            return self._send_list(handler, below, parse_qs(parts.query))
        if path.startswith(resolved) and (self.folder / path.removeprefix(resolved)).is_file():
            name = path.removeprefix(resolved)
            return _send(
                handler, 302, b"", {"Location": f"{self.files}/{quote(name)}?Signature=abc"}
            )
        known_dataset = path.startswith((f"{api}/", f"/datasets/{DATASET}/"))
        error = "RevisionNotFound" if known_dataset else "RepoNotFound"
        return _send(handler, 404, b'{"error": "not found"}', {"X-Error-Code": error})

    def _send_list(self, handler: Any, below: str, query: dict[str, list[str]]) -> None:
        found = sorted((self.folder / below).rglob("*"))
        entries = [
            {
                "type": "directory" if path.is_dir() else "file",
                "path": path.relative_to(self.folder).as_posix(),
                "size": 0 if path.is_dir() else path.stat().st_size,
                "oid": "0" * 40,
            }
            for path in found
        ]
        first = int(query.get("cursor", ["0"])[0])
        last, headers = first + self.page, {}
        if last < len(entries):
            following = f"{self.url}{handler.path.partition('?')[0]}?recursive=true&cursor={last}"
            headers["Link"] = f'<{following}>; rel="next"'
        if not (self.folder / below).is_dir():
            return _send(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
        return _send(handler, 200, json.dumps(entries[first:last]).encode(), headers)

    def _answer_files(self, handler: Any) -> None:
        name = unquote(urlsplit(handler.path).path).lstrip("/")
        self._note("files", name, handler)
        with self._lock:
            fault = self.script.pop(0) if self.script else None
            if fault is None and self._random.random() < self.error_rate:
                fault = Fault(status=self._random.choice([500, 502, 503]))
        fault = fault or (self.decide(name) if self.decide is not None else None) or Fault()
        if fault.hang_up:
            handler.close_connection = True
            return
        if fault.status != 200:
            headers = {} if fault.retry_after is None else {"Retry-After": fault.retry_after}
            return _send(handler, fault.status, b"", headers)
        size = (self.folder / name).stat().st_size
        begin, end = 0, size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if wanted is not None and not self.whole:
            begin, end = int(wanted[1]), int(wanted[2]) + 1
        with (self.folder / name).open("rb") as file:
            file.seek(begin)
            body = file.read(end - begin) if fault.body is None else fault.body
        headers = {} if self.whole else {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        _send(handler, 200 if self.whole else 206, body, headers, fault=fault)


def _send(
    handler: Any,
    status: int,
    body: bytes,
    headers: dict[str, str] | None = None,
    *,
    fault: Fault | None = None,
) -> None:
    handler.send_response(status)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if fault is not None and fault.cut:
        handler.wfile.write(body[: len(body) // 2])
        handler.close_connection = True
    elif fault is not None and fault.drip:
        for at in range(0, len(body), 1 + len(body) // 20):
            handler.wfile.write(body[at : at + 1 + len(body) // 20])
            time.sleep(fault.drip / 20)
    else:
        handler.wfile.write(body)
