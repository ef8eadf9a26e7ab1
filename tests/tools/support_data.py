"""Rows for tests: a rows API on 127.0.0.1 with scripted and random faults, and local files."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from distributed_training.config.settings import DataSettings
from distributed_training.data.block_builder import WorkerSpec
from distributed_training.data.pipeline import DataPipeline
from distributed_training.protocol.pages import PageDraw
from tests.tools.waiting import wait_for

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


@dataclass
class RowsServer:
    """Serves ``tables`` (config -> texts). Use as a context manager.

    ``script``: faults for the next requests of ``/rows``, in order; None is a good answer.
    ``decide`` may choose a fault for a request's query instead. ``revision``: the commit that each
    reply names.
    """

    tables: Mapping[str, Sequence[Any]]
    latency: float = 0.0
    error_rate: float = 0.0
    seed: int = 0
    script: list[Fault | None] = field(default_factory=list)
    size_script: list[Fault | None] = field(default_factory=list)
    size_left_out: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    revision: str = ""
    decide: Callable[[Mapping[str, str]], Fault | None] | None = None
    requests: list[tuple[float, str, dict[str, str]]] = field(default_factory=list)

    def __enter__(self) -> RowsServer:
        self._lock = threading.Lock()
        self._random = random.Random(self.seed)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = QuietServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def row_requests(self) -> list[dict[str, str]]:
        return [query for _, path, query in self.requests if path == "/rows"]

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        with self._lock:
            self.requests.append((time.monotonic(), parts.path, query))
            fault = self._fault(parts.path, query)
        try:
            time.sleep(self.latency)
            self._send(handler, parts.path, query, fault or Fault())
        except (BrokenPipeError, ConnectionResetError):
            handler.close_connection = True

    def _fault(self, path: str, query: Mapping[str, str]) -> Fault | None:
        script = self.script if path == "/rows" else self.size_script
        if script:
            return script.pop(0)
        if self.decide is not None and path == "/rows":
            return self.decide(query)
        if path == "/rows" and self._random.random() < self.error_rate:
            return Fault(status=self._random.choice([429, 500, 502, 503]))
        return None

    def _send(
        self, handler: BaseHTTPRequestHandler, path: str, query: Mapping[str, str], fault: Fault
    ) -> None:
        if fault.hang_up:
            handler.close_connection = True
            return
        status, content = fault.status, {"error": f"status {fault.status}"}
        if fault.status == 200:
            status, content = self._content(path, query)
        body = fault.body if fault.body is not None else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        if self.revision:
            handler.send_header("X-Revision", self.revision)
        if fault.retry_after is not None:
            handler.send_header("Retry-After", fault.retry_after)
        handler.end_headers()
        if fault.cut:
            handler.wfile.write(body[: len(body) // 2])
            handler.close_connection = True
            return
        if fault.drip:
            pieces = 20
            step = -(-len(body) // pieces)
            for i in range(pieces):
                handler.wfile.write(body[i * step : (i + 1) * step])
                time.sleep(fault.drip / pieces)
            return
        handler.wfile.write(body)

    def _content(self, path: str, query: Mapping[str, str]) -> tuple[int, Any]:
        if query.get("dataset") != DATASET:
            return 404, {"error": "The dataset does not exist."}
        if path == "/size":
            splits = [
                {"dataset": DATASET, "config": config, "split": "train", "num_rows": len(rows)}
                for config, rows in {**self.tables, "default": []}.items()
            ]
            return 200, {"size": {"splits": splits}, **self.size_left_out}
        rows = self.tables.get(query["config"])
        offset, length = int(query["offset"]), int(query["length"])
        if path != "/rows" or rows is None or length > 100:
            return 422, {"error": "Parameter is wrong."}
        entries = [
            {"row_idx": offset + i, "row": {"text": text, "id": offset + i}, "truncated_cells": []}
            for i, text in enumerate(rows[offset : offset + length])
        ]
        return 200, {"features": [], "rows": entries, "num_rows_total": len(rows)}


def tables(configs: int = 3, rows: int = 400, *, words: int = 30) -> dict[str, list[str]]:
    """Texts that are all different, the same in every process."""
    chosen = random.Random(7)
    vocabulary = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    return {
        f"CC-MAIN-{i}": [
            f"{i}/{row} " + " ".join(chosen.choices(vocabulary, k=words)) for row in range(rows)
        ]
        for i in range(configs)
    }


DRAW = PageDraw("0123456789ab", "lab", rows_per_page=20, held_out_pages=0)
_OF_A_RANK = ("uid", "rank", "world_size", "sequence_length", "vocabulary")


def worker_spec(
    tokenizer: tuple[Path, int], folder: Path, source: str, **changes: Any
) -> WorkerSpec:
    """Return the settings of rank 0 of 4, with small pages and sequences of 32 tokens."""
    own = {k: changes.pop(k) for k in _OF_A_RANK if k in changes}
    values: dict[str, Any] = {"pages_per_block": 4, "rows_per_page": 20, **changes}
    return WorkerSpec(
        **{"uid": 3, "rank": 0, "world_size": 4, "sequence_length": 32, **own},
        settings=DataSettings(source=source, **values),
        tokenizer_path=tokenizer[0],
        eos_id=tokenizer[1],
        folder=folder,
        draw_pages=DRAW,
    )


def wait_ready(made: DataPipeline, block: int) -> int:
    """Wait for a block's sequences, and count them."""
    wait_for(lambda: made.ready(block) is not None, f"block {block}", every=0.005)
    return made.ready(block) or 0


def write_jsonl(path: Path, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
