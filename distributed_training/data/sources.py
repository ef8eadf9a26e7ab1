"""The kinds of ``--data.source``, by the word before the colon.

A kind of your own is a function that returns a :class:`.page_source.PageSource`, and one line::

    SOURCES.register("counter", SourceKind(lambda opening: Counter()))

in a module that ``--plugins`` names. The module that reads a kind's rows is imported when a source
of that kind is opened, so a program that only checks its settings stays small.
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

from .page_source import Counts, NothingToRead, PageSource, Pin, StdlibSource


@dataclass(frozen=True)
class Opening:
    """How to open a source. ``cache``: folder for what is kept of the source, or None."""

    settings: DataSettings
    spec: SourceSpec
    cache: Path | None
    counts: Counts

    @property
    def folder(self) -> Path:
        """The folder after the colon, of a kind that has one."""
        assert self.spec.folder is not None
        return self.spec.folder


@dataclass(frozen=True)
class SourceKind:
    """One kind of source.

    ``open`` returns the rows. It raises ConfigError, or PageUnavailable if a later try may
    succeed; None stands for a kind whose rows nobody else can read. ``in_folder``: a folder stands
    after the colon. ``for_trials``: no network's file may pin it. ``tokens``: a function, for a
    kind without rows; it returns a ``block_builder.TokenSource`` for a ``WorkerSpec``, the
    specification and the counters.
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
    """Raise ConfigError when the folder of ``--data.source`` does not exist."""
    if spec.folder is not None and not spec.folder.is_dir():
        raise ConfigError(
            f"--data.source {spec.text}: {spec.folder} is no folder, so there is nothing to train "
            "on: correct the path"
        )


class Source:
    """The rows of ``--data.source``, opened when they are first asked for.

    As long as that fails, each call tries again: a mount may come late, and a hub may return.
    ``cache``: folder for what is kept of the source, such as where the rows of a file begin.

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
                f"--data.source {settings.spec.text} holds no rows that others read too, so pages "
                "cannot be compared: give the network's data here"
            )
        self._open = kind.open
        check_folder(settings.spec)

    def num_rows(self) -> Mapping[str, int]:
        """Count the rows of each config.

        Raises PageUnavailable: OtherData if it is not what the network's file pins.
        """
        if self._source is None:
            settings, source = self._opening.settings, self._open(self._opening)
            pin = Pin(settings.revision, settings.rows)
            if pin != Pin():
                pin.check(f"--data.source {settings.spec.text}", self._pin_of(source))
            self._source = source
        return self._source.num_rows()

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        assert self._source is not None  # its rows were asked for before, to choose the page
        return self._source.rows(config, row, split=split, limit=limit)

    def pin(self) -> Pin:
        """Return what the source serves now; the revision is None if it names none.

        Raises PageUnavailable.
        """
        self.num_rows()
        assert self._source is not None
        return self._pin_of(self._source)

    def _pin_of(self, source: PageSource) -> Pin:
        revision = getattr(source, "revision", None)  # a hub names it
        folder = self._opening.spec.folder
        if revision is None and folder is not None:
            from .parquet import folder_revision

            revision = folder_revision(folder, wanted=self._opening.settings.revision)
        return Pin(revision, sum(source.num_rows().values()))


def readable(settings: DataSettings) -> Pin:
    """Read a page of ``--data.source`` and return what it serves.

    Raises ConfigError, and PageUnavailable: NothingToRead if no miner could ever read it.
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


# --- the product's own ----------------------------------------------------------------------------


def _open_hub(opening: Opening) -> PageSource:
    share(HUB)  # set first, since the client of the hub reads the environment

    from .hub import HubSource

    return HubSource(opening.settings, hub=HUB, cache=opening.cache, counts=opening.counts)


def _open_parquet(opening: Opening) -> PageSource:
    from .parquet import ParquetSource

    column = opening.settings.text_column
    return ParquetSource(opening.folder, text_column=column, counts=opening.counts)


def _open_own(worker: Any, spec: SourceSpec, counts: Counts) -> Any:
    from .own_text import OwnTokens

    return OwnTokens(worker, counts)


SOURCES.register("hub", SourceKind(_open_hub))
SOURCES.register("stdlib", SourceKind(lambda _: StdlibSource(), for_trials=True))
SOURCES.register("parquet", SourceKind(_open_parquet, in_folder=True))
SOURCES.register("own", SourceKind(tokens=_open_own))
