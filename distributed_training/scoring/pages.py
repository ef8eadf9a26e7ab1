"""The text uploads are judged on: the pages of a uid's block, cut into sequences as miners cut them
(protocol page, section 5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.config import Config
from distributed_training.data.source import PageSource, PageUnavailable
from distributed_training.data.tokenizer import TextTokenizer
from distributed_training.protocol.pages import MAX_TOKENS_PER_ROW, ROWS_PER_PAGE, select_pages

# Sequences come in pairs: a tail shorter than this many sequences is dropped.
BATCH = 2


class DataUnavailable(RuntimeError):
    """Pages cannot be had now; says nothing about the upload."""


def to_sequences(tokens: np.ndarray[Any, Any], sequence_length: int) -> Tensor:
    """One line of tokens as int64 ``(n, sequence_length)``; n is even, the rest is dropped."""
    count = len(tokens) // (BATCH * sequence_length) * BATCH
    cut = tokens[: count * sequence_length].astype(np.int64)
    return torch.from_numpy(cut).view(count, sequence_length)


class PageReader:
    """Sequences of ``(uid, block)`` for the evaluator.

    ``ranks``: how many ranks of the miner are looked at, ``pages`` of each; ``limit``: at most so
    many sequences in all, the same number of each rank (0: no limit).
    """

    def __init__(
        self,
        *,
        source: PageSource,
        tokenizer: TextTokenizer,
        sequence_length: int,
        ranks: int,
        pages: int,
        limit: int = 0,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._sequence_length = sequence_length
        self._ranks = ranks
        self._pages = pages
        self._limit = limit

    @classmethod
    def from_settings(
        cls, config: Config, source: PageSource, tokenizer: TextTokenizer
    ) -> PageReader:
        """What the validator of this configuration reads."""
        return cls(
            source=source,
            tokenizer=tokenizer,
            sequence_length=config.training.sequence_length,
            ranks=config.validator.evaluation_ranks,
            pages=config.validator.evaluation_pages,
            limit=config.validator.evaluation_sequences,
        )

    def __call__(self, uid: int, block: int) -> Tensor:
        """Raises DataUnavailable: rows cannot be had now, or are too few for one sequence."""
        per_rank = -(-self._limit // self._ranks) if self._limit else None
        parts = []
        try:
            for rank in range(self._ranks):
                rows: list[str] = []
                for config, row, split in select_pages(
                    uid=uid,
                    local_rank=rank,
                    block=block,
                    n_pages=self._pages,
                    num_rows=self._source.num_rows(),
                ):
                    rows += self._source.rows(config, row, split=split, limit=ROWS_PER_PAGE)
                tokens = self._tokenizer.encode_rows(rows, max_length=MAX_TOKENS_PER_ROW)
                parts.append(to_sequences(tokens, self._sequence_length)[:per_rank])
        except (PageUnavailable, OSError) as error:
            raise DataUnavailable(f"pages of uid {uid}, block {block}: {error}") from error
        found = torch.cat(parts)
        if found.shape[0] == 0:
            raise DataUnavailable(f"pages of uid {uid}, block {block} hold less than two sequences")
        return found
