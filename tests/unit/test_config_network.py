"""No program has a default network: without one, it explains in one line how to name one."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed_training import config
from distributed_training.config import Config
from distributed_training.config.types import NoNetworkNamed
from tests.tools.settings import usual_network

pytestmark = pytest.mark.timeout(60)

PROGRAMS = {
    "miner": ("miner.__main__", []),
    "miner before torchrun": ("miner.__main__", ["check"]),
    "validator": ("validator.__main__", []),
    "dt-doctor": ("doctor", ["--offline"]),
    "dt-score": ("scoring.command", []),
    "dt-export": ("scoring.export", ["model"]),
    "pm2": ("__main__", ["stop-seconds", "miner"]),
    "update.sh": ("__main__", ["run-folder", "miner"]),
}


#: Places in which the network may be named, the strongest first.
PLACES = ("flag", "variable", ".env", "miner.toml")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of an operator without any settings."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("R2_", "BT_", "DT_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def load(*argv: str, environ: dict[str, str] | None = None) -> Config:
    own = Path("miner.toml")
    return config.load_config("miner", argv, environ=environ or {}, file=own, check=False)


@pytest.mark.parametrize("flags", [(), ("--network", ""), ("--netuid", "38")])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_names_the_three_ways_and_writes_nothing(
    program: str, flags: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, words = PROGRAMS[program]
    main = importlib.import_module(f"distributed_training.{module}").main
    assert main([*words, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "so nothing was started" in line and ("is empty" in line) is ("--network" in flags)
    assert "--network FILE" in line and "--network https://URL" in line
    assert "--network local" in line and "dt-join" in line and "commit 10170bb9" in line
    assert not list(folder.iterdir())


@given(st.lists(st.sampled_from(PLACES), unique=True), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_the_strongest_place_names_it(folder: Path, places: list[str], data: st.DataObject) -> None:
    names = {place: data.draw(st.sampled_from(["local", "other"])) for place in places}
    (folder / "other").write_text(Path(usual_network()).read_text())
    (folder / ".env").write_text(f"DT_NETWORK={names.get('.env', '')}\n")
    toml = names.get("miner.toml")
    (folder / "miner.toml").write_text(f'network = "{toml}"\n' if toml else "")
    argv = ["--network", names["flag"]] if "flag" in names else []
    environ = {"DT_NETWORK": names.get("variable", "")}
    if not names:
        with pytest.raises(NoNetworkNamed):
            load(*argv, environ=environ)
        return
    strongest = next(place for place in PLACES if place in names)
    found = load(*argv, environ=environ)
    assert found.general.network == names[strongest]
    assert (found.network.head.name == "local") is (names[strongest] == "local")


def test_subnet_38_is_refused_in_one_line(folder: Path) -> None:
    with pytest.raises(NoNetworkNamed, match=r"^--network is sn38, so .*dt-join.* 10170bb9 "):
        load("--network", "sn38")
