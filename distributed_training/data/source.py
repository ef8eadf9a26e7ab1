"""Where rows of text come from, and what is wrong with some of them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from distributed_training.config.data import DataSettings, SourceSpec
from distributed_training.config.flags import ConfigError

#: The page selection draws first rows from 0 to num_rows - 102 (protocol page, section 5).
MINIMUM_ROWS = 102


class PageUnavailable(RuntimeError):
    """A page, or the table of configs, cannot be had now. The message says why."""


class PageSource(Protocol):
    """Rows of text, addressed as the page selection does. Used from several threads at once."""

    def num_rows(self) -> Mapping[str, int]:
        """Rows of each config. Raises PageUnavailable."""
        ...

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        """Texts of at most ``limit`` rows from row ``row`` on, in order; rows that are not text are
        left out. Raises PageUnavailable, also for a page beyond the config's end."""
        ...


class Counts:
    """What happened, by name; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        if amount:
            with self._lock:
                self._counter[name] += amount

    def take(self) -> dict[str, int]:
        """Counts since the last call."""
        with self._lock:
            taken, self._counter = self._counter, Counter()
        return dict(taken)


def usable_texts(values: Iterable[object], counts: Counts) -> list[str]:
    """The values that can be trained on; the others are counted by what is wrong with them."""
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
    """False for lone surrogates: what is left of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_folder(spec: SourceSpec) -> None:
    """Raises ConfigError when the folder of ``--data.source`` is none."""
    if spec.folder is not None and not spec.folder.is_dir():
        raise ConfigError(
            f"--data.source {spec.text}: {spec.folder} is no folder, so there is nothing to train "
            "on: correct the path"
        )


def large_enough(rows: Mapping[str, int], *, where: str, counts: Counts) -> dict[str, int]:
    """The configs a page can be drawn from. Raises PageUnavailable if there are none."""
    kept = {config: count for config, count in rows.items() if count >= MINIMUM_ROWS}
    counts.add("configs_too_small", len(rows) - len(kept))
    if not kept:
        most = max(rows.values(), default=0)
        raise PageUnavailable(
            f"{where}: the largest config has {most} rows and a page is drawn from at least "
            f"{MINIMUM_ROWS}: add text"
        )
    return kept


def open_rows(
    settings: DataSettings, spec: SourceSpec, *, cache: Path | None, counts: Counts
) -> PageSource:
    """The source of one specification. ``cache``: folder for pages and indexes, None for none.

    Raises ConfigError for a folder that is none, or for shards, which hold no rows.
    """
    check_folder(spec)
    if spec.kind == "stdlib":
        from .corpus import StdlibSource

        return StdlibSource()
    if spec.kind == "hf":
        from .cache import PageCache
        from .rows_api import RowsApiSource

        size = round(settings.cache_gb * 1e9)
        return RowsApiSource(
            settings=settings,
            token=os.environ.get("HF_TOKEN"),  # Hugging Face's own convention
            cache=PageCache(cache, limit_bytes=size) if cache and size > 0 else None,
            counts=counts,
        )
    if spec.folder is None or spec.kind == "shards":
        raise ConfigError(
            f"--data.source {spec.text} holds tokens instead of rows of text, so pages cannot be "
            "compared with other neurons': give another source here"
        )
    from .folders import open_folder

    return open_folder(spec, text_column=settings.text_column, index=cache, counts=counts)


def open_source(settings: DataSettings) -> PageSource:
    """The one source that ``--data.source`` names, without a cache. Raises ConfigError."""
    sources = settings.sources
    if len(sources) != 1:
        raise ConfigError(
            f"--data.source {settings.source} names several sources where one is needed: give one"
        )
    return open_rows(settings, sources[0], cache=None, counts=Counts())
