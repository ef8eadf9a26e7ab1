"""An account without a home: HOME is not set, and no passwd entry has the user's number."""

from __future__ import annotations

import importlib
import os
import pwd
from pathlib import Path

import pytest

import distributed_training

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("home", [None, "/", "/root"])
def test_without_a_home_it_is_where_the_program_runs(
    home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setenv("HOME", home or "")  # so that it is put back
    if home is None:
        monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    importlib.reload(distributed_training)
    assert os.environ["HOME"] == (home or str(tmp_path))
    assert Path.home() == Path(home or tmp_path)
