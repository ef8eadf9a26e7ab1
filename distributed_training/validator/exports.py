"""Write the model of every n-th outer step to a folder, and run the founder's command on it.

Both run during the rounds, in their own processes with a low priority. ``dt-export`` writes the
folder from the run folder's copy of the state; then the command gets the folder and the outer step
as its last arguments. The last line that it prints, a number or a JSON object of numbers, is its
result. A command that hangs is ended together with all processes that it started. A command that
fails or hangs only causes a warning in the log.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributed_training.common.files import free_bytes
from distributed_training.common.processes import (
    describe_end,
    end_sessions,
    kill_tree,
    with_starter,
    without_secrets,
)
from distributed_training.config import Config
from distributed_training.training.weights import GlobalState

log = logging.getLogger(__name__)

FOLDER = "exports"  # in the run folder
_LONGEST = timedelta(hours=12)  # time limit for a command
_TAIL = 1 << 16  # bytes of a command's output that are kept
_RESERVE = 10**9  # bytes of the disk that must stay free
_MOST_RESULTS = 200
_LOW_PRIORITY = ["nice", "-n", "10"]  # so that rounds and scores have priority


class Exports:
    """Export the model of every ``validator.export_every``-th outer step, one at a time.

    ``folder``: the run folder. ``record`` writes an event.
    ``longest``: the time limit for a command.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        record: Callable[..., None],
        longest: timedelta = _LONGEST,
    ) -> None:
        self._settings = config.validator
        self._network = config.general.network
        self._run_folder = folder
        self._folder = folder.absolute() / FOLDER
        self._record = record
        self._longest = longest
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def after(self, state: GlobalState) -> None:
        """Start an export if one is due, and return at once."""
        if not self._settings.export_every or state.outer_step % self._settings.export_every:
            return
        if self._thread is not None and self._thread.is_alive():
            log.warning(
                "Outer step %d is not exported: the previous export or its command still runs",
                state.outer_step,
            )
            return
        self._thread = threading.Thread(
            target=self._export, args=(state,), name="export", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the running export or command, if there is one."""
        self._closed = True
        if self._process is not None:
            self._kill(self._process)

    def _export(self, state: GlobalState) -> None:
        step, began = state.outer_step, time.monotonic()
        target = self._folder / f"outer-step-{step}"
        problem, results = "", {}
        try:
            self._make(state, target)
            if self._settings.export_command:
                results = self._evaluate(step, target)
        except (OSError, ValueError) as error:
            if self._closed:
                return
            problem = str(error)
            log.warning("Export of outer step %d: %s", step, problem)
        else:
            shown = ", ".join(f"{name} {value:.6g}" for name, value in results.items())
            log.info("Exported outer step %d to %s%s", step, target, shown and f": {shown:.500}")
        self._record(
            "export",
            outer_step=step,
            folder=str(target),
            ok=not problem,
            reason=problem,
            seconds=round(time.monotonic() - began, 3),
            results=results,
            # The trackers use it as their axis, as they do for miners.
            total_inner_steps=state.total_inner_steps,
        )

    def _make(self, state: GlobalState, target: Path) -> None:
        """Delete the oldest exports, and write ``target``. Raises OSError, ValueError."""
        self._folder.mkdir(exist_ok=True)
        kept = sorted(
            (path for path in self._folder.glob("outer-step-*") if path != target),
            key=lambda path: path.stat().st_mtime,
        )
        for path in kept[: max(0, len(kept) + 1 - self._settings.keep_exports)]:
            shutil.rmtree(path)
        for left in self._folder.glob(".export-*"):  # exports that were killed left these folders
            shutil.rmtree(left, ignore_errors=True)
        # After a restart an outer step may be published, and exported, a second time.
        shutil.rmtree(target, ignore_errors=True)
        needed = 4 * sum(tensor.numel() for tensor in state.weights) + _RESERVE
        if (free := free_bytes(self._folder)) is not None and free < needed:
            raise OSError(
                f"{free / 1e9:.1f} GB are free in {self._folder} and {needed / 1e9:.1f} GB are "
                "needed, so nothing was exported: free disk space, or move old exports away"
            )
        words = [sys.executable, "-m", "distributed_training.scoring.export", str(target)]
        words += ["--outer-step", str(state.outer_step), "--from", str(self._run_folder)]
        words += ["--network", self._network] if self._network else []
        # If --network is a URL, the run folder has a copy of the network's file.
        words += ["--neuron.run_folder", str(self._run_folder)]
        self._run(words, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})

    def _evaluate(self, step: int, target: Path) -> dict[str, float]:
        """Return the results of the founder's command. Raises OSError, ValueError."""
        words = shlex.split(self._settings.export_command)
        last = self._run([*words, str(target), str(step)], {})
        try:
            return dict(_numbers("", json.loads(last)))
        except (ValueError, RecursionError):
            raise ValueError(
                f"the last line of --validator.export_command is not a number or a JSON object of "
                f"numbers ({last!r:.100}), so no result is shown: print a result there"
            ) from None

    def _run(self, command: Sequence[str], more: Mapping[str, str]) -> str:
        """Return the last line that a command prints. Raises OSError, ValueError."""
        process = subprocess.Popen(
            [*with_starter(), *_LOW_PRIORITY, *command],
            env={**without_secrets(), **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        self._process = process
        if self._closed:  # the stop came while the command was being started
            self._kill(process)
        late = threading.Event()

        def end() -> None:
            late.set()
            self._kill(process)

        timer = threading.Timer(self._longest.total_seconds(), end)
        timer.daemon = True
        timer.start()
        tail = b""
        with process.stdout:
            # The pipe ends when all processes that have it open have ended, even background ones.
            while data := os.read(process.stdout.fileno(), _TAIL):
                tail = (tail + data)[-_TAIL:]
        status = process.wait()  # a command may close its output early, and still has a time limit
        timer.cancel()
        lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip() if lines else ""
        if status:
            how = f"did not end within {self._longest}" if late.is_set() else describe_end(status)
            raise ValueError(f"{command[0]} {how}: {last!r:.300}")
        return last

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            kill_tree(process.pid)
        # A background server may have left the process tree, so end its session too.
        end_sessions([process.pid], settle=timedelta(0), grace=timedelta(0))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a number or a JSON object, named by their path. Raises ValueError."""
    if isinstance(value, dict):
        for key, inner in list(value.items())[:_MOST_RESULTS]:
            with suppress(ValueError):  # lm-evaluation-harness prints strings among its numbers
                yield from _numbers(f"{name}/{key}".strip("/"), inner)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r:.100} is not a number")
    elif math.isfinite(value):
        yield name or "result", float(value)
