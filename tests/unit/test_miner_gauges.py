"""Test what is measured of the machine and of the validators' limits."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from distributed_training.health.gpus import GpuSample
from distributed_training.miner import reporter
from distributed_training.miner.reporter import Growth, MachineGauges, limits
from distributed_training.miner.run_folder import INSTANCE, write_pid_file
from distributed_training.telemetry.metrics import METRICS
from tests.tools.miner_parts import upload_schedule

pytestmark = pytest.mark.timeout(30)


def test_a_leak_has_a_slope_and_a_start_has_none() -> None:
    growth, steady = Growth(), Growth()
    for minute in range(120):
        assert (growth.per_hour() is None) == (minute < 30)
        for second in (0, 15, 30, 45):  # as the metrics are written
            growth.add(60 * minute + second, 1e9 + 2e6 * minute + (5e5 if minute % 2 else 0))
            steady.add(60 * minute + second, 1e9)
    assert growth.per_hour() == pytest.approx(120e6, rel=0.02) and steady.per_hour() == 0


def test_the_machine_is_measured_rank_by_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INSTANCE, "mark")
    write_pid_file(tmp_path, 0)
    machine = MachineGauges(tmp_path, needed=5, gpus=0)
    figures = {name: measure() for name, measure in machine.single().items()}
    assert figures.keys() <= METRICS.keys() and figures["disk_needed_bytes"] == 5
    assert figures["memory_growth_bytes_per_hour"] is None
    assert (figures["memory_total_bytes"] or 0) > (figures["memory_bytes"] or 0) > 1e7
    (ranks,) = machine.by_rank().values()
    assert machine.by_rank().keys() == {"rank_memory_bytes"} and ranks.keys() == {0}
    assert ranks[0] > 1e7 and os.getpid()
    monkeypatch.setenv(INSTANCE, "another")
    write_pid_file(tmp_path, 0)
    assert machine.by_rank() == {}, "a rank of another start is none of ours"


class Card:
    """Report as a GPU does: the second one cannot measure its power, the third fell off the bus."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.closed = False

    def sample(self) -> GpuSample | None:
        power = 650.0 if self.index == 0 else None
        used = GpuSample(self.index, "H200", 141.0, 70.0, 98.0, 60.0, power)
        return None if self.index == 2 else used

    def close(self) -> None:
        self.closed = True


def test_each_gpu_is_told_by_its_ranks_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [Card(index) for index in range(3)]
    monkeypatch.setattr(
        reporter.NvmlSampler, "open", lambda index: dict(enumerate(cards)).get(index)
    )
    machine = MachineGauges(tmp_path, needed=5, gpus=4)  # the fourth has no NVML
    found = machine.by_rank()
    assert found.keys() <= METRICS.keys()
    assert found["rank_gpu_memory_bytes"] == {0: 70e9, 1: 70e9}
    assert found["rank_gpu_utilization_percent"] == {0: 98.0, 1: 98.0}
    assert found["rank_gpu_power_watts"] == {0: 650.0}, "what was not measured is absent"
    machine.close()
    assert all(card.closed for card in cards)


def test_both_limits_count_down() -> None:
    schedule = upload_schedule(published_at=time.monotonic() - 1000)
    newest: list[int | None] = [None]
    made = limits(
        schedule, newest=lambda: newest[0], chain_block=lambda: 1300, most_blocks=lambda: 200
    )
    assert made.keys() <= METRICS.keys()
    assert made["block_list_age_blocks"]() is None and made["block_list_blocks_left"]() is None
    newest[0] = 1250
    found = {name: measure() for name, measure in made.items()}
    assert found["publication_age_seconds"] == pytest.approx(1000, abs=5)
    assert found["publication_seconds_left"] == pytest.approx(32400 - 1000, abs=5)
    assert found["last_publication_timestamp_seconds"] == pytest.approx(time.time() - 1000, abs=5)
    assert found["block_list_age_blocks"] == 50 and found["block_list_blocks_left"] == 150
