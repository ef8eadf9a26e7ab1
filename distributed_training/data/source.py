"""Where rows of text come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from distributed_training.config.data import DataSettings


class PageUnavailable(RuntimeError):
    """A page, or the table of configs, cannot be had now. The message says why."""


class PageSource(Protocol):
    """Rows of text, addressed as the page selection does."""

    def num_rows(self) -> Mapping[str, int]:
        """Rows of each config. Raises PageUnavailable."""
        ...

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        """``limit`` texts from row ``row`` on; fewer at a config's end. Raises PageUnavailable."""
        ...


def open_source(settings: DataSettings) -> PageSource:
    """The source that ``--data.source`` names."""
    if settings.source == "stdlib":
        from .corpus import StdlibSource

        return StdlibSource()
    from .rows_api import RowsApiSource

    return RowsApiSource(
        url=settings.rows_url,
        dataset=settings.dataset,
        timeout=settings.request_timeout,
        attempts=settings.request_attempts,
    )
