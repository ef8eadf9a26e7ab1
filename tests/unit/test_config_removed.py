"""Start scripts and files of before: taken, or refused in one line, and nothing is written."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from distributed_training.config import Config, ConfigError, removed
from distributed_training.config.loader import parser_of
from distributed_training.config.removed import FIXED, MOVED, NO_EFFECT, REMOVED, RULES
from distributed_training.config.schema import schema
from distributed_training.config.types import show
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(60)

OF_0_2 = Path(__file__).parents[1] / "vectors" / "flags-0.2.0.toml"
FLAGS: dict[str, list[str]] = tomllib.loads(OF_0_2.read_text(encoding="utf-8"))
#: Rules of the network that ended: every other network has other ones.
OF_ITS_NETWORK = {
    f"neuron.{name}"
    for name in ("global_model_name", "global_tokenizer_name", "master_ss58_address", "run_id")
}


def load(*argv: str) -> Config:
    return load_config("validator", argv, environ={}, dotenv=None, check=False)


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(*argv)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_file_of_version_0_2_0_with_every_default_is_taken_over(tmp_path: Path) -> None:
    file = tmp_path / "miner.toml"
    kept = {name: texts for name, texts in FLAGS.items() if name not in OF_ITS_NETWORK}
    file.write_text("".join(f'"{n}" = "{text}"\n' for n, (text, _) in kept.items() if text))
    config = load("--config", str(file))
    (line,) = (line for line in config.warnings if "can be taken out" in line)
    for name, (text, _) in kept.items():
        gone = bool(text) and schema("validator").get(name) is None
        assert (f" {name} in {file}" in line) is gone
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", FLAGS)
def test_another_value_is_taken_over_or_refused_by_name_and_place(
    name: str, tmp_path: Path
) -> None:
    file, value = tmp_path / "miner.toml", FLAGS[name][0 if name in OF_ITS_NETWORK else 1]
    file.write_text(f'"{name}" = "{value}"\n')
    known = schema("validator").get(name)
    if name in ("netuid", "neuron.local_batch_size_train_effective"):
        (line,) = load("--config", str(file)).warnings
        assert line.startswith(f"{name} in {file} {value} has no effect")
    elif name == "r2.endpoint_url":  # the network names no store of its own
        assert "store.endpoint" in refused("--config", str(file))
    elif known is not None and name not in ("config", "network"):
        assert load("--config", str(file)).sources[known.name] == f"{name} in {file}"
    elif name == "subtensor.network":  # the guides name it
        assert "has no effect" in load("--config", str(file)).warnings[-1]
    elif name in NO_EFFECT:
        assert name in load("--config", str(file)).warnings[0]
    elif known is None:
        place = RULES.get(name) or MOVED.get(name) or FIXED[name]
        line = refused("--config", str(file))
        assert line.startswith(f"{name} in {file}") and place in line
        assert "nothing was started" in line
    assert list(tmp_path.iterdir()) == [file]


def test_removed_flags_of_any_spelling_are_one_line(tmp_path: Path) -> None:
    toml = tmp_path / "miner.toml"
    settings = schema("validator").settings
    rules = {n: settings[key].default for n, key in RULES.items() if n not in OF_ITS_NETWORK}
    values = {name: show(value) for name, value in rules.items()} | FIXED
    for name in sorted({*NO_EFFECT, *values} - {"neuron.influxdb_token"}):
        value = values.get(name, "7")
        value = "none" if value == "-" else value  # of one that the public network does not have
        toml.write_text(f'"{name}" = "{value}"\n')
        dashes = f"--{name.replace('_', '-')}"
        for spelling in ((f"--{name}={value}",), (dashes, value), ("--config", str(toml))):
            (line,) = load(*spelling).warnings
            assert name in line and line.startswith("no settings any more")
        if name in FIXED:
            assert f"it is always {value} now" in refused(f"--{name}", "another")
    assert load("--no_prompt", "--strict").warnings[0].endswith(": --no_prompt, --strict")
    line = load("--subtensor.network", "ws://me:word@10.0.0.5:9944").warnings[-1]
    assert "--subtensor.chain_endpoint" in line and "word" not in line and "no effect" in line
    for name in ("archive_endpoints", "retry_forever", "websocket_shutdown_timer"):
        line = refused(f"--subtensor.{name}", "5")
        assert line.endswith("nothing was started: did you mean --subtensor.chain_endpoint?")
    for name in MOVED:
        assert MOVED[name] in refused(f"--{name}", "another")
    assert not [n for n in REMOVED if f"--{n} " in parser_of(schema("miner")).format_help()]
    assert not [name for name in REMOVED if schema("validator").get(name)]


@pytest.mark.parametrize(
    ("text", "fixed", "same"),
    [
        ("1m", "60s", True), ("2.50", "2.5", True),
        ("off", "false", True), ("b,a", "a b", True), ("61", "60s", False),
        ("b", "a b", False), ("yes", "false", False), ("", "60s", False),
    ],
)  # fmt: skip
def test_a_removed_flag_may_have_the_value_that_holds(
    text: str, fixed: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(removed.FIXED, "neuron.shard_across_nodes", fixed)
    assert (removed.why_refused("neuron.shard_across_nodes", text) is None) is same
