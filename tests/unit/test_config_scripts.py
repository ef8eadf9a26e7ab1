"""Every argument of every script refuses a bad value in one line, with exit status 2.

A value that it accepts is within the range that the argument declares.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
from pathlib import Path

import pytest

from distributed_training.config.loader import Parser
from tests.tools import forked
from tests.unit.test_config_hostile import HOSTILE

pytestmark = pytest.mark.timeout(200)

ROOT = Path(__file__).parents[2]
# For each script: the module of its parser, and valid positional arguments.
SCRIPTS = {
    "abort_multipart_uploads": ("scripts.abort_multipart_uploads", ("llama-4b-ws-4-007",)),
    "diagnose": ("distributed_training.doctor", ()),
    "localnet": ("distributed_training.localnet.command", ()),
    "pretokenize": ("examples.pretokenize", ("stdlib", "/tmp/shards", "--tokenizer", "bytes")),
    "score": ("distributed_training.scoring.command", ()),
}
# These scripts take only the miner's flags, or no arguments.
OTHERS = {"bootstrap_pip", "lock", "release"}


@functools.cache
def parser_of(script: str) -> Parser:
    parser = importlib.import_module(SCRIPTS[script][0]).build_parser()
    assert isinstance(parser, Parser)
    return parser


def options() -> list[tuple[str, str]]:
    return [
        (script, action.option_strings[-1])
        for script in SCRIPTS
        for action in parser_of(script)._actions
        if action.option_strings and action.nargs != 0
    ]


def name_of(script: str, option: str) -> str:
    return next(a.dest for a in parser_of(script)._actions if option in a.option_strings)


def refused_in_one_line(error: str, name: str) -> None:
    (line,) = error.splitlines()
    assert line.startswith("error: ") and name in line and "so nothing was started" in line
    assert len(line) < 1000


def parse(script: str, argv: list[str], capfd: pytest.CaptureFixture) -> argparse.Namespace | str:
    try:
        return parser_of(script).parse_known_args(argv)[0]
    except SystemExit as stop:
        assert stop.code == 2
        return capfd.readouterr().err


def test_each_script_of_the_folder_is_checked() -> None:
    assert {p.stem for p in (ROOT / "scripts").glob("[!_]*.py")} == {*SCRIPTS, *OTHERS}


@pytest.mark.parametrize(("script", "option"), options())
def test_every_option_with_every_hostile_value(script: str, option: str, capfd) -> None:
    for text in HOSTILE:
        result = parse(script, [*SCRIPTS[script][1], f"{option}={text}"], capfd)
        if isinstance(result, str):
            refused_in_one_line(result, option)
            continue
        value = getattr(result, name_of(script, option))
        if isinstance(value, (int, float)):
            assert math.isfinite(value) and 0 <= value <= 1e8, f"{option} {value} is accepted"
        words = value if isinstance(value, (tuple, list)) else [value]
        assert all(str(word).isprintable() and len(str(word)) <= 4096 for word in words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("abort_multipart_uploads",), "bucket"),
        (("abort_multipart_uploads", "bucket-1"), "no network is named"),
        (("diagnose", "--network", "local", "--model", "MODEL.json"), "--model MODEL.json"),
        (("localnet", "--miner-flags", "'"), "--miner-flags"),
        (("pretokenize", "hf", "out"), "--tokenizer"),
        (("pretokenize", "stdlib", "/proc/x", "--tokenizer", "bytes"), "out /proc/x"),
        (("score", "--subnet", "nowhere"), "--subnet nowhere"),
    ],
)
def test_a_real_script_refuses_in_one_line(command, name: str, tmp_path: Path) -> None:
    (tmp_path / "MODEL.json").write_text("[" * 100_000)
    script = ROOT / "scripts" / f"{command[0]}.py"
    done = forked.run(script, *command[1:], environ={}, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and name in line and "so " in line
