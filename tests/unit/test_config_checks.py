from __future__ import annotations

import pytest

from distributed_training.config import Config, ConfigError, problems
from distributed_training.config.model import check_schedule
from tests.tools.miner_parts import config_of
from tests.tools.r2_keys import KEYS
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(20)


def config(*argv: str, **environ: str) -> Config:
    return load_config("miner", argv, environ={**KEYS, **environ}, dotenv=None, check=False)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"learning_rate": 0}, "nothing would be learned"),
        ({"warmup_steps": 9, "total_steps": 9}, "9 is not below training.total_steps 9"),
        ({"decay_from": 2000}, "only one of them"),
        ({"decay_steps": 10}, "only one of them"),
        ({"decay_from": 2000, "decay_steps": 10}, "the schedule is cosine"),
        (
            {"schedule": "constant", "decay_from": 19, "decay_steps": 10},
            "decay_from 19 is below training.warmup_steps 20",
        ),
        ({"schedule": "constant", "decay_from": 1000, "decay_steps": 10}, ""),
        ({"schedule": "constant"}, ""),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_one_line(
    rules: dict[str, object], text: str
) -> None:
    second = {"exchange": "store"}
    made = config_of(rules=second | {f"training.{key}": value for key, value in rules.items()})
    found = list(check_schedule(made))
    assert len(found) == bool(text)
    assert not text or (text in found[0] and "correct the network's file" in found[0])


@pytest.mark.parametrize("text", ["auto", "AUTO", " auto ", "", "none"])
def test_an_address_that_is_to_be_found_out_is_not_taken_literally(text: str) -> None:
    """The public miner's own default is auto, so operators have it in their scripts."""
    found = config("--dht.ip", text)
    assert found.swarm.dht_ip is None
    assert problems(found) == []


@pytest.mark.parametrize("missing", sorted(KEYS))
def test_a_missing_key_is_named(missing: str) -> None:
    environ = {name: value for name, value in KEYS.items() if name != missing}
    with pytest.raises(ConfigError, match=f"{missing} not set, so nothing could be uploaded"):
        load_config("miner", [], environ=environ, dotenv=None)


@pytest.mark.parametrize(
    ("kind", "length", "consequence"),
    [("READ", 11, "drop this miner's commitment"), ("WRITE", 63, "refuse every upload")],
)
def test_keys_of_the_wrong_length_are_found_without_being_shown(
    kind: str, length: int, consequence: str
) -> None:
    key = {f"R2_{kind}_SECRET_ACCESS_KEY": "f" * length}
    (line,) = problems(config(**key))
    assert f"R2_{kind}_SECRET_ACCESS_KEY has {length} characters instead of 64" in line
    assert consequence in line and "f" * length not in line
    assert problems(config("--network", "local", **key)) == []


@pytest.mark.parametrize("part", ["ACCESS_KEY_ID", "SECRET_ACCESS_KEY"])
def test_a_read_key_that_is_the_write_key_is_refused(part: str) -> None:
    same = KEYS[f"R2_WRITE_{part}"]
    (line,) = problems(config(**{f"R2_READ_{part}": same}))
    assert f"R2_READ_{part} and R2_WRITE_{part} are equal" in line and "for ever" in line
    assert same not in line


def test_several_problems_are_counted() -> None:
    with pytest.raises(ConfigError, match="and 1 more"):
        argv = [
            "--neuron.run_folder",
            "",
            "--r2.endpoint_url",
            "https://a.example/storage/v1/local",
        ]
        load_config("miner", ["--network", "local", *argv], environ=KEYS, dotenv=None)
    with pytest.raises(ConfigError, match="and 1 more"):
        argv = ["--nproc_per_node", "0", "--dht.port", "x"]
        load_config("miner", argv, environ=KEYS, dotenv=None)
