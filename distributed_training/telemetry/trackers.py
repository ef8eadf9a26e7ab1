"""TensorBoard and Weights & Biases: every step's figures where operators compare runs.

Both are optional and show the catalogue's metrics over one axis, the inner steps since the first
epoch. Neither may cost training anything: each has a thread of its own behind a bounded queue, and
one that cannot be opened or fails is left out from then on, with one line. W&B runs in a process of
its own (:mod:`.wandb_process`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from distributed_training.common.environment import without_secrets
from distributed_training.config.telemetry import TelemetrySettings

from .wandb_process import STEP

log = logging.getLogger(__name__)

_QUEUED_STEPS = 1000
_CLOSE_SECONDS = 5.0
_SERVER_SECONDS = 30.0  # that W&B's server may take to answer at the start

# torchtitan's names, where they mean the same thing, and what our figure is multiplied with. Its
# throughput(tps) is a single device's and its memory/* is the allocator's: ours have our names.
_TORCHTITAN: Mapping[str, tuple[str, float]] = {
    "train_loss": ("loss_metrics/global_avg_loss", 1),
    "train_mfu": ("mfu(%)", 100),
    "train_grad_norm": ("grad_norm", 1),
    "train_learning_rate": ("lr", 1),
    "train_step_seconds": ("time_metrics/end_to_end(s)", 1),
    "train_data_wait_seconds": ("time_metrics/data_loading(s)", 1),
}


class Writer(Protocol):
    """Where figures go. Any method may raise; it is not called again then."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``folder``. Steps from ``first_step`` on that an earlier run wrote, and a
    checkpoint took back, are hidden; so are those that a roll-back repeats."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder
        self._next = first_step
        self._open()

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._next, flush_secs=15)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if step < self._next:
            self._writer.close()
            self._next = step
            self._open()
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._next = step + 1

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One run of W&B for the life of a run folder: ``wandb.id`` there keeps its id.

    Sent are the figures and the miner's name, nothing else: no console, code, git state, host or
    arguments. Raises OSError when its process has ended.
    """

    def __init__(self, settings: TelemetrySettings, folder: Path, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distributed_training.telemetry.wandb_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=without_secrets(),
        )
        key = settings.wandb_api_key
        self._send(
            {
                "mode": settings.wandb,
                "project": settings.wandb_project,
                "entity": settings.wandb_entity or None,
                "name": name,
                "key": key.get_secret_value() if key is not None else None,
                "folder": str(folder),
                "patience": _SERVER_SECONDS,
            }
        )
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or '{"open": false}')
        if not answer["open"]:
            raise OSError(answer.get("problem", "its process ended"))
        if answer["problem"]:
            log.warning("W&B: %s", answer["problem"])

    def _send(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._send({STEP: step, **figures})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Tracker:
    """Calls a writer from a thread. ``opens``: makes it; what that raises is said once."""

    def __init__(self, name: str, opens: Callable[[], Writer]) -> None:
        self._name = name
        self._steps: queue.Queue[tuple[int, Mapping[str, float]] | None]
        self._steps = queue.Queue(_QUEUED_STEPS)
        self._thread = threading.Thread(
            target=self._run, args=(opens,), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Returns at once. Steps that nobody takes for hours are dropped."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._steps.put_nowait((step, metrics))

    def close(self) -> None:
        """What was logged is written, if that takes seconds at most."""
        with contextlib.suppress(queue.Full):
            self._steps.put_nowait(None)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self, opens: Callable[[], Writer]) -> None:
        try:
            writer = opens()
            while (item := self._steps.get()) is not None:
                writer.write(item[0], figures(item[1]))
            writer.close()
        except ImportError as error:
            log.warning(
                "%s shows nothing: %s is missing. Training goes on; `.venv/bin/pip install "
                "-c constraints.txt %s`, then restart",
                *(self._name, error.name, self._name.lower()),
            )
        except (OSError, ValueError, TypeError) as error:  # others end this thread alone
            log.warning(
                "%s shows nothing from here on (%s). Training goes on; events.jsonl has the same "
                "figures",
                *(self._name, str(error).partition("\n")[0] or type(error).__name__),
            )


def figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """The catalogue's metrics by the names under which they are drawn: one group for each room.

    Moments are left out: the numbers of a graph are too coarse for them.
    """
    drawn = {}
    for name, value in metrics.items():
        if name in _TORCHTITAN:
            titan, factor = _TORCHTITAN[name]
            drawn[titan] = factor * value
        elif not name.endswith("_timestamp_seconds"):
            drawn[name.replace("_", "/", 1)] = value
    seconds, wait = metrics.get("train_step_seconds"), metrics.get("train_data_wait_seconds")
    if seconds and wait is not None:
        drawn["time_metrics/data_loading(%)"] = 100 * wait / seconds
    return drawn


def open_trackers(
    settings: TelemetrySettings, folder: Path, *, name: str, first_step: int
) -> list[Tracker]:
    """What the settings ask for. ``folder``: of the run; ``first_step``: the next one's number."""
    trackers = []
    board = settings.tensorboard_dir
    if board is not None:
        trackers.append(Tracker("TensorBoard", lambda: TensorBoard(board / name, first_step)))
    if settings.wandb != "off":
        trackers.append(Tracker("W&B", lambda: WandB(settings, folder, name)))
    return trackers
