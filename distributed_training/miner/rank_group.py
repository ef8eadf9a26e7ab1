"""Fork the ranks of one miner from one process that has imported everything already.

A rank needs torch and the Llama model, seconds of imports and 300 MB. Python's fork
server imports them once (:data:`PRELOAD`) and forks each rank from there; it stays, so a rank that
died is back in the time of a fork. Nothing but ranks is forked from it.

Hazard: the server must stay fit to be forked. Nothing in the preload may start a thread, touch CUDA
or open a socket. Variables that libraries read when they are imported must be set
before it starts (:func:`rank_environment_defaults`).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from distributed_training.common.control_groups import usable_cores
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import (
    STACKS,
    Mark,
    collect_stacks,
    end_with_starter,
    is_running,
    is_secret,
    leave,
    process_folder,
    reap_orphans,
    send,
    without_secrets,
)
from distributed_training.config import Config
from distributed_training.miner.run_folder import RANK_STORE

log = logging.getLogger(__name__)

PROGRAM = "distributed_training.miner.start"  # its run_rank(config) is a rank
PRELOAD = ("distributed_training.miner.preload",)  # imported once by the server

_ROOT = Path(__file__).resolve().parents[2]
_SERVER_ENDED = 255  # what multiprocessing says of a rank whose server cannot tell its status
_STORE_BYTES = 4 << 20  # at 50 bytes a block and rank: 10,000 blocks of eight ranks
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)


def rank_environment_defaults(*, ranks: int) -> dict[str, str]:
    """Return the variables that server and ranks of one machine need."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        # numpy's and scipy's own: a thread of theirs in the server would be lost in each fork.
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Large tensors in huge pages where the kernel gives them on request: copies of the whole
        # model (checkpoints, uploads, the outer step) mostly wait for first touches of pages.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    if not os.environ.get("PYTORCH_ALLOC_CONF"):  # torch's newer name of the same
        # Segments that grow instead of many of fixed sizes: what is free can then be used. Without
        # it a GPU that is nearly full runs out of memory by fragmentation, hours into a run.
        wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    found = {name: os.environ.get(name, value) for name, value in wanted.items()}
    if sys.platform == "linux":
        # All ranks are on this machine. Its name may resolve to nothing, and an image's variable
        # may name an interface of another machine.
        found["GLOO_SOCKET_IFNAME"] = "lo"
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return found | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}


def rank_variables(rank: int, *, world_size: int, port: int) -> dict[str, str]:
    """Return the variables of torch.distributed (``env://``) for ranks on one machine.

    ``port``: a free one, the same for all ranks.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@dataclass(frozen=True)
class _Rank:
    number: int
    process: ForkServerProcess
    handle: psutil.Process | None  # None: it had ended before it was looked at

    @property
    def running(self) -> bool:
        # The server tells when a rank ended; without a server the handle still knows.
        handle = self.handle
        return self.process.exitcode is None or (handle is not None and is_running(handle))

    @property
    def ending(self) -> str:
        """The end of the rank, for the log."""
        code = self.process.exitcode or 0
        if code == _SERVER_ENDED:
            how = "was told to stop, since the process it was forked from ended"
        elif code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name} and left no exit status"
            if -code == signal.SIGKILL:
                how += ". Likely out of memory: dmesg -T"
        else:
            how = f"ended with status {code}"
        return f"rank {self.number} (pid {self.process.pid}) {how}"


class RankGroup:
    """Start this machine's ranks, and end them together.

    Each runs ``run_rank(config)`` of the module ``program``, which this process does not import.
    May be started again once all ranks have ended. ``stacks``: where :meth:`kill` writes them.
    ``start_limit`` covers :meth:`start`: a server that takes longer hangs, and is ended.
    """

    def __init__(
        self,
        *,
        config: Config,
        world_size: int,
        mark: Mark,
        stacks: Path,
        start_limit: timedelta = timedelta(minutes=20),
        program: str = PROGRAM,
    ) -> None:
        self._config = config
        self._program = program
        self.world_size = world_size
        self._mark = mark
        self._stacks = stacks
        self._start_limit = start_limit
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))
        self._ranks: list[_Rank] = []
        self._server: int | None = None  # pid
        self._tracker: psutil.Process | None = None
        self._scratch = ""  # folder of multiprocessing's sockets and the ranks' store
        self._starts = 0

    def start(self) -> None:
        """Fork every rank, which takes seconds the first time (imports).

        Raises OSError or EOFError if the server does not come up.
        """
        late = threading.Timer(self._start_limit.total_seconds(), self._end_server)
        late.daemon = True
        late.start()
        self._ranks = []
        try:
            self._ensure_tracker()
            if not self._scratch:
                # Where the next launcher finds it: one that was killed could not remove it. Sockets
                # lie there, whose paths must be short.
                tempfile.tempdir = self._scratch = process_folder("dt-", scratch_base())
                multiprocessing.util.get_temp_dir()
                tempfile.tempdir = None
                # After multiprocessing has removed its own (exit priority -100).
                multiprocessing.util.Finalize(
                    None, shutil.rmtree, (self._scratch, True), exitpriority=-101
                )
            variables = without_secrets() | rank_environment_defaults(ranks=self.world_size)
            variables |= self._mark.environment | {STACKS: str(self._stacks)}
            # Ctrl-C and a closed terminal are the launcher's: the server inherits what is blocked.
            # Were they ignored here for the moment, a stop that comes in it would be lost.
            signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
            try:
                with _environment(variables):
                    forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINAL_SIGNALS)
            # A file of its own: what ranks that were killed left must not be read.
            self._starts += 1
            store = Path(self._scratch) / f"ranks-{self._starts}"
            store.with_name(f"ranks-{self._starts - 1}").unlink(missing_ok=True)
            port = free_ports(1)[0]
            # Secrets go to each rank by a pipe: the server has none in its environment, so nobody
            # finds them in /proc, of a rank neither.
            secrets = {name: value for name, value in os.environ.items() if is_secret(name)}
            for number in range(self.world_size):
                place = rank_variables(number, world_size=self.world_size, port=port)
                process = self._context.Process(
                    target=_become_rank,
                    args=(self._program, self._config, secrets | place | {RANK_STORE: str(store)}),
                    name=f"rank {number}",
                )
                process.start()
                handle = None
                # The server may have reaped the rank already: its status tells the rest.
                with contextlib.suppress(psutil.Error):
                    handle = psutil.Process(process.pid)
                    self._server = handle.ppid()
                self._ranks.append(_Rank(number, process, handle))
        finally:
            late.cancel()

    def _end_server(self) -> None:
        """Kill the server, and leave it to multiprocessing to reap it."""
        log.warning("The fork server hangs: it started no ranks within --neuron.hang_timeout")
        self._mark.end(settle=timedelta(0), grace=timedelta(0))

    def _ensure_tracker(self) -> None:
        """Start multiprocessing's resource tracker again if it ended."""
        # Nothing of a miner needs it, but multiprocessing warns of its end on two lines. It bears
        # no mark: it ends by itself, with us.
        if self._tracker is not None:
            if is_running(self._tracker):
                return
            log.warning("The resource tracker ended: it is started again; training is not affected")
        with _environment(without_secrets()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says the same on two lines
            resource_tracker.ensure_running()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if "multiprocessing.resource_tracker" in " ".join(child.cmdline()):
                    self._tracker = child

    @property
    def running(self) -> list[int]:
        return [rank.number for rank in self._ranks if rank.running]

    @property
    def endings(self) -> list[str]:
        """A line for each rank that failed."""
        return [r.ending for r in self._ranks if not r.running and r.process.exitcode != 0]

    def wait(self, timeout: timedelta) -> None:
        """Wait until a rank ends, at most ``timeout``.

        Reaps descendants that lost their parent; starts again what must run next to the ranks.
        """
        sentinels = [r.process.sentinel for r in self._ranks if r.process.exitcode is None]
        if sentinels:
            multiprocessing.connection.wait(sentinels, timeout.total_seconds())
        else:
            time.sleep(timeout.total_seconds())
        self.reap()
        self._ensure_tracker()

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to ``ranks`` (all by default) that still run."""
        for rank in self._ranks:
            wanted = ranks is None or rank.number in ranks
            if wanted and rank.running and rank.handle is not None:
                send(rank.handle, number)

    def sweep(self, *, settle: timedelta, grace: timedelta, server: bool) -> list[str]:
        """End processes with the mark that are left; ``server``: the fork server too."""
        spare = () if server or self._server is None else (self._server,)
        ended = self._mark.end(settle=settle, grace=grace, spare=spare, reap=self.reap)
        own = f"{self._server} "
        return [line for line in ended if not line.startswith(own)]

    def kill(self) -> None:
        """End ranks that hang, and what they started, after their stacks were written."""
        spare = () if self._server is None else (self._server,)
        try:
            collect_stacks(self._stacks, self._mark.processes(spare=spare))
        except OSError as error:  # a full disk, say
            log.warning("The stacks could not be written to %s: %s", self._stacks, error)
        self._mark.end(settle=timedelta(0), grace=timedelta(0), spare=spare, reap=self.reap)

    def reap(self) -> None:
        reap_orphans(spare=() if self._server is None else (self._server,))


def scratch_base(memory: str = "/dev/shm") -> str:
    """Return where the ranks' store can lie: ``memory``, or else where temporary files are.

    A full disk, or one without locks, would fail each start of several ranks. Raises OSError.
    """
    try:
        _probe(memory)
    except OSError as error:
        base = tempfile.gettempdir()
        log.info("%s cannot be used (%s): the ranks meet in %s", memory, error.strerror, base)
        _probe(base)
        return base
    return memory


def _probe(base: str) -> None:
    """Raise OSError if ``base`` has no locks, or no room for the store of a long run."""
    with tempfile.TemporaryFile(dir=base) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(bytes(_STORE_BYTES))
        file.flush()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the environment for what multiprocessing starts meanwhile."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _become_rank(program: str, config: Config, environ: Mapping[str, str]) -> None:
    """Become, in the fork, the rank that ``environ`` names."""
    # What the server imported is half a million objects. A full collection would look at each, a
    # third of a second, and so copy the pages that the ranks share.
    gc.freeze()
    gc.enable()  # preload.py has disabled it; the loop disables it again
    # A session of its own: Ctrl-C at the terminal reaches only the launcher.
    os.setsid()
    for number in _TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Ignored first: one that came while they were blocked would end the rank.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINAL_SIGNALS)
    # The kernel tells a rank only of its parent's end, and that is the fork server.
    end_with_starter()
    os.environ.update(environ)
    leave(importlib.import_module(program).run_rank(config))
