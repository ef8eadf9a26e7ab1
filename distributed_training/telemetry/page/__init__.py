"""A page that shows what a miner does: served from the files in its run folder.

The page runs in a process of its own (:class:`PageProcess`), at low priority, and reads
``events.jsonl`` and ``metrics.prom``. So it costs training nothing, shows the past after a restart,
and goes on when the miner stands still: that is when it is looked at.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Self

from pydantic import SecretStr

from distributed_training.common.backoff import Backoff, Throttle
from distributed_training.common.processes import wait_or_kill, without_secrets

_END_SECONDS = 5.0
_FIRST_WAIT, _LONGEST_WAIT = timedelta(seconds=1), timedelta(minutes=5)
_LINES_PER_MINUTE = 20  # of the page's: callers without a limit provoke them


class PageProcess:
    """Serves the run folders ``folders`` until closed, or until this process ends.

    ``told`` gets each line it says, from a thread: ``page: <address>`` first, or why there is no
    page; at most 20 of the page's own lines a minute. A page that ends without an error line is
    started again. It gets none of this process's secrets but ``token``. Call it in the main thread.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: SecretStr | None = None,
        told: Callable[[str], None],
    ) -> None:
        environment = without_secrets()
        if token is not None:
            environment["DT_PAGE_TOKEN"] = token.get_secret_value()
        self._environment = environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._command = [
            *(sys.executable, "-m", "distributed_training.telemetry.page"),
            *map(str, folders),
            *("--host", host, "--port", str(port), "--with-parent"),
        ]
        self._told = told
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of starting one
        self._process = self._start()
        threading.Thread(target=self._listen, name="page", daemon=True).start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
            start_new_session=True,  # a Ctrl-C is ours to act on
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self) -> None:
        """Follow the process, whose parent thread must outlive it (``--with-parent``)."""
        backoff = Backoff(first=_FIRST_WAIT, longest=_LONGEST_WAIT)
        may_tell = Throttle(60.0, most=_LINES_PER_MINUTE)
        while True:
            assert self._process.stdout is not None
            line = ""
            for line in self._process.stdout:
                # All is read though little is told: a full pipe would stop the page.
                if may_tell(line):
                    self._told(line.strip())
            if self._closing.is_set() or line.startswith("error: "):
                return
            wait = backoff.failed().total_seconds()
            self._told(
                "the page has ended; training is not affected, and the page is started again in "
                f"{wait:.0f} s"
            )
            if self._closing.wait(wait):
                return
            with self._lock:
                if self._closing.is_set():
                    return
                # It has closed its output, so it is ending; not waited for, it stays a zombie.
                wait_or_kill(self._process, _END_SECONDS)
                with contextlib.suppress(OSError):  # no process left: the next turn tries again
                    self._process = self._start()

    def close(self) -> None:
        with self._lock:
            # With the lock: a page that is just being started is then either not begun or ended
            # below.
            self._closing.set()
        self._process.terminate()
        wait_or_kill(self._process, _END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
