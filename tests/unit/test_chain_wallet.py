"""Wallets, and the identity in the swarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distributed_training.chain.identity import (
    create_wallet,
    identity_file,
    load_wallet,
    make_identity,
)
from distributed_training.config.settings import ChainSettings
from distributed_training.config.types import ConfigError

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


def test_hivemind_reads_the_identity_and_derives_the_same_peer_id(tmp_path: Path) -> None:
    from hivemind.p2p import PeerID

    peer_id = make_identity(tmp_path)
    assert str(PeerID.from_identity(identity_file(tmp_path).read_bytes())) == peer_id
    assert identity_file(tmp_path).stat().st_mode & 0o777 == 0o600
    assert make_identity(tmp_path / "other") != peer_id
