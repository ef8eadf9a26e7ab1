"""Test the local corpus, the byte tokenizer, and the pipeline with a real worker process."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distributed_training.data import pipeline as pipeline_module
from distributed_training.data.block_builder import SUFFIX, WorkerSpec
from distributed_training.data.page_source import StdlibSource
from distributed_training.data.pipeline import DataPipeline
from distributed_training.data.tokenizer import BYTE_VOCABULARY, TextTokenizer
from distributed_training.protocol.pages import block_at
from tests.tools.support_data import wait_ready, worker_spec

pytestmark = pytest.mark.timeout(60)


def spec(tokenizer: tuple[Path, int], **changes: int) -> WorkerSpec:
    folder = Path(tempfile.mkdtemp(dir=tokenizer[0].parent))
    return worker_spec(
        tokenizer, folder, "stdlib", pages_per_block=2, sequence_length=64, **changes
    )


def pipeline(tokenizer: tuple[Path, int], **changes: int) -> DataPipeline:
    return DataPipeline(spec(tokenizer, **changes), micro_batch_size=2)


@pytest.fixture()
def running(tokenizer: tuple[Path, int]) -> Iterator[DataPipeline]:
    made = pipeline(tokenizer)
    yield made
    made.close()


def test_held_out_rows_are_in_no_page() -> None:
    source = StdlibSource()
    pages = {*source._table}
    held_out = [row for row in source.held_out() if len(row) > 200]
    assert len(held_out) > 50
    assert not pages.intersection(held_out)


def test_bytes_survive_the_tokenizer(tokenizer: tuple[Path, int]) -> None:
    text = "def f(x):\n\treturn 'ß → 日本'  # ok\n"
    made = TextTokenizer(tokenizer[0], eos_id=tokenizer[1])
    ids = made.encode_rows([text], max_length=1000)
    assert len(ids) == len(text.encode()) + 1
    assert ids[-1] == tokenizer[1] < BYTE_VOCABULARY
    assert made._tokenizer.decode(ids[:-1].tolist()) == text


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_miner_trains_on_every_page_that_it_counts(
    tokenizer: tuple[Path, int], world_size: int
) -> None:
    """The ranks share the pages of a block, and the judge draws from all of these pages."""
    source, made = StdlibSource(), TextTokenizer(tokenizer[0], eos_id=tokenizer[1])
    served: list[torch.Tensor] = []
    block = block_at(9, 40)
    for rank in range(world_size):
        with closing(pipeline(tokenizer, rank=rank, world_size=world_size)) as one:
            one.request(block)
            one.begin(block, wait_ready(one, block))
            while (batch := one.next()) is not None:
                served += batch.tolist()
    flat = bytes(token % 256 for sequence in served for token in sequence)
    for config, row, split in spec(tokenizer).draw_pages(
        uid=3, outer_step=9, first=40, count=2 * world_size, num_rows=source.num_rows()
    ):
        rows = source.rows(config, row, split=split, limit=20)
        tokens = made.encode_rows(rows, max_length=1024)
        # Search for a part of the page, since its place in the sequences depends on earlier pages.
        middle = bytes(int(token) % 256 for token in tokens[len(tokens) // 2 :][:32])
        assert middle in flat, (config, row)


def test_sequences_are_trimmed_as_ordered(running: DataPipeline) -> None:
    running.request(5)
    wait_ready(running, 5)
    running.begin(5, 5)
    for _ in range(2):
        batch = running.next()
        assert batch is not None and batch.shape == (2, 64) and batch.dtype == torch.int64
    assert running.next() is None  # the fifth sequence does not fill a micro-batch
    cursor = running.state_dict()
    assert cursor == {"page_block": 5, "sequences": 5, "offset": 4}
    with pytest.raises(ValueError, match="were ordered"):
        running.begin(5, 10**6)


def test_time_without_data_is_waited_for_by_the_next_batch_but_not_by_the_first(
    running: DataPipeline,
) -> None:
    running.request(5)
    wait_ready(running, 5)
    running.begin(5, 8)
    running.missed(1000.0)  # the time that a start takes
    assert running.next() is not None and running.wait_seconds < 500
    running.missed(1000.0)
    running.missed(500.0)
    assert running.next() is not None and 1500 <= running.wait_seconds < 2000
    assert running.next() is not None and running.wait_seconds < 500


def test_leftovers_of_a_killed_worker_are_removed_by_the_next_start(
    tokenizer: tuple[Path, int],
) -> None:
    same = spec(tokenizer)
    newer = replace(same, settings=replace(same.settings, revision="2" * 40))
    assert newer.blocks != same.blocks  # the blocks of the old revision must not be used
    same.blocks.mkdir(parents=True)
    half, whole = same.blocks / ".7.tokens.123.456.tmp", same.blocks / f"8{SUFFIX}"
    for path in (half, whole):
        path.write_bytes(b"tokens")
    with closing(DataPipeline(same, micro_batch_size=2)):
        assert not half.exists() and whole.exists()


def test_a_disk_that_may_only_be_read_does_not_end_training(
    running: DataPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(pipeline_module, "_KEPT_FILES", 1)
    monkeypatch.setattr(Path, "unlink", refused)
    for block in range(1, 6):
        running.request(block)
        running.begin(block, wait_ready(running, block))
