"""A data source that counts: ``--plugins tests.toys.source --data.source counter``."""

from __future__ import annotations

from collections.abc import Mapping

from distributed_training.data.sources import SOURCES, SourceKind


class Counter:
    """A million rows of text, each of which counts on from its number."""

    def num_rows(self) -> Mapping[str, int]:
        return {"numbers": 1_000_000}

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        return [" ".join(map(str, range(first, first + 500))) for first in range(row, row + limit)]


SOURCES.register("counter", SourceKind(lambda opening: Counter()))
