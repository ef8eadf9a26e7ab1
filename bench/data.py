"""Training does not wait for its data: ours against the public miner's way.

    python -m bench.data                         about 4 minutes on two cores
    python -m bench.data --repeat 1 --blocks 2   a quick look

A small model trains on blocks from a rows API on loopback, 300 ms latency and 5 % errors. Baseline
``fetch, tokenize, train``: the public miner's way (protocol page, section 3): the table twice, all
pages, tokens, then steps; its waits after an error are a second here instead of a minute. Ours is
the DataPipeline. Tokens per second and the share of the time that training waited for data; both
alternate, medians are compared.

Then eight ranks prepare blocks of Parquet files that a stand-in of the hub serves by ranges, with
50 ms latency and nothing to train: how many tokens a second come in, how many a second of a core
brings, and how many requests and bytes that takes.
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
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import ByteLevelBPETokenizer

from bench.common import alone, parser
from distributed_training.common.llama import local_llama_config
from distributed_training.config.settings import DataSettings, TrainingSettings
from distributed_training.data.block_builder import Prepared, WorkerPool, WorkerSpec
from distributed_training.data.page_source import StdlibSource
from distributed_training.data.pipeline import DataPipeline
from distributed_training.data.tokenizer import TextTokenizer
from distributed_training.protocol.pages import PageDraw
from distributed_training.training.trainer import Trainer
from tests.tools.hub_server import COMMIT, Hub
from tests.tools.support_data import DATASET, RowsServer

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
        rows,
        vocab_size=VOCABULARY,
        min_frequency=0,
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.save(str(path))
    return path


def _serve(connection: Any, latency: float, error_rate: float) -> None:
    with RowsServer(corpus(), latency=latency, error_rate=error_rate) as server:
        connection.send(server.url)
        connection.recv()


@contextlib.contextmanager
def rows_server(*, latency: float, error_rate: float) -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs, latency, error_rate), daemon=True
    )
    process.start()
    yield ours.recv()
    ours.send(None)
    process.join(5)
    process.kill()


class FetchTokenizeTrain:
    """The public miner's way with one block."""

    def __init__(self, settings: DataSettings, tokenizer: Path) -> None:
        self._settings = settings
        self._tokenizer = TextTokenizer(tokenizer, eos_id=0)
        self._client = httpx.Client(timeout=20.0)

    def _get(self, path: str, **query: Any) -> Any:
        for attempt in range(1, 101):
            answer = self._client.get(
                f"{self._settings.rows_url}/{path}", params={"dataset": DATASET, **query}
            )
            if answer.status_code == 200:
                return answer.json()
            time.sleep(1.0 * attempt)  # 60 s there
        raise RuntimeError("no answer")

    def block(self, block: int) -> Iterator[torch.Tensor]:
        for _ in range(2):
            splits = self._get("size")["size"]["splits"]
        table = {s["config"]: s["num_rows"] for s in splits if s["config"] != "default"}
        pages = DRAW(
            uid=3, outer_step=0, first=5 * block, count=self._settings.pages_per_block,
            num_rows=table,
        )  # fmt: skip

        def fetch(page: tuple[str, int, str]) -> list[str]:
            rows = self._get(
                "rows", config=page[0], split=page[2], offset=page[1],
                length=self._settings.rows_per_page,
            )  # fmt: skip
            return [row["row"]["text"] for row in rows["rows"]]

        with ThreadPoolExecutor(5) as pool:
            rows = [row for page in pool.map(fetch, pages) for row in page]
        tokens = self._tokenizer.encode_rows(rows, max_length=self._settings.max_length)
        count = len(tokens) // (MICRO * SEQUENCE) * MICRO
        batches = tokens[: count * SEQUENCE].reshape(-1, MICRO, SEQUENCE).astype(np.int64)
        yield from torch.from_numpy(batches)


class Pipeline:
    def __init__(self, settings: DataSettings, tokenizer: Path, folder: Path) -> None:
        self.pipeline = DataPipeline(
            WorkerSpec(
                settings=settings,
                uid=3,
                rank=0,
                world_size=4,
                sequence_length=SEQUENCE,
                tokenizer_path=tokenizer,
                eos_id=0,
                folder=folder,
                draw_pages=DRAW,
            ),
            micro_batch_size=MICRO,
        )
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
    trainer.load_weights(None)
    trainer.begin_epoch(0)
    found: dict[str, list[tuple[float, float]]] = {"public": [], "ours": []}
    with rows_server(latency=0.3, error_rate=0.05) as url:
        settings = DataSettings(
            source="hf", dataset=DATASET, rows_url=url, rows_per_page=rows, pages_per_block=5,
            cache_gb=0.0, workers=workers,
        )  # fmt: skip
        public = FetchTokenizeTrain(settings, tokenizer)
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


def feed(folder: Path, tokenizer: Path, rows: list[str], *, ranks: int, blocks: int) -> None:
    (folder / "files").mkdir()
    write_files(folder / "files", rows)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve_hub, args=(theirs, folder / "files", 0.05), daemon=True
    )
    process.start()
    os.environ["HF_ENDPOINT"] = ours.recv()
    settings = DataSettings(
        source="hub", dataset=DATASET, revision=COMMIT, cache_dir=folder / "ends", rows=40_000
    )
    pools = [
        WorkerPool(
            WorkerSpec(
                settings=settings,
                uid=3,
                rank=rank,
                world_size=ranks,
                sequence_length=1024,
                tokenizer_path=tokenizer,
                eos_id=0,
                folder=folder / "feed",
                draw_pages=DRAW,
            ),
            count=1,
        )
        for rank in range(ranks)
    ]
    workers = [p for p in psutil.Process().children() if "block_builder" in " ".join(p.cmdline())]

    def prepare(numbers: range) -> int:
        """Return the tokens of blocks of all ranks."""
        for number in numbers:
            for pool in pools:
                pool.submit(number)
        left, tokens = ranks * len(numbers), 0
        while left:
            for pool in pools:
                for answer in pool.answers():
                    assert isinstance(answer, Prepared) and not answer.missing, answer
                    left, tokens = left - 1, tokens + answer.sequences * 1024
            time.sleep(0.01)
        return tokens

    def used() -> float:
        return sum(sum(worker.cpu_times()[:2]) for worker in workers)

    prepare(range(1, 2))  # imports, and the ends of the files
    began, before = time.monotonic(), used()
    tokens = prepare(range(100, 100 + blocks))
    seconds, cores = time.monotonic() - began, used() - before
    for pool in pools:
        pool.close()
    ours.send(None)
    requests, size = ours.recv()
    process.join(5)
    pages = 5 * ranks * (blocks + 1)
    print(
        f"{ranks} ranks from Parquet by ranges, 50 ms a request: {tokens / seconds:,.0f} tokens/s; "
        f"a second of a core brings {tokens / cores:,.0f}, so 560,000 need "
        f"{560_000 * cores / tokens:.1f} cores; {cores / seconds:.2f} cores were busy with it; "
        f"{requests / pages:.2f} requests and {size / pages / 1e6:.2f} MB a page of "
        f"{tokens / (5 * ranks * blocks):,.0f} tokens",
        flush=True,
    )


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--repeat", type=int, default=3)
    arguments.add_argument("--blocks", type=int, default=6, help="of each repetition")
    arguments.add_argument("--only", choices=("rows", "hub"), help="of the two sources")
    options = arguments.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # On one thread: workers and server have the other core, as they would have theirs.
    with alone(), tempfile.TemporaryDirectory() as folder:
        rows = [row for table in corpus().values() for row in table]
        tokenizer = make_tokenizer(Path(folder) / "tokenizer.json", rows[:4000])
        if options.only != "hub":
            compare(Path(folder), tokenizer, options, rows=5, workers=1)
            compare(Path(folder), tokenizer, options, rows=2, workers=3)
        if options.only != "rows":
            feed(Path(folder), tokenizer, rows, ranks=8, blocks=options.blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
