"""The text uploads are judged on: the pages of a uid's block, cut into sequences as miners cut them
(protocol page, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from distributed_training.protocol.pages import MAX_TOKENS_PER_ROW, ROWS_PER_PAGE, select_pages
from distributed_training.validator.evaluator import DataUnavailable

# Sequences come in pairs: a tail shorter than this many sequences is dropped.
BATCH = 2


class PageSource(Protocol):
    """``data.PageSource``."""

    def num_rows(self) -> Mapping[str, int]: ...
    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]: ...


def to_sequences(rows: Sequence[str], tokenizer: Any, sequence_length: int) -> Tensor:
    """int64 ``(n, sequence_length)``: each row cut to 1024 tokens, an end-of-sequence token after
    each, all in one line, cut to consecutive sequences; n is even."""
    tokens: list[int] = []
    for text in rows:
        tokens += tokenizer.encode(text, truncation=True, max_length=MAX_TOKENS_PER_ROW)
        tokens.append(tokenizer.eos_token_id)
    count = len(tokens) // (BATCH * sequence_length) * BATCH
    return torch.tensor(tokens[: count * sequence_length], dtype=torch.int64).view(
        count, sequence_length
    )


class PageReader:
    """Sequences of ``(uid, block)`` for the evaluator.

    ``ranks``: how many ranks of the miner are looked at, ``pages`` of each; ``limit``: at most so
    many sequences in all, the same number of each rank (0: no limit). ``unavailable``: what the
    source raises when rows cannot be had now.
    """

    def __init__(
        self,
        *,
        source: PageSource,
        tokenizer: Any,
        sequence_length: int,
        ranks: int,
        pages: int,
        limit: int = 0,
        unavailable: tuple[type[Exception], ...] = (OSError,),
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._sequence_length = sequence_length
        self._ranks = ranks
        self._pages = pages
        self._limit = limit
        self._unavailable = unavailable

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
                sequences = to_sequences(rows, self._tokenizer, self._sequence_length)
                parts.append(sequences[:per_rank])
        except self._unavailable as error:
            raise DataUnavailable(f"pages of uid {uid}, block {block}: {error}") from error
        found = torch.cat(parts)
        if found.shape[0] == 0:
            raise DataUnavailable(f"pages of uid {uid}, block {block} hold less than two sequences")
        return found
