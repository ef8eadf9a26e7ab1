"""The gate and the disk check: pure functions as tables."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from distributed_training.store.transfer import describe_full_disk

pytestmark = pytest.mark.timeout(10)


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
