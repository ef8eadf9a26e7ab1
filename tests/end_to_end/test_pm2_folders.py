"""app.config.js under a real pm2, in folders with names as people have them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.pm2 import ROOT, Pm2, needs_pm2
from tests.tools.waiting import wait_for

#: Stands for each program: it says how it was started, and waits for pm2's signal.
PROGRAM = """
import json, os, signal, sys
with open(os.environ["SAYS"] + ".new", "w") as file:
    json.dump({"cwd": os.getcwd(), "words": sys.argv[1:], "file": __file__}, file)
os.rename(os.environ["SAYS"] + ".new", os.environ["SAYS"])
signal.pause()
"""
PROGRAMS = {"miner": "neurons", "validator": "neurons", "registry": ".venv/bin"}
ODD = "my [2] 'miner' $HOME \"ü\" (x) & 100%"


@pytest.fixture
def pm2(tmp_path: Path) -> Iterator[Pm2]:
    one = Pm2(tmp_path / "pm2", {})
    yield one
    one("kill")


def lay_out(folder: Path) -> None:
    """Make a checkout of app.config.js, of stand-ins for its programs and of an environment."""
    for program, below in PROGRAMS.items():
        (folder / below).mkdir(parents=True, exist_ok=True)
        name = "dt-registry" if program == "registry" else f"{program}.py"
        (folder / below / name).write_text(PROGRAM)
    page = folder / "distributed_training" / "__main__.py"
    page.parent.mkdir()
    page.write_text("import sys, time\nassert sys.argv[1] == 'page'\ntime.sleep(180)\n")
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    shutil.copy(ROOT / "app.config.js", folder)


@needs_pm2
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("checkout", "home"),
    [
        ("plain", ODD),
        (ODD, ""),
        (ODD, "plain"),
        (f"a b/{ODD}", f"a b/{ODD}/versions of it"),
        ("a b", "link"),
    ],
)
def test_every_program_starts_in_any_folder(
    checkout: str, home: str, pm2: Pm2, tmp_path: Path
) -> None:
    place = tmp_path / checkout
    lay_out(place)
    if home == "link":
        (tmp_path / "far away").mkdir()
        (tmp_path / home).symlink_to(tmp_path / "far away")
    of = tmp_path / home if home else place
    of.mkdir(parents=True, exist_ok=True)
    run = f"{tmp_path}/a 'run' folder"
    rows = json.dumps([["--neuron.run_folder", run]])
    for program in PROGRAMS:
        override = "app.config.override.js" if program == "miner" else f"{program}.override.js"
        (of / override).write_text(f"module.exports = {rows};")
        says = tmp_path / f"{program}.json"
        environ = {"DT_APP": program, "SAYS": str(says), "DT_FLAGS": "--a 'b c' --d=\"e f\" g"}
        pm2(
            "start",
            str(place / "app.config.js"),
            **environ,
            **({"DT_HOME": str(of)} if home else {}),
        )
        wait_for(says.exists, program, 20)
        said = json.loads(says.read_text())
        assert Path(said["cwd"]).samefile(of)
        assert Path(said["file"]).resolve().is_relative_to(place.resolve())
        assert said["words"][-6:] == ["--neuron.run_folder", run, "--a", "b c", "--d=e f", "g"]
        for name in (program, "page"):
            env = pm2.app(f"distributed_training_{name}")["pm2_env"]
            assert (env["status"], env["restart_time"]) == ("online", 0)
