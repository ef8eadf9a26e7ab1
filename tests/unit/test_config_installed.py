"""A program that lacks an extra of the wheel says so in one line, before it writes anything."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from distributed_training.config import installed
from tests.tools.network import network_file

pytestmark = pytest.mark.timeout(60)

STORE = "network.toml"
WORDS = "--name lab --data-source stdlib --registry http://10.0.0.5:8100 --host 10.0.0.5"
#: A program's module, its arguments, and the extras that its error names.
REFUSED = [
    ("miner.__main__", "--network local", "hivemind"),
    ("miner.__main__", f"--network {STORE} --network local", "hivemind"),
    ("miner.__main__", "check --network local", "hivemind"),
    ("validator.__main__", f"--network {STORE}", "validator"),
    ("doctor", "--network local", "hivemind"),
    ("scoring.command", "--network local --uid 7", "hivemind"),
    ("scoring.export", "model --network local", "hivemind"),
    ("join_command", "local --wallet.path wallets --neuron.device cpu", "hivemind"),
    ("network_command", f"init lab {WORDS} --exchange hivemind", "hivemind"),
    ("localnet.command", "--folder run", "local"),
]


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder, and hide the wheel's extras."""
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("module", "words", "extras"), REFUSED)
def test_what_is_not_installed_is_one_line(
    module: str, words: str, extras: str, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network_file(plain, {"exchange": "store", "chain.url": "http://127.0.0.1:1"})
    before = sorted(plain.rglob("*"))
    main = importlib.import_module(f"distributed_training.{module}").main
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    line = captured.err.strip().splitlines()[-1]
    assert line.endswith(f": pip install 'distributed-training-miner[{extras}]'"), line
    assert "so nothing was started" in line and captured.err.count("error: ") == 1
    assert sorted(plain.rglob("*")) == before
