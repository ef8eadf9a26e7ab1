"""Test the limits in bytes on row groups, pages and lines."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distributed_training.data import page_source, parquet
from distributed_training.data.page_source import Counts, usable_texts
from distributed_training.data.parquet import ParquetSource
from examples import line_files
from examples.line_files import JsonLinesSource
from tests.tools.support_data import write_jsonl

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use limits of kilobytes instead of megabytes."""
    monkeypatch.setattr(parquet, "KEPT", 30_000)
    monkeypatch.setattr(page_source, "PAGE", 20_000)
    monkeypatch.setattr(line_files, "PAGE", 20_000)
    monkeypatch.setattr(line_files, "_INDEX_CHUNK", 5_000)
    monkeypatch.setattr(page_source, "_too_long_is_due", lambda: True)


def rows_of(draw: random.Random, count: int) -> list[str | None]:
    """Return rows of drawn lengths, some of which may fill a page."""
    longest = draw.choice((5, 60, 60, 900, 30_000))
    repeated = "ü" * draw.randint(1, longest)
    return [
        draw.choice((None, "", repeated, "x" * draw.randint(1, longest), f"{i}\n{i}"))
        for i in range(count)
    ]


def expected(rows: list[str | None]) -> list[str]:
    """Return the rows of a page as documented: without any row that does not fit into the rest."""
    left, texts = 20_000, []
    for row in rows:
        if row and len(row.encode()) <= left:
            left -= len(row.encode())
            texts.append(row)
    return texts


@pytest.mark.parametrize("seed", range(12))
def test_pages_and_kept_parquet_metadata_are_bounded_in_bytes(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    rows: list[str | None] = []
    for i in range(4):
        part = rows_of(draw, draw.choice((150, 500)))
        rows += part
        pq.write_table(
            pa.table({"text": pa.array(part, draw.choice((pa.string(), pa.large_string())))}),
            tmp_path / f"{i}.parquet",
            row_group_size=draw.choice((40, 128, 10_000)),
            use_dictionary=draw.random() < 0.5,
        )
    made = ParquetSource(tmp_path, text_column="text", counts=Counts())
    for _ in range(30):
        first, limit = draw.randrange(len(rows)), draw.choice((1, 60, 100))
        got = made.rows("root", first, split="train", limit=limit) if made.num_rows() else []
        assert got == expected(rows[first : first + limit])
        held = sum(part.nbytes for parts in made._groups.values() for part in parts)
        assert held <= 30_000


def test_a_large_row_group_is_decoded_up_to_the_rows_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{i} " + "x" * 100 for i in range(5000)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "0.parquet")
    made = ParquetSource(tmp_path, text_column="text", counts=Counts())
    made.num_rows()
    made.rows("root", 0, split="train", limit=10)
    decoded = 0
    decode = pq.ParquetFile.iter_batches

    def counting(file: pq.ParquetFile, **how: object) -> object:
        nonlocal decoded
        for batch in decode(file, **how):
            decoded += len(batch)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counting)
    assert made.rows("root", 1000, split="train", limit=10) == rows[1000:1010]
    assert 1010 <= decoded < 1010 + 2 * parquet._ROWS and not made._groups


@pytest.mark.parametrize("seed", range(8))
def test_pages_of_lines_are_bounded_in_bytes(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    rows = [row or "-" for row in rows_of(draw, 300)]
    write_jsonl(tmp_path / "0.jsonl", rows)
    made = JsonLinesSource(tmp_path, text_key="text", index=None, counts=Counts())
    lines = (tmp_path / "0.jsonl").read_text().splitlines()
    for first in (0, 7, 150, 220):
        wanted = zip(rows[first : first + 60], lines[first : first + 60], strict=True)
        fitting: list[str | None] = [row if len(line) < 20_000 else None for row, line in wanted]
        assert made.rows("root", first, split="train", limit=60) == expected(fitting)


def test_a_bad_line_costs_only_itself(tmp_path: Path) -> None:
    """Use lines that are nested too deeply, are not JSON, or are larger than a page."""
    good = [f"row {i}" for i in range(200)]
    write_jsonl(tmp_path / "0.jsonl", good)
    with (tmp_path / "0.jsonl").open("a") as file:
        for bad in ("[" * 15_000, '{"text": ' * 2000, json.dumps({"text": "z" * 50_000}), "nul"):
            file.write(bad + "\n")
        file.write(json.dumps({"text": "last"}) + "\n")
    source = JsonLinesSource(tmp_path, text_key="text", index=None, counts=Counts())
    source.num_rows()
    assert source.rows("root", 195, split="train", limit=100) == [*good[195:], "last"]


def test_row_too_long_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    counts = Counts()
    with caplog.at_level(logging.WARNING):
        assert usable_texts(["a" * 15_000, "b" * 9_000, "c" * 5_000], counts) == [
            "a" * 15_000,
            "c" * 5_000,
        ]
    assert counts.drain() == {"rows_too_long": 1} and "A row is left out" in caplog.text
