"""Train on shards of tokens: ``--plugins examples.shard_source --data.source shards:DIR``.

``scripts/pretokenize.py`` makes them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.config.settings import SourceSpec
from distributed_training.data.block_builder import WorkerSpec
from distributed_training.data.page_source import Counts, PageUnavailable, SourceTokens
from distributed_training.data.parquet import raise_if_it_may_pass
from distributed_training.data.sources import SOURCES, SourceKind, check_folder
from distributed_training.data.tokenizer import tokenizer_hash
from examples.shards import SUFFIX, ShardError, open_shard, read_header

log = logging.getLogger(__name__)


class ShardTokens:
    """The shards in a folder, read as one row of sequences of the miner's length.

    A page is ``rows_per_page`` sequences. Pages come in a random order that uid and rank fix, and
    no page comes twice before all were used. Damaged shards and shards made with another tokenizer
    are left out.
    """

    def __init__(self, spec: WorkerSpec, source: SourceSpec, counts: Counts) -> None:
        check_folder(source)
        assert source.folder is not None
        self._spec = spec
        self._counts = counts
        self._folder = source.folder
        self._page = spec.settings.rows_per_page
        self._tokenizer = tokenizer_hash(spec.tokenizer_path)
        self._shards: list[np.ndarray[Any, Any]] = []
        self._told: set[Path] = set()  # the shards left out for which a warning was logged

    def _open(self) -> None:
        """Open all shards. Raises PageUnavailable if a shard cannot be read, or there are none."""
        self._paths: list[Path] = []
        self._vocabularies: list[int] = []
        self._verified: set[int] = set()
        self._damaged: dict[int, str] = {}
        shards: list[np.ndarray[Any, Any]] = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                header, _ = read_header(path)
                if header.tokenizer != self._tokenizer:
                    raise ShardError(
                        f"{path} was made with another tokenizer than this miner's; make it again"
                    )
                _, data = open_shard(path, verify=False)  # a shard is verified on first use
            except (OSError, ShardError) as error:
                raise_if_it_may_pass(error, path)
                if path not in self._told:  # log it once, however often the folder is opened
                    self._told.add(path)
                    self._counts.add("shards_left_out")
                    log.warning("%s: it is left out", error)
                continue
            flat = data.reshape(-1)
            length = self._spec.sequence_length
            if usable := len(flat) // length:
                shards.append(flat[: usable * length].reshape(usable, length))
                self._paths.append(path)
                self._vocabularies.append(header.vocabulary)
        if not shards:
            raise PageUnavailable(f"{self._folder} holds no usable shards")
        self._shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)
        self._page_count = -(-int(self._ends[-1]) // self._page)
        seed = self._spec.uid + self._spec.rank
        self._order = np.random.default_rng(seed).permutation(self._page_count)

    def block(self, block: int, pages: int) -> SourceTokens:
        try:
            # Try again at each block until it succeeds: a disk may be mounted late.
            if not self._shards:
                self._open()
        except PageUnavailable as error:
            self._counts.add("pages_missing", pages)
            return SourceTokens(np.zeros(0, dtype=np.int32), [str(error)])
        pieces: list[np.ndarray[Any, Any]] = []
        missing: list[str] = []
        for i in range(min(pages, self._page_count)):
            first = int(self._order[(block * pages + i) % self._page_count]) * self._page
            try:
                pieces.append(self._sequences(first))
            except (OSError, ShardError) as error:
                self._counts.add("pages_missing")
                missing.append(str(error))
        joined = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
        return SourceTokens(joined, missing)

    def _place(self, sequence: int) -> tuple[int, int]:
        """Return the shard that holds a sequence, and the number of the shard's first sequence."""
        shard = int(np.searchsorted(self._ends, sequence, side="right"))
        return shard, int(self._ends[shard - 1]) if shard else 0

    def _sequences(self, first: int) -> np.ndarray[Any, Any]:
        """Return a page's tokens. Raises ShardError, OSError."""
        pieces = []
        end = min(first + self._page, int(self._ends[-1]))
        while first < end:
            shard, begin = self._place(first)
            self._verify(shard)
            piece = self._shards[shard][first - begin : end - begin]
            first += len(piece)
            pieces.append(self._fitting(piece, self._vocabularies[shard]).reshape(-1))
        return np.concatenate(pieces)

    def _fitting(self, sequences: np.ndarray[Any, Any], vocabulary: int) -> np.ndarray[Any, Any]:
        """Leave out sequences with tokens beyond the model's vocabulary.

        Shards made without ``--vocabulary`` may contain such tokens, and a rank that trains on one
        would crash, again after each restart.
        """
        known = self._spec.vocabulary
        if known is None or vocabulary <= known:
            return sequences
        fitting = sequences[sequences.max(axis=1) < known]
        self._counts.add("sequences_beyond_vocabulary", len(sequences) - len(fitting))
        return fitting

    def _verify(self, shard: int) -> None:
        if shard in self._damaged:
            raise ShardError(self._damaged[shard])
        if shard in self._verified:
            return
        try:
            open_shard(self._paths[shard])
        except ShardError as error:  # an OSError may pass
            self._counts.add("shards_left_out")
            self._damaged[shard] = str(error)
            log.warning("%s: its pages are left out", error)
            raise
        self._verified.add(shard)


SOURCES.register("shards", SourceKind(in_folder=True, tokens=ShardTokens))
