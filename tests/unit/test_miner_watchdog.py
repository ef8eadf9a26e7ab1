from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.miner import run_folder
from distributed_training.miner.run_folder import Heartbeat, Watchdog, forget_ranks


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(run_folder, "time", clock)
    return clock


def test_ranks_that_come_to_boundaries_do_not_hang(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "pids").mkdir()
    beats = [Heartbeat(tmp_path, rank) for rank in (0, 1)]
    dog = Watchdog(tmp_path, world_size=2, limit=timedelta(seconds=5))
    clock.now += 3600  # a start takes as long as it takes
    assert not dog.hangs()
    for _ in range(200):  # boundaries every 0.2 s, as while a round or an upload is waited for
        clock.now += 0.2
        for beat in beats:
            beat()
        assert not dog.hangs()
    for _ in range(24):
        clock.now += 0.2
        beats[0]()
        assert not dog.hangs()
    clock.now += 1.5
    beats[0]()
    assert dog.hangs()  # rank 1
    forget_ranks(tmp_path)
    dog = Watchdog(tmp_path, world_size=2, limit=timedelta(seconds=5))
    assert not dog.hangs()
    clock.now += 6  # in the start: no rank came to a boundary
    assert dog.hangs()


def test_a_wall_clock_that_is_set_is_no_hang_and_hides_none(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "pids").mkdir()
    Heartbeat(tmp_path, 0)()
    file = tmp_path / "pids" / "rank-0.beat"
    dog = Watchdog(tmp_path, world_size=1, limit=timedelta(seconds=5))
    for wall in (0, 2_000_000_000, 1_000_000_000):
        os.utime(file, (wall, wall))
        clock.now += 4
        assert not dog.hangs()
    clock.now += 6
    assert dog.hangs()


def test_a_rank_without_a_launcher_does_not_mind(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "nowhere", 0)()
    assert not (tmp_path / "nowhere").exists()
