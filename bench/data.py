"""Training does not wait for its data: ours against fetching, tokenizing and training by turns.

    python -m bench.data                         about 3 minutes on two cores
    python -m bench.data --repeat 1 --blocks 2   a quick look

A small model trains on blocks of Parquet files that a stand-in of the hub serves by ranges, with
150 ms latency for each of a page's two requests. Baseline ``fetch, tokenize, train``: all pages of
a block at once, tokens, then steps. Ours is the DataPipeline. Tokens per second and the share of
the time that training waited for data; both alternate, medians are compared.

Then eight ranks prepare blocks with 50 ms latency and nothing to train: how many tokens a second
come in, how many a second of a core brings, how many requests and bytes that takes, and how long
it takes until the first blocks are there.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import ByteLevelBPETokenizer

from bench.common import alone, parser
from distributed_training.common.llama import local_llama_config
from distributed_training.config.settings import DataSettings, TrainingSettings
from distributed_training.data.block_builder import Prepared, WorkerSpec
from distributed_training.data.hub import HubSource
from distributed_training.data.page_source import Counts, StdlibSource
from distributed_training.data.pipeline import DataPipeline, DataWorker
from distributed_training.data.tokenizer import TextTokenizer
from distributed_training.protocol.pages import PageDraw
from distributed_training.training.trainer import Trainer
from testbed.first_weights import begin
from testbed.hub_server import COMMIT, DATASET, Hub

SEQUENCE, MICRO, EFFECTIVE, VOCABULARY = 256, 4, 16, 8192

DRAW = PageDraw("bench", "bench", rows_per_page=100, held_out_pages=4)


def corpus() -> dict[str, list[str]]:
    source = StdlibSource()
    return {
        config: source.rows(config, 0, split="train", limit=rows)
        for config, rows in source.num_rows().items()
    }


def make_tokenizer(path: Path, rows: list[str]) -> Path:
    """Write a BPE tokenizer of the kind language models have, learned from ``rows``."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        rows, vocab_size=VOCABULARY, min_frequency=0, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.save(str(path))
    return path


def worker_spec(
    settings: DataSettings, tokenizer: Path, folder: Path, *, ranks: int, length: int
) -> WorkerSpec:
    return WorkerSpec(
        settings=settings, uid=3, rank=0, world_size=ranks, sequence_length=length,
        tokenizer_path=tokenizer, eos_id=0, folder=folder, draw_pages=DRAW,
    )  # fmt: skip


class FetchTokenizeTrain:
    """The baseline, with one block."""

    def __init__(self, settings: DataSettings, tokenizer: Path, hub: str, cache: Path) -> None:
        self._settings = settings
        self._tokenizer = TextTokenizer(tokenizer, eos_id=0)
        self._source = HubSource(settings, hub=hub, cache=cache, counts=Counts())

    def block(self, block: int) -> Iterator[torch.Tensor]:
        pages = DRAW(
            uid=3, outer_step=0, first=5 * block, count=self._settings.pages_per_block,
            num_rows=self._source.num_rows(),
        )  # fmt: skip

        def fetch(page: tuple[str, int, str]) -> list[str]:
            config, row, split = page
            limit = self._settings.rows_per_page
            return self._source.rows(config, row, split=split, limit=limit)

        with ThreadPoolExecutor(5) as pool:
            rows = [row for page in pool.map(fetch, pages) for row in page]
        tokens = self._tokenizer.encode_rows(rows, max_length=self._settings.max_length)
        count = len(tokens) // (MICRO * SEQUENCE) * MICRO
        batches = tokens[: count * SEQUENCE].reshape(-1, MICRO, SEQUENCE).astype(np.int64)
        yield from torch.from_numpy(batches)


class Pipeline:
    def __init__(self, settings: DataSettings, tokenizer: Path, folder: Path) -> None:
        spec = worker_spec(settings, tokenizer, folder, ranks=4, length=SEQUENCE)
        self.pipeline = DataPipeline(spec, micro_batch_size=MICRO)
        self._next = 0

    def ahead(self, block: int) -> None:
        while self._next < block + self.pipeline.depth:
            self._next = max(self._next, block - 1) + 1
            self.pipeline.request(self._next)

    def block(self, block: int) -> Iterator[torch.Tensor]:
        self.ahead(block)
        while (sequences := self.pipeline.ready(block)) is None:
            time.sleep(0.001)
        if not sequences:
            return
        self.pipeline.begin(block, sequences)
        self.ahead(block + 1)
        while (batch := self.pipeline.next()) is not None:
            yield batch


def train_on(trainer: Trainer, arm: Any, blocks: range) -> tuple[float, float]:
    """Tokens per second, and the share of the time spent waiting for data."""
    began, waited, tokens = time.perf_counter(), 0.0, 0
    for block in blocks:
        batches = arm.block(block)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            trainer.add_micro_batch(batch)
            tokens += batch.numel()
    seconds = time.perf_counter() - began
    return tokens / seconds, waited / seconds


def compare(
    folder: Path, tokenizer: Path, options: argparse.Namespace, *, rows: int, workers: int
) -> None:
    trainer = Trainer(
        settings=TrainingSettings(
            local_batch_size_train=MICRO,
            local_batch_size_train_effective=EFFECTIVE,
            sequence_length=SEQUENCE,
        ),
        model_config=local_llama_config(vocab_size=VOCABULARY, sequence_length=SEQUENCE),
        device=torch.device("cpu"),
        say=lambda line: None,
    )
    begin(trainer)
    found: dict[str, list[tuple[float, float]]] = {"public": [], "ours": []}
    with contextlib.closing(HubServer(folder / "files", 0.15)) as hub:
        settings = DataSettings(
            source="hub", dataset=DATASET, revision=COMMIT, rows_per_page=rows, pages_per_block=5,
            workers=workers, rows=40_000,
        )  # fmt: skip
        public = FetchTokenizeTrain(settings, tokenizer, hub.url, folder / "ends")
        ours = Pipeline(settings, tokenizer, folder / f"ours-{rows}-{workers}")
        train_on(trainer, ours, range(1, 3))  # the first steps and the first blocks warm up
        for i in range(options.repeat):
            blocks = range(100 * (i + 1), 100 * (i + 1) + options.blocks)
            ours.ahead(blocks[0])  # as in a run under way
            found["public"].append(train_on(trainer, public, blocks))
            found["ours"].append(train_on(trainer, ours, blocks))
        ours.pipeline.close()
    speed, wait = (
        {k: statistics.median(v[i] for v in values) for k, values in found.items()} for i in (0, 1)
    )
    print(
        f"5 pages of {rows} rows a block, {workers} worker(s): fetch-tokenize-train "
        f"{speed['public']:.0f} tokens/s ({100 * wait['public']:.1f} % waiting), ours "
        f"{speed['ours']:.0f} tokens/s ({100 * wait['ours']:.2f} % waiting): "
        f"ratio {speed['ours'] / speed['public']:.2f}",
        flush=True,
    )


class HubServer:
    """A stand-in of the hub in a process of its own; ``HF_ENDPOINT`` names it."""

    def __init__(self, folder: Path, latency: float) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve_hub, args=(theirs, folder, latency), daemon=True
        )
        self._process.start()
        self.url: str = self._ours.recv()
        os.environ["HF_ENDPOINT"] = self.url

    def counted(self) -> tuple[int, int]:
        """End it; return how many ranges were asked for, and their bytes."""
        self._ours.send(None)
        counted: tuple[int, int] = self._ours.recv()
        self._process.join(5)
        return counted

    def close(self) -> None:
        self._process.kill()


def _serve_hub(connection: Any, folder: Path, latency: float) -> None:
    with Hub(folder, latency=latency) as hub:
        connection.send(hub.url)
        connection.recv()
        wanted = [wanted for at, _, wanted, _ in hub.requests if at == "files"]
        ends = [re.fullmatch(r"bytes=(\d+)-(\d+)", text) for text in wanted]
        connection.send((len(wanted), sum(int(e[2]) - int(e[1]) + 1 for e in ends if e)))


def write_files(folder: Path, rows: list[str]) -> None:
    """Write files like those of fineweb-edu: groups of 1,000 rows of 3 kB, of several columns."""
    draw = random.Random(3)
    for number in range(4):
        texts = ["".join(draw.choices(rows, k=3)) for _ in range(10_000)]
        table = pa.table({"id": [f"{number}/{i}" for i in range(len(texts))], "text": texts})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=1000, compression="zstd")


def feed(folder: Path, tokenizer: Path, *, ranks: int, blocks: int) -> None:
    server = HubServer(folder / "files", 0.05)
    settings = DataSettings(source="hub", dataset=DATASET, revision=COMMIT, rows=40_000)
    of_rank = worker_spec(settings, tokenizer, folder / "feed", ranks=ranks, length=1024)
    workers = [DataWorker(replace(of_rank, rank=rank)) for rank in range(ranks)]
    processes = [psutil.Process(worker.child.pid) for worker in workers]

    def prepare(numbers: range) -> int:
        """Return the tokens of blocks of all ranks."""
        for number in numbers:
            for worker in workers:
                worker.submit(number)
        left, tokens = ranks * len(numbers), 0
        while left:
            for worker in workers:
                for answer in worker.answers():
                    assert isinstance(answer, Prepared) and not answer.missing, answer
                    left, tokens = left - 1, tokens + answer.sequences * 1024
            time.sleep(0.01)
        return tokens

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    began = time.monotonic()
    prepare(range(1, 2))  # imports, and the ends of the files
    first = time.monotonic() - began
    memory = statistics.median(process.memory_info().rss for process in processes) / 1e6
    began, before = time.monotonic(), used()
    tokens = prepare(range(100, 100 + blocks))
    seconds, cores = time.monotonic() - began, used() - before
    for worker in workers:
        worker.child.close()
    requests, size = server.counted()
    pages = 5 * ranks * (blocks + 1)
    print(
        f"{ranks} ranks from Parquet by ranges, 50 ms a request: {tokens / seconds:,.0f} tokens/s; "
        f"a second of a core brings {tokens / cores:,.0f}, so 560,000 need "
        f"{560_000 * cores / tokens:.1f} cores; {cores / seconds:.2f} cores were busy with it; "
        f"{requests / pages:.2f} requests and {size / pages / 1e6:.2f} MB per page of "
        f"{tokens / (5 * ranks * blocks):,.0f} tokens; first blocks after {first:.1f} s; "
        f"{memory:.0f} MB a worker",
        flush=True,
    )


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--repeat", type=int, default=3)
    arguments.add_argument("--blocks", type=int, default=6, help="of each repetition")
    options = arguments.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # On one thread: workers and server have the other core, as they would have theirs.
    with alone(), tempfile.TemporaryDirectory() as folder:
        rows = [row for table in corpus().values() for row in table]
        tokenizer = make_tokenizer(Path(folder) / "tokenizer.json", rows[:4000])
        (Path(folder) / "files").mkdir()
        write_files(Path(folder) / "files", rows)
        compare(Path(folder), tokenizer, options, rows=5, workers=1)
        compare(Path(folder), tokenizer, options, rows=2, workers=3)
        feed(Path(folder), tokenizer, ranks=8, blocks=options.blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
