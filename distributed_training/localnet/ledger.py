"""The state of a local subnet's chain: one JSON file, replaced before a write is acknowledged."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATE_FILE = "chain.json"
MAX_COMMITMENT = 128  # bytes, as on the public chain
MAX_UIDS = 256


class Refused(Exception):
    """A write the chain does not accept; the text goes to the caller."""


class Ledger:
    """State of the local chain, persisted in ``folder``. Thread-safe."""

    def __init__(self, *, folder: Path, seconds_per_block: float, first_block: int = 1000) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / STATE_FILE
        self._lock = threading.Lock()
        now = time.time()
        self._state: dict[str, Any] = {
            "origin": {"block": first_block, "time": now, "seconds_per_block": seconds_per_block},
            "neurons": {},  # uid as text -> entry
            "commitments": {},
            "weights": {},  # uid as text -> {uid as text: weight}
            "version": 0,
            "chain": uuid.uuid4().hex,  # lets clients tell a new chain from a late answer
        }
        if self._path.exists():
            self._state = json.loads(self._path.read_text())
            if self._state["origin"]["seconds_per_block"] != seconds_per_block:
                self._state["origin"] = {
                    "block": self._height(now),
                    "time": now,
                    "seconds_per_block": seconds_per_block,
                }
        self._highest = self._height(now)
        self._save(self._state)

    def _height(self, now: float) -> int:
        origin = self._state["origin"]
        elapsed = max(0.0, now - origin["time"])
        return int(origin["block"]) + int(elapsed / origin["seconds_per_block"])

    def block(self) -> int:
        with self._lock:
            self._highest = max(self._highest, self._height(time.time()))
            return self._highest

    def _save(self, state: dict[str, Any]) -> None:
        temporary = self._path.with_suffix(".tmp")
        with open(temporary, "w") as file:
            json.dump(state, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _write(self, change: Callable[[dict[str, Any]], Any]) -> Any:
        """Apply ``change`` to a copy, make it durable, then let it be seen."""
        with self._lock:
            state = json.loads(json.dumps(self._state))
            result = change(state)
            state["version"] += 1
            self._save(state)
            self._state = state
            return result

    def snapshot(self) -> dict[str, Any]:
        block = self.block()
        with self._lock:
            state = self._state
        return {
            "block": block,
            "seconds_per_block": state["origin"]["seconds_per_block"],
            "version": state["version"],
            "chain": state["chain"],
            "neurons": [state["neurons"][uid] for uid in sorted(state["neurons"], key=int)],
            "commitments": state["commitments"],
            "weights": state["weights"],
        }

    def register(self, hotkey: str, body: dict[str, Any]) -> dict[str, Any]:
        """``uid`` (or the lowest free one), ``stake``, ``validator_permit``.

        A hotkey that is registered keeps its endpoint; a uid that is taken goes to the new hotkey,
        whose owner is thereby deregistered, as on the public chain.
        """
        stake = _number(body.get("stake", 0.0), "stake", 0.0, 1e12)
        permit = bool(body.get("validator_permit", False))
        block = self.block()

        def change(state: dict[str, Any]) -> dict[str, Any]:
            neurons = state["neurons"]
            old = next((n for n in neurons.values() if n["hotkey"] == hotkey), None)
            if body.get("uid") is not None:
                uid = int(_number(body["uid"], "uid", 0, MAX_UIDS - 1))
            elif old is not None:
                uid = int(old["uid"])
            else:
                free = (i for i in range(MAX_UIDS) if str(i) not in neurons)
                found = next(free, None)
                if found is None:
                    raise Refused("all uids are taken: choose one")
                uid = found
            state["neurons"] = {u: n for u, n in neurons.items() if n["hotkey"] != hotkey}
            replaced = state["neurons"].get(str(uid))
            if replaced is not None or (old is not None and int(old["uid"]) != uid):
                state["weights"].pop(str(uid), None)
            entry = {
                "uid": uid,
                "hotkey": hotkey,
                "ip": old["ip"] if old else "0.0.0.0",
                "port": old["port"] if old else None,
                "stake": stake,
                "validator_permit": permit,
                "incentive": old["incentive"] if old else 0.0,
                "trust": 0.0,
                "consensus": 0.0,
                "emission": 0.0,
                "last_update": block,
            }
            state["neurons"][str(uid)] = entry
            _score(state)
            return {"uid": uid}

        return self._write(change)

    def deregister(self, hotkey: str, body: dict[str, Any]) -> dict[str, Any]:
        def change(state: dict[str, Any]) -> dict[str, Any]:
            uid = str(_own(state, hotkey)["uid"])
            del state["neurons"][uid]
            state["weights"].pop(uid, None)
            _score(state)
            return {}

        return self._write(change)

    def commit(self, hotkey: str, body: dict[str, Any]) -> dict[str, Any]:
        text = body.get("text")
        if not isinstance(text, str) or len(text.encode()) > MAX_COMMITMENT:
            raise Refused(f"a commitment is a text of at most {MAX_COMMITMENT} bytes")

        def change(state: dict[str, Any]) -> dict[str, Any]:
            _own(state, hotkey)
            state["commitments"][hotkey] = text
            return {}

        return self._write(change)

    def serve(self, hotkey: str, body: dict[str, Any]) -> dict[str, Any]:
        ip = body.get("ip")
        port = int(_number(body.get("port"), "port", 1, 65535))
        if not isinstance(ip, str) or not ip or len(ip) > 64:
            raise Refused("ip: an address")

        def change(state: dict[str, Any]) -> dict[str, Any]:
            _own(state, hotkey).update(ip=ip, port=port)
            return {}

        return self._write(change)

    def set_weights(self, hotkey: str, body: dict[str, Any]) -> dict[str, Any]:
        given = body.get("weights")
        if not isinstance(given, dict) or len(given) > MAX_UIDS:
            raise Refused("weights: uids and numbers")
        weights = {
            str(int(_number(uid, "uid", 0, MAX_UIDS - 1))): _number(weight, "weight", 0.0, 1e12)
            for uid, weight in given.items()
        }
        block = self.block()

        def change(state: dict[str, Any]) -> dict[str, Any]:
            neuron = _own(state, hotkey)
            if not neuron["validator_permit"]:
                raise Refused("only a validator with a permit sets weights")
            unknown = sorted(set(weights) - set(state["neurons"]), key=int)
            if unknown:
                raise Refused(f"no such uids: {', '.join(unknown)}")
            state["weights"][str(neuron["uid"])] = weights
            neuron["last_update"] = block
            _score(state)
            return {}

        return self._write(change)


def _number(value: Any, name: str, low: float, high: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise Refused(f"{name}: a number") from None
    if not (math.isfinite(number) and low <= number <= high):
        raise Refused(f"{name}: between {low:g} and {high:g}")
    return number


def _own(state: dict[str, Any], hotkey: str) -> dict[str, Any]:
    for neuron in state["neurons"].values():
        if neuron["hotkey"] == hotkey:
            return neuron
    raise Refused("this hotkey is not registered")


def _score(state: dict[str, Any]) -> None:
    """Incentive = mean of the validators' normalized weights, weighted by stake.

    Simpler than Yuma consensus (no clipping, no bonds), enough to see who is paid.
    """
    neurons = state["neurons"]
    totals = dict.fromkeys(neurons, 0.0)
    for voter, weights in state["weights"].items():
        if voter not in neurons:
            continue
        total = sum(weights.values())
        for uid, weight in weights.items():
            if uid in totals and total > 0:
                totals[uid] += neurons[voter]["stake"] * weight / total
    everything = sum(totals.values())
    for uid, neuron in neurons.items():
        share = totals[uid] / everything if everything > 0 else 0.0
        neuron["incentive"] = neuron["consensus"] = share
