"""Flags that guides for the public miner name are accepted with a warning."""

from __future__ import annotations

import pytest

from distributed_training.config import Config
from distributed_training.config.loader import parser_of
from distributed_training.config.removed import GONE, RULES
from distributed_training.config.schema import schema
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(60)


def load(*argv: str) -> Config:
    return load_config("validator", argv, environ={}, dotenv=None, check=False)


def test_removed_flags_of_any_spelling_are_one_line() -> None:
    names = sorted(f"--{gone.replace('*', 'x')}" for gone in GONE)
    wanted = f"no settings any more, without effect, and can be taken out: {', '.join(names)}"
    assert load(*(f"{name}=7" for name in names)).warnings == (wanted,)
    for more in ([], ["7"], ["7", "8"]):
        dashes = [word for name in names for word in (name.replace("_", "-"), *more)]
        assert load(*dashes).warnings == (wanted,)
    assert load("--no_prompt", "--dht.port", "7").swarm.dht_port == 7
    text, known = parser_of(schema("miner")).format_help(), schema("validator")
    for name in (*RULES, *GONE):
        assert f"--{name} " not in text and known.get(name) is None


@pytest.mark.parametrize(("name", "key"), RULES.items())
def test_a_rule_of_the_network_replaces_a_flag_with_one_warning(name: str, key: str) -> None:
    (line,) = load(f"--{name}", "ws://me:word@10.0.0.5:9944").warnings
    assert line.startswith(f"--{name} has no effect") and f" says {key} = " in line
    assert line.endswith("leave it out") and "word" not in line
    assert ("--subtensor.chain_endpoint" in line) is (key == "chain.endpoint")
