"""Show each step's figures in TensorBoard and Weights & Biases, which follow ``events.jsonl``.

    python -m distributed_training.telemetry.trackers FD     started by :func:`open_trackers`

A separate process reads the file. So a library that hangs, prints or fails does not affect
training, and it has access to none of the miner's secrets except its own key. Only the figures and
the miner's name are sent: no console output, code, git state, host name or arguments. The x axis is
the number of inner steps since the first outer step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from distributed_training.common.processes import ChildProcess, ParentConnection
from distributed_training.common.proxies import share
from distributed_training.config.installed import install
from distributed_training.config.settings import TelemetrySettings
from distributed_training.telemetry.events import EventFollower, finite
from distributed_training.telemetry.metrics import read_metrics

log = logging.getLogger(__name__)

STEP = "inner_step_total"  # the axis of every figure
_POLL_SECONDS = 1.0
_CLOSE_SECONDS = 5.0  # seconds for the last figures at a stop
_SERVER_SECONDS = 30.0  # seconds that W&B's server may take to answer at the start
_HISTORY_BYTES = 8 * 2**20

# torchtitan's names for figures that mean the same as ours, with the factor for our figure. Our own
# names stay if torchtitan's figure is of a single device, throughput(tps), or of its allocator,
# memory/*.
_TORCHTITAN: Mapping[str, tuple[str, float]] = {
    "loss": ("loss_metrics/global_avg_loss", 1),
    "mfu": ("mfu(%)", 100),
    "grad_norm": ("grad_norm", 1),
    "learning_rate": ("lr", 1),
    "seconds": ("time_metrics/end_to_end(s)", 1),
    "data_wait_seconds": ("time_metrics/data_loading(s)", 1),
}

#: Write the figures of an inner step that ended at this Unix time. Return True.
Write = Callable[[int, Mapping[str, float], float], bool]

T = TypeVar("T")


@contextlib.contextmanager
def open_trackers(settings: TelemetrySettings, folder: Path, *, name: str) -> Iterator[None]:
    """Run the process that shows the run in ``folder``, if the settings name a tracker.

    On exit it waits some seconds for the last figures to be written.
    """
    if settings.tensorboard_dir is None and settings.wandb == "off":
        yield
        return
    board, key = settings.tensorboard_dir, settings.wandb_api_key
    given = {"folder": str(folder), "name": name, "wandb": settings.wandb, "began": time.time()}
    given["board"] = "" if board is None else str(board / name)
    given["key"] = None if key is None else key.get_secret_value()
    child = ChildProcess(
        "The process of TensorBoard and W&B",
        "distributed_training.telemetry.trackers",
        effect="training is not affected",
        begin=lambda: child.send(given),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    child.start()
    try:
        yield
    finally:
        child.close("end", timeout=timedelta(seconds=_CLOSE_SECONDS))


def figures(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of an event, keyed by the names under which they are drawn."""
    if event["kind"] == "export":
        known = {f"evaluation/{name}": finite(value) for name, value in event["results"].items()}
        return {name: value for name, value in known.items() if value is not None}
    drawn = {}
    for name, value in event.items():
        if (number := finite(value)) is None or name in ("time", "total_inner_steps"):
            continue
        titan, factor = _TORCHTITAN.get(name, (f"train/{name}", 1))
        drawn[titan] = factor * number
    if drawn.get("time_metrics/end_to_end(s)"):
        wait = drawn["time_metrics/data_loading(s)"] / drawn["time_metrics/end_to_end(s)"]
        drawn["time_metrics/data_loading(%)"] = 100 * wait
    return drawn


def gauges(folder: Path) -> dict[str, float]:
    """Return the current figures in ``metrics.prom`` that steps lack, including those of plug-ins.

    Timestamps are left out: the numbers in a graph are too coarse for them.
    """
    return {
        name.removeprefix("dt_").replace("_", "/", 1): value
        for name, value in read_metrics(folder / "metrics.prom").items()
        if "." not in name
        and not name.endswith("_timestamp_seconds")
        and (name.endswith("_total") or not name.startswith("dt_train_"))
    }


def tensorboard(given: Mapping[str, Any]) -> Write:
    """Return a writer of TensorBoard's event files. Raises ImportError, OSError."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    files: list[Any] = []
    reached = 0

    def write(step: int, figures: Mapping[str, float], at: float) -> bool:
        nonlocal reached
        # A new file hides the same and later steps in earlier files: steps before a roll-back, and
        # steps of an earlier start that no checkpoint contains.
        if step <= reached or not files:
            files[:] = [EventFileWriter(given["board"], flush_secs=15)]
            files[0].add_event(Event(step=step, file_version="brain.Event:2"))
            start = SessionLog(status=SessionLog.START)
            files[0].add_event(Event(step=step, session_log=start))
        reached = step
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        files[0].add_event(Event(step=step, wall_time=at, summary=Summary(value=values)))
        files[0].flush()
        return True

    return write


def wandb(given: Mapping[str, Any]) -> Write:
    """Return a writer for a W&B run, in one group per miner. Raises what W&B raises."""
    import wandb as library

    logging.getLogger("wandb").setLevel(logging.CRITICAL)  # our own line below says what failed
    if server := os.environ.get("WANDB_BASE_URL"):
        share(server)
    options: dict[str, Any] = {
        "project": os.environ.get("WANDB_PROJECT", "distributed_training"),
        "name": given["name"],
        "group": given["name"],
        "dir": given["folder"],
        "settings": library.Settings(
            api_key=given["key"], init_timeout=_SERVER_SECONDS, silent=True, console="off",
            save_code=False, disable_code=True, disable_git=True, disable_job_creation=True,
            x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True,
            x_save_requirements=False,
        ),
    }  # fmt: skip
    try:
        run = library.init(mode=given["wandb"], **options)
    except library.Error as error:
        library.teardown()  # W&B's helper process still has the failed run
        log.warning(
            "W&B: %s. The figures are kept in %s, `wandb sync` sends them: check WANDB_API_KEY in "
            ".env and the network",
            _first_line(error),
            Path(given["folder"], "wandb"),
        )
        run = library.init(mode="offline", **options)
    run.define_metric("*", step_metric=STEP)
    return lambda step, figures, at: run.log({STEP: step, **figures}) is None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def attempt(name: str, call: Callable[[], T]) -> T | None:
    """Return what a library's call returns; None, with one line, if it fails."""
    try:
        return call()
    except ImportError as error:
        why = f"shows nothing: {error.name} is missing. Training continues; "
        why += f"{install('wandb' if name == 'W&B' else 'tensorboard')}, then restart"
    except Exception as error:  # noqa: BLE001 - a library may raise anything
        why = f"shows nothing from here on ({_first_line(error)}). Training continues; "
        why += "events.jsonl has the same figures"
    log.warning("%s %s", name, why)
    return None


def follow(given: Mapping[str, Any], over: threading.Event) -> None:
    """Write the figures of this start's steps until ``over`` is set and no event is left."""
    folder, writers = Path(given["folder"]), dict[str, Write]()
    makers = {"TensorBoard": tensorboard if given["board"] else None}
    makers["W&B"] = None if given["wandb"] == "off" else wandb
    for name, make in makers.items():
        if make is not None and (writer := attempt(name, partial(make, given))) is not None:
            writers[name] = writer
    follower = EventFollower(folder / "events.jsonl")
    events = [*follower.history(at_most=_HISTORY_BYTES)]
    while True:
        rows = []
        for event in events:
            # A line that is damaged or from another version is skipped.
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                known = event["kind"] in ("step", "export") and not event.get("skipped")
                if known and (at := float(event["time"])) >= given["began"]:
                    rows.append((int(event["total_inner_steps"]), figures(event), at))
        if rows:
            rows[-1][1].update(gauges(folder))
        for row in rows:
            for name, writer in [*writers.items()]:
                if attempt(name, partial(writer, *row)) is None:
                    del writers[name]
        ended = over.wait(_POLL_SECONDS)
        events = follower.poll()
        if ended and not events:
            return


def main() -> None:
    """Follow the run that the parent names, until the parent closes its socket."""
    # Ctrl-C reaches all processes in a terminal, but the parent ends this one with a message.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)  # training goes first
    parent = ParentConnection(plugins=False, ends=None)  # write the last figures before ending
    parent.forward_log()
    given, over = parent.receive(), threading.Event()

    def wait() -> None:
        with contextlib.suppress(EOFError, OSError):
            parent.receive()
        over.set()

    threading.Thread(target=wait, name="parent", daemon=True).start()
    follow(given, over)


if __name__ == "__main__":
    main()
