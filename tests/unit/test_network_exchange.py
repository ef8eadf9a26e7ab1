"""The two kinds of network: which keys a file of each has, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from bittensor_core import Keypair
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.config import Config, ConfigError, loader
from distributed_training.config.settings import StoreSettings
from distributed_training.network import OF_EXCHANGE, of_exchange, signed, to_toml
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "network-file.md").read_text(encoding="utf-8")
EXAMPLE = tomllib.loads(DOCUMENT.partition("```toml\n")[2].partition("```")[0])
ALICE = Keypair.create_from_uri("//Alice")


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "STORE_IS_READY", True)


def store_rules(**keys: Any) -> dict[str, Any]:
    """The documents' example as a store network, with ``keys`` (``round__grace``) changed."""
    rules = of_exchange(EXAMPLE, "store")
    rules["round"]["grace"] = "300s"
    rules["store"]["endpoint"] = "https://s3.example.org"
    for key, value in keys.items():
        table, _, name = key.rpartition("__")
        content = rules.setdefault(table, {}) if table else rules
        content[name] = value
        if value is None:
            del content[name]
    return rules


def load(rules: dict[str, Any], folder: Path, kind: str = "miner") -> Config:
    path = folder / "network.toml"
    path.write_text(signed(to_toml(rules), ALICE, beside=lambda name: ""))
    return load_config(kind, ("--network", str(path)), environ={}, dotenv=None, check=False)


@pytest.mark.parametrize("kind", ["miner", "validator"])
def test_a_store_network_has_no_key_of_a_swarm(tmp_path: Path, kind: str) -> None:
    rules = store_rules(round__bits=2, store__hosts=["cdn.example.org:8443"])
    assert "swarm" not in rules and "compression" not in rules
    config = load(rules, tmp_path, kind)
    of_kind = config.miner if kind == "miner" else config.validator
    assert config.exchange == config.training.exchange == of_kind.exchange == "store"
    assert config.miner.bits == config.training.bits == 2
    assert config.round_period.total_seconds() == 400 * 12
    assert config.miner.grace.total_seconds() == 300
    assert config.store.allowed_hosts == {"s3.example.org", "cdn.example.org:8443"}
    assert config.store.access == "registry" and config.miner.keep_uploads == 8


@pytest.mark.parametrize("exchange", ["hivemind", "store"])
def test_each_key_has_a_place_with_one_exchange_alone(tmp_path: Path, exchange: str) -> None:
    rules = EXAMPLE if exchange == "hivemind" else store_rules()
    (other,) = OF_EXCHANGE.keys() - {exchange}
    for key in OF_EXCHANGE[other]:
        table, _, name = key.rpartition(".")
        foreign = (
            {**rules, table: {**rules.get(table, {}), name: 1}} if table else {**rules, key: 1}
        )
        with pytest.raises(ConfigError, match=f"{key} has no place with exchange '{exchange}'"):
            load(foreign, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"round__grace": None}, "round.grace is missing"),
        ({"round__grace": "1601s"}, "is above a third of the period"),
        ({"round__bits": 5}, "5 is more than 4"),
        ({"store__endpoint": None}, "store.endpoint is missing"),
        ({"store__access": "anybody"}, "'anybody' is not one of registry, own"),
        ({"store__hosts": ["a/b"]}, "HOST:PORT"),
        ({"exchange": "pigeon"}, "exchange 'pigeon'"),
        ({"chain": EXAMPLE["chain"] | {"kind": "toy"}}, "nobody would hand out access"),
    ],
)
def test_a_store_network_that_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    rules = store_rules(**change)
    try:
        config = load(rules, tmp_path)
    except ConfigError as error:
        assert words in str(error) and "\n" not in str(error)
    else:
        assert any(words in line for line in loader.problems(config))


def test_each_member_with_a_bucket_of_its_own_needs_no_registry(tmp_path: Path) -> None:
    rules = store_rules(store__access="own", store__endpoint=None)
    rules["chain"] = {"kind": "bittensor", "endpoint": "finney", "netuid": 7} | {
        "master_hotkey": EXAMPLE["chain"]["master_hotkey"]
    }
    assert load(rules, tmp_path).store.access == "own"


@given(hosts=st.lists(st.sampled_from(["a.org", "b.org:9000", "[::1]:9000"]), unique=True))
def test_the_pinned_hosts_are_those_of_the_file(hosts: list[str]) -> None:
    store = StoreSettings(
        hosts=" ".join(hosts) or "none",
        endpoint_url="https://S3.example.org",
        public_url="https://cdn.example.org/x",
        addressing="virtual",
        global_model_name="model/part",
    )
    expected = {"s3.example.org", "model.s3.example.org", "cdn.example.org", *hosts}
    assert store.allowed_hosts == expected
