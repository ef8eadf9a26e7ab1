"""Test the commands of ``dt-miner`` other than the start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed_training import __version__
from distributed_training.__main__ import main as commands
from distributed_training.config.loader import parser_of
from distributed_training.config.model import KEY_VARIABLES
from distributed_training.config.schema import schema
from distributed_training.miner.__main__ import main

pytestmark = pytest.mark.timeout(30)
SECRETS = {name: "ab"[name.startswith("R2_READ")] * 32 for name in KEY_VARIABLES} | {
    name: "cd"[name.startswith("R2_READ")] * 64 for name in KEY_VARIABLES if "SECRET" in name
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("R2_", "BT_", "DT_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def test_every_setting_is_shown_with_its_origin_and_no_secret(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".env").write_text("".join(f"{n}={text}\n" for n, text in SECRETS.items()))
    (folder / ".env").chmod(0o600)
    (folder / "miner.toml").write_text('network = "local"\n[dht]\nport = 7001\n')
    monkeypatch.setenv("BT_WALLET_NAME", "mine")
    assert main(["config", "--neuron.checkpoint_steps", "40"]) == 0
    shown = capsys.readouterr()
    lines = {line.split()[0]: line for line in shown.out.splitlines() if line.startswith("  ")}
    for name, origin in (
        ("--dht.port", "7001   (dht.port in miner.toml)"),
        ("--wallet.name", "mine   (BT_WALLET_NAME)"),
        ("--neuron.checkpoint_steps", "40   (command line)"),
        ("training.sequence_length", "(training.sequence_length in local)"),
        ("R2_WRITE_SECRET_ACCESS_KEY", "********   (R2_WRITE_SECRET_ACCESS_KEY)"),
    ):
        assert lines[name].endswith(origin), lines[name]
    assert all(line.endswith(")") for line in lines.values())
    secrets = {text for name, text in SECRETS.items() if "SECRET" in name}
    assert len(secrets) == 2 and not [text for text in secrets if text in shown.out + shown.err]


def test_the_help_names_the_program_and_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: dt-miner ") and "dt-miner config" in text
    for words, said in ((["--help"], "doctor"), (["--version"], __version__)):
        assert commands(words) == 0 and said in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["miner", "validator"])
def test_the_help_shows_every_flag(kind: str) -> None:
    known = schema(kind)  # type: ignore[arg-type]
    text = parser_of(known).format_help()
    assert not [flag for flag in known.flags if f"\n  --{flag.name} " not in text]
