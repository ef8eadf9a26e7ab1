"""Keep the ranks of several machines (*nodes*) together, where torchrun started them.

torchrun starts the ranks of its node, passes a signal on to them, and ends them all once one has
failed. It looks at no other node. So each rank has a connection of its own to torchrun's store on
node 0, and does this every two seconds:

    beat/R      count up its own; check whether the others' still change
    stop        count it up once this node was asked to stop; rank 0 then saves and ends all
    over        end at once: a rank failed, and the line says why

A rank that was silent for :data:`SILENCE` is lost: its process was stopped, or its machine is off
or unplugged. Then each rank ends with a line, torchrun ends with its ranks, and pm2 or Slurm starts
torchrun again. It waits for the other nodes, and training continues from the last checkpoint.
Collectives keep their long timeouts, since compiling a model may put minutes between two ranks.

A torchrun that comes back early finds the store of the start before. Each rank counts up
``started/R`` first, so that it is no part of a start that has lost it: it ends that one.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distributed_training import __version__
from distributed_training.common.processes import leave, limit_resources
from distributed_training.config import Config
from distributed_training.config.schema import schema
from distributed_training.config.types import show
from distributed_training.health.gpus import visible_gpu_count
from distributed_training.node.start import NetworkFailure, StopNow, log_settings
from distributed_training.protocol.types import ExitStatus

from .launcher import dashboard, occupied
from .run_folder import RankEnvironment

log = logging.getLogger(__name__)

SILENCE = timedelta(seconds=60)
#: Until a rank is heard for the first time: it imports torch, maybe from a cold disk.
FIRST_SILENCE = timedelta(minutes=10)
BEAT = timedelta(seconds=2)

_STORE_TIMEOUT = timedelta(seconds=30)
_POLL = 0.1  # seconds
_LOG_GRACE = timedelta(seconds=5)

#: Settings outside of the packages training and data that must be equal on all nodes.
_OF_ALL = {"store.global_bucket", "tokenizer.name"}
#: Settings inside that need not be: where things lie, and how much of the machine is used.
_OF_ONE_NODE = frozenset({"data.workers", "profile.steps"})


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def list_facts(config: Config, *, ranks: int) -> dict[str, str]:
    """Return what must be equal on all nodes, as an operator would write it.

    ``ranks``: of each node.
    """
    settings = [
        setting
        for setting in schema("miner")
        if (setting.name in _OF_ALL or setting.places[0][0] in ("training", "data"))
        and setting.name not in _OF_ONE_NODE
    ]
    # Between two releases the number stays. Another default is then no flag that somebody gave.
    defaults = zlib.crc32(repr([(s.name, s.default) for s in settings]).encode())
    on_gpu = config.miner.device != "cpu" and visible_gpu_count() > 0
    network = config.network
    return {
        "version": f"{__version__}+{defaults:08x}",
        "torch": version("torch"),
        "--nproc_per_node": str(ranks),
        "--neuron.device": "cuda" if on_gpu else "cpu",
        "--network": network.head.name if network is not None else "",
    } | {
        # A node that started later may have read a newer file.
        f"{setting.name} of the network's file" if setting.is_rule else f"--{setting.name}": show(
            config.get(setting.name)
        )
        for setting in settings
    }


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
    """One rank's watch over all ranks.

    ``store``: a connection for only this object, since an answer that does not come must hold up
    nothing else. ``stop_wanted``: whether this process was asked to stop. ``hangs``: whether this
    rank shows no sign of life, so that it must not count up any more. ``stop_limit``: from the
    first rank that ended well to the last.
    """

    def __init__(
        self,
        store: Any,
        me: RankEnvironment,
        *,
        stop_wanted: Callable[[], bool],
        hangs: Callable[[], bool],
        stop_limit: timedelta,
    ) -> None:
        self._store = store
        self._me = me
        self._stop_wanted = stop_wanted
        self._hangs = hangs
        self._stop_limit = stop_limit
        self._counts = dict.fromkeys(range(me.world_size), 0)
        self._heard = dict.fromkeys(range(me.world_size), time.monotonic())
        self._told_stop = False
        self._stopped_elsewhere = False
        self._closed = threading.Event()

    def join(self, config: Config, folder: Path, stack: ExitStack) -> None:
        """Do what else the launcher does before there are ranks; watch, and wait for all ranks.

        ``stack`` ends it. Raises ConfigError; NetworkFailure where nodes differ, and in a start
        that an earlier process of this rank was part of; Stopped.
        """
        limit_resources()
        if self._me.local_rank == 0:
            log_settings(config)
            stack.enter_context(occupied(config, folder))
        if self._me.rank == 0:
            stack.enter_context(dashboard(config, folder))
        self.start()
        self.compare(list_facts(config, ranks=self._me.local_world_size))

    def start(self) -> None:
        if self._store.add(f"started/{self._me.rank}", 1) > 1:
            line = (
                f"rank {self._me.rank} was started again, and what it trained is lost with it, so "
                "the ranks of all nodes end: they continue from the last checkpoint once torchrun "
                "runs on all nodes again"
            )
            self._end_all(line)
            raise NetworkFailure(line)
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name="nodes", daemon=True).start()

    def compare(self, facts: Mapping[str, str]) -> None:
        """Wait for all ranks. Raises as :meth:`join` does, on all of them if nodes differ."""
        self._store.set(f"facts/{self._me.rank}", json.dumps(facts))
        keys = [f"facts/{rank}" for rank in range(self._me.world_size)]
        # Not Store.wait: a rank that blocks in it handles no SIGTERM.
        while not self._store.check(keys):
            if self._stop_wanted():
                self._end_all("a node was asked to stop before all ranks had met")
                raise StopNow
            time.sleep(_POLL)
        first, *others = (json.loads(self._store.get(key)) for key in keys)
        ranks = int(first["--nproc_per_node"])
        for rank, other in enumerate(others, start=1):
            for name in [*first, *other]:
                here, there = first.get(name), other.get(name)
                if here != there:
                    raise NetworkFailure(
                        f"{name} is {there} on node {max(1, rank // ranks)} and {here} on node 0, "
                        "so the nodes cannot train one model together: give all nodes the same "
                        "flags and versions"
                    )

    def close(self, status: int, reason: str) -> int:
        """Stop watching. Return the exit status for torchrun.

        A failure ends all ranks. After a stop that another node was asked for, this one is to be
        started again: then it waits for that node, while torchrun after 0 would wait 300 s first.
        """
        self._closed.set()
        if self._me.rank == 0:
            log.info("Stopped with status %d%s", status, f": {reason}" if reason else "")
        try:
            if status != ExitStatus.STOPPED:
                self._end_all(f"rank {self._me.rank} failed: {reason}")
                return status
            # Others may still write or close what they have: nobody may end them for a silence now.
            self._store.set("done", "")
            # All may have saved before this rank's next beat.
            if not self._stop_wanted() and self._store.add("stop", 0) > 0:
                self._stopped_elsewhere = True
        except RuntimeError:  # torchrun on node 0 is gone
            log.debug("torchrun's store is gone", exc_info=True)
        if not self._stopped_elsewhere:
            return status
        log.info("Another node was asked to stop: saved; once it is back, training continues")
        return ExitStatus.FAULT

    def _end_all(self, why: str) -> None:
        """End the ranks of all nodes. The first reason stays: others fail as it ends them."""
        self._store.compare_set("over", "", why)

    # --- threads -------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Exchange beats; answers that do not come count as silence."""
        while not self._closed.wait(BEAT.total_seconds()):
            try:
                if self._hangs():
                    faulthandler.dump_traceback()
                    line = (
                        f"Rank {self._me.rank} hangs: it came to no micro-batch boundary within "
                        "--neuron.hang_timeout, or no further in its start, so the ranks of all "
                        "nodes end (stacks are in its output)"
                    )
                    self._end_all(line)
                    self._end(line)
                else:
                    self._exchange()
            except RuntimeError:
                log.debug("torchrun's store does not answer", exc_info=True)

    def _exchange(self) -> None:
        for rank, before in self._counts.items():
            count = self._store.add(f"beat/{rank}", int(rank == self._me.rank))
            if count != before:
                self._counts[rank], self._heard[rank] = count, time.monotonic()
        if self._store.check(["over"]):
            self._end(self._store.get("over").decode())
        if self._store.check(["done"]):
            self._closed.set()
            # One that hangs while it closes what it has would keep torchrun from ending.
            _exit_after(self._stop_limit)
        asked = self._store.add("stop", 0) > 0
        if self._stop_wanted():
            if not self._told_stop and not self._stopped_elsewhere:
                self._told_stop = True
                self._store.add("stop", 1)
        elif asked and not self._stopped_elsewhere:
            self._stopped_elsewhere = True
            if self._me.rank == 0:  # which decides for all, as if it had been asked itself
                os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self) -> None:
        """End this process after a silence. A thread of its own: the other may wait for a store."""
        while not self._closed.wait(1.0):
            now = time.monotonic()
            for rank, heard in self._heard.items():
                node = rank // self._me.local_world_size
                limit = SILENCE if self._counts[rank] else FIRST_SILENCE
                if now - heard > limit.total_seconds():
                    self._end(
                        f"Nothing was heard of node {node} (rank {rank}) for "
                        f"{limit.total_seconds():.0f} s, so the ranks of this node end: training "
                        "continues from the last checkpoint once torchrun runs on all nodes again"
                    )

    def _end(self, why: str) -> None:
        if self._closed.is_set():
            return
        _exit_after(_LOG_GRACE)  # a disk that hangs may hold up the log
        log.error("%s", why)
        leave(ExitStatus.FAULT)


def _exit_after(limit: timedelta) -> None:
    late = threading.Timer(limit.total_seconds(), os._exit, (ExitStatus.FAULT,))
    late.daemon = True
    late.start()
