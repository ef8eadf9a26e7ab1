"""Open a source by its kind, which is the word before the colon in ``--data.source``.

To add your own kind, write a function that returns a :class:`.page_source.PageSource`, and put a
line such as this::

    SOURCES.register("counter", SourceKind(lambda opening: Counter()))

into a module that ``--plugins`` names. The module that reads a kind's rows is imported only when a
source of that kind is opened, so that a program that only checks its settings stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.common.kinds import Kinds
from distributed_training.common.proxies import HUB, share
from distributed_training.config.settings import DataSettings, SourceSpec
from distributed_training.config.types import ConfigError, choose_kind
from distributed_training.protocol.pages import PageDraw

from .page_source import Counts, NothingToRead, OtherData, PageSource, StdlibSource


@dataclass(frozen=True)
class Pin:
    """What a network's file can pin of its data: the commit, and the total number of rows.

    ``revision`` is None if the source does not know it.
    """

    revision: str | None
    rows: int


@dataclass(frozen=True)
class Opening:
    """The values that are needed to open a source.

    ``cache`` is a folder in which to cache the source's data, or None.
    """

    settings: DataSettings
    spec: SourceSpec
    cache: Path | None
    counts: Counts

    @property
    def folder(self) -> Path:
        """The folder after the colon, for a kind that has one."""
        assert self.spec.folder is not None
        return self.spec.folder


@dataclass(frozen=True)
class SourceKind:
    """One kind of source.

    Attributes:
        open: Returns the rows. Raises ConfigError, or PageUnavailable if a later attempt may
            succeed. It is None for a kind whose rows nobody else can read.
        in_folder: Whether a folder follows the colon.
        for_trials: Whether the kind is only for trials, so that a network's file may not use it.
        tokens: For a kind without rows, a function that returns a ``block_builder.TokenSource``,
            given a ``WorkerSpec``, the specification of the source and the counters.
    """

    open: Callable[[Opening], PageSource] | None = None
    in_folder: bool = False
    for_trials: bool = False
    tokens: Callable[[Any, SourceSpec, Counts], Any] | None = None


SOURCES: Kinds[SourceKind] = Kinds("data source")


def kind_of(spec: SourceSpec) -> SourceKind:
    """Return the kind of a source. Raises ConfigError."""
    kind = choose_kind(SOURCES, spec.kind, key=f"--data.source {spec.text}")
    if kind.in_folder != (spec.folder is not None):
        raise ConfigError(
            f"--data.source {spec.text} {'names no' if kind.in_folder else 'takes no'} folder, so "
            f"there is nothing to train on: give {spec.kind}{':DIR' if kind.in_folder else ''}"
        )
    return kind


def check_folder(spec: SourceSpec) -> None:
    """Raise ConfigError if the folder of ``--data.source`` does not exist."""
    if spec.folder is not None and not spec.folder.is_dir():
        raise ConfigError(
            f"--data.source {spec.text}: {spec.folder} is not a folder, so there is nothing to "
            "train on: correct the path"
        )


class Source:
    """The rows of ``--data.source``, which is opened on first use.

    If that fails, the next call tries again, since a disk may be mounted late and a hub may
    recover. ``cache`` is a folder in which to cache data such as the positions of row groups.

    Raises ConfigError for a folder that does not exist, and for a kind without rows.
    """

    def __init__(
        self, settings: DataSettings, *, cache: Path | None = None, counts: Counts | None = None
    ) -> None:
        self._opening = Opening(settings, settings.spec, cache, counts or Counts())
        self._source: PageSource | None = None
        kind = kind_of(settings.spec)
        if kind.open is None:
            raise ConfigError(
                f"--data.source {settings.spec.text} has no rows that others can read, so pages "
                "cannot be compared: use the network's data here"
            )
        self._open = kind.open
        check_folder(settings.spec)

    def num_rows(self) -> Mapping[str, int]:
        """Count the rows of each config.

        Raises PageUnavailable, in particular OtherData if the source does not have the data that
        the network's file pins.
        """
        return self._opened().num_rows()

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        return self._opened().rows(config, row, split=split, limit=limit)

    def pin(self) -> Pin:
        """Return the pin of what the source serves now. Raises PageUnavailable."""
        return self._pin_of(self._opened())

    def _opened(self) -> PageSource:
        if self._source is None:
            settings, source = self._opening.settings, self._open(self._opening)
            if (settings.revision, settings.rows) != (None, None):
                now = self._pin_of(source)
                for name, pinned, found in (
                    ("revision", settings.revision, now.revision),
                    ("row count", settings.rows, now.rows),
                ):
                    if None not in (pinned, found) and pinned != found:
                        raise OtherData(
                            f"--data.source {settings.spec.text} has {name} {found} and the "
                            f"network's file pins {pinned}, so its pages would differ from the "
                            "other members' pages: use the pinned data with --data.source "
                            "parquet:DIR, or ask the founder for a newer file"
                        )
            self._source = source
        return self._source

    def _pin_of(self, source: PageSource) -> Pin:
        revision = getattr(source, "revision", None)  # only the hub's source has one
        folder = self._opening.spec.folder
        if revision is None and folder is not None:
            from .parquet import folder_revision

            revision = folder_revision(folder, wanted=self._opening.settings.revision)
        return Pin(revision, sum(source.num_rows().values()))


def readable(settings: DataSettings) -> Pin:
    """Read a page of ``--data.source`` to test it, and return the pin of what it serves.

    Raises ConfigError, NothingToRead if no miner could ever read the source, and PageUnavailable if
    it cannot be read now.
    """
    source = Source(settings)
    pin = source.pin()
    try:
        draw = PageDraw("", "", settings.rows_per_page, held_out_pages=0)
        table = source.num_rows()
        ((config, row, split),) = draw(uid=0, outer_step=0, first=0, count=1, num_rows=table)
    except ValueError as error:  # no config is large enough for a page
        raise NothingToRead(f"--data.source {settings.source}: {error}") from None
    if not source.rows(config, row, split=split, limit=settings.rows_per_page):
        raise NothingToRead(
            f"the rows of {config} have no text in the column {settings.text_column!r}"
        )
    return pin


# --- built-in kinds -------------------------------------------------------------------------------


def _open_hub(opening: Opening) -> PageSource:
    share(HUB)  # do this first, because the hub's client reads the environment

    from .hub import HubSource

    return HubSource(opening.settings, hub=HUB, cache=opening.cache, counts=opening.counts)


def _open_parquet(opening: Opening) -> PageSource:
    from .parquet import ParquetSource

    column = opening.settings.text_column
    return ParquetSource(opening.folder, text_column=column, counts=opening.counts)


def _open_own(worker: Any, _: SourceSpec, counts: Counts) -> Any:
    from .own_text import OwnTokens

    return OwnTokens(worker, counts)


SOURCES.register("hub", SourceKind(_open_hub))
SOURCES.register("stdlib", SourceKind(lambda _: StdlibSource(), for_trials=True))
SOURCES.register("parquet", SourceKind(_open_parquet, in_folder=True))
SOURCES.register("own", SourceKind(tokens=_open_own))
