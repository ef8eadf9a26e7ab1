"""Orders, votes and readiness over real gloo processes."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.multiprocessing as mp

from distributed_training.common.ports import free_ports
from distributed_training.miner.orders import Command, DataOrder, Order
from distributed_training.miner.rank_group import rank_variables
from distributed_training.miner.ranks import join_ranks
from tests import forked

pytestmark = pytest.mark.timeout(120)

SCRIPT = [
    Command(Order.TRAIN, 0, DataOrder(11, 10, 64, 24)),
    Command(Order.SNAPSHOT, 2**40),
    Command(Order.STOP, 3),
]


def _rank(rank: int, world_size: int, port: int, folder: str) -> None:
    os.environ.update(rank_variables(rank, world_size=world_size, port=port))
    ranks = join_ranks(
        environ=os.environ,
        timeout=timedelta(seconds=30),
        backend="gloo",
    )
    listens = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}
    assert listens <= {"127.0.0.1"}, listens  # nobody else's machine can talk to the ranks
    assert listens or rank != 0
    lines = [str(ranks.share("start", {"uid": 227} if rank == 0 else None))]
    for command in SCRIPT:
        lines.append(str(ranks.agree(command if rank == 0 else None)))
    lines.append(str(ranks.all_agree(True)))
    lines.append(str(ranks.all_agree(rank != 1)))
    if rank == 0:
        # A rank that has not reported does not block rank 0; it is simply not ready.
        assert ranks.ready_everywhere(99, 8) is None
        assert ranks.ready_everywhere(10, None) is None
    ranks.all_agree(True)
    ranks.report_ready(10, 40 + rank)
    ranks.all_agree(True)
    if rank == 0:
        assert ranks.ready_everywhere(10, 100) == 41
    Path(folder, str(rank)).write_text("\n".join(lines))
    ranks.close()


def test_all_ranks_see_the_same(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    forked.prepare()
    mp.start_processes(_rank, (2, port, str(tmp_path)), nprocs=2, start_method="forkserver")
    first, second = ((tmp_path / name).read_text() for name in "01")
    assert first == second
    assert first.splitlines() == ["{'uid': 227}", *map(str, SCRIPT), "True", "False"]
