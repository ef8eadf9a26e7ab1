"""The gate and the disk check: pure functions as tables."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from distributed_training.store.snapshot_folder import disk_allows, upload_gate
from distributed_training.store.transfer import MIB, part_size_for

pytestmark = pytest.mark.timeout(10)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"blocks": ()}, "block list is empty"),
        ({"not_finite": "x of model.safetensors"}, "NaN or Inf in x of model.safetensors"),
        ({"preview_delta": 0.01, "block_on_preview": True}, "+0.0100"),
        ({"preview_delta": float("nan"), "block_on_preview": True}, "NaN"),
    ],
)
def test_each_block_has_its_line(change: dict, text: str) -> None:
    good = {"blocks": (7,), "preview_delta": -0.1}
    assert upload_gate(**good) is None
    assert upload_gate(blocks=(7,), block_on_preview=True) is None, "nothing was measured"
    line = upload_gate(**good | change)
    assert line is not None
    assert text in line
    assert "\n" not in line


def test_parts_are_equal_and_never_too_many() -> None:
    for size in (6 * MIB, 511 * MIB, 2048 * MIB, 48 * 10**9, 5 * 10**12):
        part = part_size_for(size)
        assert part >= 5 * MIB
        assert -(-size // part) <= 10_000
    assert part_size_for(100 * MIB, wanted=5 * MIB) == 5 * MIB


def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    assert disk_allows(tmp_path / "not" / "there", 1) is None
    line = disk_allows(tmp_path, 10**18)
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
    line = disk_allows(tmp_path, 1)
    assert line is not None and "UPLOAD BLOCKED" in line and "does not answer" in line
