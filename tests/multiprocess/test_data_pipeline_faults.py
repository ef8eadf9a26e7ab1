"""Test that worker processes prepare the same blocks after restarts and after any fault."""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed_training.common import processes
from distributed_training.data import block_builder
from distributed_training.data.pipeline import DataPipeline
from distributed_training.data.tokenizer import TextTokenizer
from distributed_training.protocol.pages import Page, PageDraw, place_of
from testbed.hub_server import COMMIT, DATASET, Fault, Hub
from tests.tools.support_data import (
    tables,
    wait_ready,
    worker_spec,
    write_tables,
)
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(150)

TABLES = tables(configs=4, rows=500, words=20)
SIZES = {config: len(rows) for config, rows in TABLES.items()}
LENGTH = 64


DRAW = PageDraw("0123456789ab", "lab", rows_per_page=100, held_out_pages=0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tables as Parquet files, one for each page."""
    return write_tables(tmp_path_factory.mktemp("files"), TABLES, rows=100)


@contextlib.contextmanager
def pipeline(
    hub: Hub, tokenizer: tuple[Path, int], folder: Path, **changes: Any
) -> Iterator[DataPipeline]:
    values = {"pages_per_block": 5, "rows_per_page": 100, "dataset": DATASET, **changes}
    values |= {"revision": COMMIT}
    spec = worker_spec(tokenizer, folder, "hub", uid=11, sequence_length=LENGTH, **values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        made = DataPipeline(replace(spec, draw_pages=DRAW), micro_batch_size=2)
        try:
            yield made
        finally:
            made.close()


def serve(made: DataPipeline, block: int, sequences: int | None = None) -> np.ndarray:
    count = wait_ready(made, block)
    made.begin(block, count if sequences is None else sequences)
    batches = list(iter(made.next, None))
    return np.concatenate([batch.numpy() for batch in batches])


def pages_of(block: int) -> list[Page]:
    step, first = place_of(block)
    return DRAW(uid=11, outer_step=step, first=first, count=5, num_rows=SIZES)


def expected(tokenizer: tuple[Path, int], block: int) -> np.ndarray:
    """Return the sequences of a block as docs/protocol.md defines them."""
    made = TextTokenizer(tokenizer[0], eos_id=tokenizer[1])
    ids: list[int] = []
    for config, row, _ in pages_of(block):
        for text in TABLES[config][row : row + 100]:
            ids += made.encode_rows([text], max_length=1024).tolist()
    count = len(ids) // LENGTH
    return np.array(ids[: count * LENGTH]).reshape(count, LENGTH)


def test_the_tokens_are_the_same_after_every_fault(
    files: Path, tokenizer: tuple[Path, int], tmp_path: Path
) -> None:
    blocks = [1000, 1001, 1003]
    whole = [expected(tokenizer, block) for block in blocks]
    for number, (ahead, errors, workers) in enumerate([(1, 0.0, 1), (3, 0.1, 2)]):
        folder = tmp_path / str(number)
        with (
            Hub(files, latency=errors / 2, error_rate=errors) as hub,
            pipeline(hub, tokenizer, folder, workers=workers) as made,
        ):
            following = iter(blocks)
            for block in itertools.islice(following, ahead):
                made.request(block)
            for block, tokens in zip(blocks, whole, strict=True):
                served = serve(made, block)
                assert np.array_equal(served, tokens[: len(served)])
                assert len(tokens) - len(served) < 2
                for later in itertools.islice(following, 1):
                    made.request(later)
            counts = made.counters()
        assert counts["sequences_served"] == sum(len(tokens) // 2 * 2 for tokens in whole)


def file_of(page: Page) -> str:
    return f"{page[0]}/{page[1]:06d}.parquet"


def without(page: Page) -> Callable[[str], Fault | None]:
    """Return the decisions of a hub that has all pages except this one."""
    return lambda name: Fault(status=404) if name == file_of(page) else None


def test_one_failing_page_does_not_stop_the_others(
    files: Path, tokenizer: tuple[Path, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = pages_of(5)[1]
    with Hub(files) as hub, pipeline(hub, tokenizer, tmp_path) as made:
        made.request(1000)
        assert wait_ready(made, 1000)  # now the ends of the files are known
        hub.decide = without(page)
        made.request(5)
        served = serve(made, 5)
        counts = made.counters()
    assert counts["pages_missing"] == 1
    (line,) = [line for line in caplog.messages if "A page of block 5 is left out" in line]
    assert file_of(page) in line and "HTTP 404" in line
    (path,) = (tmp_path / "blocks").rglob("5.tokens")
    sequences, _ = block_builder.read_block(path)
    assert np.array_equal(served, sequences[: len(served)])


def test_a_dead_source_costs_no_waiting_and_kept_blocks_stay(
    files: Path, tokenizer: tuple[Path, int], tmp_path: Path
) -> None:
    with Hub(files) as hub, pipeline(hub, tokenizer, tmp_path) as made:
        made.request(1)
        first = serve(made, 1)
        for block in (6, 11):  # which have other pages than the first block
            answered = threading.Event()

            def refuse(name: str, may: threading.Event = answered) -> Fault:
                assert may.wait(60)
                return Fault(status=404)

            hub.decide = refuse
            asked = len(hub.ranges())
            made.request(block)
            wait_for(lambda n=asked: len(hub.ranges()) > n, "the source is asked")
            assert made.ready(block) is None, "asking never waits for the source"
            answered.set()
            assert wait_ready(made, block) == 0
        made.request(1)  # it is still on the disk
        assert np.array_equal(serve(made, 1), first)
        # A block that could not be prepared is tried again when it is requested again.
        hub.decide = None
        made.request(6)
        assert wait_ready(made, 6) > 0


def test_a_pipeline_that_starts_again_continues_at_the_next_sequence(
    files: Path, tokenizer: tuple[Path, int], tmp_path: Path
) -> None:
    # A page is missing when the block is first prepared, but not after the restart. The kept block
    # must still have the tokens to which the position refers.
    with Hub(files) as hub:
        with pipeline(hub, tokenizer, tmp_path) as made:
            made.request(1000)
            wait_ready(made, 1000)  # now the ends of the files are known
            hub.decide = without(pages_of(40)[0])
            made.request(40)
            made.begin(40, wait_ready(made, 40))
            for _ in range(7):
                made.next()
            made.request(41)
            cursor = made.state_dict()
        hub.decide = None
        assert (cursor["page_block"], cursor["offset"]) == (40, 14)
        fetched = len(hub.ranges())
        with pipeline(hub, tokenizer, tmp_path) as made:
            made.load_state_dict(cursor)
            assert wait_ready(made, 40) == cursor["sequences"]
            assert len(hub.ranges()) == fetched
            made.begin(40, cursor["sequences"], start=cursor["offset"])
            assert made.state_dict() == cursor
            rest = np.concatenate([b.numpy() for b in iter(made.next, None)])
            again = serve(made, 40)
        assert np.array_equal(rest, again[14:])


def test_blocks_on_disk_are_bounded_and_damage_is_repaired(
    files: Path, tokenizer: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed_training.data.pipeline._KEPT_FILES", 4)
    with Hub(files) as hub:
        with pipeline(hub, tokenizer, tmp_path) as made:
            for block in range(100, 112):
                made.request(block)
                serve(made, block)
            folder = made._block_folder
            assert len(list(folder.iterdir())) <= 4 + 5  # the last few are still in use
            assert len(made._blocks) == 1
        kept = folder / "111.tokens"
        data = bytearray(kept.read_bytes())
        data[-1] ^= 1
        kept.write_bytes(data)
        with pipeline(hub, tokenizer, tmp_path) as made:
            made.request(111)
            tokens = expected(tokenizer, 111)
            assert np.array_equal(serve(made, 111), tokens[: len(tokens) // 2 * 2])
        # A pipeline with other settings does not use these blocks.
        with pipeline(hub, tokenizer, tmp_path, pages_per_block=2) as made:
            assert not folder.exists() and made._block_folder != folder


def test_a_worker_that_cannot_work_says_why(
    files: Path, tokenizer: tuple[Path, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Hub(files) as hub, pipeline(hub, tokenizer, tmp_path) as made:
        folder = made._block_folder
        made.request(1)
        wait_ready(made, 1)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.write_text("in the way")
        made.request(2)
        assert wait_ready(made, 2) == 0
        made._workers[0].child._process.kill()
        made.request(3)  # the file is in the way when the next worker starts
        assert wait_ready(made, 3) == 0
        folder.unlink()
        made.request(4)
        assert wait_ready(made, 4) > 0
    assert "Block 2 could not be prepared" in caplog.text
    assert "Block 3 could not be prepared" in caplog.text


def test_a_worker_that_could_not_be_started_is_not_its_block_s_fault(
    files: Path, tokenizer: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = processes.start_child
    failed: list[str] = []

    def start(module: str, **options: Any) -> Any:
        if len(failed) < 2:
            failed.append(module)
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(module, **options)

    monkeypatch.setattr(processes, "_FIRST_WAIT", timedelta(seconds=0.1))
    with Hub(files, latency=0.3) as hub, pipeline(hub, tokenizer, tmp_path) as made:
        made.request(7)
        made._workers[0].child._start_process = partial(
            start, block_builder.__name__, keep={"HF_TOKEN"}
        )
        made._workers[0].child._process.kill()
        assert wait_ready(made, 7) > 0
    assert len(failed) == 2
