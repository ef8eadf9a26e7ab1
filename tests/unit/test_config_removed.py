"""Start scripts and files of before: taken over, or refused in one line; nothing is written."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from distributed_training.config import Config, ConfigError
from distributed_training.config.loader import parser_of
from distributed_training.config.removed import GONE, REFUSED, RENAMED, RULES, is_removed
from distributed_training.config.schema import schema
from tests.tools.r2_keys import KEYS
from tests.tools.settings import load_config, usual_network

pytestmark = pytest.mark.timeout(60)

VECTORS = Path(__file__).parents[1] / "vectors"
OF_0_2 = VECTORS / "flags-0.2.0.toml"
FLAGS: dict[str, list[str]] = tomllib.loads(OF_0_2.read_text(encoding="utf-8"))
#: Flags of the public protocol's page that were gone before 0.2.0.
BEFORE = """
neuron.global_batch_size_train neuron.quantization_bins neuron.quantization_range
neuron.dont_wandb_log neuron.influxdb_url neuron.influxdb_org neuron.influxdb_bucket
neuron.influxdb_token no_prompt axon.max_workers strict show_all_rank_logs
"""


def load(*argv: str) -> Config:
    return load_config("validator", argv, environ={}, dotenv=None, check=False)


def test_a_file_of_version_0_2_0_with_every_default_is_taken_over(tmp_path: Path) -> None:
    file = tmp_path / "miner.toml"
    file.write_text("".join(f'"{n}" = "{text}"\n' for n, (text, _) in FLAGS.items() if text))
    config = load("--config", str(file))
    (gone,) = (line for line in config.warnings if "can be taken out" in line)
    for name, (text, _) in FLAGS.items():
        if text and schema("validator").get(name) is None:
            ruled = [w for w in config.warnings if w.startswith(f"{name} in {file} has no effect")]
            assert (f" {name} in {file}" in gone) is (name not in RULES and name not in RENAMED)
            assert len(ruled) == (name in RULES)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", FLAGS)
def test_another_value_is_taken_over_or_refused_by_name_and_place(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "miner.toml"
    file.write_text(f'"{name}" = "{FLAGS[name][1]}"\n')
    new = RENAMED.get(name, name)
    if name == "r2.endpoint_url":  # the network names no store of its own
        wanted, text = "store.endpoint", ""
    else:
        wanted, text = REFUSED[name][1] if name in REFUSED else "", ""
    try:
        config = load("--config", str(file))
    except ConfigError as error:
        text = str(error)
    if wanted:
        assert text.startswith(f"{name} in {file}") and wanted in text and "\n" not in text
        assert "nothing was started" in text
    elif schema("validator").get(new) is not None:
        if name not in ("config", "network"):
            assert config.sources[new] == f"{new} in {file}"
    else:
        (line,) = config.warnings
        assert f"{name} in {file}" in line and line.endswith(("leave it out", f"{name} in {file}"))
        assert RULES.get(name, "") in line
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("commit", ["10170bb9", "5e5e1336"])
def test_the_example_files_of_earlier_editions_are_taken_over(commit: str, tmp_path: Path) -> None:
    """With all that they suggest."""
    for name in ("miner.toml", ".env"):
        example = VECTORS / "editions" / commit / f"{name.removeprefix('.')}.example"
        text = re.sub(r"(?m)^#(?=\w)", "", example.read_text(encoding="utf-8"))
        (tmp_path / name).write_text(text.replace("network.toml", usual_network()))
    (tmp_path / ".env").chmod(0o600)
    config = load_config(
        "miner", [], environ=KEYS, dotenv=tmp_path / ".env", file=tmp_path / "miner.toml"
    )
    assert all("can be taken out" in line or "has no effect" in line for line in config.warnings)
    named = [name for name in ("preset", "axon.port") if f"{name} in" in config.warnings[0]]
    assert named == (["preset"] if commit == "5e5e1336" else ["preset", "axon.port"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".env", "miner.toml"]


def test_removed_flags_of_any_spelling_are_one_line() -> None:
    names = sorted(f"--{gone.replace('*', 'x')}" for gone in GONE)
    wanted = f"no settings any more, without effect, and can be taken out: {', '.join(names)}"
    assert load(*(f"{name}=7" for name in names)).warnings == (wanted,)
    for more in ([], ["7"], ["7", "8"]):
        dashes = [word for name in names for word in (name.replace("_", "-"), *more)]
        assert load(*dashes).warnings == (wanted,)
    assert load("--no_prompt", "--strict").warnings[0].endswith(": --no_prompt, --strict")
    assert load("--no_prompt", "--dht.port", "7").swarm.dht_port == 7
    line = load("--subtensor.network", "ws://me:word@10.0.0.5:9944").warnings[-1]
    assert "--subtensor.chain_endpoint" in line and "word" not in line and "no effect" in line
    text = parser_of(schema("miner")).format_help()
    known = schema("validator")
    assert not [n for n in FLAGS if f"--{n} " in text and known.get(n) is None]
    assert not [setting.name for setting in known.flags if setting.name in RULES | REFUSED]
    assert all(is_removed(name) or known.get(RENAMED.get(name, name)) for name in FLAGS)
    assert all(map(is_removed, BEFORE.split()))


def test_a_preset_in_the_environment_is_named() -> None:
    config = load_config("miner", [], environ=KEYS | {"DT_PRESET": "public-24gb"}, dotenv=None)
    assert config.warnings == (
        "no settings any more, without effect, and can be taken out: DT_PRESET",
    )


def test_the_former_name_of_help_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help-all")
    assert ended.value.code == 0 and "--neuron.upload_steps" in capsys.readouterr().out
