"""Programs of tests whose imports take longer than their work: forks of a process that has them.

All workers of one run of the tests have one fork server of Python's: its imports take six seconds
of a core.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

from distributed_training.miner.rank_group import rank_variables
from distributed_training.miner.run_folder import RANK_STORE

ROOT = Path(__file__).parents[2]
_PRELOAD = (
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "distributed_training.miner.start",
    __name__,  # a fork begins in it: with its imports in a tenth of a second
)
_CONTEXT = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Start the server if there is none yet, or take that of another worker of this run."""
    server: Any = forkserver._forkserver
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if server._forkserver_address is not None or run is None:
        _start()
        return
    place = Path(tempfile.gettempdir(), f"dt-forks-{run}")
    with place.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if said := file.read():
            address, owner, alive = json.loads(said)
            with suppress(OSError):  # it has ended
                # The server lives for as long as anybody holds this end of its pipe.
                server._forkserver_alive_fd = os.open(f"/proc/{owner}/fd/{alive}", os.O_WRONLY)
                server._forkserver_address = address
                server.ensure_running = resource_tracker.ensure_running
                return
        _start()
        file.truncate(0)
        json.dump((server._forkserver_address, os.getpid(), server._forkserver_alive_fd), file)
        atexit.register(place.unlink, missing_ok=True)


def _start() -> None:
    """Start a server. What it imports reads its environment: one thread each, or ranks wait for
    each other's on two cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        _CONTEXT.set_forkserver_preload(list(_PRELOAD))
        forkserver._forkserver.ensure_running()


class Program:
    """``script`` with ``arguments``, as ``python script`` would run it, in a session of its own.

    ``environ``: added to this process's. ``log``: takes all that it writes; its standard error
    goes to ``errors``, if that is given. ``folder``: that it runs in.
    """

    def __init__(
        self,
        script: Path,
        *arguments: str,
        environ: Mapping[str, str],
        log: Path,
        errors: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        prepare()
        self.log = log
        where = (str(log), str(errors or log), str(folder or Path.cwd()))
        self._process = _CONTEXT.Process(
            target=_run, args=(str(script), arguments, {**os.environ, **environ}, *where)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        status = self.poll()
        assert status is not None, f"it did not end in {seconds:.0f} s\n{self.log.read_text()}"
        return status

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()
            self._process.join(10)


class Ranks:
    """``world_size`` processes of a program of ``tests/tools``, whose logs lie in ``folder``."""

    def __init__(
        self,
        script: str,
        *arguments: str,
        folder: Path,
        world_size: int = 2,
        log: Path | None = None,
    ) -> None:
        self.folder, name = folder, f"{script}-{time.time_ns()}"
        meet = {RANK_STORE: str(folder / f"{name}.meet")}
        self.processes = [
            Program(
                ROOT / "tests" / "tools" / f"{script}.py",
                *arguments,
                environ=rank_variables(rank, world_size=world_size) | meet,
                log=log or folder / f"{name}-{rank}.log",
            )
            for rank in range(world_size)
        ]

    def finish(self, *, killed: bool = False, seconds: float = 120.0) -> None:
        """Fail the test unless all end with 0; with ``killed``, unless the first was killed."""
        try:
            if killed:
                self.processes[0].wait(seconds)
                self.processes[1].kill()  # as the launcher does, unless it saw that first
            ends = [process.wait(seconds) for process in self.processes]
        finally:
            self.kill()
        logs = "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))
        assert (ends[0] == -9) if killed else set(ends) == {0}, f"{ends}\n{logs}"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def run(
    script: Path, *arguments: str, environ: Mapping[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a :class:`Program` in ``folder`` to its end; return what it wrote."""
    with tempfile.TemporaryDirectory() as place:
        out, errors = Path(place, "out"), Path(place, "errors")
        program = Program(
            script, *arguments, environ=environ, log=out, errors=errors, folder=folder
        )
        try:
            status = program.wait(180)
        finally:
            program.kill()
        said = out.read_text(), errors.read_text()
        return subprocess.CompletedProcess(arguments, status, *said)


def _run(
    script: str,
    arguments: tuple[str, ...],
    environ: Mapping[str, str],
    log: str,
    errors: str,
    folder: str,
) -> None:
    """Run the program, in the fork."""
    _lead_session(log, errors)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.path.insert(0, str(ROOT))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _lead_session(log: str, errors: str) -> None:
    gc.freeze()  # or a full collection looks at all that the server holds: a third of a second
    gc.enable()
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
    for number, path in enumerate((log, errors), start=1):
        with open(path, "ab", buffering=0) as file:
            os.dup2(file.fileno(), number)
