"""Test the keys in the files of networks of each exchange, and keys that are refused."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bittensor_core import Keypair

from distributed_training import founder
from distributed_training.common.llama import named_config
from distributed_training.config import Config, ConfigError, loader, rules_at
from distributed_training.config.model import KEY_VARIABLES, Kind
from distributed_training.health import machine
from distributed_training.health.machine import Examination
from distributed_training.network import (
    of_exchange,
    signed,
    to_toml,
)
from distributed_training.network_command import main
from distributed_training.protocol.growth import Growth, file_bytes, grace_seconds
from distributed_training.protocol.types import OWN_CODECS
from distributed_training.protocol.update_file import largest_file
from distributed_training.training.model import parameter_schema

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
EXAMPLE = tomllib.loads((ROOT / "docs" / "network.toml").read_text(encoding="utf-8"))
ALICE = Keypair.create_from_uri("//Alice")


def store_rules(**keys: Any) -> dict[str, Any]:
    """Return the example as a store network, with ``keys`` such as ``round__grace`` changed."""
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


def load(rules: dict[str, Any], folder: Path, kind: Kind = "miner") -> Config:
    path = folder / "network.toml"
    path.write_text(signed(to_toml(rules), ALICE))
    return rules_at(path, kind)


@pytest.mark.parametrize("kind", ["miner", "validator"])
def test_a_store_network_has_no_key_of_a_swarm(tmp_path: Path, kind: Kind) -> None:
    rules = store_rules(round__bits=2, store__hosts=["cdn.example.org:8443"])
    assert "swarm" not in rules and "compression" not in rules
    config = load(rules, tmp_path, kind)
    assert config.rounds.exchange == "store" and config.rounds.codec == "2-bit"
    assert config.rounds.period.total_seconds() == 400 * 12
    assert config.rounds.grace.total_seconds() == 300
    assert config.store.hosts == ("cdn.example.org:8443",)
    assert not config.has_bucket and config.rounds.keep_uploads == 8


@pytest.mark.parametrize("exchange", ["store", "hivemind"])
@pytest.mark.parametrize("kind", ["miner", "validator"])
def test_buckets_of_their_own_need_no_registry_and_a_key_each(
    tmp_path: Path, kind: Kind, exchange: str
) -> None:
    """A public chain holds the members' buckets and the addresses of their DHT peers."""
    chain = {"kind": "bittensor", "endpoint": "finney", "netuid": 5}
    chain["master_hotkey"] = EXAMPLE["chain"]["master_hotkey"]
    rules = store_rules(store__access="own", store__endpoint=None, chain=chain, exchange=exchange)
    if exchange == "hivemind":
        rules["round"]["average_after"] = "100s"
    config = load(rules, tmp_path, kind)
    assert config.averages == (exchange == "hivemind")
    assert config.has_bucket and config.key_variables == KEY_VARIABLES
    assert any("R2_READ_ACCESS_KEY_ID" in line for line in loader.problems(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"round__grace": None}, "round.grace is missing"),
        ({"round__average_after": "5s"}, "round.average_after does not fit exchange 'store'"),
        ({"round__sample": 1}, "round.sample does not fit exchange 'store'"),
        ({"round__grace": "1601s"}, "is above a third of the period"),
        ({"round__bits": 5}, "round.bits is 5"),
        ({"round__bits": 4, "round__codec": "4-bit"}, "round.bits is 4"),
        ({"store__endpoint": None}, "store.endpoint is missing"),
        ({"store__endpoint": 5}, "store.endpoint"),
        ({"store__endpoint": "http://s3.example.org"}, "hands out are secrets"),
        ({"store__endpoint": "folder:///srv/store"}, "hands out are secrets"),
        ({"store__access": "shared"}, "store.access"),
        ({"store__hosts": ["a/b"]}, "HOST:PORT"),
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


# --- creating one ---------------------------------------------------------------------------------


def found(folder: Path, *more: str) -> int:
    words = ("--exchange", "store", "--name", "lab", "--data-source", "stdlib")
    place = ("--registry", "https://registry.example.org", "--store", "https://s3.example.org")
    return main(["init", str(folder), *words, *place, *more])


def read(folder: Path, kind: Kind = "miner") -> Config:
    return rules_at(folder / "network.toml", kind)


def test_a_founder_is_asked_for_nothing_of_a_swarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lab"
    assert found(folder, "--slowest-link", "1", "--miners", "4") == 0
    said = capsys.readouterr().out
    config = read(folder, "validator")
    assert config.rounds.exchange == "store"
    needed = grace_seconds(config.network.head.parameters, "4-bit", 1.0, period=4800)
    assert config.rounds.grace.total_seconds() == needed == 70
    assert "a member sends 1.0 MB within 70s" in said and "with 4 members the store keeps" in said
    assert "a key that reads, writes and deletes objects of the global bucket lab" in said
    assert not (folder / "validator" / "swarm").exists()
    plan = founder.FounderPlan.of(folder, environ={"R2_WRITE_ACCESS_KEY_ID": "x"})
    assert [*plan.words] == ["registry", "validator"]
    assert plan.signs == {"R2_WRITE_ACCESS_KEY_ID", "R2_WRITE_SECRET_ACCESS_KEY"}
    line = plan.line("validator")
    assert "dht" not in line and "initial_peers" not in line
    assert not read(folder).key_variables and not loader.problems(read(folder))
    (missing,) = loader.problems(config)
    assert missing.startswith("R2_WRITE_ACCESS_KEY_ID, R2_WRITE_SECRET_ACCESS_KEY not set")


def test_a_member_needs_no_port_and_no_key(tmp_path: Path) -> None:
    assert found(tmp_path / "lab") == 0
    config = read(tmp_path / "lab")
    names = {check.name for check in machine.start_checks(config, ranks=1)}
    assert names and not [name for name in names if name.startswith("port")]
    found_by_doctor = [*machine.check_configuration(Examination(config, 1))]
    assert [check.status for check in found_by_doctor] == ["ok"]


@pytest.mark.parametrize("codec", OWN_CODECS)
def test_the_formula_gives_the_bytes_of_a_real_file(codec: str) -> None:
    schema = parameter_schema(named_config("1b"))
    count = sum(math.prod(shape) for _, shape in schema)
    assert largest_file(schema, codec) == pytest.approx(file_bytes(count, codec), rel=0.005)


def test_the_table_of_scaling_is_the_formula_s() -> None:
    """The table is for 4 billion parameters and links of 1,000 Mbit/s."""
    figure = json.loads((ROOT / "docs" / "figures" / "growth.json").read_text())
    units = {"MB": 1e6, "GB": 1e9, "s": 1.0, "min": 60.0, "$": 1.0}
    rows: dict[str, Callable[[Growth], float]] = {
        "validator receives": lambda of: of.validator_receives,
        "validator receives for": lambda of: 8 * of.validator_receives / 1e9,
        "validator sends": lambda of: of.validator_sends,
        "store sends": lambda of: of.store_sends,
        "store keeps": lambda of: of.stored,
        "R2 costs a month": lambda of: of.dollars_a_month,
    }
    assert [name for name, *_ in figure["rows"]] == [*rows]
    for name, *cells in figure["rows"]:
        for members, cell in zip((4, 16, 64, 256, 1024), cells, strict=True):
            number, unit = cell.replace(",", "").split()
            digits = len(number.partition(".")[2])
            found = rows[name](Growth(members, 4 * 10**9)) / units[unit]
            assert f"{found:.{digits}f}" == number, (name, members)
