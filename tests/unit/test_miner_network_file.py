"""Test how a miner compares its network file with the statement in the global bucket."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.common.llama import named_config
from distributed_training.config import ConfigError, load_config
from distributed_training.miner.build import describe_size
from distributed_training.network import Shown, other_version
from distributed_training.telemetry.facts import Fact
from distributed_training.telemetry.verdict import judge
from tests.tools.network import network_file
from tests.unit.test_verdict import NOW, WELL

pytestmark = pytest.mark.timeout(30)


def network(version: int = 1, run_id: str = "aa", place: str = "lab/network.toml") -> Any:
    return SimpleNamespace(
        place=place,
        head=SimpleNamespace(name="lab", version=version),
        values={"chain.master_hotkey": "5Master", "run_id": run_id},
        rules_id=run_id,
    )


def shown(version: int, run_id: str | None) -> Shown:
    return Shown("lab", version, "5Master", run_id)


def test_a_signed_file_whose_count_is_not_its_models_is_refused_in_one_line(tmp_path: Path) -> None:
    content = {key: each for key, each in named_config("tiny").items() if each is not None}
    sizes = list[str]()
    for count in (1, 1_872_576):
        rules = {"exchange": "store", "model.config": content, "model.parameters": count}
        words = ["--network", network_file(tmp_path, rules)]
        config = load_config("miner", words, environ={}, dotenv=None, check=False)
        try:
            sizes.append(describe_size(content, config))
        except ConfigError as error:
            sizes.append(str(error))
    assert sizes[0].count("\n") == 0 and "model.parameters is 1 and its model has" in sizes[0]
    assert sizes[1] == ": a model of 1.87 M parameters"


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (shown(1, "aa"), network(), ""),
        (shown(1, None), network(), ""),  # written by a validator of an earlier version
        (shown(2, "bb"), network(), "at version 2 of its file, but this miner at 1"),
        (shown(2, None), network(), "from its founder again, put it in lab/network.toml"),
        (shown(2, "bb"), network(place="https://lab/n.toml"), "restart, which fetches https://lab"),
        (shown(1, "bb"), network(), "has different rules from this miner's"),
        (shown(1, "bb"), network(2, "aa"), "until the validator has started with it too"),
    ],
)
def test_another_version_of_the_networks_file_is_named(
    theirs: Shown, ours: Any, words: str
) -> None:
    found = other_version(theirs, ours)
    assert (words in found) and bool(found) == bool(words)
    judged = judge(replace(WELL, other_version=Fact(found, NOW)), NOW)
    assert (judged.verdict == "other version") == judged.bad == bool(words)
    assert words in judged.words
