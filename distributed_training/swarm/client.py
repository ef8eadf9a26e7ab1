"""Rank 0's side of the swarm: starts the host, hands it rounds, keeps the deadline."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distributed_training.config.swarm import SwarmSettings
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    RoundRequest,
)

from .bootstrap import any_reachable
from .norms import PastNorms
from .room import SwarmUnavailable, judge, norm_of, usual_norm

log = logging.getLogger(__name__)

#: The host keeps the round's deadline itself; this much later it is taken for hung and killed.
_HANG_MARGIN = timedelta(seconds=10)
_START_ATTEMPTS = 3
_PROBE_TIMEOUT = timedelta(seconds=3)
_REJOIN_FIRST, _REJOIN_LONGEST = 2.0, 120.0  # seconds between probes, doubled each time
_LOOK_AFTER_HOST = 1.0  # seconds between two looks whether it still runs
_LOG_BYTES = 8 * 1024 * 1024
_REJOIN_PATIENCE = 10.0  # seconds a round waits for a join that is under way
#: What p2pd says when none of the initial peers answers.
_NO_BOOTSTRAP = "failed to connect to bootstrap peers"


class HivemindSwarm:
    """A full peer of the swarm. Every public method may be called from any thread.

    ``schema``: names and shapes in state-dict order. ``run_folder``: keeps the identity (so that a
    restart keeps the peer id), the norms of past rounds and hivemind's log. Raises SwarmUnavailable
    when the DHT does not start in ``settings.start_timeout``, tried three times.

    When none of the initial peers can be reached the peer starts alone, training goes on, and the
    swarm is joined as soon as one of them opens its port (``joined``). Once joined, the loss of
    the initial peers no longer matters.
    """

    def __init__(
        self,
        *,
        settings: SwarmSettings,
        schema: Sequence[tuple[str, tuple[int, ...]]],
        run_folder: Path,
    ) -> None:
        self.peer_id = ""
        self.visible_maddrs: list[str] = []
        self._settings = settings
        self._shapes = [tuple(shape) for _, shape in schema]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._folder = run_folder / "swarm"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()  # one round at a time
        self._start_lock = threading.Lock()
        self._cancelled = threading.Event()  # of the round that runs
        self._round = 0
        self._bandwidth: float | None = None  # Mbit/s, measured; None until a round was
        self._norms = PastNorms(self._folder / "norms.json", run_id=settings.run_id)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.joined = True  # False: started alone because no initial peer could be reached
        self._rejoin: threading.Thread | None = None
        self._reviving = False
        self._closed = False
        self._ended = threading.Event()
        self._port = settings.dht_port  # 0: any, kept from the first start on
        self._memory = os.fdopen(os.memfd_create("swarm-tensors"), "r+b")
        self.buffers: Sequence[torch.Tensor] = self._map_tensors()
        self._start()

    # --- life ----------------------------------------------------------------------------------

    def _map_tensors(self) -> list[torch.Tensor]:
        # Memory, not a file: the kernel would write each round's values to the disk, and /dev/shm
        # is small in containers.
        size = sum(self._sizes)
        self._memory.truncate(4 * size)
        path = f"/proc/self/fd/{self._memory.fileno()}"
        flat = torch.from_file(path, shared=True, size=size, dtype=torch.float32)
        return [p.view(s) for p, s in zip(flat.split(self._sizes), self._shapes, strict=True)]

    def _start(self) -> None:
        problem = ""
        for attempt in range(_START_ATTEMPTS):
            if attempt:
                time.sleep(2.0**attempt)
            problem = self._start_once(self._settings.initial_peers)
            if not problem:
                self.joined = True
                return
            if _NO_BOOTSTRAP in problem:
                log.warning(
                    "None of the initial peers can be reached, so no round can be taken part in "
                    "yet; training goes on and they are tried again (--neuron.initial_peers)"
                )
                problem = self._start_once(())
                if not problem:
                    self.joined = False
                    self._rejoin_in_background()
                    return
            log.warning("The swarm host did not start (attempt %d): %s", attempt + 1, problem)
        raise SwarmUnavailable(
            f"the swarm could not be joined ({problem}), so no round can be taken part in: check "
            f"--neuron.initial_peers and that port {self._settings.dht_port} (--dht.port) is free"
        )

    def _rejoin_in_background(self) -> None:
        if self._rejoin is None or not self._rejoin.is_alive():  # it may be itself that started us
            self._rejoin = threading.Thread(
                target=self._rejoin_later, name="swarm-rejoin", daemon=True
            )
            self._rejoin.start()

    def _rejoin_later(self) -> None:
        """Starts the host again once an initial peer opens its port, never during a round."""
        wait = _REJOIN_FIRST
        while not self.joined and not self._ended.wait(wait):
            wait = min(2 * wait, _REJOIN_LONGEST)
            if not any_reachable(self._settings.initial_peers, timeout=_PROBE_TIMEOUT):
                continue
            with self._lock:
                if self._closed:
                    return
                try:
                    self.restart()
                except SwarmUnavailable as error:
                    log.warning("%s", error)
                if self._closed:  # in the meantime
                    self._kill()
                    return
            if self.joined:
                log.info("The swarm is joined")

    def _start_once(self, initial_peers: Sequence[str]) -> str:
        """Empty when the host is ready, else why not."""
        settings = self._settings
        read_end, write_end = os.pipe()
        bound_log(self._folder / "hivemind.log")
        hivemind_log = (self._folder / "hivemind.log").open("ab")
        self._answers = queue.SimpleQueue()
        with hivemind_log:
            process = subprocess.Popen(
                [sys.executable, "-m", "distributed_training.swarm.host"],
                stdin=subprocess.PIPE,
                stdout=hivemind_log,
                stderr=hivemind_log,
                pass_fds=(write_end, self._memory.fileno()),
                start_new_session=True,
                text=True,
                cwd=Path(__file__).resolve().parents[2],
                env=os.environ | {"HIVEMIND_COLORS": "false", "CUDA_VISIBLE_DEVICES": ""},
            )
        os.close(write_end)
        self._process = process
        threading.Thread(
            target=_read_answers, args=(read_end, self._answers), name="swarm-answers", daemon=True
        ).start()
        identity = self._folder / "identity.key"
        announce = [f"/ip4/{settings.dht_ip}/tcp/{self._port}"] if settings.dht_ip else []
        self._send(
            {
                "parent": os.getpid(),
                "answers": write_end,
                "tensors": self._memory.fileno(),
                "shapes": self._shapes,
                "sizes": self._sizes,
                "initial_peers": list(initial_peers),
                "listen": [f"/ip4/{settings.dht_listen_ip}/tcp/{self._port}"],
                "announce": announce if self._port else [],
                "identity": str(identity),
                "start_timeout": settings.start_timeout.total_seconds(),
                "prefix": f"{settings.run_id}_grad_averager",
                "part_size": settings.part_size,
                "compression": settings.compression,
            }
        )
        try:
            answer = self._answers.get(timeout=settings.start_timeout.total_seconds() + 15)
        except queue.Empty:
            answer = {"kind": "broken", "detail": "no answer in time"}
        if answer is None or answer["kind"] != "ready":
            self._kill()
            detail = answer["detail"] if answer else "the host ended"
            return f"{detail}; see {self._folder / 'hivemind.log'}"
        with contextlib.suppress(OSError):
            identity.chmod(0o600)
        self.peer_id = answer["peer_id"]
        self.visible_maddrs = answer["maddrs"]
        # Others know us by this address: a restarted host must come back to it.
        self._port = self._port or int(self.visible_maddrs[0].split("/")[4])
        log.info(
            "Swarm peer %s, announced as %s. Whether others can reach it there is not checked from "
            "here: TCP port %d must be open (--dht.port, --dht.ip)",
            self.peer_id,
            ", ".join(self.visible_maddrs),
            self._port,
        )
        return ""

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def restart(self) -> None:
        """End the host with everything it started, and start it again. Raises SwarmUnavailable."""
        with self._start_lock:
            self._kill()
            self._start()

    def close(self) -> None:
        """Ends the host and everything it started, within a few seconds. Idempotent."""
        self._closed = True
        self._ended.set()
        self.cancel()
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                self._send({"kind": "close"})
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(6)
        self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # The host leads its session: DHT, averager and p2pd are in this group, and nobody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _send(self, order: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    # --- rounds --------------------------------------------------------------------------------

    def cancel(self) -> None:
        self._cancelled.set()
        with contextlib.suppress(OSError, ValueError, AssertionError):
            self._send({"kind": "cancel", "round": self._round})

    def average(
        self,
        request: RoundRequest,
        *,
        weight: float = 1.0,
        cancelled: threading.Event | None = None,
    ) -> AllReduceResult:
        """See :class:`~.room.Swarm`. A host that hangs past the deadline is started again."""
        cancelled = cancelled or threading.Event()
        began = time.monotonic()
        self._await_host(request.timeout or self._settings.round_timeout, cancelled)
        try:
            return self._average(request, weight, cancelled, began)
        finally:
            self._lock.release()
            bound_log(self._folder / "hivemind.log")

    def _await_host(self, timeout: timedelta, cancelled: threading.Event) -> None:
        """Returns with the lock held, or raises AllReduceError."""
        patience = timeout.total_seconds() if self._reviving else 0.0
        if not self.joined:
            patience = max(patience, _REJOIN_PATIENCE)
        deadline = time.monotonic() + patience
        while not self._lock.acquire(timeout=min(0.2, max(0.0, deadline - time.monotonic()))):
            if cancelled.is_set():
                raise AllReduceError(AllReduceFault.CANCELLED)
            if time.monotonic() >= deadline:
                detail = "a round is already running"
                if patience:
                    detail = f"the swarm host could not be started within {patience:.0f} s"
                raise AllReduceError(AllReduceFault.LOCAL, detail)

    def _average(
        self, request: RoundRequest, weight: float, cancelled: threading.Event, began: float
    ) -> AllReduceResult:
        settings = self._settings
        self._cancelled = cancelled
        if self._closed or cancelled.is_set():
            raise AllReduceError(AllReduceFault.CANCELLED)
        if not self.alive():
            self._revive()
        timeout = request.timeout or settings.round_timeout
        timeout -= timedelta(seconds=time.monotonic() - began)
        timeout = max(timeout, timedelta(seconds=1))
        # A call may carry a timeout longer than the round's; the round's deadline stands.
        allreduce = min(request.allreduce_timeout or settings.allreduce_timeout, timeout)
        local_norm = norm_of(self.buffers)
        started = time.monotonic()
        self._round += 1
        try:
            self._send(
                {
                    "kind": "average",
                    "round": self._round,
                    "timeout": timeout.total_seconds(),
                    "weight": weight,
                    "min_group_size": request.min_group_size or settings.min_group_size,
                    "min_matchmaking_time": _seconds(
                        request.min_matchmaking_time, settings.min_matchmaking_time
                    ),
                    "request_timeout": _seconds(request.request_timeout, settings.request_timeout),
                    "allreduce_timeout": allreduce.total_seconds(),
                    "next_chunk_timeout": _seconds(
                        request.next_chunk_timeout, settings.next_chunk_timeout
                    ),
                    "bandwidth": self._bandwidth,
                }
            )
            if cancelled.is_set():  # maybe before the host had heard of this round
                self.cancel()
            answer = self._next_answer(timeout + _HANG_MARGIN)
        except (OSError, ValueError):
            answer = None
        except queue.Empty:
            self._revive_in_background()
            raise AllReduceError(
                AllReduceFault.TIMEOUT, "the swarm host hung; it is started again"
            ) from None
        if answer is None:
            if cancelled.is_set():
                raise AllReduceError(AllReduceFault.CANCELLED)
            self._revive_in_background()
            raise AllReduceError(
                AllReduceFault.SWARM_DOWN, "the swarm host ended; it is started again"
            )
        if answer["kind"] == "failed":
            raise AllReduceError(AllReduceFault[answer["fault"]], answer["detail"])
        return self._judged(answer, local_norm, time.monotonic() - started)

    def _next_answer(self, timeout: timedelta) -> dict[str, Any] | None:
        """None: the host is gone. Raises queue.Empty when it says nothing for that long."""
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            left = deadline - time.monotonic()
            try:
                return self._answers.get(timeout=max(0.0, min(_LOOK_AFTER_HOST, left)))
            except queue.Empty:
                # Its children hold the other end of the pipe, so there is no end of file.
                if not self.alive() and self._answers.empty():
                    return None
                if left <= _LOOK_AFTER_HOST:
                    raise

    def _revive_in_background(self) -> None:
        """Training waits for the round that failed, not for the next host."""
        self._kill()
        self._reviving = True

        def revive() -> None:
            with self._lock:
                try:
                    if not self._closed and not self.alive():
                        self.restart()
                except SwarmUnavailable as error:
                    log.warning("%s", error)
                finally:
                    self._reviving = False
                if self._closed:
                    self._kill()

        threading.Thread(target=revive, name="swarm-revive", daemon=True).start()

    def _revive(self) -> None:
        try:
            self.restart()
        except SwarmUnavailable as error:
            raise AllReduceError(AllReduceFault.SWARM_DOWN, str(error)) from error

    def _judged(self, answer: dict[str, Any], local_norm: float, total: float) -> AllReduceResult:
        settings = self._settings
        average_norm = norm_of(self.buffers)
        previous = self._norms()
        try:
            judge(
                local_norm=local_norm,
                average_norm=average_norm,
                max_ratio=settings.max_norm_ratio,
                previous=previous,
            )
        except AllReduceError:
            # When the run itself changes, the measure must follow; but slowly, or three rounds of
            # nonsense would make nonsense usual.
            usual = usual_norm(local_norm, previous)
            if usual > 0 and math.isfinite(average_norm):
                self._norms.add(min(average_norm, 2 * usual))
            raise
        self._norms.add(average_norm)
        failed = tuple(answer["failed"])
        if (failed or answer["kept_local"] > 0) and not settings.allow_failed_peers:
            raise AllReduceError(
                AllReduceFault.PEER_FAILED,
                f"{len(failed)} peers failed, {answer['kept_local']:.1%} of the values have no "
                "average (--neuron.allow_failed_peers no)",
            )
        transfer = answer["transfer"]
        if transfer > 0.5 and not failed:
            # What passed through this peer in both directions, as load balancing counts it.
            self._bandwidth = 8e-6 * 4 * sum(self._sizes) / transfer
        return AllReduceResult(
            peers=tuple(answer["peers"]),
            failed_peers=failed,
            matchmaking_seconds=answer["matchmaking"],
            transfer_seconds=transfer,
            total_seconds=total,
            average_norm=average_norm,
            local_norm=local_norm,
            kept_local=answer["kept_local"],
        )


def bound_log(path: Path, most: int = _LOG_BYTES) -> None:
    """Beyond ``most`` bytes the log becomes ``<name>.1`` and begins anew.

    The host's processes hold it open for appending, so it is copied and emptied, not renamed.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size > most:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)


def _seconds(asked: timedelta | None, configured: timedelta) -> float:
    return (asked or configured).total_seconds()


def _read_answers(descriptor: int, answers: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    with os.fdopen(descriptor, encoding="utf-8") as pipe:
        for line in pipe:
            answers.put(json.loads(line))
    answers.put(None)
