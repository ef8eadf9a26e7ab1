"""Test which text an upload is judged on."""

from __future__ import annotations

import pickle
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distributed_training.config import load_config
from distributed_training.data.block_builder import RowsTokens, WorkerSpec
from distributed_training.data.page_source import Counts
from distributed_training.protocol.pages import JUDGED_PAGES, PageDraw, block_at
from distributed_training.scoring.evaluator import DataUnavailable, PageReader, pages_of
from tests.tools.network import network_file
from tests.tools.r2_keys import KEYS

pytestmark = pytest.mark.timeout(60)
NUM_ROWS = {"a": 500, "b": 900}
BLOCK = block_at(3, 1234)
DRAW = PageDraw("0123456789ab", "lab", rows_per_page=100, held_out_pages=2)


class ByteTokenizer:
    def encode_rows(self, rows: list[str], *, max_length: int, **_: object) -> np.ndarray:
        tokens = [t for row in rows for t in [*row.encode()[:max_length], 256]]
        return np.array(tokens, dtype=np.int32)


class Source:
    def __init__(self, length: int = 5) -> None:
        self.asked: list[tuple[str, int, str, int]] = []
        self.length = length

    def num_rows(self) -> dict[str, int]:
        return NUM_ROWS

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        self.asked.append((config, row, split, limit))
        return [f"{config}{row + i}"[: self.length] for i in range(limit)]


def _reader(source: object, **changes: object) -> PageReader:
    options: dict = {
        "source": source,
        "tokenizer": ByteTokenizer(),
        "sequence_length": 16,
        "rows_per_page": 100,
        "max_length": 1024,
        "draw_pages": DRAW,
        **changes,
    }
    return PageReader(**options)


@pytest.mark.parametrize("tokens, count", [(63, 0), (64, 2), (127, 2), (128, 4)])
def test_sequences_come_in_pairs(tokens: int, count: int) -> None:
    counted = SimpleNamespace(encode_rows=lambda *_, **__: np.arange(tokens, dtype=np.int32))
    reader = _reader(Source(), tokenizer=counted, sequence_length=32)
    if count == 0:
        with pytest.raises(DataUnavailable, match="from 1234 on, outer step 3 have fewer than two"):
            reader(7, BLOCK)
        return
    found = reader(7, BLOCK)
    assert found.shape == (count, 32) and found.dtype == torch.int64
    assert found.flatten().tolist() == list(range(count * 32))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_miner_and_the_validator_draw_the_same_pages(
    tmp_path: Path, tokenizer: tuple[Path, int], world_size: int
) -> None:
    """The network's file decides the pages. The ranks read each page once, and no held-out page."""
    rules = {"exchange": "store", "data.selection": 2, "data.pages_per_block": 3,
             "data.rows_per_page": 20, "data.rows": 1400, "data.held_out_pages": 5}  # fmt: skip
    file = network_file(tmp_path, rules)
    miner, validator = (
        load_config(kind, ["--network", file], environ=KEYS, dotenv=None, check=False)
        for kind in ("miner", "validator")
    )
    read: set[tuple[str, int]] = set()
    blocks = [block_at(77, first) for first in range(0, 24, 3 * world_size)]
    for rank in range(world_size):
        source = Source()
        own = WorkerSpec(
            settings=miner.data, uid=6, rank=rank, world_size=world_size, sequence_length=16,
            tokenizer_path=tokenizer[0], eos_id=tokenizer[1], folder=tmp_path,
            draw_pages=pickle.loads(pickle.dumps(miner.draw_pages)),
        )  # fmt: skip
        assert own.blocks != replace(own, draw_pages=DRAW).blocks
        for block in blocks:
            RowsTokens(own, source, Counts()).block(block, 3)
        of_rank = {(config, row) for config, row, _, limit in source.asked if limit == 20}
        assert len(of_rank) == 3 * len(blocks) and not of_rank & read, "none is read twice"
        read |= of_rank
    source = Source()
    reader = pages_of(validator, *tokenizer)
    assert isinstance(reader, PageReader)
    replace(reader, source=source, tokenizer=ByteTokenizer(), sequence_length=16)(
        6, block_at(77, 24 - JUDGED_PAGES)
    )
    judged = {(config, row) for config, row, _, _ in source.asked}
    assert len(judged) == JUDGED_PAGES and judged <= read and len(read) == 24
    held_out = {(config, row) for config, row, _ in miner.draw_pages.held_out(NUM_ROWS)}
    assert len(held_out) == 5 and not held_out & read


def test_rows_that_cannot_be_had_are_nobodys_fault() -> None:
    class Down(Source):
        def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
            raise TimeoutError("no answer")

    with pytest.raises(DataUnavailable, match="no answer"):
        _reader(Down())(7, BLOCK)

    class Small(Source):
        def num_rows(self) -> dict[str, int]:
            return {"a": 101}

    with pytest.raises(DataUnavailable, match="its pages take longer than 0 s"):
        _reader(Source(), patience=timedelta(0))(7, BLOCK)
    with pytest.raises(DataUnavailable, match="2 are held out, so none is left to train on"):
        _reader(Small())(7, BLOCK)
