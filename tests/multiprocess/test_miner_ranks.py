"""Test commands, votes and readiness of data over real gloo processes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.multiprocessing as mp

from distributed_training.miner.events import Action, Command, DataPart
from distributed_training.miner.rank_group import rank_variables
from distributed_training.miner.ranks import join_ranks
from distributed_training.miner.run_folder import RANK_STORE, rank_environment
from tests.tools import forked
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(120)

SCRIPT = [
    Command(Action.TRAIN, data=DataPart(11, 10, 64, 24)),
    Command(Action.FOLLOW_SCHEDULE, outer_step=7, inner_steps=2**40),
    Command(Action.WRITE_UPLOAD),
    Command(Action.STOP, exit_status=3),
]


def _rank(rank: int, world_size: int, folder: str) -> None:
    os.environ.update(rank_variables(rank, world_size=world_size))
    os.environ[RANK_STORE] = str(Path(folder, "store"))
    ranks = join_ranks(rank_environment(), timeout=timedelta(seconds=30), backend="gloo")
    listens = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}
    assert listens <= {"127.0.0.1"}, listens  # no other machine can connect to the ranks
    assert listens or rank != 0
    lines = [str(ranks.share("start", {"uid": 227} if rank == 0 else None))]
    for command in SCRIPT:
        lines.append(str(ranks.broadcast(command if rank == 0 else None)))
    lines.append(str(ranks.vote(True)))
    lines.append(str(ranks.vote(rank != 1)))
    if rank == 0:
        # A rank that has not reported does not block rank 0; it is simply not ready.
        assert ranks.ready_everywhere(99, 8) is None
        assert ranks.ready_everywhere(10, None) is None
    ranks.vote(True)
    ranks.report_ready(10, 40 + rank)
    ranks.vote(True)
    if rank == 0:
        assert ranks.ready_everywhere(10, 100) == 41
    Path(folder, str(rank)).write_text("\n".join(lines))
    ranks.close()


def test_all_ranks_see_the_same_commands(tmp_path: Path) -> None:
    forked.prepare()
    mp.start_processes(_rank, (2, str(tmp_path)), nprocs=2, start_method="forkserver")
    first, second = ((tmp_path / name).read_text() for name in "01")
    assert first == second
    assert first.splitlines() == ["{'uid': 227}", *map(str, SCRIPT), "True", "False"]


RANK = """
import os, sys, time
from datetime import timedelta
from distributed_training.miner.ranks import join_ranks
from distributed_training.miner.run_folder import rank_environment
ranks = join_ranks(rank_environment(), timeout=timedelta(seconds=60), backend="gloo")
print("joined", flush=True)
while ranks.rank == 0 and not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print(ranks.share("start", {"uid": 227} if ranks.rank == 0 else None), flush=True)
ranks.close()
"""

#: A program of another account, which knows the ports and the names of the keys and of the file.
STRANGER = """
import os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
os.setgroups([]); os.setgid(65534); os.setuid(65534)
path, ports = sys.argv[1], sys.argv[2:]
for change in (lambda: open(path, "ab"), lambda: os.listdir(os.path.dirname(path)),
               lambda: os.unlink(path), lambda: dist.FileStore(path, 2).set("a", "b")):
    try:
        change()
    except (OSError, RuntimeError):
        continue
    print("the file is open to all")
answered = []
def ask(port):
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5),
                          wait_for_workers=False)
    store.set("miner/share/start", '{"uid": 666}')
    answered.append((port, store.list_keys()))
threading.excepthook = lambda _: None
asking = [threading.Thread(target=ask, args=(int(port),), daemon=True) for port in ports]
for thread in asking:
    thread.start()
end = time.monotonic() + 10
for thread in asking:
    thread.join(max(0, end - time.monotonic()))  # one that is no store never answers
print(*answered, sep="", end="", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another account")
def test_another_account_of_the_machine_cannot_reach_the_ranks_store(tmp_path: Path) -> None:
    memory = os.memfd_create("ranks")  # as the launcher creates it
    store, go = f"/proc/{os.getpid()}/fd/{memory}", tmp_path / "go"
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "stranger.py").write_text(STRANGER)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, memory)
        ranks = []
        for rank in range(2):
            environ = rank_variables(rank, world_size=2) | {RANK_STORE: store}
            log = tmp_path / f"{rank}.log"
            ranks.append(forked.Program(tmp_path / "rank.py", str(go), environ=environ, log=log))
            stack.callback(ranks[-1].kill)
        for process in ranks:
            wait_for(lambda log=process.log: log.exists() and "joined" in log.read_text())
        ports = {
            connection.laddr.port
            for process in ranks
            for connection in psutil.Process(process.pid).net_connections()
            if connection.status == "LISTEN"
        }
        asked = map(str, (store, *ports))
        elsewhere = Path(tempfile.gettempdir())
        found = forked.run(tmp_path / "stranger.py", *asked, environ={}, folder=elsewhere)
        assert found.returncode == 0 and not found.stdout, found.stdout + found.stderr
        go.touch()
        assert [process.wait(60) for process in ranks] == [0, 0]
    outputs = [process.log.read_text() for process in ranks]
    assert outputs == ["joined\n{'uid': 227}\n"] * 2
