"""The files that ranks and launcher share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed_training.common.exits import ExitStatus
from distributed_training.common.processes import Mark
from distributed_training.miner import process
from distributed_training.miner.process import INSTANCE


def test_what_an_earlier_instance_wrote_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INSTANCE, "one")
    process.write_pid_file(tmp_path, 0)
    process.write_exit_status(tmp_path, 3, "deregistered")
    assert process.listening_ranks(tmp_path, instance="one") == {0: os.getpid()}
    written = process.read_exit_status(tmp_path, instance="one")
    assert written == (ExitStatus.DEREGISTERED, "deregistered")
    assert process.listening_ranks(tmp_path, instance="two") == {}
    assert process.read_exit_status(tmp_path, instance="two") is None
    process.forget_ranks(tmp_path)
    assert process.listening_ranks(tmp_path, instance="one") == {}
    assert process.read_exit_status(tmp_path, instance="one") is None
    assert not list(tmp_path.rglob("*.json*"))


@pytest.mark.parametrize(
    "text", ['{"status": 0, "inst', "[1]", '{"status": 9, "instance": "x"}', '{"instance": "x"}']
)
def test_a_broken_file_is_no_file(tmp_path: Path, text: str) -> None:
    for name in ("exit_status.json", "instance.json"):
        (tmp_path / name).write_text(text)
    assert process.read_exit_status(tmp_path, instance="x") is None
    assert process.launcher_pid(tmp_path) is None
    assert process.mark_of(tmp_path) in (None, Mark(INSTANCE, "x"))


def test_the_mark_of_the_last_launcher_is_kept(tmp_path: Path) -> None:
    assert process.mark_of(tmp_path) is None
    process.write_instance(tmp_path, Mark(INSTANCE, "abc"))
    assert process.mark_of(tmp_path) == Mark(INSTANCE, "abc")
    assert process.launcher_pid(tmp_path) == os.getpid()


def test_rank_environment() -> None:
    env = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", INSTANCE: "m"}
    assert process.rank_environment(env) == process.RankEnvironment(3, 1, 4, "m")
    with pytest.raises(KeyError):
        process.rank_environment({})
