"""Test the registries of kinds, and the operator's modules that register more kinds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distributed_training.common import kinds
from distributed_training.common.kinds import Kinds, PluginError, UnknownKindError
from distributed_training.common.processes import start_child, wait_or_kill
from distributed_training.config import ConfigError
from distributed_training.network_command import main as network_command
from tests.tools.settings import load_config

CHILD = """
import os
from distributed_training.common.processes import ParentConnection
parent = ParentConnection()
import my_kinds
parent.send(my_kinds.WHERE)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, which has a plug-in ``my_kinds``; undo the test's imports."""
    (tmp_path / "my_kinds.py").write_text("import os\nWHERE = os.getpid()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(kinds, "_imported", [])
    monkeypatch.delitem(sys.modules, "my_kinds", raising=False)
    return tmp_path


def test_a_kind_is_found_by_its_name_and_an_unknown_name_lists_all() -> None:
    colours: Kinds[int] = Kinds("colour")
    colours.register("red", 1)
    colours.register("blue", 2)
    assert colours["red"] == 1
    assert list(colours) == ["red", "blue"]
    with pytest.raises(UnknownKindError, match="no colour called 'green': there are blue, red, "):
        colours["green"]
    with pytest.raises(ValueError, match="two kinds of colour called 'red'"):
        colours.register("red", 3)


def test_plugins_are_imported_before_the_configuration_is_built(folder: Path) -> None:
    argv = ["--network", str(folder / "away.toml"), "--plugins", "my_kinds"]
    with pytest.raises(ConfigError, match=r"away\.toml"):
        load_config("miner", argv, environ={}, dotenv=None)
    assert "my_kinds" in sys.modules


@pytest.mark.parametrize(
    ("argv", "environ"),
    [(["--plugins", "my_kinds"], {}), ([], {"DT_PLUGINS": "my_kinds"})],
    ids=["flag", "variable"],
)
def test_plugins_come_from_a_flag_or_a_variable(
    folder: Path, argv: list[str], environ: dict[str, str]
) -> None:
    del folder
    config = load_config("miner", argv, environ=environ, dotenv=None, check=False)
    assert config.general.plugins == ("my_kinds",)
    assert "my_kinds" in sys.modules


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "raise OSError('one\\ntwo')",
            "--plugins: the module broken .*OSError: one.*correct the module",
        ),
        (
            "import no_such_library",
            "--plugins: the module broken .*No module named 'no_such_library'",
        ),
        ("def", "--plugins: the module broken .*SyntaxError"),
    ],
)
def test_a_plugin_that_fails_is_one_line(folder: Path, text: str, says: str) -> None:
    (folder / "broken.py").write_text(text)
    with pytest.raises(ConfigError, match=says) as raised:
        load_config("miner", ["--plugins", "broken"], environ={}, dotenv=None, check=False)
    assert "\n" not in str(raised.value)
    assert raised.value.status == 2


def test_a_plugin_that_is_missing_ends_a_program_with_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert network_command(["show", "network.toml", "--plugins", "absent"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: --plugins: the module absent cannot be imported")


def test_a_child_imports_the_modules_of_its_parent(folder: Path) -> None:
    (folder / "child.py").write_text(CHILD)
    kinds.import_plugins(["my_kinds"])
    process, connection = start_child("child")
    try:
        assert connection.poll(30)
        assert connection.recv() == process.pid
    finally:
        connection.close()
        wait_or_kill(process, 10)


def test_two_plugins_that_register_one_name_are_refused(folder: Path) -> None:
    code = "from test_kinds_colours import COLOURS\nCOLOURS.register('red', 1)\n"
    (folder / "test_kinds_colours.py").write_text(
        "from distributed_training.common.kinds import Kinds\nCOLOURS = Kinds('colour')\n"
    )
    for name in ("first_colour", "second_colour"):
        (folder / f"{name}.py").write_text(code)
    with pytest.raises(PluginError, match=r"second_colour .*two kinds of colour called 'red'"):
        kinds.import_plugins(["first_colour", "second_colour"])
