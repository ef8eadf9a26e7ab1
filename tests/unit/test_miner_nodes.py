"""Test how ranks of several nodes stop together, and the checks before torchrun starts."""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distributed_training.common.ports import free_ports
from distributed_training.miner import nodes
from distributed_training.miner.__main__ import main
from distributed_training.miner.nodes import Nodes
from distributed_training.miner.ranks import join_ranks
from distributed_training.miner.run_folder import RankEnvironment, write_exit_status
from distributed_training.node.start import NetworkFailure
from distributed_training.protocol.types import ExitStatus
from tests.multiprocess.test_launcher_tree import COMMON
from tests.tools.miner_parts import config_of
from tests.tools.r2_keys import KEYS
from tests.tools.waiting import wait_for


def node(store: Any, rank: int, folder: Path, *, stop: list[bool]) -> Nodes:
    """Return one of two ranks on separate nodes. ``stop[0]``: whether it was asked to stop."""
    me = RankEnvironment(rank=rank, local_rank=0, world_size=2, local_world_size=1)
    made = Nodes(store, me, stop_wanted=lambda: stop[0], hangs=lambda: False)
    with ExitStack() as stack:
        made.join(config_of("--neuron.page_port", "off"), folder, stack)
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the signals that ranks send to themselves."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(nodes, "LOOK", 0.02)
    monkeypatch.setattr(nodes, "occupied", lambda *_, sends: nullcontext())
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    return sent


def test_a_stop_of_one_node_is_rank_0s_and_the_other_starts_again(
    tmp_path: Path, quick: list[tuple[int, int]]
) -> None:
    store, here, there = dist.HashStore(), [False], [False]
    first, second = node(store, 0, tmp_path, stop=here), node(store, 1, tmp_path, stop=there)
    there[0] = True
    wait_for(lambda: quick, "rank 0 is asked")
    here[0] = True  # the signal handler would set this
    assert first.close(ExitStatus.STOPPED, "asked to stop") == ExitStatus.FAULT
    assert second.close(ExitStatus.STOPPED, "") == ExitStatus.STOPPED
    assert quick == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.usefixtures("quick")
def test_a_stop_that_was_faster_than_a_look_is_another_nodes_all_the_same(tmp_path: Path) -> None:
    store = dist.HashStore()
    store.add("stop", 1)
    assert node(store, 1, tmp_path, stop=[False]).close(ExitStatus.STOPPED, "") == ExitStatus.FAULT
    asked = Nodes(store, RankEnvironment(1, 0, 2, 1), stop_wanted=lambda: True, hangs=lambda: False)
    assert asked.close(ExitStatus.STOPPED, "") == ExitStatus.STOPPED
    assert asked.close(ExitStatus.DEREGISTERED, "") == ExitStatus.DEREGISTERED


@pytest.mark.usefixtures("quick")
def test_a_rank_that_comes_back_before_the_others_ended_ends_once_more(tmp_path: Path) -> None:
    store = dist.HashStore()
    node(store, 1, tmp_path, stop=[False]).close(ExitStatus.FAULT, "killed")
    with pytest.raises(NetworkFailure, match=r"rank 1 ended, so it ends once more: .* last check"):
        node(store, 1, tmp_path, stop=[False])


@pytest.mark.usefixtures("quick")
def test_a_rank_that_hangs_ends_with_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda: ended.append(-1))

    def leave(status: int) -> None:
        ended.append(status)
        hung._closed.set()

    monkeypatch.setattr(nodes, "leave", leave)
    me = RankEnvironment(rank=1, local_rank=1, world_size=2, local_world_size=2)
    hung = Nodes(dist.HashStore(), me, stop_wanted=lambda: False, hangs=lambda: True)
    with ExitStack() as stack:
        hung.join(config_of(), tmp_path, stack)
        wait_for(lambda: len(ended) == 2, "its end")
    assert ended == [-1, ExitStatus.FAULT] and "Rank 1 hangs: it came to no" in caplog.text


def test_ranks_that_do_not_meet_name_the_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
    soon = timedelta(seconds=1)
    with pytest.raises(NetworkFailure, match=r"did not meet at 127\.0\.0\.1 .* all TCP ports"):
        join_ranks(RankEnvironment(1, 0, 2, 1), timeout=soon, backend="gloo")
    with pytest.raises(RuntimeError):  # on one machine no firewall is involved
        join_ranks(RankEnvironment(1, 1, 2, 2), timeout=soon, backend="gloo")


def test_a_check_before_torchrun_has_the_status_that_torchrun_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GROUP_RANK", "1")  # a node other than node 0 needs no keys
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
