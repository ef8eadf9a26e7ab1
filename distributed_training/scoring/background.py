"""The score preview beside a miner that trains: one look at a time, at the lowest priority.

A process of its own, so that its memory goes back when it is done and nothing it meets can end the
miner: ``scripts/score.py --background``, which takes one thread, no GPU, and what CPU is left over.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from distributed_training.common.environment import without_secrets

log = logging.getLogger(__name__)

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "score.py"
TIMEOUT = timedelta(hours=1)  # of one look
#: By the count of operations a look at 1B takes one thread half an hour (docs/scoring.md).
MOST_PARAMETERS = 1_200_000_000
# Not secrets, but named like ones: where the store is, and the dataset's token.
_KEPT = ("R2_ENDPOINT_URL", "R2_ACCOUNT_ID", "HF_TOKEN")


def too_large(parameters: int) -> str | None:
    """The line that says why no look would end in its time, or None."""
    if parameters <= MOST_PARAMETERS:
        return None
    return (
        f"No score previews: a model of {parameters / 1e9:.1f}B parameters takes one thread "
        f"longer than the {TIMEOUT.total_seconds() / 60:.0f} minutes it is given. Leave "
        "out --neuron.score_preview, and run scripts/score.py on a machine with a GPU"
    )


class BackgroundPreview:
    """``flags``: the miner's own. ``mode``: ``own`` scores this uid alone, ``ranked`` also ranks it
    among the best paid others. ``told``: gets what :func:`~.report.row_fields` says and how many
    ``seconds`` the look took, from a thread.
    """

    def __init__(
        self,
        *,
        flags: Sequence[str],
        uid: int,
        mode: Literal["own", "ranked"],
        told: Callable[[Mapping[str, Any]], None],
        script: Path = SCRIPT,
    ) -> None:
        others = "0" if mode == "own" else "8"
        options = ["--uid", str(uid), "--others", others, "--json", "--background"]
        self._command = [sys.executable, str(script), *options, *flags]
        self._uid = uid
        self._told = told
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._again = self._closed = False

    def look(self) -> None:
        """Look now, or once the look under way has ended. Returns at once."""
        with self._lock:
            if self._closed:
                return
            if self._process is not None:
                self._again = True
                return
            try:
                self._process = self._start()
            except (OSError, RuntimeError) as error:  # no memory, process or thread is left
                log.warning("No score preview of this publication: it cannot start (%s)", error)

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self._command,
            env=without_secrets(keep=_KEPT),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            threading.Thread(
                target=self._follow, args=(process,), name="score-preview", daemon=True
            ).start()
        except RuntimeError:
            process.kill()
            process.communicate()
            raise
        return process

    def close(self) -> None:
        """End a look under way. Idempotent."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()

    def _follow(self, process: subprocess.Popen[str]) -> None:
        try:
            said, problem = process.communicate(timeout=TIMEOUT.total_seconds())
        except subprocess.TimeoutExpired:
            process.kill()
            said, problem = "", f"it took longer than {TIMEOUT.total_seconds() / 60:.0f} minutes"
            process.communicate()
        with self._lock:
            self._process = None
            again, self._again = self._again and not self._closed, False
            closed = self._closed
        if not closed:
            self._tell(said, problem)
        if again:
            self.look()

    def _tell(self, said: str, problem: str) -> None:
        try:
            look = json.loads(said)
            (mine,) = [row for row in look["miners"] if row["uid"] == self._uid]
        except (ValueError, KeyError, TypeError):
            last = problem.strip().splitlines()[-1:] or ["it said nothing"]
            log.warning("No score preview of this publication: %s", last[0])
            return
        self._told({"seconds": look.get("seconds"), **mine})
