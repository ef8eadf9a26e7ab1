"""Test the limits that containers set on cores and memory, in both versions of control groups."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

import psutil
import pytest

from distributed_training.common import control_groups
from distributed_training.common.control_groups import usable_cores
from distributed_training.common.memory import host_bytes
from distributed_training.miner.rank_group import rank_environment_defaults

pytestmark = pytest.mark.timeout(30)


def lay_out(root: Path, *, version: int, path: str, joined: str = "cpu,cpuacct") -> Path:
    """Create /proc and /sys for a process in the group ``path``; return the folder of groups."""
    assert host_bytes(root) == psutil.virtual_memory().total  # without /proc
    (root / "proc/self").mkdir(parents=True)
    lines = [f"0::{path}"] if version == 2 else [f"4:memory:{path}", f"3:{joined}:{path}", "0::/"]
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    mount = root / "sys/fs/cgroup"
    if version == 1:
        mount /= joined
    mount.mkdir(parents=True)
    return mount


def write_quota(folder: Path, version: int, quota: int | None, period: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} {period}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


@pytest.mark.parametrize("seed", range(20))
def test_the_least_quota_on_the_way_counts(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cores are those of the affinity, or fewer if one of the nested groups has a lower quota.

    The kernel kills a process at its group's memory limit, even if the machine has more memory.
    """
    draw = random.Random(seed)
    version, cores = draw.choice((1, 2)), draw.choice((1, 8, 128))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    parts = ["kubepods.slice", "pod-1", "container"][: draw.randint(0, 3)]
    joined = draw.choice(("cpu,cpuacct", "cpuacct,cpu", "cpu"))
    shown = draw.choice((True, False))  # a container shows only its own group, at the mount
    path = "/".join(["" if shown else draw.choice(("", "/../..")), *parts])  # in another namespace
    mount = lay_out(tmp_path, version=version, path=path or "/", joined=joined)
    least, memory = cores, host_bytes() or 0
    for i in range(len(parts) + 1) if shown else [0]:
        quota = draw.choice((None, 1000, 50_000, 100_000, 150_000, 800_000, 10**8))
        period = draw.choice((100_000, 50_000))
        write_quota(mount.joinpath(*parts[:i]), version, quota, period)
        if quota is not None:
            least = min(least, math.ceil(quota / period))
        limit = draw.choice((None, 4096, 3_000_000, 2**63 - 4096))
        memory = min(memory, limit or memory)
        name, unlimited = "memory.max", "max"
        folder = mount
        if version == 1:
            name, unlimited, folder = "memory.limit_in_bytes", "garbage", mount.parent / "memory"
        folder.joinpath(*parts[:i]).mkdir(parents=True, exist_ok=True)
        folder.joinpath(*parts[:i], name).write_text(f"{limit or unlimited}\n")
    assert usable_cores(tmp_path) == least and host_bytes(tmp_path) == memory


@pytest.mark.parametrize("text", ["", "max", "0 0", "100000", "x y", "-1 100000", "1 2 3", "\xff"])
def test_missing_control_group_value_is_no_limit(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert usable_cores(tmp_path) == 8
    mount = lay_out(tmp_path, version=2, path="/")
    (mount / "cpu.max").write_bytes(text.encode("latin-1"))
    (mount / "memory.max").write_bytes(text.encode("latin-1"))
    assert usable_cores(tmp_path) == 8
    assert host_bytes(tmp_path) == (100_000 if text == "100000" else host_bytes())


def test_ranks_share_the_cores_of_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "cpu.max").write_text("250000 100000")
    monkeypatch.setattr(control_groups, "group_folders", lambda *_: [(tmp_path, 2)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for ranks, threads in ((1, "3"), (2, "1"), (8, "1")):
        assert rank_environment_defaults(ranks=ranks)["OMP_NUM_THREADS"] == threads
