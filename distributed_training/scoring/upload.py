"""Describe an upload to be judged, and read the text that it is judged on.

Text is that of a few pages in a row of those that are assigned to a member, cut into sequences as
members cut them (protocol page, section 3). A :class:`Cause` names why an upload is reset: it
counts as no improvement.
"""

from __future__ import annotations

import enum
import errno
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from distributed_training.chain.base import Neuron
from distributed_training.config import Config
from distributed_training.data.held_out import domain_tokens
from distributed_training.data.page_source import PageSource, PageUnavailable
from distributed_training.data.sources import Source
from distributed_training.data.tokenizer import TextTokenizer
from distributed_training.node.start import NetworkFailure
from distributed_training.protocol.pages import (
    JUDGED_OF_DOMAINS,
    JUDGED_PAGES,
    PageDraw,
    place_of,
)
from distributed_training.protocol.types import Schema
from distributed_training.store.bucket_reader import BucketReader


class Cause(enum.Enum):
    """The causes of a reset, by the name that events have, in words."""

    STALE = "it came too late"
    BAD_GRADIENT = "the file cannot be used"
    NOT_FINITE = "the loss after it is not finite"
    NO_DATA = "it could not be judged in time"
    MAKES_IT_WORSE = "it raises the loss on unseen text"


@dataclass(frozen=True)
class Judged:
    """The global state that uploads are judged against.

    Args:
        outer_step: Of the close.
        schema: Names and shapes of the parameters, in state-dict order.
        weights: Global weights of outer step X, float32 on the CPU, in the order of ``schema``.
        learning_rate: The outer learning rate.

    Examples:
        ```python
        judged = Judged(
            outer_step=state.outer_step,
            schema=state.schema,
            weights=state.weights,
            learning_rate=state.learning_rate,
        )
        ```
    """

    outer_step: int
    schema: Schema
    weights: Sequence[Tensor]
    learning_rate: float


# Opens a member's bucket by its commitment. Raises NoBucket and ChainError.
OpenBucket = Callable[[Neuron], BucketReader]


BATCH = 2  # sequences come in pairs


class DataUnavailable(RuntimeError):
    """Pages, or this machine's memory, cannot be had now; says nothing about the upload."""


class ShortText(DataUnavailable):
    """A block has less text than a judgement needs, and never will have more."""


def pages_of(
    config: Config, tokenizer_path: Path, eos_id: int, *, limit: int = 0
) -> Callable[[int, int], Tensor]:
    """Return the reader of the text that this network's uploads are judged on.

    Raises ConfigError, NetworkFailure.
    """
    if not config.data.own:
        return PageReader.from_settings(config, tokenizer_path, eos_id, limit=limit)
    length, wanted = config.training.sequence_length, limit or JUDGED_OF_DOMAINS
    try:
        tokens = domain_tokens(config, tokenizer_path, eos_id)
    except PageUnavailable as error:
        raise NetworkFailure(f"uploads cannot be judged: {error}") from None

    def read(uid: int, block: int) -> Tensor:
        del uid  # all members are judged on the same text
        draw, found = random.Random(block), []
        for domain in config.domains:
            of_domain = tokens[domain.name]
            for _ in range(max(1, round(wanted * domain.weight))):
                start = draw.randint(0, len(of_domain) - length)
                found.append(torch.from_numpy(of_domain[start : start + length].astype(np.int64)))
        return torch.stack(found)

    return read


@dataclass(frozen=True)
class PageReader:
    """Reads the text of ``(uid, block)`` for the evaluator, as the miner with that uid reads it.

    Args:
        source: Has the rows of the data set.
        tokenizer: Turns rows into tokens.
        sequence_length: Tokens of a sequence.
        rows_per_page: Rows of a page.
        max_length: Tokens after which a row is cut.
        limit: The most sequences in all; 0: no limit.
        draw_pages: The network's draw of pages.
        patience: The longest time for the pages of a block, apart from the last page's own.

    Examples:
        ```python
        read = PageReader.from_settings(config, tokenizer_path, eos_id=0)
        sequences = read(17, block_at(3, 40))  # uid, outer step, page: int64 (n, sequence_length)
        ```
    """

    source: PageSource
    tokenizer: TextTokenizer
    sequence_length: int
    rows_per_page: int
    max_length: int
    draw_pages: PageDraw
    limit: int = 0
    patience: timedelta = timedelta(minutes=5)  # time for all pages of a block but the last

    @classmethod
    def from_settings(
        cls, config: Config, tokenizer_path: Path, eos_id: int, *, limit: int = 0
    ) -> PageReader:
        """Make the reader that a validator with this configuration has.

        Args:
            config: The validator's configuration, with the network's rules.
            tokenizer_path: A ``tokenizer.json``.
            eos_id: Token id that ends a row.
            limit: The most sequences of a block; 0: no limit.

        Raises:
            ConfigError: If the data source cannot be opened.
        """
        return cls(
            source=Source(config.data, cache=config.data_cache),
            tokenizer=TextTokenizer(tokenizer_path, eos_id=eos_id),
            sequence_length=config.training.sequence_length,
            rows_per_page=config.data.rows_per_page,
            max_length=config.data.max_length,
            limit=limit,
            draw_pages=config.draw_pages,
        )

    def __call__(self, uid: int, block: int) -> Tensor:
        """Return the text of a block as int64 ``(n, sequence_length)``.

        Raises DataUnavailable: rows cannot be had now, or come too slowly; ShortText: they are too
        few for two sequences or a page.
        """
        rows: list[str] = []
        deadline = time.monotonic() + self.patience.total_seconds()
        outer_step, first = place_of(block)
        try:
            for config, row, split in self.draw_pages(
                uid=uid,
                outer_step=outer_step,
                first=first,
                count=JUDGED_PAGES,
                num_rows=self.source.num_rows(),
            ):
                # A slow server gets two minutes per page, and a validator cannot lead a round
                # before the text is there.
                if time.monotonic() >= deadline:
                    took = f"its pages take longer than {self.patience.total_seconds():g} s"
                    raise PageUnavailable(took)
                rows += self.source.rows(config, row, split=split, limit=self.rows_per_page)
            tokens = self.tokenizer.encode_rows(rows, max_length=self.max_length)
        # ValueError means that the data have too few pages.
        except (PageUnavailable, OSError, ValueError) as error:
            kind = ShortText if isinstance(error, ValueError) else DataUnavailable
            why = f"pages of uid {uid} from {first} on, outer step {outer_step}"
            raise kind(f"{why}: {error}") from error
        length = self.sequence_length
        count = len(tokens) // (BATCH * length) * BATCH
        if count == 0:
            raise ShortText(
                f"pages of uid {uid} from {first} on, outer step {outer_step} hold less than two "
                "sequences"
            )
        cut = torch.from_numpy(tokens[: count * length].astype(np.int64)).reshape(count, length)
        if 0 < self.limit < count:  # take some of all pages
            cut = cut[torch.linspace(0, count - 1, self.limit).long()]
        return cut


class Payload(Protocol):
    """The pseudo-gradient of an upload."""

    def decode(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return a parameter's values; None: it was not sent."""
        ...


@dataclass(frozen=True)
class ReadUpload:
    """One miner's upload, read and checked.

    Args:
        uid: The miner's.
        blocks: Of text that it was trained on, to be tried in this order; never empty.
        payload: The pseudo-gradient.

    Examples:
        ```python
        upload = ReadUpload(uid, (block_at(3, 40),), file)
        for name, shape in judged.schema:
            delta = upload.payload.decode(name, shape)  # float32, or None: not sent
        ```
    """

    uid: int
    blocks: tuple[int, ...]
    payload: Payload


def in_a_line(error: BaseException) -> str:
    """Return type and text of an error that nobody expected, 200 characters at most."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


_LACKING = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO)


def of_this_machine(error: BaseException | None) -> bool:
    """Return whether it is this machine that lacks something, whatever it was reading."""
    if isinstance(error, OSError):
        return error.errno in _LACKING
    lacking = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    # torch raises a RuntimeError where the host has no memory left.
    return isinstance(error, lacking) or "t allocate memory" in str(error)
