"""Wallets and the settings of the chain room."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distributed_training.chain.identity import create_wallet, load_wallet
from distributed_training.config.settings import ChainSettings
from distributed_training.config.types import ConfigError

ROOT = Path(__file__).parents[2]
KEY_NAMES = [
    f"R2_{use}_{part}"
    for use in ("READ", "WRITE")
    for part in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
]

pytestmark = pytest.mark.timeout(60)


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


def test_a_missing_wallet_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    keys = {name: name.ljust(64, "x") for name in KEY_NAMES} | {"R2_ACCOUNT_ID": "a" * 32}
    code = (
        "import runpy, sys\n"
        "del sys.argv[0]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: assert not {'torch', 'bittensor'} & set(sys.modules)\n"
    )
    command = [
        *(sys.executable, "-c", code),
        *(str(ROOT / "neurons" / "miner.py"), "--preset", "local"),
    ]
    environment = {"PATH": os.environ["PATH"], "BT_WALLET_PATH": str(tmp_path), **keys}
    missing = f"no hotkey at {tmp_path}/default/hotkeys/default, so the miner"
    # A wallet may be on a mount that is late: the miner tries again until it is stopped.
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as miner:
        assert miner.stdout is not None
        assert any(f"Cannot train: {missing}" in line for line in miner.stdout)
        miner.terminate()
        _, errors = miner.communicate(timeout=60)
        assert "AssertionError" not in errors
