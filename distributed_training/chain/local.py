"""Client of the local subnet's chain server (``distributed_training.localnet.chain_server``)."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import httpx

from .base import Chain, ChainError, Neuron
from .identity import Wallet

log = logging.getLogger(__name__)


class LocalChain(Chain):
    """A :class:`~.base.Chain` over HTTP. A thread polls; reads never wait for it.

    ``poll_interval`` is the time between two polls; ``timeout`` covers one HTTP call, read or
    write. Losing the server costs nothing but age.
    """

    def __init__(
        self,
        *,
        url: str,
        wallet: Wallet | None,
        poll_interval: timedelta = timedelta(milliseconds=300),
        timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        super().__init__()
        self._url = url.rstrip("/")
        self._wallet = wallet
        self._interval = poll_interval.total_seconds()
        self._timeout = timeout.total_seconds()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._seen = -1  # version of the state
        self._thread = threading.Thread(target=self._poll, name="local-chain", daemon=True)
        self._thread.start()

    def register(
        self, *, uid: int | None = None, stake: float = 0.0, validator_permit: bool = False
    ) -> int:
        """Only here: the local chain lets a hotkey choose. Returns the uid."""
        fields = {"uid": uid, "stake": stake, "validator_permit": validator_permit}
        return int(self._write("register", fields))

    def deregister(self) -> None:
        self._write("deregister", {})

    def commit(self, text: str) -> None:
        self._write("commit", {"text": text})

    def serve(self, ip: str, port: int) -> None:
        self._write("serve", {"ip": ip, "port": port})

    def set_weights(self, weights: Mapping[int, float]) -> None:
        self._write("weights", {"weights": {str(u): float(w) for u, w in weights.items()}})

    def _write(self, kind: str, fields: Mapping[str, Any]) -> Any:
        """What the server returns; the state after the write is known then."""
        with self._writing():
            return self._post(kind, fields)

    def _post(self, kind: str, fields: Mapping[str, Any]) -> Any:
        from bittensor import http_auth

        if self._wallet is None:
            raise ChainError(f"{kind}: no wallet was given, so nothing can be signed")
        path, raw = f"/{kind}", json.dumps(fields).encode()
        headers = http_auth.sign(self._wallet.hotkey, method="POST", path=path, body=raw)
        try:
            with self._client() as client:
                reply = client.post(self._url + path, content=raw, headers=headers)
            content = reply.json()
            if reply.status_code == 200:
                self._see(content["state"])
                return content["result"]
            raise ChainError(f"{kind}: {str(content['message'])[:300]}")
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ChainError(f"{kind}: {type(error).__name__} at {self._url}") from error

    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=self._timeout, trust_env=False, verify=False)

    def _poll(self) -> None:
        reported = False
        with self._client() as client:
            while not self._stop.is_set():
                try:
                    reply = client.get(self._url + "/state")
                    reply.raise_for_status()
                    self._see(reply.json())
                    if reported:
                        log.info("Chain server at %s answers again", self._url)
                    reported = False
                except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                    self._counts["failures"] += 1
                    if not reported:
                        log.warning(
                            "Chain server at %s does not answer (%s): going on with what was last "
                            "known; check that the local subnet's chain server is running",
                            self._url,
                            type(error).__name__,
                        )
                    reported = True
                self._stop.wait(self._interval)

    def _see(self, state: Mapping[str, Any]) -> None:
        version = int(state["version"])
        with self._lock:
            if version >= self._seen:  # two reads may cross; the older must not win
                neurons = tuple(Neuron(**entry) for entry in state["neurons"])
                self._saw_neurons(neurons)
                self._saw_commitments(dict(state["commitments"]))
                self._seen = version
            self._saw_time(float(state["time"]))
            self._saw_block(int(state["block"]))

    def close(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(self._timeout + 1)
