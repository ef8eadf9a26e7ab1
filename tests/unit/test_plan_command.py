"""Test ``dt-plan``: its output, its proposals, and arguments that cannot be used."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed_training.common.gpus import CARDS
from distributed_training.common.llama import named_config
from distributed_training.common.memory import MOST_WORKERS, WORKER_BYTES, ModelShape
from distributed_training.plan_command import main
from tests.tools.network import network_file

pytestmark = pytest.mark.timeout(60)
GIVEN = ["--model", "4b", "--gpu", "h100x8", "--link", "100/20", "--peers", "16"]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) in (0, 1)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_names_all_that_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(GIVEN) == 0
    said = capsys.readouterr().out
    print(said)
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in said.splitlines()[1:])
    assert {"inner step", "GPU memory", "host memory, disk", "an outer step"} < lines.keys()
    assert {"bytes of it", "upload", "utilization", "store", "dollars"} < lines.keys()
    assert "micro-batch 8" in lines["GPU memory"] and "inner steps" in lines["an outer step"]
    assert "sends 2.00 GB" in lines["bytes of it"] and "388.14 GB" in lines["store"]
    assert "566 a day" in lines["dollars"] and "72.9 billion tokens" in lines
    assert "1 x H100" in lines["validator"] and "judges an upload in" in lines["validator"]
    assert "->" in lines["change first"]


_ROW = re.compile(
    r"\| ([\d.]+ [MB]) \| (\d) x (?:RTX )?(\w+) \| (.+?): (.+?) \| (.+?) each \| "
    r"(.+?)(?: a month)? \| (.+?) tokens in (.+?), (.+?) \|"
)


def test_the_readme_shows_the_printed_plan(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _ROW.findall((Path(__file__).parents[2] / "README.md").read_text())
    assert len(rows) == 3
    models = {"125 M": "125m", "1.1 B": "1b", "3.6 B": "4b"}
    for model, count, card, period, steps, moved, price, tokens, lasting, dollars in rows:
        gpu = f"{card.lower()}x{count}"
        assert not main(
            ["--model", models[model], "--gpu", gpu, "--link", "100/20", "--peers", "4"]
        )
        said = capsys.readouterr().out
        *wanted, unit = moved.replace(" and", "").split()
        places = 2 if unit == "GB" else 0
        there = re.findall(rf"(?:sends|receives) ([\d.]+) {unit}", said)
        assert [f"{float(each):.{places}f}" for each in there] == (2 * wanted)[:2]
        assert f" {steps}, " in said and f": {price})" in said and f"each {period}\n" in said
        assert re.search(rf"{tokens} tokens +{lasting}, {re.escape(dollars)} of all", said)


def rules_of_a_store(model: str) -> dict[str, Any]:
    config = named_config(model)
    return {
        "exchange": "store",
        "private": True,
        "chain.url": "http://127.0.0.1:8100",
        "model.config": {key: value for key, value in config.items() if value is not None},
        "model.parameters": ModelShape.from_config(config).parameters,
    }


def test_a_plan_goes_by_the_networks_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = rules_of_a_store("125m") | {
        "round.period": "20m",
        "round.grace": "300s",
        "round.codec": "2-bit",
    }
    machine = ["--gpu", "4090", "--link", "100/20"]
    found = plan(capsys, "--network", network_file(tmp_path, rules), *machine)
    assert found["fits"] and found["in_time"] and found["stored"] > 0
    assert found["sent"] == pytest.approx(134_105_856 * 0.266 * 1.06, rel=0.03)
    assert found["received"] == pytest.approx(134_105_856 * 0.516 * 1.05, rel=0.02)
    assert found["inner_steps"] * found["step_seconds"] == pytest.approx(1200, rel=0.02)
    local = plan(capsys, "--network", "local", *machine)
    assert local["fits"] and local["stored"] > 0


def test_a_plan_counts_one_moment_of_a_matrix_with_muon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = rules_of_a_store("1b")
    adamw, muon = (
        plan(
            capsys,
            *("--network", network_file(tmp_path / name, rules | {"training.optimizer": name})),
            *("--gpu", "h100x8", "--link", "100/20"),
        )
        for name in ("adamw", "muon")
    )
    shape = ModelShape.from_config(named_config("1b"))
    fewer = 4 * (shape.parameters - shape.embedding_parameters)  # bytes: a float32 of each
    assert adamw["device_bytes"] - muon["device_bytes"] == pytest.approx(1.08 * fewer / 8, rel=0.01)
    assert adamw["host_bytes"] - muon["host_bytes"] == pytest.approx(fewer, rel=0.01)
    assert adamw["disk_bytes"] - muon["disk_bytes"] == pytest.approx(3 * fewer, rel=0.01)


def test_a_plan_counts_the_data_workers_of_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    one, eight = (
        plan(capsys, "--model", "125m", "--gpu", f"h100x{gpus}", "--link", "100")["host_bytes"]
        for gpus in (1, 8)
    )
    assert eight - one == 7 * MOST_WORKERS * WORKER_BYTES


@pytest.mark.parametrize(
    ("words", "why", "what"),
    [
        (["--gpu", "h100x8", "--link", "100/5"], "an upload takes", "a period of"),
        (["--gpu", "h100x8", "--link", "100/11"], "an upload takes", 'round.codec = "2-bit"'),
        (
            ["--gpu", "h100x8", "--link", "100/5", "--model", "4b"],
            "the update comes",
            'codec = "2-bit"',
        ),
        (["--gpu", "4090", "--link", "100/20"], "does not fit", "x RTX 4090"),
        (["--gpu", "4090x8", "--link", "500/500"], "gathers", "effective_batch"),
        (["--gpu", "h100x8", "--link", "900/50", "--peers", "900"], "validator", "link"),
        (["--gpu", "h100x8", "--link", "15", "--exchange", "hivemind"], "an all-reduce", "store"),
    ],
)
def test_the_bottleneck_is_named_with_the_effect_of_its_change(
    words: list[str], why: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a file, whose period is what it is, or of a new network, whose period fits its link."""
    rules = rules_of_a_store("4b") | {"round.period": "80m", "round.grace": "1600s"}
    rules |= {"training.effective_batch": 512, "training.sequence_length": 1024}
    named = {"--model", "--exchange"} & {*words}
    of = [] if "--model" in words else ["--model", "4b"]
    of = of if named else ["--network", network_file(tmp_path, rules)]
    first, *_ = plan(capsys, *of, *words)["changes"]
    print(first)
    assert why in first["why"] and what in first["what"] and first["effect"]


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
def test_more_of_a_link_never_costs_and_figures_agree(
    card: str, gpus: int, up: float, peers: int, exchange: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "1b", "--gpu", f"{card}x{gpus}", "--peers", str(peers)]
    words += ["--exchange", exchange, "--tokens", "1e10"]
    slow, fast = (plan(capsys, *words, "--link", f"{n:.3f}") for n in (up, 2 * up))
    # Over hivemind a longer round also makes an outer step longer, of which less is held.
    assert slow["fits"] and 0 <= slow["utilization"] <= fast["utilization"] + 0.01 <= 1.01
    assert fast["transfer"] <= slow["transfer"]
    if fast["utilization"]:
        assert fast["dollars"] == pytest.approx(fast["days"] * fast["dollars_a_day"] * peers)
        assert math.isfinite(fast["dollars"])
    else:
        assert fast["dollars"] is None and fast["changes"]


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
    given_words = [*GIVEN]
    given_words += [f"{flag}={word}"]
    try:
        status = main(given_words)
    except SystemExit as stopped:
        status = int(str(stopped.code))
    said = capsys.readouterr()
    if status == 2:
        assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
        assert "so nothing was" in said.err
    else:
        assert status in (0, 1) and "change first" in said.out and said.err == ""


def test_a_config_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/nowhere/config.json", "--gpu", "h100", "--link", "1"]) == 2
    said = capsys.readouterr().err
    assert "/nowhere/config.json: it is no file" in said and "hidden_size" not in said


@settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seconds=st.integers(1, 60_000),
    own=st.booleans(),
)
def test_the_period_of_a_plan_is_the_files_whatever_it_is(
    seconds: int, own: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = rules_of_a_store("125m") | {
        "round.period": f"{seconds}s",
        "round.grace": "1s",
    }
    if own:
        rules |= {"data.own": True, "data.held_out": f"/x#{'0' * 64}"}
    machine = ["--gpu", "4090", "--link", "100000"]
    found = plan(capsys, "--network", network_file(tmp_path, rules), *machine)
    assert found["inner_steps"] * found["step_seconds"] == pytest.approx(
        seconds, abs=0.05 * found["step_seconds"] + 5
    )


def test_a_plan_has_the_validator_and_does_not_round_hours_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A look of the judge at 2 x 4 pages, three passes, on one GPU."""
    words = ["--model", "125m", "--gpu", "4090", "--link", "100/20", "--peers", "4"]
    assert not main(words)
    said = capsys.readouterr().out
    assert "each 12 min" in said and "120 inner steps, 62.9 million tokens" in said
    assert re.search(r"2\.68 billion tokens +2\.1 hours, 3\.\d\d \$ of all members", said)
    judge = plan(capsys, *words)["validator"]
    assert judge["card"]["name"] == "RTX 4090" and 1 < judge["seconds"] < 60
    assert 4 * 134_105_856 < judge["device_bytes"] < 24e9
    assert judge["dollars_a_day"] == pytest.approx(9.6)
    large = plan(capsys, "--model", "1b", *words[2:])["validator"]
    assert large["card"]["name"] == "RTX 4090" and large["seconds"] > 3 * judge["seconds"]
    assert plan(capsys, *words, "--exchange", "hivemind")["validator"] == judge


@pytest.mark.parametrize(
    "words",
    [
        ["--gpu", "h100", "--link", "1"],
        ["--model", "1b", "--network", "local", "--gpu", "h100", "--link", "1"],
        ["--network", "/nowhere.toml", "--gpu", "h100", "--link", "1"],
        ["--network", "local", "--exchange", "store", "--gpu", "h100", "--link", "1"],
    ],
)
def test_what_contradicts_itself_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(words) == 2
    except SystemExit as stopped:
        assert stopped.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
