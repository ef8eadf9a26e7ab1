"""What a data worker does: the tokens of one block. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distributed_training.config.data import DataSettings, SourceSpec
from distributed_training.protocol.pages import pages_read_by, select_pages

from . import mixture
from .shards import SUFFIX, ShardError, open_shard, read_header, token_digest, write_shard
from .source import Counts, PageSource, PageUnavailable, check_folder, open_rows
from .tokenizer import TextTokenizer, tokenizer_hash

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker needs; picklable. ``folder`` takes prepared blocks and the cache.

    ``vocabulary``: the model's; rows with ids beyond it are left out. None: not checked.
    """

    settings: DataSettings
    uid: int
    rank: int
    world_size: int
    sequence_length: int
    tokenizer_path: Path
    eos_id: int
    folder: Path
    vocabulary: int | None = None

    @property
    def blocks(self) -> Path:
        """Where this rank's prepared blocks are. What changes their content changes the name."""
        settings = self.settings
        mixed = [(s.name, s.text, s.weight) for s in settings.sources]
        facts = [
            mixed, settings.dataset, settings.text_column, settings.pages_per_block,
            settings.rows_per_page, settings.max_length, self.uid, self.rank, self.world_size,
            self.sequence_length, self.eos_id, self.vocabulary,
            tokenizer_hash(self.tokenizer_path),
        ]  # fmt: skip
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        return self.folder / "blocks" / f"rank{self.rank}-{name}"

    @property
    def cache(self) -> Path:
        return self.settings.cache_dir or self.folder / "pages"


@dataclass(frozen=True)
class Prepared:
    """A block whose tokens lie in ``path``; see :mod:`.shards`.

    The header's ``extra`` has ``sources`` (sequences of each), ``pages`` ([source, config, row,
    split, tokens]) in the order of the tokens, and ``digest``.
    """

    block: int
    path: Path
    sequences: int
    seconds: float
    missing: tuple[str, ...]
    counts: dict[str, int]
    kept: bool = False  # it was there already, from before a restart


@dataclass(frozen=True)
class Failure:
    """A block that could not be prepared, or (without a block) a line of the worker's log."""

    block: int | None
    line: str


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
        limit = self._spec.vocabulary
        encoded = self._tokenizer.encode_each(rows, max_length=self._spec.settings.max_length)
        if limit is not None and limit < self._tokenizer.vocabulary:
            fitting = [ids for ids in encoded if int(ids.max()) < limit]
            self._counts.add("rows_beyond_vocabulary", len(encoded) - len(fitting))
            encoded = fitting
        self._counts.add("rows", len(encoded))
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


class BlockMaker:
    """Prepares blocks of one rank: every source's share, cut into sequences, in a file.

    Raises ConfigError for a folder that is none.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._counts = Counts()
        self._tokenizer = TextTokenizer(spec.tokenizer_path, eos_id=spec.eos_id)
        self._sources = spec.settings.sources
        self._tokens: list[TokenSource] = [self._open(source) for source in self._sources]
        self._folder = spec.blocks
        self._folder.mkdir(parents=True, exist_ok=True)

    def _open(self, source: SourceSpec) -> TokenSource:
        if source.kind == "shards":
            return ShardTokens(self._spec, source, self._counts)
        rows = _Reopened(
            lambda: open_rows(
                self._spec.settings, source, cache=self._spec.cache, counts=self._counts
            )
        )
        return RowsTokens(self._spec, rows, self._tokenizer, self._counts)

    def prepare(self, block: int) -> Prepared:
        """Raises OSError when the block cannot be written."""
        started = time.monotonic()
        path = self._folder / f"{block}{SUFFIX}"
        kept = self._kept(block, path)
        if kept is not None:
            return replace(kept, counts=self._counts.take())
        length = self._spec.sequence_length
        weights = [source.weight for source in self._sources]
        parts, missing, pages, per_source = [], [], [], []
        for source, tokens, n in zip(
            self._sources,
            self._tokens,
            mixture.pages_of(weights, self._spec.settings.pages_per_block),
            strict=True,
        ):
            had = tokens.block(block, n)
            count = len(had.tokens) // length
            parts.append(had.tokens[: count * length].reshape(count, length))
            per_source.append(count)
            pages += [[source.name, *page] for page in had.pages]
            missing += [f"{source.name}: {line}" if source.name else line for line in had.missing]
        sequences = np.concatenate(parts)
        self._counts.add("blocks")
        self._counts.add("tokens", sequences.size)
        if len(sequences):  # a block without tokens is asked for again, not kept
            write_shard(
                path,
                sequences,
                tokenizer=self._tokenizer.hash,
                eos_id=self._spec.eos_id,
                vocabulary=self._tokenizer.vocabulary,
                extra={
                    "block": block,
                    "sources": per_source,
                    "pages": pages,
                    "missing": missing,
                    "digest": token_digest(sequences),
                },
                durable=False,  # it carries its checksum, and can be had again
            )
        return Prepared(
            block=block,
            path=path,
            sequences=len(sequences),
            seconds=time.monotonic() - started,
            missing=tuple(missing),
            counts=self._counts.take(),
        )

    def _kept(self, block: int, path: Path) -> Prepared | None:
        """The block as it was prepared before a restart, so that positions in it still hold."""
        try:
            header, _ = open_shard(path)
        except FileNotFoundError:
            return None
        except (OSError, ShardError) as error:
            log.warning("A kept block is damaged and is prepared again: %s", error)
            return None
        os.utime(path)
        return Prepared(block, path, header.sequences, 0.0, (), {}, kept=True)


class _Reopened:
    """A source opened when a block first needs it, and again for each next block while that fails:
    its pages are missing then, those of other sources are not."""

    def __init__(self, open_source: Callable[[], PageSource]) -> None:
        self._open = open_source
        self._source: PageSource | None = None

    def num_rows(self) -> Mapping[str, int]:
        if self._source is None:
            self._source = self._open()
        return self._source.num_rows()

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        assert self._source is not None  # pages are chosen by its rows
        return self._source.rows(config, row, split=split, limit=limit)
