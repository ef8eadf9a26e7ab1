"""Start the ranks of one miner, and end them together.

    python -m distributed_training.miner.rank_group PROGRAM FD      one rank

Each rank is a plain process that leads a session. It receives settings and secrets through its
socket, so that they do not show up in ``/proc``. However the launcher ends, the rank then gets
SIGTERM and saves what it has.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

from distributed_training.common.control_groups import usable_cores
from distributed_training.common.processes import (
    STACKS,
    ParentConnection,
    collect_stacks,
    describe_end,
    end_sessions,
    is_secret,
    leave,
    members,
    start_child,
    wait_or_kill,
)
from distributed_training.config import Config
from distributed_training.miner.run_folder import RANK_STORE

log = logging.getLogger(__name__)

PROGRAM = "distributed_training.miner.start"  # the module whose run_rank(config) runs a rank


def rank_environment_defaults(*, ranks: int) -> dict[str, str]:
    """Return the variables that libraries read on import in the ranks of one machine."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        # Threads of numpy and scipy, which nothing here uses.
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Put large tensors into huge pages if the kernel grants them on request: copies of the
        # whole model (checkpoints, uploads, the outer step) mostly wait for page faults.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    if not os.environ.get("PYTORCH_ALLOC_CONF"):  # torch's newer name for the same variable
        # Use segments that grow instead of many fixed ones, so that all free memory is usable.
        # Otherwise a nearly full GPU runs out of memory through fragmentation, hours into a run.
        wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    found = {name: os.environ.get(name, value) for name, value in wanted.items()}
    if sys.platform == "linux":
        # All ranks are on this machine, so use loopback: the host name may not resolve, and a
        # variable set in an image may name an interface that only another machine has.
        found["GLOO_SOCKET_IFNAME"] = "lo"
    return found | {"PYTHONUNBUFFERED": "1"}


def rank_variables(rank: int, *, world_size: int) -> dict[str, str]:
    """Return the variables that tell a rank on one machine its place among the ranks."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


class RankGroup:
    """Starts this machine's ranks, and ends them together.

    Each rank runs ``run_rank(config)`` of the module ``program``, which this process does not
    import. The group may be started again once all ranks have ended. ``stacks``: the path to which
    :meth:`kill` writes the ranks' stacks.
    """

    def __init__(
        self, *, config: Config, world_size: int, stacks: Path, program: str = PROGRAM
    ) -> None:
        self._config = config
        self._program = program
        self.world_size = world_size
        self._stacks = stacks
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._sockets: list[Connection] = []  # a rank ends when its socket is closed

    def start(self) -> None:
        """Start every rank. Raises OSError; some ranks may already be running then."""
        self._ranks, self._sockets = [], []
        # No other account can open this file, no full disk can prevent it, and it vanishes when the
        # last rank has ended.
        store = os.memfd_create("ranks")
        secrets = {name: value for name, value in os.environ.items() if is_secret(name)}
        try:
            for number in range(self.world_size):
                process, socket = start_child(
                    __name__,
                    self._program,
                    variables=rank_environment_defaults(ranks=self.world_size)
                    | rank_variables(number, world_size=self.world_size)
                    | {RANK_STORE: f"/proc/self/fd/{store}", STACKS: str(self._stacks)},
                    pass_fds=[store],
                    start_new_session=True,
                )
                self._ranks.append(process)
                self._sockets.append(socket)
                # The rank has ended, and its exit status says why.
                with contextlib.suppress(OSError):
                    socket.send((self._config, secrets))
        finally:
            os.close(store)

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    @property
    def running(self) -> list[int]:
        return [number for number, rank in enumerate(self._ranks) if rank.poll() is None]

    @property
    def endings(self) -> list[str]:
        """Lines that say how each failed rank has ended."""
        found = []
        for number, rank in enumerate(self._ranks):
            if status := rank.poll():
                how = describe_end(status)
                if status < 0:
                    how += " and left no exit status"
                if status == -signal.SIGKILL:
                    how += ". Likely out of memory: dmesg -T"
                found.append(f"rank {number} (pid {rank.pid}) {how}")
        return found

    def wait(self, timeout: timedelta) -> None:
        """Wait until a rank ends, but at most ``timeout``."""
        wait([self._sockets[number] for number in self.running], timeout.total_seconds())

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to those of ``ranks`` (all by default) that are still running."""
        for each in range(len(self._ranks)) if ranks is None else ranks:
            self._ranks[each].send_signal(number)  # does nothing for a rank that has ended

    def end(self, *, settle: timedelta, grace: timedelta) -> list[str]:
        """End all remaining ranks and the processes that they started; return a line for each."""
        ended = end_sessions(self.pids, settle=settle, grace=grace)
        for rank in self._ranks:
            wait_or_kill(rank, 0)
        return ended

    def kill(self) -> None:
        """Write the stacks of ranks that hang, then end them and the processes they started."""
        try:
            collect_stacks(self._stacks, members(self.pids))
        except OSError as error:  # for example a full disk
            log.warning("The stacks could not be written to %s: %s", self._stacks, error)
        self.end(settle=timedelta(0), grace=timedelta(0))


def main() -> None:
    """Become the rank that the environment names."""
    parent = ParentConnection(plugins=False, ends=signal.SIGTERM)
    config, secrets = parent.receive()
    os.environ.update(secrets)
    program = importlib.import_module(sys.argv[1])
    parent.end_with_parent()
    leave(program.run_rank(config))


if __name__ == "__main__":
    main()
