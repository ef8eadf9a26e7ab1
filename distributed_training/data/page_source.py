"""Read rows of text by the positions that the page selection draws.

A :class:`PageSource` returns the rows of one page. Rows without usable text are left out and
counted. One source, the Python standard library of this machine, is always available, so the local
subnet uses it. Some of its files are *held out*, which means that no page contains them. A hash of
the path selects these files, so that every process selects the same ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distributed_training.common.backoff import Throttle

if TYPE_CHECKING:
    import numpy as np

#: The page selection draws the first row of a page from 0 to num_rows - 102 (docs/protocol.md,
#: section 3), so a config with fewer rows has no pages.
MINIMUM_ROWS = 102
#: The most bytes of text in a page, for example 100 books of 0.6 MB.
PAGE = 64 * 2**20
#: A value that stands for a row that was not read, because it is larger than a page.
TOO_LONG = object()

log = logging.getLogger(__name__)

_too_long_is_due = Throttle(3600.0)


class PageUnavailable(RuntimeError):
    """A page, or the table of configs, cannot be read now. The message says why."""


class NothingToRead(PageUnavailable):
    """A source answers, but it has no text to read and never will."""


class OtherData(PageUnavailable):
    """A source does not serve the data that the network's file pins, so its pages differ."""


@dataclass(frozen=True)
class SourceTokens:
    """The tokens of a block, int32 (tokens,), and a reason for each page that is missing."""

    tokens: np.ndarray[Any, Any]
    missing: list[str]


class PageSource(Protocol):
    """Rows of text that are read by their positions. Several threads use a source at once."""

    def num_rows(self) -> Mapping[str, int]:
        """Count the rows of each config. Raises PageUnavailable."""
        ...

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        """Return the texts of at most ``limit`` rows from row ``row`` on, in order.

        Rows that are not text are left out. Raises PageUnavailable if the rows cannot be read, or
        if ``row`` is beyond the end of the config.
        """
        ...


class Counts:
    """Counters, each with a name. Several threads may use them at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        if amount:
            with self._lock:
                self._counter[name] += amount

    def drain(self) -> dict[str, int]:
        """Return the counts since the last call."""
        with self._lock:
            # Replace the counter under the lock, so that no count is lost that is added meanwhile.
            taken, self._counter = self._counter, Counter()
        return dict(taken)


def usable_texts(values: Iterable[object], counts: Counts) -> list[str]:
    """Return the values that can be trained on, and count the others by their defects.

    A value that would make the page larger than ``PAGE`` bytes is left out too, which is logged at
    most once per hour.
    """
    texts = []
    left = PAGE
    for value in values:
        if value is TOO_LONG:
            size = PAGE + 1
        elif not isinstance(value, str):
            counts.add("rows_without_text")
            continue
        elif not value:
            counts.add("rows_empty")
            continue
        else:
            try:
                size = len(value.encode())
            # Bytes that are not UTF-8 were decoded to lone surrogates, which cannot be encoded.
            except UnicodeEncodeError:
                counts.add("rows_not_utf8")
                continue
        if size > left:
            counts.add("rows_too_long")
            if _too_long_is_due():
                log.warning(
                    "A row is left out: with it a page has more than %d MB of text. Split the long "
                    "rows of the data",
                    PAGE // 2**20,
                )
        else:
            left -= size
            texts.append(str(value))
    return texts


# --- the standard library ------------------------------------------------------------------------

_CONFIG = "stdlib"
_ROW_CHARACTERS = 1000
_HELD_OUT_OF_100 = 4
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "ensurepip"}


class StdlibSource:
    """A :class:`PageSource` that reads the ``*.py`` files of the standard library."""

    def __init__(self) -> None:
        self._folder = Path(sysconfig.get_paths()["stdlib"])

    def num_rows(self) -> Mapping[str, int]:
        return {_CONFIG: len(self._table)}

    def all_rows(self) -> dict[str, int]:
        """Count the rows of all configs, each of which is large enough for a page."""
        return dict(self.num_rows())

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        return self._table[row : row + limit]

    def held_out(self) -> list[str]:
        """Return the rows of the held-out files, in a fixed order."""
        return [row for path in self._paths if _held_out(path) for row in self._rows_of(path)]

    @cached_property
    def _table(self) -> list[str]:
        # Leave out rows that also occur in held-out files. Codec tables and licences, for example,
        # are repeated word for word.
        held_out = set(self.held_out())
        paths = (path for path in self._paths if not _held_out(path))
        return [row for path in paths for row in self._rows_of(path) if row not in held_out]

    @cached_property
    def _paths(self) -> list[str]:
        """The paths below the folder, sorted by their parts."""
        found: list[str] = []
        for folder, subfolders, names in os.walk(self._folder):
            # Do not search some folders: site-packages may contain a hundred thousand files.
            subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
            below = Path(folder).relative_to(self._folder)
            found += [(below / name).as_posix() for name in names if name.endswith(".py")]
        if not found:
            raise PageUnavailable(f"{self._folder} contains no Python sources")
        # Sort the paths, because every process must give the rows the same numbers, but os.walk
        # uses the order of the disk.
        return sorted(found, key=lambda path: path.split("/"))

    def _rows_of(self, path: str) -> Iterator[str]:
        """Yield pieces of about ``_ROW_CHARACTERS``, each made of whole lines."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            piece: list[str] = []
            length = 0
            text = (self._folder / path).read_text(encoding="utf-8")
            for line in text.splitlines(keepends=True):
                piece.append(line)
                length += len(line)
                if length >= _ROW_CHARACTERS:
                    yield "".join(piece)
                    piece, length = [], 0
            if length:
                yield "".join(piece)


def _held_out(path: str) -> bool:
    # Do not use hash(), which differs from process to process.
    digest = hashlib.sha256(f"held out/{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < _HELD_OUT_OF_100
