"""The swarm host: a process that owns hivemind's DHT and averager.

    python -m distributed_training.swarm.host        started by HivemindSwarm, never by hand

Orders come as JSON lines on standard input, answers leave as JSON lines on the descriptor given as
``answers``; standard output and error are hivemind's. The host leads a process group of its own
(DHT, averager and p2pd are in it), and ends that group when its parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_ORPHAN_POLL = 1.0
_STEP_POLL = 0.05


def _end_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _watch_parent(parent: int) -> None:
    """p2pd outlives a killed parent; nobody else would end it."""
    while os.getppid() == parent:
        time.sleep(_ORPHAN_POLL)
    _end_group()


class Host:
    """One DHT for the life of the host, one averager per round (its settings are the round's)."""

    def __init__(self, config: dict[str, Any], answers: Any) -> None:
        import hivemind
        import torch

        torch.set_num_threads(1)
        self._answers = answers
        self._config = config
        self._cancelled: float = -1  # the newest round that is not wanted any more
        flat = torch.from_file(
            f"/proc/self/fd/{config['tensors']}",
            shared=True,
            size=sum(config["sizes"]),
            dtype=torch.float32,
        )
        os.close(config["tensors"])  # the mapping stays
        self._tensors = [
            part.view(shape)
            for part, shape in zip(flat.split(config["sizes"]), config["shapes"], strict=True)
        ]
        for tensor in self._tensors:
            # The averager calls share_memory_() on each tensor, which would move these, shared
            # already, into a segment of torch's own: rank 0 would never see an average.
            tensor.share_memory_ = lambda t=tensor: t  # type: ignore[method-assign]
        self._dht = hivemind.DHT(
            initial_peers=config["initial_peers"],
            host_maddrs=config["listen"],
            announce_maddrs=config["announce"] or None,
            identity_path=config["identity"],
            startup_timeout=config["start_timeout"],
            start=True,
            daemon=True,
        )
        self.tell(
            {
                "kind": "ready",
                "peer_id": str(self._dht.peer_id),
                "maddrs": [str(m) for m in self._dht.get_visible_maddrs()],
            }
        )

    def tell(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def cancel(self, number: float) -> None:
        """From another thread; the order to average may still be on its way to this object."""
        self._cancelled = max(self._cancelled, number)

    def average(self, order: dict[str, Any]) -> None:
        """One round; always answers with ``average`` or ``failed``."""
        from hivemind.averaging.control import AveragingStage

        from .averager import COMPRESSIONS, DTGradAverager, compressed_part_size

        started = time.monotonic()
        deadline = started + order["timeout"]
        compression = COMPRESSIONS[self._config["compression"]]()
        averager = DTGradAverager(
            averaged_tensors=self._tensors,
            dht=self._dht,
            start=True,
            prefix=self._config["prefix"],
            min_group_size=order["min_group_size"],
            target_group_size=None,
            min_matchmaking_time=order["min_matchmaking_time"],
            request_timeout=order["request_timeout"],
            allreduce_timeout=order["allreduce_timeout"],
            next_chunk_timeout=order["next_chunk_timeout"],
            part_size_bytes=compressed_part_size(compression, self._config["part_size"]),
            compression=compression,
            bandwidth=order["bandwidth"],
            client_mode=False,
            auxiliary=False,
            allow_state_sharing=False,
            shutdown_timeout=2.0,
        )
        found_at: float | None = None
        try:
            step = averager.step(
                gather=0, weight=order["weight"], timeout=order["timeout"], wait=False
            )
            while not step.done():
                if found_at is None and step.stage is AveragingStage.RUNNING_ALLREDUCE:
                    found_at = time.monotonic()
                cancelled = order["round"] <= self._cancelled
                if cancelled or time.monotonic() >= deadline:
                    step.cancel()
                    fault = "CANCELLED" if cancelled else "TIMEOUT"
                    if fault == "TIMEOUT" and found_at is None:
                        fault = "NO_GROUP"
                    self.tell({"kind": "failed", "fault": fault, "detail": ""})
                    return
                time.sleep(_STEP_POLL)
            self._tell_outcome(step, started, found_at)
        finally:
            with contextlib.suppress(OSError, ValueError, EOFError):
                averager.shutdown()

    def _tell_outcome(self, step: Any, started: float, found_at: float | None) -> None:
        now = time.monotonic()
        try:
            result = step.result(timeout=0)
        except Exception as error:  # noqa: BLE001 - hivemind raises what its process raised
            detail = f"{type(error).__name__}: {error}"
            if "could not find a group" in detail:
                fault = "NO_GROUP"
            elif isinstance(error, TimeoutError):
                fault = "TIMEOUT" if found_at is not None else "NO_GROUP"
            else:
                fault = "PEER_FAILED" if found_at is not None else "NO_GROUP"
            self.tell({"kind": "failed", "fault": fault, "detail": detail[:500]})
            return
        self.tell(
            {
                "kind": "average",
                "peers": result["peers"],
                "failed": result["failed"],
                "kept_local": result["kept_local"],
                "matchmaking": (found_at or now) - started,
                "transfer": now - (found_at or now),
            }
        )

    def close(self) -> None:
        self._dht.shutdown()


def _orders() -> Iterator[bytes]:
    """Lines of standard input, read without ``sys.stdin``: a forked child closes that first of all
    and would wait for ever for the lock its reader holds here."""
    rest = b""
    while data := os.read(0, 65536):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _read_orders(
    host: Host, orders: Iterator[bytes], rounds: queue.SimpleQueue[dict[str, Any] | None]
) -> None:
    for line in orders:
        order = json.loads(line)
        if order["kind"] == "average":
            rounds.put(order)
        elif order["kind"] == "cancel":
            host.cancel(order["round"])
        else:
            break
    host.cancel(math.inf)
    rounds.put(None)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = _orders()
    config = json.loads(next(orders))
    threading.Thread(target=_watch_parent, args=(config["parent"],), daemon=True).start()
    answers = os.fdopen(config["answers"], "w", encoding="utf-8")
    try:
        host = Host(config, answers)
    except Exception as error:  # told to the client, which knows what to do about it
        answers.write(
            json.dumps({"kind": "broken", "detail": f"{type(error).__name__}: {error}"}) + "\n"
        )
        answers.flush()
        _end_group()
        raise
    # Rounds run here and orders are read aside: hivemind installs signal handlers when it forks
    # the averager, which only a main thread may do.
    rounds: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(host, orders, rounds), daemon=True).start()
    while (order := rounds.get()) is not None:
        try:
            host.average(order)
        except Exception as error:  # noqa: BLE001 - the client waits for an answer
            host.tell(
                {
                    "kind": "failed",
                    "fault": "SWARM_DOWN",
                    "detail": f"{type(error).__name__}: {error}",
                }
            )
    with contextlib.suppress(OSError, ValueError, EOFError):
        host.close()
    _end_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
