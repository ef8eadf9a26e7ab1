"""Build the tokens of blocks in data workers: open the source, fetch pages, tokenize, cut.

``python -m distributed_training.data.block_builder FD`` is a worker: its rank sends a picklable
:class:`WorkerSpec`, then block numbers, over a socket pair; answers are :class:`Prepared`. It is
started as a plain program because ``multiprocessing``'s spawn would import the rank's program,
torch included, and because a worker must end with its rank however that ends: it does when the
socket closes. Nothing here imports torch, so a worker starts in a fraction of a second.

A worker may end for its own reasons (no memory, a kill) or because of a block. The one in its place
gets its blocks; a block that ends three workers in a row is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distributed_training.common.processes import (
    ChildProcess,
    ParentConnection,
    write_stacks_on_signal,
)
from distributed_training.config.settings import DataSettings, SourceSpec
from distributed_training.config.types import ConfigError, load_optional
from distributed_training.protocol.pages import Page, PageDraw, place_of

from .page_source import (
    Counts,
    NothingToRead,
    PageSource,
    PageUnavailable,
    Pin,
    SourceTokens,
)
from .parquet import folder_revision
from .shards import SUFFIX, ShardError, open_shard, write_shard
from .sources import Opening, kind_of
from .tokenizer import TextTokenizer, tokenizer_hash

log = logging.getLogger(__name__)

#: Of prepared blocks: an older version that an update goes back to must not take these for its own.
_FORMAT = 3
_NICENESS = 5  # training goes first
_MOST_BLAMED = 2  # workers that may end over one block


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
    draw_pages: PageDraw
    vocabulary: int | None = None

    @property
    def blocks(self) -> Path:
        """The folder of this rank's prepared blocks; all that changes them changes its name."""
        settings = self.settings
        mixed = [(s.name, s.text, s.weight) for s in settings.sources]
        # What is left out here must not change a token: a restart would train on the blocks of the
        # settings before.
        facts = [
            _FORMAT, mixed, settings.dataset, settings.text_column, settings.pages_per_block,
            settings.rows_per_page, settings.max_length, self.uid, self.rank, self.world_size,
            self.sequence_length, self.eos_id, self.vocabulary,
            tokenizer_hash(self.tokenizer_path),
            *filter(None, [settings.revision, settings.folder]),
            repr(self.draw_pages),
            *settings.own_text,
        ]  # fmt: skip
        # Short: it becomes a part of paths.
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        return self.folder / "blocks" / f"rank{self.rank}-{name}"

    @property
    def cache(self) -> Path:
        return self.settings.cache_dir or self.folder / "pages"


def check_folder(spec: SourceSpec) -> None:
    """Raise ConfigError when the folder of ``--data.source`` does not exist."""
    if spec.folder is not None and not spec.folder.is_dir():
        raise ConfigError(
            f"--data.source {spec.text}: {spec.folder} is no folder, so there is nothing to train "
            "on: correct the path"
        )


def open_rows(
    settings: DataSettings, spec: SourceSpec, *, cache: Path | None, counts: Counts
) -> PageSource:
    """Open the source of one specification.

    ``cache``: folder for pages and indexes, or None.

    Raises ConfigError for a folder that does not exist, or for shards, which hold no rows;
    OtherData for a folder that does not hold what the network's file pins.
    """
    kind = kind_of(spec)
    check_folder(spec)
    source = kind.open(Opening(settings, spec, cache, counts))
    pin = Pin(settings.revision, settings.rows)
    if not kind.checks_pin and pin != Pin():
        pin.check(
            f"--data.source {spec.text}",
            # Once, when it is opened: it reads a note next to each file of the folder.
            revision=_revision(spec, wanted=pin.revision),
            rows=sum(source.num_rows().values()),
        )
    return source


def _revision(spec: SourceSpec, *, wanted: str | None = None) -> str | None:
    return None if spec.folder is None else folder_revision(spec.folder, wanted=wanted)


def served(settings: DataSettings, *, cache: Path | None) -> Pin:
    """Return what ``--data.source`` serves now; its revision is None where it does not tell.

    ``cache``: as of :func:`open_source`. Raises ConfigError, PageUnavailable (OtherData where it
    is not what the settings pin).
    """
    return _pin_of(open_source(settings, cache=cache), settings)


def _pin_of(source: PageSource, settings: DataSettings) -> Pin:
    rows = sum(source.num_rows().values())
    told = getattr(source, "revision", None)  # of a dataset server
    return Pin(told or _revision(settings.sources[0]), rows)


def readable(settings: DataSettings) -> Pin:
    """Read a page of ``--data.source`` and return what it serves, as :func:`served` does.

    Raises ConfigError, and PageUnavailable: NothingToRead where no miner could ever read it.
    """
    source = open_source(settings)
    pin = _pin_of(source, settings)
    try:
        draw = PageDraw("", "", settings.rows_per_page, held_out_pages=0)
        table = source.num_rows()
        ((config, row, split),) = draw(uid=0, outer_step=0, first=0, count=1, num_rows=table)
    except ValueError as error:  # no config that a page can be drawn from
        raise NothingToRead(f"--data.source {settings.source}: {error}") from None
    if not source.rows(config, row, split=split, limit=settings.rows_per_page):
        raise NothingToRead(
            f"the rows of {config} have no text in the column {settings.text_column!r}"
        )
    return pin


def open_source(settings: DataSettings, *, cache: Path | None = None) -> PageSource:
    """Open the one source that ``--data.source`` names, without a cache of pages.

    A folder without files is opened again when rows are asked for. ``cache``: a folder for what is
    also fetched, such as where a file's rows begin. Raises ConfigError.
    """
    sources = settings.sources
    if len(sources) != 1:
        raise ConfigError(
            f"--data.source {settings.source} names several sources where one is needed, so "
            "nothing is read: give one"
        )

    of_pages = not kind_of(sources[0]).caches_no_pages

    def open_it() -> PageSource:
        return open_rows(settings, sources[0], cache=None if of_pages else cache, counts=Counts())

    try:
        return open_it()
    except PageUnavailable:  # an empty folder, maybe of a mount that comes late
        return _Reopened(open_it)


class TokenSource(Protocol):
    """A source that yields the tokens of a block's pages.

    Of a member's own text ``block`` is the place in it where the block begins.
    """

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
        # Threads: all they do is to wait for the network or a disk.
        self._pool = ThreadPoolExecutor(spec.settings.connections, "pages")

    def block(self, block: int, pages: int) -> SourceTokens:
        empty = np.zeros(0, dtype=np.int32)
        try:
            chosen = self._choose(block, pages)
        # ValueError: the page selection finds no config, or one that is too small.
        except (PageUnavailable, ValueError) as error:
            self._counts.add("pages_missing", pages)
            return SourceTokens(empty, [str(error)])
        pieces: list[np.ndarray[Any, Any]] = []
        missing: list[str] = []
        # Page order, not completion order.
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

    def _choose(self, block: int, pages: int) -> list[Page]:
        outer_step, first = place_of(block)
        return self._spec.draw_pages(
            uid=self._spec.uid,
            outer_step=outer_step,
            first=first + self._spec.rank * self._spec.settings.pages_per_block,
            count=pages,
            num_rows=self._source.num_rows(),
        )

    def _fetch(self, page: Page) -> list[str] | PageUnavailable:
        config, row, split = page
        limit = self._spec.settings.rows_per_page
        try:
            return self._source.rows(config, row, split=split, limit=limit)
        except PageUnavailable as error:
            return error


@dataclass(frozen=True)
class Prepared:
    """A block whose tokens lie in ``path``; see :mod:`.shards`.

    The header's ``extra`` has ``sources``: how many sequences are of each.
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
        sources = spec.settings.sources
        pages = [spec.settings.pages_per_block]
        if len(sources) > 1:
            mixture = load_optional("mixture", wanted_by="--data.source with several sources")
            pages = mixture.pages_of([source.weight for source in sources], *pages)
        self._shares = [(s, self._open(s), n) for s, n in zip(sources, pages, strict=True)]
        self._folder = spec.blocks
        self._folder.mkdir(parents=True, exist_ok=True)

    def _open(self, source: SourceSpec) -> TokenSource:
        if (open_tokens := kind_of(source).tokens) is not None:
            opened: TokenSource = open_tokens(self._spec, source, self._counts)
            return opened
        rows = _Reopened(
            lambda: open_rows(
                self._spec.settings, source, cache=self._spec.cache, counts=self._counts
            )
        )
        return RowsTokens(self._spec, rows, self._tokenizer, self._counts)

    def prepare(self, block: int, place: int | None = None) -> Prepared:
        """Prepare a block, of own text from ``place`` on. Raises OSError, PageUnavailable."""
        started = time.monotonic()
        path = self._folder / f"{block}{SUFFIX}"
        kept = self._find_prepared(block, path, place)
        if kept is not None:
            return replace(kept, counts=self._counts.drain())
        length = self._spec.sequence_length
        parts, missing, per_source = [], [], []
        for source, tokens, pages in self._shares:
            had = tokens.block(block if place is None else place, pages)
            count = len(had.tokens) // length
            # Sequences never cross sources: what is left of a block's tokens is dropped.
            parts.append(had.tokens[: count * length].reshape(count, length))
            per_source.append(count)
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
                extra={"sources": per_source} | ({} if place is None else {"place": place}),
                durable=False,  # it carries its checksum, and can be had again
            )
        return Prepared(
            block=block,
            path=path,
            sequences=len(sequences),
            seconds=time.monotonic() - started,
            missing=tuple(missing),
            counts=self._counts.drain(),
        )

    def _find_prepared(self, block: int, path: Path, place: int | None) -> Prepared | None:
        """Return the block prepared before a restart, so that positions in it still hold."""
        try:
            header, _ = open_shard(path)
        except FileNotFoundError:
            return None
        except (OSError, ShardError) as error:
            log.warning("A kept block is damaged and is prepared again: %s", error)
            return None
        if header.extra.get("place") != place:  # later than the checkpoint that is gone back to
            return None
        # Files are deleted by age (pipeline._forget), and this one is in use again.
        os.utime(path)
        return Prepared(block, path, header.sequences, 0.0, (), {}, kept=True)


class _Reopened:
    """A source opened when a block first needs it, and again for each next block while that fails.

    Its pages are missing then, those of other sources are not.
    """

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


# --- the workers, as their rank sees them ---------------------------------------------------------


class DataWorker:
    """The rank's end of a worker. Nothing here waits for it.

    A worker that ended gets the blocks that were under way again. One that ends workers again and
    again is answered with a :class:`Failure`.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self.blocks: dict[int, int | None] = {}  # under way, in order, and the place of each
        self._arrived: queue.SimpleQueue[Prepared | Failure] = queue.SimpleQueue()
        self._blamed: Counter[int] = Counter()  # block: workers that ended over it
        self.child = ChildProcess(
            "A data worker",
            __name__,
            begin=self._begin,
            receive=self._receive,
            effect="its blocks are prepared again",
            keep={"HF_TOKEN"},
            start_new_session=True,  # a Ctrl-C in the terminal is the rank's to handle
        )
        self.child.start()

    def submit(self, block: int, place: int | None) -> None:
        with self.child.lock:
            self.blocks[block] = place
            self.child.send((block, place))

    def answers(self) -> Iterator[Prepared | Failure]:
        """Yield the answers since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._arrived.get_nowait()

    def _begin(self) -> None:
        if self.child.starts > 1 and self.blocks:
            # The first was under way; those behind it had not begun.
            block = next(iter(self.blocks))
            self._blamed[block] += 1
            if self._blamed[block] > _MOST_BLAMED:
                log.warning("Block %d ends the data worker again and again: it is left out", block)
                self._receive(Failure(block, "it ended the data worker"))
        self.child.send(self._spec)
        for under_way in self.blocks.items():
            self.child.send(under_way)

    def _receive(self, answer: Prepared | Failure) -> None:
        with self.child.lock:
            # Here, not when it is asked for: a worker that ends now is not to prepare it again.
            self.blocks.pop(answer.block, None)
            self._blamed.pop(answer.block, None)
        self._arrived.put(answer)


class WorkerPool:
    """``count`` workers. Not thread-safe; nothing here waits for a worker."""

    def __init__(self, spec: WorkerSpec, *, count: int) -> None:
        self._spec = spec
        self._workers = [DataWorker(spec) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._workers)

    def add(self) -> None:
        """Start one more."""
        self._workers.append(DataWorker(self._spec))

    @property
    def restarts(self) -> int:
        return sum(worker.child.starts - 1 for worker in self._workers)

    def submit(self, block: int, place: int | None = None) -> None:
        """Give ``block`` to the worker with the least to do."""
        # By what is under way, not in turn: a worker may hang in one slow page.
        min(self._workers, key=lambda w: len(w.blocks)).submit(block, place)

    def answers(self) -> Iterator[Prepared | Failure]:
        """Yield the answers since the last call."""
        for worker in self._workers:
            yield from worker.answers()

    def close(self) -> None:
        for worker in self._workers:
            worker.child.close(timeout=timedelta(seconds=3))


# --- in the process of its own ------------------------------------------------------------------


def _run(parent: ParentConnection) -> None:
    spec: WorkerSpec = parent.receive()
    parent.forward_log()
    logging.getLogger().setLevel(logging.WARNING)
    maker: BlockMaker | None = None

    def prepare(block: int, place: int | None) -> Prepared:
        nonlocal maker
        maker = maker or BlockMaker(spec)  # at each block again: what is in the way may pass
        return maker.prepare(block, place)

    def send(block: int, prepared: Future[Prepared]) -> None:
        error = prepared.exception()  # whatever it is, it must not end the worker
        failed = f"{type(error).__name__}: {error}"
        parent.send(prepared.result() if error is None else Failure(block, failed))

    # One thread: the tokenizer is not for several. This one still receives, so that the worker ends
    # at once when the socket closes.
    pool = ThreadPoolExecutor(1)
    while True:
        block, place = parent.receive()
        pool.submit(prepare, block, place).add_done_callback(partial(send, block))


def main() -> None:
    os.nice(_NICENESS)
    write_stacks_on_signal()
    with contextlib.suppress(EOFError, OSError):  # the rank is gone
        _run(ParentConnection())
    os._exit(0)  # without waiting for requests under way


if __name__ == "__main__":
    # By its own name: what is sent to the rank is pickled with the name of its module.
    from distributed_training.data import block_builder

    block_builder.main()
