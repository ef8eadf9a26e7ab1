"""The gate and the disk check: pure functions as tables."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from distributed_training.store.room import describe_full_disk
from distributed_training.store.transfer import MIB, part_size_for

pytestmark = pytest.mark.timeout(10)


def test_parts_are_equal_and_never_too_many() -> None:
    for size in (6 * MIB, 511 * MIB, 2048 * MIB, 48 * 10**9, 5 * 10**12):
        part = part_size_for(size)
        assert part >= 5 * MIB
        assert -(-size // part) <= 10_000
    assert part_size_for(100 * MIB, wanted=5 * MIB) == 5 * MIB


def test_a_full_disk_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    assert describe_full_disk(tmp_path / "not" / "there", 1) is None
    line = describe_full_disk(tmp_path, 10**18)
    assert line is not None
    assert "UPLOAD BLOCKED" in line
    assert "--neuron.run_folder" in line


def test_a_disk_that_does_not_answer_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked on the thread that trains."""

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(shutil, "disk_usage", stale)
    line = describe_full_disk(tmp_path, 1)
    assert line is not None and "UPLOAD BLOCKED" in line and "does not answer" in line
