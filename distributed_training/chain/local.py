"""Client of the local subnet's chain server (``distributed_training.localnet.chain_server``)."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import httpx

from .base import ChainError, ChainUnavailable, Neuron
from .wallet import Wallet

log = logging.getLogger(__name__)

_FIELDS = frozenset(Neuron.__dataclass_fields__)


class LocalChain:
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
        self._url = url.rstrip("/")
        self._wallet = wallet
        self._interval = poll_interval.total_seconds()
        self._timeout = timeout.total_seconds()
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._poke = threading.Event()
        self._block = 0
        self._neurons: tuple[Neuron, ...] = ()
        self._uids: dict[str, int] = {}
        self._commitments: dict[str, str] = {}
        self._version = -1
        self._chain = ""
        self._read_at: float | None = None  # monotonic
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._poll, name="local-chain", daemon=True)
        self._thread.start()

    # reads

    def wait_ready(self, timeout: timedelta) -> bool:
        return self._ready.wait(timeout.total_seconds())

    def _check(self) -> None:
        if not self._ready.is_set():
            raise ChainUnavailable(f"the chain server at {self._url} has not answered yet")

    def block(self) -> int:
        self._check()
        return self._block

    def neurons(self) -> Sequence[Neuron]:
        self._check()
        return self._neurons

    def uid(self, hotkey: str) -> int | None:
        self._check()
        return self._uids.get(hotkey)

    def commitment(self, hotkey: str) -> str | None:
        self._check()
        return self._commitments.get(hotkey)

    def reads(self) -> int:
        return self._counts["reads"]

    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)

    def age(self) -> timedelta:
        read_at = self._read_at
        return timedelta.max if read_at is None else timedelta(seconds=time.monotonic() - read_at)

    # writes

    def register(
        self, *, uid: int | None = None, stake: float = 0.0, validator_permit: bool = False
    ) -> int:
        """Only here: the local chain lets a hotkey choose. Returns the uid."""
        body = {"uid": uid, "stake": stake, "validator_permit": validator_permit}
        return int(self._write("/register", body)["uid"])

    def deregister(self) -> None:
        self._write("/deregister", {})

    def commit(self, text: str) -> None:
        self._write("/commit", {"text": text})

    def serve(self, ip: str, port: int) -> None:
        self._write("/serve", {"ip": ip, "port": port})

    def set_weights(self, weights: Mapping[int, float]) -> None:
        self._write("/weights", {"weights": {str(u): float(w) for u, w in weights.items()}})

    def _write(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._counts["writes"] += 1
        try:
            return self._post(path, body)
        except ChainError:
            self._counts["writes_failed"] += 1
            raise

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        from bittensor import http_auth

        if self._wallet is None:
            raise ChainError(f"{path[1:]}: no wallet was given, so nothing can be signed")
        raw = json.dumps(body).encode()
        headers = http_auth.sign(self._wallet.hotkey, method="POST", path=path, body=raw)
        try:
            reply = httpx.post(
                self._url + path,
                content=raw,
                headers=headers,
                timeout=self._timeout,
                trust_env=False,
                verify=False,
            )
        except httpx.HTTPError as error:
            raise ChainError(f"{path[1:]}: {type(error).__name__} at {self._url}") from error
        if reply.status_code != 200:
            raise ChainError(f"{path[1:]}: {_message(reply)}")
        result: dict[str, Any] = reply.json()
        self._refresh()
        return result

    def _refresh(self) -> None:
        """See our own write: one poll, in this thread, whose failure is the poller's business."""
        try:
            with httpx.Client(timeout=self._timeout, trust_env=False, verify=False) as client:
                self._read(client)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            self._poke.set()

    # polling

    def _poll(self) -> None:
        reported = False
        with httpx.Client(timeout=self._timeout, trust_env=False, verify=False) as client:
            while not self._stop.is_set():
                try:
                    self._read(client)
                    if reported:
                        log.info("Chain server at %s answers again", self._url)
                    reported = False
                except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                    self._counts["failures"] += 1
                    if not reported:
                        log.warning(
                            "Chain server at %s does not answer (%s): going on with what was last "
                            "known; check that the local subnet's chain server is running",
                            self._url,
                            type(error).__name__,
                        )
                    reported = True
                self._poke.wait(self._interval)
                self._poke.clear()

    def _read(self, client: httpx.Client) -> None:
        reply = client.get(self._url + "/state")
        reply.raise_for_status()
        state = reply.json()
        version, chain = int(state["version"]), str(state["chain"])
        with self._lock:
            self._block = max(self._block, int(state["block"]))
            # Two reads may cross; the older must not win.
            if version > self._version or chain != self._chain:
                neurons = tuple(
                    Neuron(**{k: v for k, v in entry.items() if k in _FIELDS})
                    for entry in state["neurons"]
                )
                self._commitments = {str(k): str(v) for k, v in state["commitments"].items()}
                self._uids = {n.hotkey: n.uid for n in neurons}
                self._neurons = neurons
                self._version, self._chain = version, chain
            self._read_at = time.monotonic()
            self._counts["reads"] += 1
        self._ready.set()

    def close(self) -> None:
        self._stop.set()
        self._poke.set()
        if self._thread is not threading.current_thread():
            self._thread.join(self._timeout + 1)


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return f"status {reply.status_code}"
