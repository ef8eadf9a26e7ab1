"""No flag that an operators' guide names may end a miner, in any kind of network.

Guides of the public network tell everybody to give these flags. If a rule of the network's file
takes precedence over a flag, the start says so in one warning.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from distributed_training.config import problems
from tests.tools.network import network_file
from tests.tools.r2_keys import KEYS
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(60)

STORE = {
    "exchange": "store",
    "private": True,
    "chain.url": "http://127.0.0.1:8100",
    "training.effective_batch": 16,
}
#: Every flag of the guides (scoring, performance, throughput, scripts) with the values that they
#: recommend or replace, as words of a command line.
NAMED = [
    *(["--neuron.local_batch_size_train_effective", n] for n in ("128", "256", "512", "1024")),
    ["--neuron.local_batch_size_train_effective=256"],
    *([f"--neuron.local_batch_size_train={n}"] for n in (1, 2)),
    *(["--neuron.upload_steps", n] for n in ("60", "120")),
    ["--neuron.use_dct"],
    ["--neuron.use_dct=true"],
    ["--netuid", "38"],
    ["--netuid", "1"],
    ["--nproc_per_node=4"],
    ["--nproc_per_node", "8"],
]
#: The flags that the network's rules replace, by kind of network.
REPLACED = {
    "store": {"netuid", "local_batch_size_train_effective", "upload_steps"},
    # There, each member has a bucket, and sends progress uploads to it.
    "hivemind": {"netuid", "local_batch_size_train_effective"},
    "local": {"netuid", "local_batch_size_train_effective"},
}


def place_of(kind: str, folder: Path) -> str:
    if kind == "local":
        return kind
    rules = STORE if kind == "store" else {"exchange": "hivemind"}
    return network_file(folder, rules)


@pytest.mark.parametrize(("kind", "words"), product(REPLACED, NAMED), ids=str)
def test_a_flag_of_the_guides_never_ends_a_miner(
    kind: str, words: list[str], tmp_path: Path
) -> None:
    place = place_of(kind, tmp_path)
    plain = load_config("miner", ["--network", place], environ=KEYS, dotenv=None, check=False)
    config = load_config(
        "miner", ["--network", place, *words], environ=KEYS, dotenv=None, check=False
    )
    assert problems(config) == problems(plain)
    flag = words[0].partition("=")[0]
    told = [line for line in config.warnings if line.startswith(flag)]
    name = flag.removeprefix("--").removeprefix("neuron.")
    assert len(told) == (name in REPLACED[kind]), config.warnings
    gone = [line for line in config.warnings if line.startswith("no settings any more")]
    assert len(gone) == (name == "use_dct") and len(config.warnings) <= 1
    if told:
        assert told[0].endswith("leave it out") and "\n" not in told[0]
        assert config.training == plain.training and config.chain == plain.chain


def test_a_key_of_the_other_exchange_has_no_value(tmp_path: Path) -> None:
    config = load_config(
        "validator", ["--network", place_of("store", tmp_path)], environ=KEYS, dotenv=None,
        check=False,
    )  # fmt: skip
    assert config.get("round.average_after") is None and config.get("round.grace") is not None
    peers = load_config("validator", ["--network", "local"], environ=KEYS, dotenv=None)
    assert peers.get("round.average_after").total_seconds() == 5
    assert peers.rounds.period.total_seconds() == 60
