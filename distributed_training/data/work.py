"""What a data worker does: the tokens of one block. Imports no torch."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distributed_training.config.data import SourceSpec

from . import mixture
from .shards import SUFFIX, ShardError, open_shard, token_digest, write_shard
from .source import Counts, PageSource, open_rows
from .spec import WorkerSpec
from .token_sources import RowsTokens, ShardTokens, TokenSource
from .tokenizer import TextTokenizer

log = logging.getLogger(__name__)


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
    """A block that could not be prepared."""

    block: int
    line: str


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
