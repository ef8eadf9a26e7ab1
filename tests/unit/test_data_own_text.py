"""Test that a member's own text is read completely, even after kills, or refused in one line."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import logging
import random
import shutil
import tracemalloc
from collections import Counter
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from distributed_training import doctor, join_command
from distributed_training.config import Config, ConfigError, load_config, problems
from distributed_training.config.settings import DataSettings
from distributed_training.config.types import ConfigAway
from distributed_training.data import own_text
from distributed_training.data.block_builder import SUFFIX, Failure, WorkerSpec
from distributed_training.data.own_text import OwnText, require_own_text
from distributed_training.data.page_source import Counts
from distributed_training.data.pipeline import DataPipeline
from distributed_training.data.tokenizer import TextTokenizer
from distributed_training.health import outside
from distributed_training.health.machine import Examination
from distributed_training.scoring.evaluator import pages_of
from tests.tools.network import network_file
from tests.tools.store_world import StoreWorld
from tests.tools.support_data import DRAW, wait_ready
from tests.tools.validator_world import MODEL_CONFIG, RULES, one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(120)
Tokenizer = tuple[Path, int]
LENGTH = 32


def data(*paths: Path | str, **changes: object) -> DataSettings:
    return DataSettings(own=True, own_text=tuple(map(str, paths)), **changes)


def words(count: int, seed: int = 0) -> list[str]:
    """Return lines that are all different."""
    draw = random.Random(seed)
    return [f"{seed}-{i} {draw.randbytes(draw.randrange(100)).hex()}" for i in range(count)]


def lines_of(text: OwnText) -> list[str]:
    joined = [piece for unit in range(text.units) for piece in text.rows(unit)]
    return [line for piece in joined for line in piece.split("\n") if line]


def test_files_of_three_kinds_are_read_whole_and_each_row_once(tmp_path: Path) -> None:
    texts = [words(3000, seed) for seed in range(4)]
    (tmp_path / "a.h").write_text("\n".join(texts[0]) + "\n")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[1]))
    pq.write_table(pa.table({"text": texts[2]}), tmp_path / "c.parquet", row_group_size=700)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "d").write_text("\n".join(texts[3]) + "\n")
    text = OwnText(data(tmp_path), Counts())
    assert text.units > 20
    assert Counter(lines_of(text)) == Counter(line for each in texts for line in each)
    # A file that is named twice is read only once.
    again = OwnText(data(tmp_path / "a.h", tmp_path), Counts())
    assert Counter(lines_of(again)) == Counter(lines_of(text))


@settings(max_examples=60, deadline=None)
@given(
    some.lists(
        some.text(some.characters(codec="utf-8", exclude_characters="\0"), max_size=90),
        max_size=60,
    ),
    some.integers(16, 300),
)
def test_drawn_text_is_read_whole_wherever_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], unit: int
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    written = "\n".join([*rows, "the end"])
    (folder / "a.txt").write_bytes(written.encode())
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": r}) + "\n" for r in [*rows, "z"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_text, "UNIT", unit)
        patch.setattr(own_text, "_EDGE", 16)
        text = OwnText(data(folder / "a.txt"), Counts())
        assert "".join(p for u in range(text.units) for p in text.rows(u)) == written
        of_lines = OwnText(data(folder / "b.jsonl"), Counts())
        found = [p for u in range(of_lines.units) for p in of_lines.rows(u)]
        assert found == [row for row in [*rows, "z"] if row]
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["one.txt", "one.jsonl", "one.parquet"])
def test_a_long_row_is_read_in_pieces_of_bounded_memory(tmp_path: Path, name: str) -> None:
    row, path = "word " * 4_000_000, tmp_path / name  # 20 MB
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": [row]}), path)
    else:
        path.write_text(json.dumps({"text": row}) + "\n" if name.endswith("jsonl") else row)
    text = OwnText(data(path), Counts())
    seen = 0
    tracemalloc.start()
    for unit in range(text.units):
        for piece in text.rows(unit):
            assert len(piece) <= own_text._PIECE
            seen += len(piece)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(name, "peak", most / 1e6, "MB")
    assert seen == len(row) and most < (10e6 if name == "one.txt" else 150e6)


def parquet_of(column: str) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({column: ["a"]}), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("empty", b"", "it is empty"),
        ("latin-1", "größe".encode("latin-1") * 9, r"it is not UTF-8 text \(byte 2\)"),
        ("utf-16", "abc".encode("utf-16"), "it is not UTF-8 text"),
        ("json.jsonl", b'{"body": "a"}\n{"body": "b"}\n', "no line has text in 'text'"),
        ("column.parquet", parquet_of("body"), "has no column 'text'"),
        ("no.parquet", b"PAR1 no", "cannot be trained on"),
        ("away", None, "No such file"),
    ],
)
def test_a_bad_file_is_one_line_at_the_start(
    tmp_path: Path, name: str, content: bytes | None, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = tmp_path / name
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(ConfigError, match=cause) as refused:
        require_own_text(data(bad))
    assert "\n" not in str(refused.value) and str(bad) in str(refused.value)
    if content is None:
        return
    # If a folder was named, its other files are read, and the line is a warning.
    (tmp_path / "good").write_text("some text\n")
    require_own_text(data(tmp_path))
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line.startswith("Own text: 1 files, 0.0 MB; 1 left out, first ") and str(bad) in line
    (tmp_path / "good").unlink()
    with pytest.raises(ConfigError, match=f"no file of {tmp_path} contains text"):
        require_own_text(data(tmp_path))


def test_text_of_a_disk_that_is_away_at_a_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("some words")

    def away(path: Path) -> int:
        raise OSError(errno.EIO, "Input/output error")

    for where, name in ((OwnText, "_size"), (own_text, "files_below")):
        monkeypatch.setattr(where, name, lambda *found: away(found[-1]))
        with pytest.raises(ConfigAway, match="cannot be read now"):
            require_own_text(data(tmp_path))
        monkeypatch.undo()


# --- the order, across kills ----------------------------------------------------------------------


def spec(folder: Path, tokenizer: Tokenizer, text: Path, **changes: int) -> WorkerSpec:
    own = {"rank": 0, "world_size": 1, **changes}
    return WorkerSpec(
        settings=data(text, pages_per_block=1, rows_per_page=512, workers=2),
        uid=3, sequence_length=LENGTH, tokenizer_path=tokenizer[0], eos_id=tokenizer[1],
        folder=folder, draw_pages=DRAW, **own,
    )  # fmt: skip


def serve(made: DataPipeline, block: int, batches: int, *, start: int = 0) -> list[tuple[int, ...]]:
    """Begin a block, and return the sequences of its next ``batches`` batches."""
    made.request(block)
    made.begin(block, wait_ready(made, block), start)
    found: list[tuple[int, ...]] = []
    for _ in range(batches):
        if (batch := made.next()) is None:
            break
        found += map(tuple, batch.tolist())
    return found


@pytest.fixture()
def own_files(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(5):
        (text / f"{number}.txt").write_text("\n".join(words(800, number)) + "\n")
    return text


@pytest.mark.parametrize("kept", [True, False], ids=["blocks on the disk", "lost"])
def test_a_kill_repeats_no_text_and_loses_none(
    tmp_path: Path, tokenizer: Tokenizer, own_files: Path, kept: bool
) -> None:
    """The checkpoint is older than the kill, and later blocks have other numbers."""
    units = OwnText(data(own_files), Counts()).units
    straight = DataPipeline(spec(tmp_path / "a", tokenizer, own_files), micro_batch_size=2)
    with closing(straight):
        wanted = [serve(straight, 100 + number, 10**9) for number in range(units)]
    flat = [s for block in wanted for s in block]
    assert len(flat) == len({*flat}) > 10_000, "each sequence of the text is served once"

    killed = DataPipeline(spec(tmp_path / "b", tokenizer, own_files), micro_batch_size=2)
    with closing(killed):
        found = serve(killed, 100, 10**9)
        killed.request(101)
        killed.request(103)  # requested ahead, but not begun before the checkpoint
        found += serve(killed, 101, 7)
        checkpoint = json.loads(json.dumps(killed.state_dict()))
        # This text was trained on after the checkpoint, so the kill lost its weights.
        while killed.next() is not None:
            pass
        serve(killed, 103, 10**9)
        serve(killed, 104, 10**9)
    blocks = spec(tmp_path / "b", tokenizer, own_files).blocks
    if not kept:
        for path in blocks.glob(f"*{SUFFIX}"):
            path.unlink()
    again = DataPipeline(spec(tmp_path / "b", tokenizer, own_files), micro_batch_size=2)
    with closing(again):
        again.load_state_dict(checkpoint)
        found += serve(again, 101, 10**9, start=checkpoint["offset"])
        # Block 104 is on the disk, but with text from another place than it has now.
        for block in (103, 104, *range(200, 200 + units - 4)):
            found += serve(again, block, 10**9)
    assert len(found) == len({*found})
    assert {*found} == {*flat} and found[: len(wanted[0])] == wanted[0]


def test_ranks_share_the_text_and_a_pass_has_another_order(
    tmp_path: Path, tokenizer: Tokenizer, own_files: Path
) -> None:
    units = OwnText(data(own_files), Counts()).units
    of_ranks = []
    for rank in range(2):
        one = spec(tmp_path / "run", tokenizer, own_files, rank=rank, world_size=2)
        with closing(DataPipeline(one, micro_batch_size=1)) as made:
            of_ranks.append([serve(made, block, 10**9) for block in range(1, units + 1)])
    half = units // 2
    first = [{s for block in blocks[:half] for s in block} for blocks in of_ranks]
    assert not first[0] & first[1]
    both = [b for pair in zip(*of_ranks, strict=True) for b in pair]
    one_pass, next_pass = both[:units], both[units:]
    assert sorted(map(sorted, one_pass)) == sorted(map(sorted, next_pass[:units]))
    assert one_pass != next_pass[:units]


def test_text_of_a_disk_that_is_away_is_not_lost(
    tmp_path: Path, tokenizer: Tokenizer, own_files: Path
) -> None:
    made = DataPipeline(spec(tmp_path / "run", tokenizer, own_files), micro_batch_size=2)
    with closing(made):
        first = serve(made, 1, 10**9)

        made._receive(own_text_failure(made, 2))
        second = serve(made, 3, 10**9)
        waits = made.state_dict()
        third = serve(made, 4, 10**9)
        position = made.state_dict()
    assert first and second and third and len({*first, *second, *third}) > len({*first, *second})
    assert waits["next"] == 3 and waits["returned"] == [1] and not position["returned"]


def test_text_that_can_never_be_read_keeps_back_no_other(
    tmp_path: Path, tokenizer: Tokenizer, own_files: Path
) -> None:
    made = DataPipeline(spec(tmp_path / "run", tokenizer, own_files), micro_batch_size=2)
    with closing(made):
        served = []
        for block in range(1, 13):
            if made._place(block) == 0:  # as if this text were on a bad sector
                made._receive(own_text_failure(made, block))
            else:
                served.append(serve(made, block, 10**9))
    assert len(served) >= 6 and len({s for block in served for s in block}) == sum(map(len, served))


def own_text_failure(made: DataPipeline, block: int) -> Failure:
    """Return the answer of a worker whose disk fails, and give the block a place."""
    made._place(block)
    return Failure(block, "PageUnavailable: it cannot be read now")


# --- the network's file, and the scores -----------------------------------------------------------


def configured(folder: Path, *flags: str, kind: str = "miner", **rules: object) -> Config:
    held = folder / "held.txt"
    held.write_text("the held-out text of this network\n" * 200)
    digest = hashlib.sha256(held.read_bytes()).hexdigest()
    values = {"data.own": True, "data.held_out": f"{held}#{digest}"} | rules
    file = network_file(folder / "lab", {"exchange": "store", **values})
    argv = ["--network", file, *flags]
    return load_config(kind, argv, environ={}, dotenv=None, check=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "rules", "cause"),
    [
        ([], {}, "--data.own_text names no text"),
        (["--data.own_text", "a", "--data.source", "stdlib"], {}, "--data.source would not be"),
        (["--data.own_text", "a"], {"data.own": False}, "file does not set data.own"),
    ],
)
def test_settings_against_the_networks_file_are_one_line(
    tmp_path: Path, flags: list[str], rules: dict[str, object], cause: str
) -> None:
    found = [line for line in problems(configured(tmp_path, *flags, **rules)) if cause in line]
    assert len(found) == 1 and "\n" not in found[0]
    good = configured(tmp_path, "--data.own_text", "a b")
    assert good.data.own_text == ("a", "b")
    assert not [line for line in problems(good) if "own_text" in line]
    assert not [line for line in problems(configured(tmp_path, kind="validator")) if "own" in line]


@pytest.mark.parametrize("flags", [[], ["--data.own_text", "a"]], ids=["a script", "a miner"])
def test_dt_join_has_the_doctor_check_no_text_that_a_script_reads(
    tmp_path: Path,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, asked = configured(tmp_path, *flags), []
    monkeypatch.setattr(join_command, "enter", lambda folder, words: (config, 1))
    monkeypatch.setattr(doctor, "main", lambda argv: asked.append(argv) or 0)
    assert join_command.main(["INVITATION"]) == 0
    assert asked == [[] if flags else ["--script"]]
    assert ("or your script" in capsys.readouterr().out) == (not flags)
    of_script = dataclasses.replace(config, of_script=True)
    assert not [line for line in problems(of_script) if "own_text" in line]
    if not flags:
        (row,) = outside.check_data(Examination(of_script, ranks=1))
        assert row.status == "skip"


@pytest.mark.parametrize(
    "rules",
    [{"data.held_out": "python"}, {"data.selection": 2, "data.rows": 9999}],
    ids=["python", "pages"],
)
def test_a_network_on_own_text_names_files_to_judge_on(
    tmp_path: Path, rules: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="nobody else has the members' text to judge them"):
        configured(tmp_path, **rules)


def test_uploads_are_judged_on_the_domains_by_their_weights(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    held = []
    for name, letters, weight in (("a", "ab", 3), ("b", "cd", 1)):
        (tmp_path / name).write_text(letters * 4000)
        digest = hashlib.sha256((letters * 4000).encode()).hexdigest()
        held.append(f"{name}*{weight}={tmp_path / name}#{digest}")
    config = configured(tmp_path, kind="validator", **{"data.held_out": held})
    read = pages_of(config, *tokenizer)
    text = read(3, 1000)
    assert text.shape == (64, 256) and torch.equal(text, read(17, 1000)), "the same for all"
    assert not torch.equal(text, read(3, 1001))
    first = text[:, 5].tolist()
    made = TextTokenizer(tokenizer[0], eos_id=tokenizer[1])
    of_a = {*made.encode_rows(["ab"], max_length=9).tolist()[:2]}
    assert sum(token in of_a for token in first) == 48


def test_assigned_text_has_no_weight_in_such_a_network(tmp_path: Path) -> None:
    model = {"model.config": MODEL_CONFIG}
    rules = configured(tmp_path, kind="validator", **RULES | model)
    world = StoreWorld(
        tmp_path / "run",
        change=lambda config: dataclasses.replace(config, network=rules.network, data=rules.data),
    )
    asked: list[int] = []
    reader = world.pages
    world.pages = lambda uid, block: asked.append(block) or reader(uid, block + 1)  # type: ignore[func-returns-value]
    for _ in range(3):
        world.round()
    assert len({*asked}) == 3, "no block of a member's list is looked at"
    (event, *_) = world.events.of("upload_scored")
    assert event["ok"] and "assigned_before" not in event
    assert event["random_before"] > event["random_after"]
    scores = world.events.of("scores")[-1]["scores"]
    assert {figures["assigned"] for figures in scores.values()} == {0.0}
    assert max(figures["total"] for figures in scores.values()) > 0.5
    assert world.validator.standings.weights()
    for figures in scores.values():
        assert figures["train"] == max(0.0, figures["random"])
