"""What a data worker process does: the tokens of one block. Imports no torch."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.config.data import DataSettings
from distributed_training.protocol.pages import select_pages

from .source import PageSource, PageUnavailable, open_source
from .tokenizer import TextTokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker needs; picklable."""

    settings: DataSettings
    uid: int
    local_rank: int
    tokenizer_path: Path
    eos_id: int


@dataclass(frozen=True)
class BlockTokens:
    """Tokens of a block's pages in page order, and the pages that could not be had."""

    block: int
    tokens: np.ndarray[Any, Any]  # int32 (tokens,)
    missing: tuple[str, ...]


_worker: tuple[WorkerSpec, PageSource, TextTokenizer] | None = None


def start_worker(spec: WorkerSpec) -> None:
    """Initializer of a worker process."""
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = TextTokenizer(spec.tokenizer_path, eos_id=spec.eos_id)
    _worker = (spec, open_source(spec.settings), tokenizer)


def block_tokens(block: int) -> BlockTokens:
    """Fetch and tokenize the pages assigned to ``block``. Page order, not completion order."""
    assert _worker is not None
    spec, source, tokenizer = _worker
    return tokens_of_block(spec, source, tokenizer, block)


def tokens_of_block(
    spec: WorkerSpec, source: PageSource, tokenizer: TextTokenizer, block: int
) -> BlockTokens:
    """See :func:`block_tokens`. A page that cannot be had is left out and named."""
    settings = spec.settings
    try:
        table = source.num_rows()
    except PageUnavailable as error:
        return BlockTokens(block, np.zeros(0, dtype=np.int32), (str(error),))
    pages = select_pages(
        uid=spec.uid,
        local_rank=spec.local_rank,
        block=block,
        n_pages=settings.pages_per_block,
        num_rows=table,
    )

    def fetch(page: tuple[str, int, str]) -> list[str] | PageUnavailable:
        config, row, split = page
        try:
            return source.rows(config, row, split=split, limit=settings.rows_per_page)
        except PageUnavailable as error:
            return error

    with ThreadPoolExecutor(max(1, settings.connections)) as pool:
        fetched = list(pool.map(fetch, pages))
    missing = tuple(str(rows) for rows in fetched if isinstance(rows, PageUnavailable))
    tokens = [
        tokenizer.encode_rows(rows, max_length=settings.max_length)
        for rows in fetched
        if not isinstance(rows, PageUnavailable)
    ]
    joined = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int32)
    return BlockTokens(block, joined, missing)
