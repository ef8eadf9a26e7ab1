"""Show each step's figures in TensorBoard and Weights & Biases, which follow ``events.jsonl``.

    python -m distributed_training.telemetry.trackers FD     started by :func:`open_trackers`

A separate process reads the file, so that a library that hangs, prints or fails does not affect
training. Of the miner's secrets, the process has only the key of W&B. It sends only the figures and
the miner's name, but no console output, code, git state, host name or arguments. The x axis is the
number of inner steps since the first outer step.
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

#: A function that writes the figures of an inner step that ended at a Unix time, and returns True.
Write = Callable[[int, Mapping[str, float], float], bool]

T = TypeVar("T")


@contextlib.contextmanager
def open_trackers(settings: TelemetrySettings, folder: Path, *, name: str) -> Iterator[None]:
    """Run the process that shows the run in ``folder``, if the settings name a tracker.

    On exit, wait some seconds for it to write the last figures.
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
    """Return the figures of an event, keyed by the names that they have in the graphs."""
    exported = event["kind"] == "export"
    group, values = ("evaluation", event["results"]) if exported else ("train", event)
    known = {name: finite(value) for name, value in values.items()}
    return {
        f"{group}/{name}": value
        for name, value in known.items()
        if value is not None and name not in ("time", "total_inner_steps")
    }


def gauges(folder: Path) -> dict[str, float]:
    """Return the current figures in ``metrics.prom`` that no step has, such as those of plug-ins.

    Timestamps are left out, because graphs store numbers too coarsely for them.
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
        # A new file hides the same and later steps in earlier files. These are steps that a
        # roll-back has undone, or steps of an earlier start that no checkpoint contains.
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
    """Return a writer for a new W&B run in the miner's group. Raises any error of W&B."""
    import wandb as library

    logging.getLogger("wandb").setLevel(logging.CRITICAL)  # we log failures ourselves
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
        library.teardown()  # otherwise W&B's helper process keeps the failed run
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
    """Return the result of a call of a library. If it fails, log one line and return None."""
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
    """Write the figures of this start's steps, until ``over`` is set and no event is left."""
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
            # Skip a line that is damaged or from another version.
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
    # Ctrl-C reaches every process in a terminal. Ignore it here, since the parent will end this
    # process with a message.
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
