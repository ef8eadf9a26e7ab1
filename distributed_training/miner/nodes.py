"""Join the ranks of several machines (*nodes*) that torchrun started.

torchrun starts the ranks of its node, forwards a signal to them, and ends them all once one has
failed. A rank of another node then fails in its next collective, so torchrun ends on all nodes, pm2
or Slurm starts it again, and training continues from the last checkpoint. There are two things that
torchrun does not do, so the ranks do them through torchrun's store on node 0:

    stop           a node was asked to stop: rank 0 saves, and ends all ranks
    started/R      rank R has started; if it finds this key already set, it came back too early
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distributed_training.common.processes import leave, limit_resources
from distributed_training.config import Config
from distributed_training.node.start import NetworkFailure, log_settings
from distributed_training.protocol.types import ExitStatus

from .launcher import dashboard, occupied
from .run_folder import RankEnvironment

log = logging.getLogger(__name__)

LOOK = 2.0  # seconds between two checks of torchrun's store
_STORE_TIMEOUT = timedelta(seconds=30)


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def open_tcp_store() -> dist.Store:
    """Connect to torchrun's store on node 0."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
    )
    return dist.PrefixStore("nodes", store)


class Nodes:
    """Carries out one rank's part in a miner on several machines.

    ``store``: a connection that only this object uses, since a missing answer must not hold up
    anything else. ``stop_wanted``: returns whether this process was asked to stop. ``hangs``:
    returns whether this rank shows no sign of life.
    """

    def __init__(
        self,
        store: Any,
        me: RankEnvironment,
        *,
        stop_wanted: Callable[[], bool],
        hangs: Callable[[], bool],
    ) -> None:
        self._store = store
        self._me = me
        self._stop_wanted = stop_wanted
        self._hangs = hangs
        self._stopped_elsewhere = False
        self._closed = threading.Event()

    def join(self, config: Config, folder: Path, stack: ExitStack) -> None:
        """Do what the launcher otherwise does before it starts the ranks, and begin to watch.

        Closing ``stack`` undoes these steps. Raises ConfigError, and NetworkFailure if an earlier
        process of this rank already took part in the same start.
        """
        limit_resources()
        if self._me.local_rank == 0:
            log_settings(config)
            # Nodes may share the disk that holds the wallet.
            stack.enter_context(occupied(config, folder, sends=self._me.rank == 0))
        if self._me.rank == 0:
            stack.enter_context(dashboard(config, folder))
        if self._store.add(f"started/{self._me.rank}", 1) > 1:
            raise NetworkFailure(
                f"the ranks of the other nodes have not noticed yet that rank {self._me.rank} "
                "ended, so it ends once more: training continues from the last checkpoint once "
                "torchrun has restarted on all nodes"
            )
        threading.Thread(target=self._watch, name="nodes", daemon=True).start()

    def close(self, status: int, reason: str) -> int:
        """Stop watching. Return the exit status for torchrun.

        If another node was asked to stop, this node must be started again, so that it waits for
        that node. The status is then FAULT, since after 0 torchrun would first wait 300 s.
        """
        self._closed.set()
        if self._me.rank == 0:
            log.info("Stopped with status %d%s", status, f": {reason}" if reason else "")
        asked = self._stopped_elsewhere
        if status == ExitStatus.STOPPED and not asked and not self._stop_wanted():
            try:  # all ranks may have saved before this rank's next check
                asked = self._store.add("stop", 0) > 0
            except RuntimeError:
                log.debug("torchrun's store is gone", exc_info=True)
        if status != ExitStatus.STOPPED or not asked:
            return status
        log.info("Another node was asked to stop: saved; once it is back, training continues")
        return ExitStatus.FAULT

    def _watch(self) -> None:
        while not self._closed.wait(LOOK):
            if self._hangs():
                faulthandler.dump_traceback()
                log.error(
                    "Rank %d hangs: it came to no micro-batch boundary within "
                    "--neuron.hang_timeout, or no further in its start, so the ranks of all nodes "
                    "end (stacks are in its output)",
                    self._me.rank,
                )
                leave(ExitStatus.FAULT)
            try:
                if self._stop_wanted() and not self._stopped_elsewhere:
                    self._store.add("stop", 1)
                elif (
                    self._me.rank == 0
                    and not self._stopped_elsewhere
                    and self._store.add("stop", 0) > 0
                ):
                    # This rank decides for all, as if it had been asked to stop.
                    self._stopped_elsewhere = True
                    os.kill(os.getpid(), signal.SIGTERM)
            except RuntimeError:
                log.debug("torchrun's store does not answer", exc_info=True)
