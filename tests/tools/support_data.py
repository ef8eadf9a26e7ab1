"""Make rows for tests, and write them to local files."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distributed_training.config.settings import DataSettings
from distributed_training.data.block_builder import WorkerSpec
from distributed_training.data.pipeline import DataPipeline
from distributed_training.protocol.pages import PageDraw
from tests.tools.waiting import wait_for


def tables(configs: int = 3, rows: int = 400, *, words: int = 30) -> dict[str, list[str]]:
    """Return texts that are all different, but the same in every process."""
    chosen = random.Random(7)
    vocabulary = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    return {
        f"CC-MAIN-{i}": [
            f"{i}/{row} " + " ".join(chosen.choices(vocabulary, k=words)) for row in range(rows)
        ]
        for i in range(configs)
    }


def write_tables(folder: Path, texts: Mapping[str, Sequence[str]], *, rows: int) -> Path:
    """Write ``texts`` (config -> rows) as Parquet files of ``rows`` rows, and return the folder."""
    for config, all_rows in texts.items():
        (folder / config).mkdir(parents=True)
        for first in range(0, len(all_rows), rows):
            table = pa.table({"text": all_rows[first : first + rows]})
            pq.write_table(table, folder / config / f"{first:06d}.parquet")
    return folder


DRAW = PageDraw("0123456789ab", "lab", rows_per_page=20, held_out_pages=0)
_OF_A_RANK = ("uid", "rank", "world_size", "sequence_length", "vocabulary")


def worker_spec(
    tokenizer: tuple[Path, int], folder: Path, source: str, **changes: Any
) -> WorkerSpec:
    """Return a worker's specification for rank 0 of 4, with small pages and short sequences."""
    own = {k: changes.pop(k) for k in _OF_A_RANK if k in changes}
    values: dict[str, Any] = {"pages_per_block": 4, "rows_per_page": 20, **changes}
    return WorkerSpec(
        **{"uid": 3, "rank": 0, "world_size": 4, "sequence_length": 32, **own},
        settings=DataSettings(source=source, **values),
        tokenizer_path=tokenizer[0],
        eos_id=tokenizer[1],
        folder=folder,
        draw_pages=DRAW,
    )


def wait_ready(made: DataPipeline, block: int) -> int:
    """Wait until a block is prepared, and return how many sequences it has."""
    wait_for(lambda: made.ready(block) is not None, f"block {block}", every=0.005)
    return made.ready(block) or 0


def write_jsonl(path: Path, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
