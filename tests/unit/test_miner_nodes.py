"""The watch of ranks over other nodes' ranks, and the checks before torchrun."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from distributed_training.common.ports import free_ports
from distributed_training.miner import nodes
from distributed_training.miner.__main__ import main, set_rank_environment
from distributed_training.miner.nodes import Nodes, list_facts
from distributed_training.miner.ranks import join_ranks
from distributed_training.miner.run_folder import RankEnvironment, write_exit_status
from distributed_training.node.start import NetworkFailure
from distributed_training.protocol.types import ExitStatus
from tests.multiprocess.test_launcher_tree import COMMON
from tests.tools.miner_parts import config_of
from tests.tools.r2_keys import KEYS
from tests.tools.waiting import wait_for


class Watched(Nodes):
    """One of two ranks, each on a node of its own; it notes why it would end its process."""

    def __init__(self, store: Any, rank: int) -> None:
        self.wanted = self.hanging = False
        self.ended: list[str] = []
        super().__init__(
            store,
            RankEnvironment(rank=rank, local_rank=0, world_size=2, local_world_size=1),
            stop_wanted=lambda: self.wanted,
            hangs=lambda: self.hanging,
            stop_limit=timedelta(hours=1),
        )

    def _end(self, why: str) -> None:
        self.ended.append(why)
        self._closed.set()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watched]]:
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda: None)
    monkeypatch.setattr(nodes, "BEAT", timedelta(seconds=0.02))
    monkeypatch.setattr(nodes, "SILENCE", timedelta(seconds=0.5))
    store = dist.HashStore()
    made = [Watched(store, rank) for rank in range(2)]
    for each in made:
        each.start()
    yield made
    for each in made:
        each._closed.set()


def test_a_rank_that_falls_silent_ends_the_other(pair: list[Watched]) -> None:
    wait_for(lambda: min(pair[0]._counts.values()) > 2, "beats")
    pair[1]._closed.set()  # as a process that was stopped, or a machine without its cable
    wait_for(lambda: pair[0].ended, "the silence")
    assert pair[0].ended[0].startswith("Nothing was heard of node 1 (rank 1) for 0 s, so the ranks")


def test_a_rank_that_hangs_ends_all(pair: list[Watched]) -> None:
    pair[1].hanging = True
    wait_for(lambda: pair[0].ended and pair[1].ended, "both end")
    assert pair[0].ended == pair[1].ended and pair[0].ended[0].startswith("Rank 1 hangs: it came")


def test_a_stop_of_one_node_is_rank_0s_and_the_other_starts_again(
    pair: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    pair[1].wanted = True
    wait_for(lambda: sent, "rank 0 is asked")
    pair[0].wanted = True  # by its handler
    assert pair[0].close(ExitStatus.STOPPED, "asked to stop") == ExitStatus.FAULT
    assert pair[1].close(ExitStatus.STOPPED, "") == ExitStatus.STOPPED
    assert sent == [(os.getpid(), signal.SIGTERM)] and not pair[0].ended and not pair[1].ended


def test_a_stop_that_was_faster_than_a_beat_is_another_nodes_all_the_same() -> None:
    here, there = (Watched(dist.HashStore(), 1) for _ in range(2))
    here._store.add("stop", 1)
    there._store.add("stop", 1)
    there.wanted = True
    assert here.close(ExitStatus.STOPPED, "") == ExitStatus.FAULT
    assert there.close(ExitStatus.STOPPED, "") == ExitStatus.STOPPED


def test_only_the_first_reason_is_logged(pair: list[Watched]) -> None:
    third = Watched(pair[0]._store, 1)
    pair[0].close(ExitStatus.FAULT, "the disk is full")
    third.close(ExitStatus.FAULT, "Connection reset by peer")
    wait_for(lambda: pair[1].ended, "the other ends")
    assert pair[1].ended == ["rank 0 failed: the disk is full"]


def test_a_node_that_comes_back_early_ends_the_start_that_lost_it(pair: list[Watched]) -> None:
    again = Watched(pair[0]._store, 1)
    with pytest.raises(NetworkFailure, match=r"rank 1 was started again, .* last checkpoint"):
        again.start()
    wait_for(lambda: pair[0].ended, "the start before ends")
    assert pair[0].ended[0].startswith("rank 1 was started again")


@pytest.mark.parametrize("status", [ExitStatus.FAULT, ExitStatus.DEREGISTERED])
def test_a_failure_of_one_rank_ends_all(pair: list[Watched], status: ExitStatus) -> None:
    assert pair[0].close(status, "the disk is full") == status
    wait_for(lambda: pair[1].ended, "the other ends")
    assert pair[1].ended == ["rank 0 failed: the disk is full"]


def test_different_settings_of_two_nodes_are_logged_on_both() -> None:
    store = dist.HashStore()
    facts = [list_facts(config_of("--data.prefetch_blocks", text), ranks=1) for text in ("2", "9")]
    line = (
        "--data.prefetch_blocks is 9 on node 1 and 2 on node 0, so the nodes cannot train one model"
    )
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(Watched(store, r).compare, facts[r]) for r in range(2)]:
            with pytest.raises(NetworkFailure, match=line):
                each.result(30)


def test_machines_compare_all_settings_that_decide_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = list_facts(config_of(), ranks=2)

    def compare(*flags: str, ranks: int = 2) -> None:
        store = dist.HashStore()
        other = list_facts(config_of(*flags), ranks=ranks)
        store.set("facts/1", json.dumps(other))
        Watched(store, 0).compare(mine)

    compare("--data.workers", "7", "--neuron.run_folder", "x")
    with pytest.raises(NetworkFailure, match=r"^--data\.source is stdlib on node 1"):
        compare("--data.source", "stdlib")
    with pytest.raises(NetworkFailure, match="--nproc_per_node is 4 on node 1 and 2 on node 0"):
        compare(ranks=4)
    monkeypatch.setattr(nodes, "visible_gpu_count", lambda: 1)  # those here would talk gloo
    with pytest.raises(NetworkFailure, match=r"--neuron\.device is cuda on node 1 and cpu"):
        compare()


def test_ranks_that_do_not_meet_name_the_firewall() -> None:
    environ = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]),
    }  # fmt: skip
    with pytest.raises(NetworkFailure, match=r"did not meet at 127\.0\.0\.1 .* all TCP ports"):
        join_ranks(environ=environ, timeout=timedelta(seconds=1), backend="gloo")
    alone = environ | {"LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(RuntimeError):  # on one machine there is nothing to open
        join_ranks(environ=alone, timeout=timedelta(seconds=1), backend="gloo")


def test_gradients_go_through_the_interface_that_leads_to_node_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    found = psutil.net_if_addrs()
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found | {"ib0": []})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1", "NCCL_SOCKET_IFNAME": "ib0"}
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    set_rank_environment()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0", "the operator's"


def test_a_check_before_torchrun_has_the_status_that_torchrun_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GROUP_RANK", "1")  # where no keys are needed
    flags = [*COMMON, "--neuron.run_folder", str(tmp_path / "run")]
    assert main(["check", *flags]) == 0
    assert main(["check", *flags, "--neuron.sed", "9"]) == 2
    assert "--neuron.sed" in capsys.readouterr().err
    write_exit_status(tmp_path / "run", ExitStatus.DEREGISTERED, "the hotkey is gone")
    assert main(["check", *flags]) == 3
    assert capsys.readouterr().err == "error: the hotkey is gone\n"
    assert main(["check", *flags]) == 0, "whoever starts again has corrected it"
    monkeypatch.setenv("GROUP_RANK", "0")
    assert main(["check", *flags]) == 2, "node 0 needs them"
    for name, text in KEYS.items():
        monkeypatch.setenv(name, text)
    assert main(["check", *flags]) == 0
