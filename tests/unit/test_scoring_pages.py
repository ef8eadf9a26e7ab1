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
from distributed_training.protocol.page_permutation import PagePermutation
from distributed_training.protocol.pages import select_pages
from distributed_training.scoring.upload import DataUnavailable, PageReader
from tests.tools.network import network_file
from tests.tools.r2_keys import KEYS

pytestmark = pytest.mark.timeout(60)
NUM_ROWS = {"a": 500, "b": 900}


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
        "ranks": 2,
        "pages": 2,
        "rows_per_page": 100,
        "max_length": 1024,
        **changes,
    }
    return PageReader(**options)


@pytest.mark.parametrize("tokens, count", [(63, 0), (64, 2), (127, 2), (128, 4)])
def test_sequences_come_in_pairs(tokens: int, count: int) -> None:
    counted = SimpleNamespace(encode_rows=lambda *_, **__: np.arange(tokens, dtype=np.int32))
    reader = _reader(Source(), tokenizer=counted, sequence_length=32, ranks=1)
    if count == 0:
        with pytest.raises(DataUnavailable, match="less than two"):
            reader(7, 1234)
        return
    found = reader(7, 1234)
    assert found.shape == (count, 32) and found.dtype == torch.int64
    assert found.flatten().tolist() == list(range(count * 32))


def test_the_first_pages_of_each_rank_are_read() -> None:
    source = Source()
    found = _reader(source)(7, 1234)
    expected = [
        (config, row, split, 100)
        for rank in range(2)
        for config, row, split in select_pages(
            uid=7, local_rank=rank, block=1234, n_pages=5, num_rows=NUM_ROWS
        )[:2]
    ]
    assert source.asked == expected
    assert found.shape[1] == 16 and found.shape[0] % 2 == 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_a_miner_and_the_validator_draw_the_same_pages_of_a_network_of_its_own(
    tmp_path: Path, tokenizer: tuple[Path, int], world_size: int
) -> None:
    """data.selection 2 of the shared file decides the pages; no held-out page is read."""
    rules = {"exchange": "store", "data.selection": 2, "data.pages_per_block": 3,
             "data.rows_per_page": 20, "data.rows": 1400, "data.held_out_pages": 5}  # fmt: skip
    file = network_file(tmp_path, rules)
    miner, validator = (
        load_config(kind, ["--network", file], environ=KEYS, dotenv=None, check=False)
        for kind in ("miner", "validator")
    )
    read: set[tuple[str, int]] = set()
    for rank in range(world_size):
        source = Source()
        own = WorkerSpec(
            settings=miner.data, uid=6, rank=rank, world_size=world_size, sequence_length=16,
            tokenizer_path=tokenizer[0], eos_id=tokenizer[1], folder=tmp_path,
            draw_pages=pickle.loads(pickle.dumps(miner.draw_pages)),
        )  # fmt: skip
        assert own.blocks != replace(own, draw_pages=select_pages).blocks
        RowsTokens(own, source, ByteTokenizer(), Counts()).block(77, 3)
        read |= {(config, row) for config, row, _, limit in source.asked if limit == 20}
    source = Source()
    reader = PageReader.from_settings(validator, *tokenizer)
    replace(reader, source=source, tokenizer=ByteTokenizer(), sequence_length=16)(6, 77)
    judged = {(config, row) for config, row, _, _ in source.asked}
    assert len(judged) == 8 and judged <= read and len(read) >= 3 * world_size
    draw = miner.draw_pages
    assert isinstance(draw, PagePermutation)
    held_out = {(config, row) for config, row, _ in draw.held_out(NUM_ROWS)}
    assert len(held_out) == 5 and not held_out & read


def test_a_limit_takes_the_same_number_of_each_rank() -> None:
    whole, some = _reader(Source())(7, 1234), _reader(Source(), limit=8)(7, 1234)
    assert some.shape == (8, 16)
    assert torch.equal(some[:4], whole[:4])
    assert torch.equal(some[4:], whole[whole.shape[0] // 2 :][:4])


def test_all_ranks_are_cut_to_the_shortest() -> None:
    """The public validators' ranks agree on the least number of tokens too."""
    first = {
        row
        for _, row, _ in select_pages(uid=7, local_rank=0, block=1234, n_pages=2, num_rows=NUM_ROWS)
    }

    class Uneven(Source):
        def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
            return [("long" if row in first else "s")] * limit

    found = _reader(Uneven())(7, 1234)
    assert found.shape == (48, 16)  # of twice 400 tokens; the first rank has 1000
    assert bool((found[:24] == ord("l")).any()) and not bool((found[24:] == ord("l")).any())


def test_rows_that_cannot_be_had_are_nobodys_fault() -> None:
    class Down(Source):
        def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
            raise TimeoutError("no answer")

    with pytest.raises(DataUnavailable, match="no answer"):
        _reader(Down())(7, 1234)

    class Small(Source):
        def num_rows(self) -> dict[str, int]:
            return {"a": 101}

    with pytest.raises(DataUnavailable, match="its pages take longer than 0 s"):
        _reader(Source(), patience=timedelta(0))(7, 1234)
    with pytest.raises(DataUnavailable, match="config a has 101 rows; a page needs 102"):
        _reader(Small())(7, 1234)
