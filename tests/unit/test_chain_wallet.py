"""Wallets, the replay memory and the settings of the chain room."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.chain.replay import NonceMemory
from distributed_training.chain.wallet import create_wallet, load_wallet
from distributed_training.config.chain import ChainSettings, parse_range
from distributed_training.config.flags import ConfigError

pytestmark = pytest.mark.timeout(60)
WINDOW = timedelta(seconds=20)
NS = 10**9


def settings_of(folder: Path, name: str = "miner") -> ChainSettings:
    return replace(ChainSettings(), wallet_path=str(folder), wallet_name=name)


def test_a_hotkey_without_a_coldkey_is_enough(tmp_path: Path, capfd) -> None:
    created = create_wallet(tmp_path, "miner")
    loaded = load_wallet(settings_of(tmp_path))
    assert loaded.ss58 == created.ss58
    assert create_wallet(tmp_path, "miner").ss58 == created.ss58  # kept
    assert not (tmp_path / "miner" / "coldkey").exists()
    # The mnemonic is nowhere, nor is the key in what a log line would show.
    assert capfd.readouterr().out == ""
    assert "Keypair" not in repr(loaded)


def test_what_is_wrong_with_a_wallet_is_one_line(tmp_path: Path) -> None:
    def fails(pattern: str) -> None:
        with pytest.raises(ConfigError, match=pattern) as caught:
            load_wallet(settings_of(tmp_path))
        assert "\n" not in str(caught.value)

    fails("--wallet.name")
    sdk = create_wallet(tmp_path, "other").sdk
    sdk = type(sdk)(name="miner", hotkey="default", path=str(tmp_path))
    sdk.create_new_hotkey(suppress=True, use_password=True, hotkey_password="secret word")
    fails("encrypted")
    (tmp_path / "miner" / "hotkeys" / "default").write_text("{not a key")
    fails("not a bittensor key file")


def test_nonces_are_used_once() -> None:
    memory = NonceMemory(window=WINDOW)
    now = time.time_ns()
    assert memory.use("a", now) and not memory.use("a", now) and memory.used("a", now)
    assert memory.use("a", now, "another uuid")
    assert memory.use("b", now)
    assert memory.use("a", now - 5 * NS)  # late, but within the window
    assert not memory.use("a", now - 21 * NS)  # too old to tell, whatever a clock says


def test_memory_of_nonces_is_bounded() -> None:
    memory = NonceMemory(window=WINDOW)
    start = time.time_ns()
    for i in range(5000):
        assert memory.use("a", start + i * NS // 10)  # ten calls a second
    assert len(memory) <= 202


def test_the_floor_survives_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "nonces.json"
    first = NonceMemory(window=WINDOW, file=file)
    now = time.time_ns()
    first.use("a", now)
    first.save()
    second = NonceMemory(window=WINDOW, file=file)
    assert second.used("a", now) and second.used("a", now - 1)
    assert second.use("a", now + 1) and second.use("b", now - 1)


def test_a_floor_that_cannot_be_is_left_out(tmp_path: Path, caplog) -> None:
    file = tmp_path / "nonces.json"
    file.write_text(json.dumps({"a": time.time_ns() + 3600 * NS}))
    assert not NonceMemory(window=WINDOW, file=file).used("a", time.time_ns())
    file.write_text("{")
    assert not NonceMemory(window=WINDOW, file=file).used("a", time.time_ns())
    assert str(file) in caplog.text


def test_a_disk_that_is_full_stops_nothing(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    memory = NonceMemory(window=WINDOW, file=tmp_path / "file" / "nonces.json")
    memory.use("a", time.time_ns())
    memory.save()
    assert "replayed after a restart" in caplog.text


def test_a_slow_disk_does_not_hold_up_the_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = NonceMemory(window=WINDOW, file=tmp_path / "nonces.json")
    memory.use("a", time.time_ns())
    syncing, done = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        syncing.set()
        assert done.wait(10)

    monkeypatch.setattr(os, "fsync", slow)
    saver = threading.Thread(target=memory.save)
    saver.start()
    try:
        assert syncing.wait(10)
        found: list[bool] = []
        caller = threading.Thread(target=lambda: found.append(memory.use("b", time.time_ns())))
        caller.start()
        caller.join(5)
        assert found == [True]
    finally:
        done.set()
        saver.join(10)


def test_ranges() -> None:
    assert parse_range("1:2.5") == (1.0, 2.5)
    for text in ("", "1", "2:1", "-1:2", "1:inf", "nan:1", "a:b"):
        with pytest.raises(ConfigError):
            parse_range(text)
