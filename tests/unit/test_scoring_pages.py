"""Test which text an upload is judged on."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distributed_training.protocol.pages import select_pages
from distributed_training.scoring.upload import DataUnavailable, PageReader

pytestmark = pytest.mark.timeout(60)
NUM_ROWS = {"a": 500, "b": 900}


class ByteTokenizer:
    def encode_rows(self, rows: list[str], *, max_length: int) -> np.ndarray:
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


def test_a_limit_takes_the_same_number_of_each_rank() -> None:
    whole, some = _reader(Source())(7, 1234), _reader(Source(), limit=8)(7, 1234)
    assert some.shape == (8, 16)
    assert torch.equal(some[:4], whole[:4])
    assert torch.equal(some[4:], whole[whole.shape[0] // 2 :][:4])


def test_all_ranks_are_cut_to_the_shortest() -> None:
    """As the public validators' ranks agree on the least number of tokens."""
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
