"""Every flag refuses a value in one line that names the flag, or accepts it within its range."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Le
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distributed_training.config import Config, ConfigError, describe
from distributed_training.config.schema import Setting, schema
from distributed_training.config.settings import MinerSettings
from distributed_training.node.start import make_run_folder
from tests.tools.r2_keys import KEYS
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
SETTINGS = list(schema("validator"))
MASTER_HOTKEY = MinerSettings().master_ss58_address
PEER = "/ip4/161.97.156.125/tcp/8000/p2p/12D3KooWHDMAeP3zKHrALtREoc2vfYQL7HhsMN7WBvft7hgBCRhK"
FLAGS = [setting for setting in SETTINGS if not setting.secret]

# Values like these have opened files, crashed programs or hidden text, here or elsewhere.
HOSTILE = [
    *("", " ", "none", "0", "-0", "1", "-1", "2", "00", "1.5", "1e3", "1_0", "0x10", "٣", "½"),
    *("nan", "NaN", "-nan", "inf", "-inf", "Infinity", "1e999", "-1e999", "1e-400", "9" * 30),
    *("9" * 400, "2147483648", "18446744073709551616", "99999999999d", "1ms", "0s", "-5s"),
    *("PT5M", "9999d", "10GiB", "9EiB", "-1GiB", "0:0", "5:2", "1:2", "nan:nan", "1:inf", ":"),
    *("true", "false", "maybe", "auto", "public", "local", "cpu", "[1, 2]", "{}", "null"),
    *("../../etc", "/etc/passwd", "/dev/zero", "/dev/null", "/", ".", "..", "~", "~nobody-x/a"),
    *("a\nb", "a\rb", "a\0b", "\x1b[2J", "a\u202eb", "\ud800", "ä", "🦙", "a b", "a,b", "'", '"'),
    *("${R2_WRITE_SECRET_ACCESS_KEY}", "$(reboot)", "`reboot`", "%s%n", "{0}", "\\"),
    *("0.0.0.0", "127.0.0.1", "::1", "[::]", "999.1.1.1", "1.2.3", "localhost", "2130706433"),
    *("http://", "http://a", "http://a:b@c", "http://a:99999", "file:///etc", "wss://a:b"),
    *("https://a\nb", MASTER_HOTKEY, MASTER_HOTKEY[:-1] + "Q", MASTER_HOTKEY[1:]),
    *(PEER, PEER[:-1], "/ip4/1.2.3.4/tcp/1/p2p/x", "/ip4/1.2.3.4"),
    *("x" * 300, "x" * 5000, "-", "--", "-x", "=", "a=b", "hf,stdlib", "web=hf,web=hf"),
    *("jsonl:~nobody-x/a", "shards:", "hf:x", "parquet:/nowhere", "a=nan"),
]
#: The hostile values that a flag's bounds and format should refuse.
BEYOND = [
    *("", "none", "-1", "0", "1.5", "nan", "-inf", "1e999", "9" * 30, "-5s", "9999d", "9EiB"),
    *("nan:nan", "1:inf", "maybe", "../../etc", "a\nb", "\ud800", "x" * 5000, "http://a:99999"),
]
texts = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(max_size=40),
    st.floats().map(str),
    st.integers().map(str),
    st.tuples(st.integers(-10, 10**12), st.sampled_from(["s", "m", "d", "GiB", ":5"])).map(
        lambda pair: f"{pair[0]}{pair[1]}"
    ),
)


def refusal_or_config(kind: str, argv: list[str], environ: dict[str, str]) -> str | Config:
    try:
        return load_config(kind, argv, environ=environ, dotenv=None)  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)


def holds(setting: Setting, value: Any) -> bool:
    """Return whether ``setting`` allows ``value``, without pydantic, which is under test."""
    if value is None:
        return setting.optional
    if isinstance(value, bool):
        return bool in setting.parts
    values = list(value) if isinstance(value, tuple) else [value]
    if all(isinstance(v, (int, float, timedelta)) for v in values) and values:
        low = next(part.ge for part in setting.parts if isinstance(part, Ge))
        high = next(part.le for part in setting.parts if isinstance(part, Le))
        finite = all(isinstance(v, timedelta) or math.isfinite(v) for v in values)
        return finite and all(low <= v <= high for v in values)
    if setting.choices:
        return all(v in setting.choices for v in values)
    return all(len(str(v)) <= 4096 and str(v).isprintable() for v in values)


def assert_refused_or_right(setting: Setting, result: str | Config, source: str) -> None:
    if isinstance(result, str):
        assert source in result or (setting.env and setting.env in result), result
        assert "\n" not in result and result.isprintable() and len(result) < 9000
        assert ": " in result and ("so " in result or "needs" in result), result
        return
    value = result.get(setting.name)
    assert holds(setting, value), f"{setting.name}: {value!r} is accepted"
    if setting.name != "neuron.run_folder":
        assert result.run_folder.parts[0] == "runs" and len(result.run_folder.parts) == 2
    for line in describe(result):
        assert line.isprintable(), line


def kind_of(setting: Setting) -> str:
    """Return the kind of a flag. Of flags that differ only in bounds, one gets all values."""
    bare = re.sub(r"(ge|le)=[^)]*", "", repr(sorted(map(repr, setting.parts))))
    return f"{bare}, {setting.choices}, {setting.optional}"


FIRST = {kind_of(setting): setting for setting in reversed(FLAGS)}


@pytest.mark.slow
@pytest.mark.parametrize("setting", FLAGS, ids=lambda setting: setting.name)
def test_every_flag_with_every_hostile_value(setting: Setting) -> None:
    for text in HOSTILE if FIRST[kind_of(setting)] is setting else BEYOND:
        result = refusal_or_config("validator", [f"--{setting.name}={text}"], KEYS)
        assert_refused_or_right(setting, result, f"--{setting.name}")


@settings(max_examples=300, deadline=None)
@given(setting=st.sampled_from([s for s in SETTINGS if s.env]), text=texts)
def test_any_variable_with_any_text(setting: Setting, text: str) -> None:
    variable = str(setting.env)
    result = refusal_or_config("miner", [], {**KEYS, variable: text})
    if not isinstance(result, str):
        value = result.get(setting.name)
        assert setting.secret or holds(setting, value)
        return
    assert_refused_or_right(setting, result, variable)
    if setting.secret and len(text.strip()) > 8:
        assert text.strip() not in result


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=100).map(str.encode)))
@example(content=b"=\nexport\n'\n\"\nDT_PRESET='")
def test_any_bytes_in_the_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    for argv, dotenv in (([], path), (["--config", str(path)], None)):
        try:
            load_config("miner", argv, environ=KEYS, dotenv=dotenv)
        except ConfigError as error:
            assert "\n" not in str(error) and str(error).isprintable()


def folder_flags() -> list[str]:
    """Return the flags of folders to write to; the other flags name a folder or file to read."""
    paths = {setting.name for setting in FLAGS if Path in setting.parts}
    return sorted(paths - {"config", "validator.model"})


@pytest.mark.parametrize("flag", folder_flags())
@pytest.mark.parametrize("folder", ["/proc/x", "/proc", "/dev/null/x", "/dev/null"])
def test_a_folder_that_cannot_be_written_is_named(flag: str, folder: str, tmp_path: Path) -> None:
    argv = ["--neuron.run_folder", str(tmp_path), f"--{flag}", folder]
    config = load_config("miner", argv, environ=KEYS, dotenv=None)
    with pytest.raises(ConfigError, match=f"--{flag} {folder} cannot be written") as refusal:
        make_run_folder(config)
    assert "\n" not in str(refusal.value)
