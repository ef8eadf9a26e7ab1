"""A stand-in of the Hugging Face Hub's API, as far as an upload of a model needs it.

Files go through Git LFS or inside the commit, as ``huggingface_hub`` sends them without Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

TOKEN = "hf_" + "t" * 34


class Hub(ThreadingHTTPServer):
    """``files``: what was committed, by repository and path. ``full``: refuses each commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, dict[str, Any]] = {}
        self.files: dict[tuple[str, str], bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.full = False


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400:
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        digest = hashlib.sha256(data).hexdigest()
        assert self.path == f"/objects/{digest}"
        self.server.objects[digest] = data
        self._answer({})

    def do_POST(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'lab'}/{asked['name']}"
            there = name in hub.repositories
            hub.repositories.setdefault(name, asked)
            return self._answer(
                {"url": f"{hub.url}/{name}", "error": "exists"}, 409 if there else 200
            )
        if path.endswith("/info/lfs/objects/batch"):
            found = []
            for wanted in json.loads(body)["objects"]:
                upload = {"href": f"{hub.url}/objects/{wanted['oid']}"}
                found.append({**wanted, "actions": {"upload": upload}})
            return self._answer({"transfer": "basic", "objects": found})
        name = "/".join(path.split("/")[3:5])
        assert name in hub.repositories, path
        if path == f"/api/models/{name}/preupload/main":
            found = []
            for wanted in json.loads(body)["files"]:
                mode = "lfs" if wanted["path"].endswith(".safetensors") else "regular"
                entry = {"path": wanted["path"], "uploadMode": mode, "shouldIgnore": False}
                found.append(entry)
            return self._answer({"files": found})
        assert path == f"/api/models/{name}/commit/main", path
        if hub.full:
            return self._answer({"error": "over the quota"}, 403)
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                hub.messages.append(value["summary"])
            elif entry["key"] == "file":
                hub.files[name, value["path"]] = base64.b64decode(value["content"])
            else:
                assert entry["key"] == "lfsFile", entry
                hub.files[name, value["path"]] = hub.objects[value["oid"]]
        commit = {"commitUrl": f"{hub.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}
        self._answer(commit | {"hookOutput": "", "success": True})

    def do_GET(self) -> None:
        name = "/".join(urlsplit(self.path).path.split("/")[3:5])
        if name not in self.server.repositories:
            return self._answer({"error": "Repository Not Found"}, 404)
        self._answer({"id": name, "sha": "0" * 40, "siblings": [], "private": True})


@contextmanager
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
