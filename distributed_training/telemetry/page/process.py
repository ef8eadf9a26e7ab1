"""The page as a process beside whoever wants it shown: a miner's launcher, a local subnet."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import SecretStr

from distributed_training.common.environment import without_secrets

_END_SECONDS = 5.0


class PageProcess:
    """Serves the run folders ``folders`` until closed, or until this process ends.

    ``told`` gets each line it says, from a thread: ``page: <address>`` first, or why there is no
    page. None of this process's secrets reach it but ``token``. Call it in the main thread.
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
        self._told = told
        self._closing = False
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "distributed_training.telemetry.page"),
                *map(str, folders),
                *("--host", host, "--port", str(port), "--with-parent"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # a Ctrl-C is ours to act on
        )
        threading.Thread(target=self._listen, name="page", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        line = ""
        for line in self._process.stdout:
            self._told(line.strip())
        if not (self._closing or line.startswith("error: ")):
            self._told("the page has ended; training is not affected")

    def close(self) -> None:
        self._closing = True
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> PageProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
