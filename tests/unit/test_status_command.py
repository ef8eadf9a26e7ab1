"""Test ``dt-status`` on run folders of each state, and on damaged ones."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import pytest

from distributed_training import status_command as status
from distributed_training.telemetry.facts import FACTS_FILE
from distributed_training.telemetry.neuron_state import COLUMNS, NeuronState
from distributed_training.telemetry.page.__main__ import describe as describe_page
from distributed_training.telemetry.verdict import Verdict
from tests.tools.miner_states import STATES, make_miner, step_fields
from tests.tools.mutations import mutated

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("state", STATES)
def test_each_state_has_its_verdict_and_exit_status(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict, level, alive = STATES[state]
    folder = str(make_miner(tmp_path, state))
    code = status.main([folder, "--json"])
    row = json.loads(capsys.readouterr().out)
    assert row["verdict"] == verdict
    # If a start was refused, an operator must act, although no process runs.
    away = not alive and verdict != "cannot start"
    assert code == row["status"] == (3 if away else 1 if level == "bad" else 0)
    page = describe_page(NeuronState(Path(folder)), row["time"])["judgement"]
    words = ("verdict", "cause", "remedy", "counts", "status")
    assert [page[word] for word in words] == [row[word] for word in words]
    assert page["level"] == level and row["bad"] == (level == "bad")
    text = status.text_of(row)
    assert text.startswith(f"{state} miner (uid 17): {verdict.upper()}\n  {row['cause']}\n")
    assert (f"  do            {row['remedy']}\n" in text) == bool(row["remedy"])
    assert ("  a day         " in text) == (row["state"] == "running")
    if row["tokens_a_day"]:
        assert "million tokens" in text or row["state"] != "running"
    shown = {line.split("  ")[1] for line in text.splitlines()[2:]}
    assert "disk" in shown and ("link" in shown) == (row["state"] == "running")
    assert ("last upload" in shown) == (row["last_upload"] is not None)
    assert ("next round" in shown) == (row["state"] == "running")


def test_step_and_next_times_are_those_of_page_and_log(tmp_path: Path) -> None:
    """The step is that of the last event and log line; the facts are up to 15 s older."""
    folder, now = make_miner(tmp_path, "store-silent"), time.time()
    step = step_fields(9, 44, 2.0) | {"time": now, "kind": "step"}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(step) + "\n")
    neuron = NeuronState(folder).catch_up()
    row = status.describe(neuron, now)
    last = dict(zip(COLUMNS, neuron.steps[-1], strict=True))
    assert (row["outer_step"], row["inner_step"]) == (last["outer_step"], last["inner_step"])
    assert (row["inner_step"], row["step_at"]) == (44, now)
    assert (
        row["next_upload_at"]
        == row["next_round_at"]
        == describe_page(NeuronState(folder), now)["next_round"]
    )
    assert row["next_round_at"] > now, "by the clock, while the store is silent"
    (folder / FACTS_FILE).unlink()
    named = status.describe(neuron, now)["name"]
    assert named == neuron.title == "store-silent miner", "before the first facts too"


def test_several_miners_have_a_row_each_and_the_worst_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {state: str(make_miner(tmp_path, state)) for state in ("counts", "stopped", "stuck")}
    for chosen, code in (
        (["counts", "stopped"], 3),
        (["counts", "stopped", "stuck"], 1),
        (["counts", "counts"], 0),
    ):
        assert status.main([folders[state] for state in chosen]) == code
        head, *rows = capsys.readouterr().out.splitlines()
        assert head.split()[:3] == ["MINER", "UID", "VERDICT"]
        assert [row.split()[0] for row in rows] == chosen


@pytest.mark.parametrize("tty", [False, True])
def test_status_watch_prints_each_change(
    tty: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, looks = make_miner(tmp_path, "counts"), 0
    other = make_miner(tmp_path, "stopped")

    def sleep(seconds: float) -> None:
        nonlocal looks
        assert seconds == 2.0
        looks += 1
        if looks == 3:
            for name in ("launcher.json", "instance.json", FACTS_FILE):
                (folder / name).write_bytes((other / name).read_bytes())
        if looks == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    assert status.main([str(folder), "--watch"]) == 130
    out = capsys.readouterr().out
    if tty:
        assert out.count("\x1b[H\x1b[2J") == 6
    else:
        first, second = out.splitlines()
        assert "counts miner: counts: the upload of outer step 9 was merged" in first
        assert "stopped miner: stopped: it was stopped (signal SIGINT)" in second


def test_a_folder_of_no_miner_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    file.touch()
    for words in (
        [str(tmp_path)],
        [str(file)],
        [str(tmp_path / "none")],
        [],
    ):
        assert status.main(words) == 2
        said = capsys.readouterr()
        assert said.err.startswith("error: ") and said.err.count("\n") == 1 and not said.out
    with pytest.raises(SystemExit) as ended:
        status.main(["--neuron.name", "two"])
    assert ended.value.code == 2


def test_without_a_folder_the_miners_of_this_machine_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two" / "runs").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    make_miner(tmp_path / "two" / "runs", "stopped")
    assert status.main(["--json"]) == 3, "settings that are refused hide no miner"
    make_miner(tmp_path, "counts").rename(tmp_path / "runs" / "miner-default")
    (tmp_path / "miner.toml").write_text('network = "local"\n')
    capsys.readouterr()
    assert status.main(["--json"]) == 3
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["folder"] for row in rows] == ["runs/miner-default", "two/runs/stopped"]
    monkeypatch.setenv("DT_RUN_FOLDER", "two/runs/stopped")
    assert status.main([]) == 3


def test_no_folder_content_and_no_clock_ends_a_reader(tmp_path: Path) -> None:
    """Each case damages one file of the run folder, and sets the clock forward or back."""
    miner = make_miner(tmp_path, "counts")
    events = miner / "events.jsonl"
    events.write_bytes(b"".join(events.read_bytes().splitlines(keepends=True)[-30:]))
    honest = {path: path.read_bytes() for path in (miner / FACTS_FILE, *miner.glob("*.json*"))}
    assert {"events.jsonl", "launcher.json"} <= {path.name for path in honest}
    for case in range(200):
        draw = random.Random(case)
        path = draw.choice([*honest])
        path.write_bytes(mutated(draw, path.name, honest[path]))
        now = time.time() + draw.choice((0.0, -1e5, 3600.0, 1e8, -1.7e9))
        neuron = NeuronState(miner).catch_up(at_most=2**20)
        json.dumps({**neuron.shown(), **describe_page(neuron, now)})
        row = status.describe(neuron, now)
        assert row["status"] in (0, 1, 3) and row["verdict"] in list(Verdict), case
        json.dumps(row, allow_nan=False)
        for shown in (status.text_of(row), status.table_of([row, row]), status.line_of(row)):
            assert all(c.isprintable() or c == "\n" for c in shown), case
        path.write_bytes(honest[path])
