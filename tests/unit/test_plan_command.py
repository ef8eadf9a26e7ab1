"""Test ``dt-plan``: its figures, and arguments that cannot be used."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed_training.common import kinds
from distributed_training.common.gpus import CARDS
from distributed_training.common.llama import named_config
from distributed_training.common.memory import WORKER_BYTES, ModelShape
from distributed_training.config.settings import TrainingSettings
from distributed_training.plan_command import main
from distributed_training.protocol.codecs import CODECS
from distributed_training.training.lora import read_rules
from tests.tools.network import network_file

pytestmark = pytest.mark.timeout(60)
GIVEN = ["--model", "4b", "--gpu", "h100x8", "--link", "100/20", "--peers", "16"]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) in (0, 1)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


_ROW = re.compile(
    r"\| ([\d.]+ [MB]) \| (\d) x (?:RTX )?(\w+) \| (.+?) each in (.+?) \| "
    r"(.+?) tokens in (.+?), (.+?) \|"
)


def test_the_readme_shows_the_printed_plan(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _ROW.findall((Path(__file__).parents[2] / "README.md").read_text())
    assert len(rows) == 3
    models = {"125 M": "125m", "1.1 B": "1b", "3.6 B": "4b"}
    for model, count, card, moved, period, tokens, lasting, dollars in rows:
        gpu = f"{card.lower()}x{count}"
        given_words = ["--gpu", gpu, "--link", "100/20", "--peers", "4"]
        assert not main(["--model", models[model], *given_words])
        said = capsys.readouterr().out
        assert f"sends {moved}, receives {moved}\n" in said
        assert f"each {period}\n" in said
        assert re.search(rf"{tokens} tokens +{lasting}, {re.escape(dollars)} of all", said)


def test_a_plan_goes_by_the_networks_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = named_config("125m")
    rules = {
        "exchange": "store",
        "private": True,
        "chain.url": "http://127.0.0.1:8100",
        "model.config": {key: value for key, value in config.items() if value is not None},
        "model.parameters": ModelShape.from_config(config).parameters,
        "round.period": "20m",
        "round.grace": "300s",
        "round.codec": "2-bit",
    }
    file = network_file(tmp_path, rules)
    found = plan(capsys, "--network", file, "--gpu", "4090", "--link", "100/20")
    assert (found["period"], found["grace"]) == (1200, 300)
    assert found["in_time"] and found["fast_enough"]
    assert found["sent"] < 0.6 * found["received"]  # 2 bits per value instead of 4
    main(["--network", file, "--gpu", "4090", "--link", "100/20"])
    said = capsys.readouterr().out
    assert (
        f"{found['upload_seconds']:.0f} s of 300 s grace\n" in said
    )  # in the words of dt-network init
    assert f"{found['disk_bytes'] / 1e9:.0f} GB and up to 10 of data on each machine\n" in said
    slow = plan(capsys, "--network", file, "--gpu", "4090", "--link", "0.5", "--speed", "9")
    assert not slow["in_time"] and not slow["fast_enough"]


def test_a_plan_with_a_codec_from_a_plug_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.delitem(sys.modules, "sparse_codec", raising=False)
    monkeypatch.setattr(kinds, "_imported", [])
    monkeypatch.setattr(CODECS, "_made", dict(CODECS._made))
    usual = plan(capsys, *GIVEN)
    with monkeypatch.context() as imported:
        imported.setattr(CODECS, "_made", dict(CODECS._made))
        sparse = plan(capsys, *GIVEN, "--codec", "sparse", "--plugins", "sparse_codec")
    assert sparse["sent"] < 0.06 * usual["sent"]
    assert sparse["received"] == usual["received"]  # updates have a codec of their own
    for words in (["--codec", "sparse"], ["--plugins", "nothing_there"]):
        assert main([*GIVEN, *words]) == 2
        assert words[-1] in capsys.readouterr().err


def test_a_plan_holds_a_base_in_the_dtype_that_init_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {key: each for key, each in named_config("tiny").items() if each is not None}
    file, needs = tmp_path / "config.json", dict[str, float]()
    for which, more in (("none", {}), ("bf16", {"dtype": "bfloat16"})):
        file.write_text(json.dumps(config | more))
        dtype = read_rules("r=4", config | more)["dtype"]
        words = ["--model", str(file), "--gpu", "h100", "--link", "100"]
        found, named = (plan(capsys, *words, "--lora", f"r=4{w}") for w in ("", f",dtype={dtype}"))
        assert found == named
        needs[which] = found["device_bytes"]
    assert needs["bf16"] < needs["none"]


@pytest.mark.parametrize("gpus", [1, 8])
def test_host_memory_holds_each_process_its_workers_and_a_frozen_base(
    gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the memory per trained parameter depends on how many parameters are trained."""
    words = ["--model", "125m", "--gpu", f"h100x{gpus}", "--link", "100"]
    fixed = gpus * (1e9 + 4 * WORKER_BYTES)
    for lora, frozen in (("", 0), ("r=16,dtype=bfloat16", 2), ("r=16,dtype=float32", 4)):
        found = plan(capsys, *words, *(["--lora", lora] if lora else []))
        base = frozen * (found["parameters"] - found["trained"])
        each = (found["host_bytes"] - fixed - base) / found["trained"]
        assert 36 <= each <= 44, (lora, each)
        averaging = plan(
            capsys, *words, *(["--lora", lora] if lora else []), "--exchange", "hivemind"
        )
        assert averaging["host_bytes"] - found["host_bytes"] == 8 * found["trained"]


def test_the_plan_follows_the_formulas_of_the_documents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "requirements.md").read_text()
    (block,) = re.findall(r"```python\n(tokens_per_second.*?)```", text, re.DOTALL)
    found, rules = plan(capsys, *GIVEN), TrainingSettings()
    names = {
        "peak": CARDS["h100"].peak,
        "gpus": 8,
        "batch": rules.local_batch_size_train_effective,
        "length": rules.sequence_length,
        "link_down": 100e6 / 8,
        "link_up": 20e6 / 8,
        "members": 16,
        "vocabulary": ModelShape.from_config(named_config("4b")).vocab,
        **{name: found[name] for name in ("parameters", "tokens", "price")},
    }
    exec(block, names)
    for name in re.findall(r"^(\w+) =", block, re.MULTILINE):
        assert names[name] == pytest.approx(found[name], rel=1e-6), name


@pytest.mark.parametrize(
    ("words", "fits"), [(["--gpu", "4090"], False), (["--gpu", "4090x8"], True)]
)
def test_memory_says_whether_the_model_fits(
    words: list[str], fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GIVEN, *words]) == (not fits)
    assert ("does not fit" not in capsys.readouterr().out) is fits


@settings(
    deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    card=st.sampled_from(list(CARDS)),
    gpus=st.sampled_from([1, 2, 8]),
    up=st.floats(0.1, 1e4),
    peers=st.integers(1, 300),
    exchange=st.sampled_from(["store", "hivemind"]),
)
def test_a_faster_link_never_costs_and_a_given_speed_counts(
    card: str, gpus: int, up: float, peers: int, exchange: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "1b", "--gpu", f"{card}x{gpus}", "--peers", str(peers)]
    words += ["--exchange", exchange, "--tokens", "1e10"]
    slow, fast = (plan(capsys, *words, "--link", f"{n:.3f}") for n in (up, 2 * up))
    assert fast["upload_seconds"] <= slow["upload_seconds"] and fast["sent"] == slow["sent"]
    assert fast["dollars"] == pytest.approx(fast["days"] * fast["dollars_a_day"] * peers)
    speed = 2 * fast["tokens_per_second"]
    twice = plan(capsys, *words, "--link", "100", "--speed", str(speed))
    assert twice["days"] == pytest.approx(fast["days"] / 2)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    flag=st.sampled_from(["--model", "--gpu", "--link", "--peers", "--price", "--tokens"]),
    word=st.one_of(
        st.text(max_size=30),
        st.sampled_from(["", "nan", "-1", "1e999", "h100x0", "h100x8x", "/", "9/", "/9", "a.json"]),
        st.from_regex(r"(h100|4090|xx)(x\d{0,3}){0,3}|\d{0,9}[/.]\d{0,9}", fullmatch=True),
    ),
)
def test_bad_input_is_one_line(flag: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([*GIVEN, f"{flag}={word}"])
    except SystemExit as stopped:
        status = int(str(stopped.code))
    said = capsys.readouterr()
    if status == 2:
        assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
        assert "so nothing was" in said.err
    else:
        assert status in (0, 1) and "dollars" in said.out and said.err == ""
