"""Rows of text as the page selection addresses them.

A :class:`PageSource` returns the rows of one page. Rows that hold no usable text are left out and
counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

#: The page selection draws first rows from 0 to num_rows - 102 (protocol page, section 5).
MINIMUM_ROWS = 102


class PageUnavailable(RuntimeError):
    """A page, or the table of configs, cannot be had now. The message says why."""


class OtherData(PageUnavailable):
    """A source serves other data than the network's file pins: its pages are nobody else's."""


@dataclass(frozen=True)
class Pin:
    """The data that the network's file names: commit, and rows of all configs. None: any."""

    revision: str | None = None
    rows: int | None = None

    def check(self, where: str, *, revision: str | None = None, rows: int | None = None) -> None:
        """Raise OtherData for another value; None is what ``where`` does not tell."""
        for name, pinned, found in (
            ("revision", self.revision, revision),
            ("row count", self.rows, rows),
        ):
            if pinned is not None and found is not None and pinned != found:
                raise OtherData(
                    f"{where} has {name} {found} and the network's file pins {pinned}, so its "
                    "pages would not be those of the other peers: give the pinned data with "
                    "--data.source parquet:DIR, or ask the founder for a newer file"
                )


class PageSource(Protocol):
    """Rows of text, addressed as the page selection does. Used from several threads at once."""

    def num_rows(self) -> Mapping[str, int]:
        """Count the rows of each config. Raises PageUnavailable."""
        ...

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        """Return the texts of at most ``limit`` rows from row ``row`` on, in order.

        Rows that are not text are left out. Raises PageUnavailable, also for a page beyond the
        config's end.
        """
        ...


class Counts:
    """Counters by name; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        if amount:
            with self._lock:
                self._counter[name] += amount

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        with self._lock:
            # Exchanged under the lock: what a thread adds meanwhile is in the next answer.
            taken, self._counter = self._counter, Counter()
        return dict(taken)


def usable_texts(values: Iterable[object], counts: Counts) -> list[str]:
    """Return the values that can be trained on; the others are counted by their defect."""
    texts = []
    for value in values:
        if not isinstance(value, str):
            counts.add("rows_without_text")
        elif not value:
            counts.add("rows_empty")
        elif not _is_unicode(value):
            counts.add("rows_not_utf8")
        else:
            texts.append(value)
    return texts


def _is_unicode(text: str) -> bool:
    """Return False for lone surrogates: the rest of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def large_enough(rows: Mapping[str, int], *, where: str, counts: Counts) -> dict[str, int]:
    """Return the configs a page can be drawn from. Raises PageUnavailable if there are none."""
    kept = {config: count for config, count in rows.items() if count >= MINIMUM_ROWS}
    counts.add("configs_too_small", len(rows) - len(kept))
    if not kept:
        most = max(rows.values(), default=0)
        raise PageUnavailable(
            f"{where}: the largest config has {most} rows and a page is drawn from at least "
            f"{MINIMUM_ROWS}: add text"
        )
    return kept
