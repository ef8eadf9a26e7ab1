"""Tokens of a block from one source: pages of rows, or shards that were tokenized before.

Imports no torch: data workers run it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distributed_training.config.data import SourceSpec
from distributed_training.protocol.pages import pages_read_by, select_pages

from .shards import SUFFIX, ShardError, open_shard, read_header
from .source import Counts, PageSource, PageUnavailable, check_folder
from .spec import WorkerSpec
from .tokenizer import TextTokenizer, tokenizer_hash

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceTokens:
    """What one source has for a block: int32 (tokens,), its pages with their tokens, and the pages
    that could not be had."""

    tokens: np.ndarray[Any, Any]
    pages: list[tuple[str, int, str, int]]  # config, row, split, tokens
    missing: list[str]


class TokenSource(Protocol):
    def block(self, block: int, pages: int) -> SourceTokens: ...


class RowsTokens:
    """Pages of rows as the page selection assigns them, tokenized in page order."""

    def __init__(
        self, spec: WorkerSpec, source: PageSource, tokenizer: TextTokenizer, counts: Counts
    ) -> None:
        self._spec = spec
        self._source = source
        self._tokenizer = tokenizer
        self._counts = counts
        self._pool = ThreadPoolExecutor(spec.settings.connections, "pages")

    def block(self, block: int, pages: int) -> SourceTokens:
        empty = np.zeros(0, dtype=np.int32)
        try:
            chosen = self._choose(block, pages)
        except (PageUnavailable, ValueError) as error:
            self._counts.add("pages_missing", pages)
            return SourceTokens(empty, [], [str(error)])
        pieces: list[np.ndarray[Any, Any]] = []
        used: list[tuple[str, int, str, int]] = []
        missing: list[str] = []
        # Page order, not completion order.
        for page, fetched in zip(chosen, self._pool.map(self._fetch, chosen), strict=True):
            if isinstance(fetched, PageUnavailable):
                self._counts.add("pages_missing")
                missing.append(str(fetched))
                continue
            tokens = self._encode(fetched)
            if not len(tokens):
                self._counts.add("pages_empty")
                missing.append(f"page {page[0]} {page[1]} has no text")
                continue
            pieces.append(tokens)
            used.append((*page, len(tokens)))
        return SourceTokens(np.concatenate(pieces) if pieces else empty, used, missing)

    def _choose(self, block: int, pages: int) -> list[tuple[str, int, str]]:
        table = self._source.num_rows()
        dealt = pages_read_by(rank=self._spec.rank, world_size=self._spec.world_size, n_pages=pages)
        of_rank = {
            owner: select_pages(
                uid=self._spec.uid,
                local_rank=owner,
                block=block,
                n_pages=1 + max(number for other, number in dealt if other == owner),
                num_rows=table,
            )
            for owner in {owner for owner, _ in dealt}
        }
        return [of_rank[owner][number] for owner, number in dealt]

    def _fetch(self, page: tuple[str, int, str]) -> list[str] | PageUnavailable:
        config, row, split = page
        limit = self._spec.settings.rows_per_page
        try:
            return self._source.rows(config, row, split=split, limit=limit)
        except PageUnavailable as error:
            return error

    def _encode(self, rows: Sequence[str]) -> np.ndarray[Any, Any]:
        encoded = self._tokenizer.encode_fitting(
            rows,
            max_length=self._spec.settings.max_length,
            vocabulary=self._spec.vocabulary,
            counts=self._counts,
        )
        return np.concatenate(encoded) if encoded else np.zeros(0, dtype=np.int32)


class ShardTokens:
    """Shards of a folder, read as one run of sequences of the miner's length.

    A page is ``rows_per_page`` sequences; pages come in a random order fixed by uid and rank, none
    twice before all were used. Damaged shards and those of another tokenizer are left out.
    """

    def __init__(self, spec: WorkerSpec, source: SourceSpec, counts: Counts) -> None:
        check_folder(source)
        assert source.folder is not None
        self._spec = spec
        self._counts = counts
        self._folder = source.folder
        self._shards: list[np.ndarray[Any, Any]] = []
        self._paths: list[Path] = []
        self._verified: set[int] = set()
        self._damaged: dict[int, str] = {}
        wanted = tokenizer_hash(spec.tokenizer_path)
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                header, _ = read_header(path)
                if header.tokenizer != wanted:
                    raise ShardError(
                        f"{path} was made with another tokenizer than this miner's; make it again"
                    )
                _, data = open_shard(path, verify=False)  # each when it is first used
            except (OSError, ShardError) as error:
                counts.add("shards_left_out")
                log.warning("%s: it is left out", error)
                continue
            flat = data.reshape(-1)
            usable = len(flat) // spec.sequence_length
            if usable:
                self._shards.append(
                    flat[: usable * spec.sequence_length].reshape(usable, spec.sequence_length)
                )
                self._paths.append(path)
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)
        self._page = spec.settings.rows_per_page
        total = int(self._ends[-1]) if self._shards else 0
        self._page_count = -(-total // self._page)
        self._order = np.random.default_rng(spec.uid + spec.rank).permutation(self._page_count)

    def block(self, block: int, pages: int) -> SourceTokens:
        if not self._shards:
            self._counts.add("pages_missing", pages)
            problem = f"{self._folder} holds no usable shards"
            return SourceTokens(np.zeros(0, dtype=np.int32), [], [problem])
        pieces: list[np.ndarray[Any, Any]] = []
        used: list[tuple[str, int, str, int]] = []
        missing: list[str] = []
        for i in range(min(pages, self._page_count)):
            first = int(self._order[(block * pages + i) % self._page_count]) * self._page
            shard, begin = self._place(first)
            try:
                page = self._sequences(first)
            except (OSError, ShardError) as error:
                self._counts.add("pages_missing")
                missing.append(str(error))
                continue
            pieces.append(page)
            used.append((self._paths[shard].name, first - begin, "shard", page.size))
        joined = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
        return SourceTokens(joined, used, missing)

    def _place(self, sequence: int) -> tuple[int, int]:
        """The shard that holds a sequence, and the number of the shard's first."""
        shard = int(np.searchsorted(self._ends, sequence, side="right"))
        return shard, int(self._ends[shard - 1]) if shard else 0

    def _sequences(self, first: int) -> np.ndarray[Any, Any]:
        """A page's tokens. Raises ShardError, OSError."""
        pieces = []
        end = min(first + self._page, int(self._ends[-1]))
        while first < end:
            shard, begin = self._place(first)
            self._verify(shard)
            piece = self._shards[shard][first - begin : end - begin]
            pieces.append(piece.reshape(-1))
            first += len(piece)
        return np.concatenate(pieces)

    def _verify(self, shard: int) -> None:
        if shard in self._damaged:
            raise ShardError(self._damaged[shard])
        if shard in self._verified:
            return
        try:
            open_shard(self._paths[shard])
        except (OSError, ShardError) as error:
            self._counts.add("shards_left_out")
            self._damaged[shard] = str(error)
            log.warning("%s: its pages are left out", error)
            raise
        self._verified.add(shard)
