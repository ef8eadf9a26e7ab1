"""The local subnet's text: this machine's own Python standard library, which is always there.

Files fall into configs by a hash of their path, so the split is the same in every process. Held-out
files are never part of a page.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from .page_source import PageUnavailable

_CONFIGS = 8
_ROW_CHARACTERS = 1000
_HELD_OUT_OF_100 = 4
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "ensurepip"}


class StdlibSource:
    """A :class:`~.page_source.PageSource` over ``*.py`` of the standard library."""

    def __init__(self) -> None:
        self._folder = Path(sysconfig.get_paths()["stdlib"])

    def num_rows(self) -> Mapping[str, int]:
        return {config: len(rows) for config, rows in self._tables.items()}

    def all_rows(self) -> dict[str, int]:
        """Count rows as :meth:`num_rows` does: every config is large enough for a page."""
        return dict(self.num_rows())

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        if config not in self._tables:
            raise PageUnavailable(f"{config} is not a config of the standard library corpus")
        return self._tables[config][row : row + limit]

    def held_out(self) -> list[str]:
        """Return the rows of the held-out files, in a fixed order."""
        return [row for path in self._paths if _held_out(path) for row in self._rows_of(path)]

    @cached_property
    def _tables(self) -> dict[str, list[str]]:
        tables: dict[str, list[str]] = {f"stdlib-{i}": [] for i in range(_CONFIGS)}
        held_out = set(self.held_out())  # codec tables and licences repeat word for word
        for path in self._paths:
            if not _held_out(path):
                table = tables[f"stdlib-{_digest(path) % _CONFIGS}"]
                table.extend(row for row in self._rows_of(path) if row not in held_out)
        return tables

    @cached_property
    def _paths(self) -> list[str]:
        """Below the folder, in the order of their parts."""
        found: list[str] = []
        for folder, subfolders, names in os.walk(self._folder):
            # Not looked into: site-packages may hold a hundred thousand files.
            subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
            below = Path(folder).relative_to(self._folder)
            found += [(below / name).as_posix() for name in names if name.endswith(".py")]
        if not found:
            raise PageUnavailable(f"{self._folder} holds no Python sources")
        # Every process must number the rows alike; os.walk has the disk's order.
        return sorted(found, key=lambda path: path.split("/"))

    def _rows_of(self, path: str) -> Iterator[str]:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield from _rows((self._folder / path).read_text(encoding="utf-8"))


def _digest(path: str) -> int:
    # Not hash(): Python's own differs from process to process.
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")


def _held_out(path: str) -> bool:
    return _digest("held out/" + path) % 100 < _HELD_OUT_OF_100


def _rows(text: str) -> Iterator[str]:
    """Yield pieces of whole lines, each about ``_ROW_CHARACTERS`` long."""
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        length += len(line)
        if length >= _ROW_CHARACTERS:
            yield "".join(piece)
            piece, length = [], 0
    if length:
        yield "".join(piece)
