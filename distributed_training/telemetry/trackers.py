"""TensorBoard and Weights & Biases: every step's figures where operators compare runs.

Both are optional and show the catalogue's metrics over one axis, the inner steps since the first
outer step. Neither may cost training anything: each has a thread of its own behind a bounded queue,
and one that cannot be opened or fails is left out from then on, with one line.

    python -m distributed_training.telemetry.trackers FD     W&B's process; started by rank 0
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from distributed_training.common.processes import ParentConnection, start_child
from distributed_training.common.proxies import share
from distributed_training.config.installed import install
from distributed_training.config.settings import TelemetrySettings

log = logging.getLogger(__name__)

STEP = "inner_step_total"  # the axis of every figure
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
    """A destination of figures. Any method may raise; it is not called again then."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``folder``.

    Steps from ``first_step`` on that an earlier run wrote, and a checkpoint took back, are hidden;
    so are those that a roll-back repeats.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder
        self._next = first_step
        self._open()

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._next, flush_secs=15)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        # After a roll-back: a new writer's purge_step hides the old figures of these steps.
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
    """A run of W&B for each start; those of one miner are a group, over one axis of steps.

    W&B's library hands its helper this process's whole environment, secrets too, and replaces hooks
    of the interpreter. So it runs in a child. Sent are the figures and the miner's name, nothing
    else: no console, code, git state, host or arguments.
    """

    def __init__(self, settings: TelemetrySettings, folder: Path, name: str) -> None:
        if find_spec("wandb") is None:
            raise ImportError(name="wandb")
        if server := os.environ.get("WANDB_BASE_URL"):
            share(server)
        self._process, self._connection = start_child(
            "distributed_training.telemetry.trackers",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        key = settings.wandb_api_key
        self._connection.send(
            {
                "mode": settings.wandb,
                "name": name,
                "key": key.get_secret_value() if key is not None else None,
                "folder": str(folder),
                "patience": _SERVER_SECONDS,
            }
        )
        try:
            # No limit: only this thread waits.
            is_open, problem = self._connection.recv()
        except EOFError:
            is_open, problem = False, "its process ended"
        if not is_open:
            raise OSError(problem)
        if problem:
            log.warning(
                "W&B: %s. The figures are kept in %s, `wandb sync` sends them: check "
                "WANDB_API_KEY in .env and the network",
                problem,
                folder / "wandb",
            )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._connection.send({STEP: step, **figures})

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


class Tracker:
    """Calls a writer from a thread. ``opens`` makes it; its error is logged once."""

    def __init__(self, name: str, opens: Callable[[], Writer]) -> None:
        self._name = name
        self._steps: queue.Queue[tuple[int, Mapping[str, float]] | None]
        self._steps = queue.Queue(_QUEUED_STEPS)
        self._thread = threading.Thread(
            target=self._run, args=(opens,), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue figures and return at once. Steps that nobody takes for hours are dropped."""
        # Else nobody takes them, and the queue would keep a thousand steps.
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._steps.put_nowait((step, metrics))

    def close(self) -> None:
        """Write the queued figures, if that takes seconds at most."""
        with contextlib.suppress(queue.Full):
            self._steps.put_nowait(None)
        # No longer: a stop has other things to do in its time.
        self._thread.join(_CLOSE_SECONDS)

    def _run(self, opens: Callable[[], Writer]) -> None:
        try:
            # In this thread: the libraries import for seconds, and W&B may wait for its server.
            writer = opens()
            while (item := self._steps.get()) is not None:
                writer.write(item[0], figures(item[1]))
            writer.close()
        except ImportError as error:
            log.warning(
                "%s shows nothing: %s is missing. Training continues; %s, then restart",
                self._name,
                error.name,
                install("wandb" if self._name == "W&B" else "tensorboard"),
            )
        except Exception as error:  # noqa: BLE001 - whatever a foreign library raises
            log.warning(
                "%s shows nothing from here on (%s). Training continues; events.jsonl has the same "
                "figures",
                self._name,
                _first_line(error),
            )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics by the names under which they are drawn: a group for each package.

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
    """Open the trackers that the settings name.

    ``folder``: of the run; ``first_step``: the next one's number.
    """
    trackers = []
    board = settings.tensorboard_dir
    if board is not None:
        trackers.append(Tracker("TensorBoard", lambda: TensorBoard(board / name, first_step)))
    if settings.wandb != "off":
        trackers.append(Tracker("W&B", lambda: WandB(settings, folder, name)))
    return trackers


def main() -> None:
    """Send the figures that :class:`WandB` sends here to W&B, until it closes the connection."""
    # Ctrl-C reaches the whole terminal; the rank ends this run by closing the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)  # training goes first
    import wandb

    logging.getLogger("wandb").setLevel(logging.CRITICAL)  # the rank logs its messages
    parent = ParentConnection(plugins=False, ends=None)  # it still sends what it has
    given = parent.receive()
    problem = ""
    try:
        options: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", "distributed_training"),
            "name": given["name"],
            "group": given["name"],
            "dir": given["folder"],
            "settings": wandb.Settings(
                api_key=given["key"], init_timeout=given["patience"], silent=True, console="off",
                save_code=False, disable_code=True, disable_git=True, disable_job_creation=True,
                x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        }  # fmt: skip
        try:
            run = wandb.init(mode=given["mode"], **options)
        except wandb.Error as error:
            wandb.teardown()  # its helper still holds the run that failed
            problem = _first_line(error)
            run = wandb.init(mode="offline", **options)
    except Exception as error:  # noqa: BLE001 - another version of the library has other settings
        parent.send((False, _first_line(error)))
        return
    parent.send((True, problem))
    run.define_metric("*", step_metric=STEP)
    with contextlib.suppress(EOFError, OSError):
        while True:
            run.log(parent.receive())
    run.finish()


if __name__ == "__main__":
    main()
