"""Run one rank of a miner: ``store_ranks.py MOMENT OUTER_STEP FOLDER BUCKET EXCHANGE``.

The rank is built as in the product, including the thread that follows the store. BUCKET is a
folder, where :class:`~tests.tools.store_leader.Leader` stands for the validator; only the chain is
simulated. At MOMENT of an upload, or of the update that follows, all ranks are killed. With
``none`` the miner stops at OUTER_STEP. With ``traced`` it also lists the files that it executed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections import defaultdict
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

import psutil

from distributed_training.common.processes import leave
from distributed_training.config import Config
from distributed_training.exchange import store_rounds
from distributed_training.miner import events as ev
from distributed_training.miner import start
from distributed_training.miner.events import MinerState
from distributed_training.miner.ranks import join_ranks
from distributed_training.miner.run_folder import rank_environment
from tests.tools.member_world import STORE_RULES, build_played, save_starts
from tests.tools.miner_parts import config_of
from tests.tools.small_miner import FLAGS

#: Threads that follow the network -> the phase for which they are traced.
FETCHES = dict.fromkeys(("store-rounds", "manifests", "download"), "round")
RANK = int(os.environ.get("RANK", "0"))


def store_config(exchange: str = "store") -> Config:
    flags = [f"--{k}={v}" for k, v in FLAGS.items()]
    flags += ["--dht.ip=127.0.0.1"] if exchange == "hivemind" else []
    return config_of(*flags, rules=STORE_RULES | {"exchange": exchange})


def kill() -> None:
    os.kill(0, 9)  # the whole process group


def killed_at(moment: str, event: ev.Event) -> bool:
    match event:
        case ev.UploadBegun():
            return moment == "taken"
        case ev.UploadWritten():
            return moment == "written"
        case ev.UploadEnded():
            return moment == "sent"
        case ev.OuterStepEnded(committed=True):
            return moment == "committed"
    return False


def run(moment: str, until: int, folder: Path, bucket: Path, exchange: str) -> None:
    store_rounds._INTERVAL, store_rounds._SOON = 0.2, 0.1
    config = store_config(exchange)
    ranks = join_ranks(rank_environment(), timeout=timedelta(seconds=60), backend="gloo")
    events: SimpleQueue[ev.Event] = SimpleQueue()
    stack = ExitStack()
    files, phase = defaultdict[str, set[str]](set), ["inner step"]

    def profile(frame: FrameType, event: str, argument: object) -> None:
        name = threading.current_thread().name.partition("_")[0]
        # Other threads belong to no phase.
        if (where := {"MainThread": phase[0], "upload": "upload"} | FETCHES).get(name):
            files[where[name]].add(frame.f_code.co_filename)

    with stack:
        rank = build_played(bucket, config, folder, ranks, events, stack)
        trainer, rank_zero = rank.loop._trainer, rank.rank_zero
        if moment == "prepared":
            trainer.commit_outer_step = kill  # type: ignore[method-assign]
        if rank_zero is not None:
            rank_zero.controller.subscribe(lambda event, state: follow(event, state))

        def follow(event: ev.Event, state: MinerState) -> None:
            if killed_at(moment, event):
                kill()
            if isinstance(event, ev.InnerStepDone) and trainer.outer_step >= until:
                events.put(ev.StopRequested("the test is over"))
            if moment == "stopped" and isinstance(event, ev.UploadEnded):
                events.put(ev.StopRequested("the test is over"))

        def trace(event: ev.Event, state: MinerState) -> None:
            match event:
                case ev.InnerStepDone():
                    sys.setprofile(profile)
                case ev.CloseReached():
                    phase[0] = "upload"
                case ev.UpdateReady():
                    phase[0] = "round"
                case ev.StopRequested():
                    phase[0] = "stop"

        if moment == "traced":
            threading.setprofile(profile)
            if rank_zero is not None:
                rank_zero.controller._subscribers.insert(0, trace)
        ended = rank.run()
        sys.setprofile(None)
        assert ended == (0, "the test is over" if RANK == 0 else "")
        save_starts(trainer, folder)
        if RANK == 0:
            me = psutil.Process()
            listens = [
                f"{each.name()}: {found.laddr}"
                for each in (me, *me.children(recursive=True))
                for found in each.net_connections("inet")
                # gloo, by which the ranks meet, listens on the loopback interface only.
                if found.status == psutil.CONN_LISTEN and not found.laddr.ip.startswith("127.")
            ]
            product = str(Path(start.__file__).parents[1]) + os.sep
            seen = {
                "modules": [n for n in sys.modules if "hivemind" in n],
                "listens": listens,
                "files": {
                    where: sorted(n.removeprefix(product) for n in found if n.startswith(product))
                    for where, found in files.items()
                },
            }
            (folder / "seen.json").write_text(json.dumps(seen | {"outer_step": trainer.outer_step}))
    ranks.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, force=True)
    run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
    leave(0)
