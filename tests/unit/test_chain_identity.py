"""Test wallets, and how a DHT peer finds the address at which others reach it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import bittensor
import bittensor_core
import pytest

from distributed_training.chain.identity import (
    AddressUnknown,
    create_wallet,
    external_ip,
    load_wallet,
)
from distributed_training.config.settings import ChainSettings
from distributed_training.config.types import ConfigError
from testbed.namespaces import machines
from tests.tools.chain_raw import trickle
from tests.tools.chain_world import answers

pytestmark = pytest.mark.timeout(60)


def settings_of(folder: Path, name: str = "miner") -> ChainSettings:
    return replace(ChainSettings(), wallet_path=str(folder), wallet_name=name)


def test_a_hotkey_without_a_coldkey_is_enough(tmp_path: Path, capfd) -> None:
    created = create_wallet(tmp_path, "miner")
    loaded = load_wallet(settings_of(tmp_path))
    assert loaded.ss58 == created.ss58
    assert create_wallet(tmp_path, "miner").ss58 == created.ss58  # kept
    assert not (tmp_path / "miner" / "coldkey").exists()
    # The mnemonic is printed nowhere, and a log line would not show the key.
    assert capfd.readouterr().out == ""
    assert "Keypair" not in repr(loaded)


def test_wallets_of_bittensor_are_read_and_ours_are_as_it_writes_them(tmp_path: Path) -> None:
    theirs = bittensor.Wallet("theirs", "hot", str(tmp_path))
    theirs.create_new_hotkey(suppress=True, use_password=False)
    assert create_wallet(tmp_path, "theirs", "hot").ss58 == theirs.hotkey.ss58_address
    ours = create_wallet(tmp_path, "ours", "hot")
    seen = ours.of_sdk()
    assert seen.hotkey.ss58_address == seen.hotkeypub.ss58_address == ours.ss58
    for wallet in (theirs, seen):
        for file in (wallet.hotkey_file, wallet.hotkeypub_file):
            key = bittensor_core.deserialize_keypair_from_keyfile_data(Path(file.path).read_bytes())
            again = bytes(bittensor_core.serialized_keypair_to_keyfile_data(key))
            assert sorted(again) == sorted(Path(file.path).read_bytes())  # keys in any order
            assert Path(file.path).stat().st_mode & 0o777 == 0o600
    signed = ours.hotkey.sign(b"text")
    assert bittensor_core.verify(b"text", signed, ours.ss58)


@pytest.mark.slow
def test_bad_wallet_is_one_line(tmp_path: Path) -> None:
    def fails(pattern: str) -> None:
        with pytest.raises(ConfigError, match=pattern) as caught:
            load_wallet(settings_of(tmp_path))
        assert "\n" not in str(caught.value)

    fails("--wallet.name.*btcli wallet new-hotkey")
    with pytest.raises(ConfigError, match=r"or join with dt-join$"):  # it has no btcli
        load_wallet(replace(settings_of(tmp_path), kind="registry"))
    sdk = bittensor.Wallet(name="miner", hotkey="default", path=str(tmp_path))
    sdk.create_new_hotkey(suppress=True, use_password=True, hotkey_password="secret word")
    fails("encrypted")
    (tmp_path / "miner" / "hotkeys" / "default").write_text("{not a key")
    fails("not a bittensor key file")


@contextmanager
def service(*texts: str, status: int = 200) -> Iterator[str]:
    """Yield the URL of a server that answers with ``texts`` in turn, then repeats the last."""
    left = list(texts)
    with answers(lambda _: (status, (left.pop(0) if len(left) > 1 else left[0]).encode())) as port:
        yield f"http://127.0.0.1:{port}"


def test_in_a_private_network_the_address_is_the_one_that_calls_the_registry() -> None:
    private = replace(ChainSettings(), private=True, registry_url="http://127.0.0.1:8100")
    assert external_ip(private, services=()) == "127.0.0.1", "a trial on one machine"
    named = replace(private, registry_url="http://localhost:8100")
    with pytest.raises(AddressUnknown, match=r"localhost is reached from .*--dht\.ip"):
        external_ip(named, services=())
    with machines(2, network="10.77.3") as (registry, miner):
        url = f"http://{registry.address}:8100"
        with miner.inside():
            found = external_ip(replace(private, registry_url=url), services=())
    assert found == miner.address


@pytest.mark.slow
def test_two_answers_have_to_agree() -> None:
    with (
        service("<html>") as odd,
        service("1.1.1.1", status=503) as down,
        service("192.168.1.4") as private,
        service("6.6.6.6") as wrong,
        service("8.8.4.4\n") as good,
        service("8.8.4.4") as other,
    ):
        bad = ["http://127.0.0.1:1", odd, down, private]
        assert external_ip(ChainSettings(), services=[*bad, wrong, good, other]) == "8.8.4.4"
        # A service that answers is asked again; two different answers of one service do not count.
        assert external_ip(ChainSettings(), services=[*bad, good]) == "8.8.4.4"
        with service("6.6.6.6", "7.7.7.7") as unsure:
            with pytest.raises(AddressUnknown, match=r"6\.6\.6\.6, 7\.7.*--dht\.ip"):
                external_ip(ChainSettings(), services=[*bad, unsure])
        with pytest.raises(AddressUnknown, match=r"--dht\.ip"):
            external_ip(ChainSettings(), services=bad)


def test_the_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy's address is not the one at which peers reach this machine."""
    with service("6.6.6.6") as proxy, service("8.8.4.4") as good:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert external_ip(ChainSettings(), services=[good]) == "8.8.4.4"


@pytest.mark.slow
def test_an_answer_is_bounded_in_size_and_time() -> None:
    with (
        service("8.8.4.4" + " " * 10**6) as large,
        trickle() as slow,
        service("9.9.9.9") as good,
    ):
        began = time.monotonic()
        asked = [large, f"http://127.0.0.1:{slow}", good]
        timeout = timedelta(seconds=1)
        assert external_ip(ChainSettings(), services=asked, timeout=timeout) == "9.9.9.9"
        assert time.monotonic() - began < 15
