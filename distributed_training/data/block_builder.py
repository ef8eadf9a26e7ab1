"""Prepare blocks in data workers, which fetch pages, tokenize them and cut them into sequences.

``python -m distributed_training.data.block_builder FD`` runs a worker. Over a socket pair, the rank
sends its worker a picklable :class:`WorkerSpec` and then block numbers. The worker answers each of
them with a :class:`Prepared` or a :class:`Failure`.

A worker is a plain program for two reasons. The spawn method of ``multiprocessing`` would import
the rank's program, and torch with it; nothing here imports torch, so a worker starts in a fraction
of a second. And a worker must exit whenever its rank exits, so it exits when the socket closes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distributed_training.common.files import atomic_file
from distributed_training.common.processes import ParentConnection, write_stacks_on_signal
from distributed_training.config.settings import DataSettings
from distributed_training.protocol.pages import Page, PageDraw, place_of

from .page_source import Counts, PageSource, PageUnavailable, SourceTokens
from .sources import Source, kind_of
from .tokenizer import text_tokenizer, tokenizer_hash

log = logging.getLogger(__name__)

SUFFIX = ".tokens"
#: Format version of prepared blocks. An older version of the program, to which an operator may go
#: back, must not use these blocks.
_FORMAT = 5
_NO_PLACE = -1  # the place of a block that is not made of own text
_NICENESS = 5  # added to the worker's nice value, so that training has priority
_PAGES_AT_ONCE = 4  # pages of a block that are fetched at once


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker needs, in a picklable form.

    ``folder`` contains the prepared blocks and the page cache. ``vocabulary`` is the size of the
    model's vocabulary. Rows with larger token ids are left out, unless it is None.
    """

    settings: DataSettings
    uid: int
    rank: int
    world_size: int
    sequence_length: int
    tokenizer_path: Path
    eos_id: int
    folder: Path
    draw_pages: PageDraw
    vocabulary: int | None = None

    @property
    def blocks(self) -> Path:
        """The folder of this rank's prepared blocks; its name depends on all that affects them."""
        settings = self.settings
        # List everything that affects the tokens. Otherwise, after a restart with other settings, a
        # rank would train on blocks that were prepared with the earlier settings.
        facts = [
            _FORMAT, settings.spec.text, settings.dataset, settings.text_column,
            settings.pages_per_block, settings.rows_per_page, settings.max_length,
            self.uid, self.rank, self.world_size, self.sequence_length, self.eos_id,
            self.vocabulary, tokenizer_hash(self.tokenizer_path),
            *filter(None, [settings.revision, settings.folder]),
            repr(self.draw_pages),
            *settings.own_text,
        ]  # fmt: skip
        # Keep the name short, since it becomes part of paths.
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        return self.folder / "blocks" / f"rank{self.rank}-{name}"

    @property
    def cache(self) -> Path:
        return self.folder / "pages"


class TokenSource(Protocol):
    """A source that returns the tokens of a block.

    If the source is a member's own text, ``block`` is the place in the text at which the block
    begins.
    """

    def block(self, block: int, pages: int) -> SourceTokens: ...


class RowsTokens:
    """The tokens of the pages that the page selection assigns, in its order."""

    def __init__(self, spec: WorkerSpec, source: PageSource, counts: Counts) -> None:
        self._spec = spec
        self._source = source
        self._tokenizer = text_tokenizer(spec.tokenizer_path, spec.eos_id)
        self._counts = counts
        # Threads are enough here, because they only wait for the network or a disk.
        self._pool = ThreadPoolExecutor(_PAGES_AT_ONCE, "pages")

    def block(self, block: int, pages: int) -> SourceTokens:
        empty = np.zeros(0, dtype=np.int32)
        try:
            outer_step, first = place_of(block)
            chosen = self._spec.draw_pages(
                uid=self._spec.uid,
                outer_step=outer_step,
                first=first + self._spec.rank * self._spec.settings.pages_per_block,
                count=pages,
                num_rows=self._source.num_rows(),
            )
        # The page selection raises ValueError if no config is large enough.
        except (PageUnavailable, ValueError) as error:
            self._counts.add("pages_missing", pages)
            return SourceTokens(empty, [str(error)])
        pieces: list[np.ndarray[Any, Any]] = []
        missing: list[str] = []
        # Keep the pages in the order of the selection, not in the order of their arrival.
        for page, fetched in zip(chosen, self._pool.map(self._fetch, chosen), strict=True):
            if isinstance(fetched, PageUnavailable):
                self._counts.add("pages_missing")
                missing.append(str(fetched))
                continue
            tokens = self._tokenizer.encode_rows(
                fetched,
                max_length=self._spec.settings.max_length,
                vocabulary=self._spec.vocabulary,
                counts=self._counts,
            )
            if not len(tokens):
                self._counts.add("pages_empty")
                missing.append(f"page {page[0]} {page[1]} has no text")
                continue
            pieces.append(tokens)
        return SourceTokens(np.concatenate(pieces) if pieces else empty, missing)

    def _fetch(self, page: Page) -> list[str] | PageUnavailable:
        config, row, split = page
        limit = self._spec.settings.rows_per_page
        try:
            return self._source.rows(config, row, split=split, limit=limit)
        except PageUnavailable as error:
            return error


def open_tokens(spec: WorkerSpec, counts: Counts) -> TokenSource:
    """Return the token source that ``--data.source`` names. Raises ConfigError."""
    source = spec.settings.spec
    if (opened := kind_of(source).tokens) is not None:
        tokens: TokenSource = opened(spec, source, counts)
        return tokens
    return RowsTokens(spec, Source(spec.settings, cache=spec.cache, counts=counts), counts)


@dataclass(frozen=True)
class Prepared:
    """A block that is prepared. :func:`read_block` reads its tokens from ``path``."""

    block: int
    path: Path
    sequences: int
    seconds: float
    missing: tuple[str, ...]
    counts: dict[str, int]
    kept: bool = False  # True if the block was prepared before a restart


def read_block(path: Path) -> tuple[np.ndarray[Any, Any], int]:
    """Return a block's tokens (sequences, sequence_length), and its place in the own text.

    Raises OSError if the file cannot be read, ValueError if it is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            return found["tokens"], int(found["place"])
    except OSError:
        raise
    except Exception as error:  # damaged bytes can raise anything in the libraries
        raise ValueError(f"{path} is damaged: {error}") from error


@dataclass(frozen=True)
class Failure:
    """A block that could not be prepared."""

    block: int
    line: str


class BlockMaker:
    """Prepares one rank's blocks: files with the tokens of its pages, cut into sequences.

    Raises ConfigError if the source's folder does not exist.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._counts = Counts()
        vocabulary = text_tokenizer(spec.tokenizer_path, spec.eos_id).vocabulary
        self._dtype = np.uint16 if vocabulary <= 2**16 else np.uint32
        self._tokens = open_tokens(spec, self._counts)
        self._folder = spec.blocks
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare(self, block: int, place: int | None = None) -> Prepared:
        """Prepare a block, which begins at ``place`` if it is made of own text.

        Raises OSError, PageUnavailable.
        """
        started = time.monotonic()
        path = self._folder / f"{block}{SUFFIX}"
        kept = self._find_prepared(block, path, place)
        if kept is not None:
            return replace(kept, counts=self._counts.drain())
        had = self._tokens.block(
            block if place is None else place, self._spec.settings.pages_per_block
        )
        length = self._spec.sequence_length
        count = len(had.tokens) // length
        self._counts.add("blocks")
        self._counts.add("tokens", count * length)
        if count:  # a block without tokens is not kept, because it will be requested again
            # The file contains a checksum and can be made again, so it need not be durable.
            with atomic_file(path, durable=False) as file:
                tokens = had.tokens[: count * length].reshape(count, length).astype(self._dtype)
                np.savez(file, tokens=tokens, place=_NO_PLACE if place is None else place)
        return Prepared(
            block=block,
            path=path,
            sequences=count,
            seconds=time.monotonic() - started,
            missing=tuple(had.missing),
            counts=self._counts.drain(),
        )

    def _find_prepared(self, block: int, path: Path, place: int | None) -> Prepared | None:
        """Return the block if it was prepared before a restart, or None.

        Only with the same block does the position in a checkpoint stay valid.
        """
        try:
            tokens, found = read_block(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("A prepared block is damaged, so it is prepared again: %s", error)
            return None
        # A block with another place was made after the checkpoint from which training resumed.
        if found != (_NO_PLACE if place is None else place):
            return None
        # The pipeline deletes the oldest files. Refresh the time of this one, which is in use.
        os.utime(path)
        return Prepared(block, path, len(tokens), 0.0, (), {}, kept=True)


# --- the process ----------------------------------------------------------------------------------


def _run(parent: ParentConnection) -> None:
    spec: WorkerSpec = parent.receive()
    parent.forward_log()
    logging.getLogger().setLevel(logging.WARNING)
    maker: BlockMaker | None = None

    def prepare(block: int, place: int | None) -> Prepared:
        nonlocal maker
        maker = maker or BlockMaker(spec)  # if this raises an error, the next block tries again
        return maker.prepare(block, place)

    def send(block: int, prepared: Future[Prepared]) -> None:
        error = prepared.exception()  # an error in one block must not end the worker
        failed = f"{type(error).__name__}: {error}"
        parent.send(prepared.result() if error is None else Failure(block, failed))

    # One thread prepares blocks, since the tokenizer is not thread-safe. Meanwhile the main thread
    # receives, so the worker exits at once when the socket closes.
    pool = ThreadPoolExecutor(1)
    while True:
        block, place = parent.receive()
        pool.submit(prepare, block, place).add_done_callback(partial(send, block))


def main() -> None:
    os.nice(_NICENESS)
    write_stacks_on_signal()
    with contextlib.suppress(EOFError, OSError):  # raised when the rank has ended
        _run(ParentConnection())
    os._exit(0)  # do not wait for requests in progress


if __name__ == "__main__":
    # Import this module under its real name, because objects that are sent to the rank are pickled
    # with the name of their module, which would otherwise be __main__.
    from distributed_training.data import block_builder

    block_builder.main()
