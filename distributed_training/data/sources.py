"""The kinds of ``--data.source``, by the word before the colon.

A kind of your own is a function that returns a :class:`.page_source.PageSource`, and one line::

    SOURCES.register("counter", SourceKind(lambda opening: Counter()))

in a module that ``--plugins`` names. What reads the rows of a kind is imported when one is opened,
so a program that only checks its settings stays small.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from distributed_training.common.kinds import Kinds
from distributed_training.common.proxies import HUB
from distributed_training.config.settings import DataSettings, SourceSpec
from distributed_training.config.types import ConfigError, choose_kind, load_optional

from .page_source import Counts, PageSource, StdlibSource

if TYPE_CHECKING:
    from .dataset_server import PageCache


@dataclass(frozen=True)
class Opening:
    """The arguments of an opening. ``cache``: folder for pages and indexes, or None."""

    settings: DataSettings
    spec: SourceSpec
    cache: Path | None
    counts: Counts

    @property
    def folder(self) -> Path:
        """The folder after the colon, of a kind that has one."""
        assert self.spec.folder is not None
        return self.spec.folder

    def page_cache(self) -> PageCache | None:
        """Return the cache of what is fetched, in the bounds of the settings."""
        from .dataset_server import PageCache

        size = round(self.settings.cache_gb * 1e9)
        return PageCache(self.cache, limit_bytes=size) if self.cache and size > 0 else None


@dataclass(frozen=True)
class SourceKind:
    """One kind of source.

    ``open`` returns the rows; it raises ConfigError, or PageUnavailable to be tried again.
    ``in_folder``: a folder stands after the colon. ``checks_pin``: it compares itself what it
    serves with what the network's file pins. ``for_trials``: no network's file pins it.
    ``caches_no_pages``: what it keeps is the same for whoever reads, and no page.
    ``tokens``: of a kind that holds no rows; returns a ``block_builder.TokenSource`` for a
    ``WorkerSpec``, the specification and the counters.
    """

    open: Callable[[Opening], PageSource]
    in_folder: bool = False
    checks_pin: bool = False
    for_trials: bool = False
    caches_no_pages: bool = False
    tokens: Callable[[Any, SourceSpec, Counts], Any] | None = None


SOURCES: Kinds[SourceKind] = Kinds("data source")


def kind_of(spec: SourceSpec) -> SourceKind:
    """Return the kind of one source. Raises ConfigError."""
    kind = choose_kind(SOURCES, spec.kind, key=f"--data.source {spec.text}")
    if kind.in_folder != (spec.folder is not None):
        raise ConfigError(
            f"--data.source {spec.text} {'names no' if kind.in_folder else 'takes no'} folder, so "
            f"there is nothing to train on: give {spec.kind}{':DIR' if kind.in_folder else ''}"
        )
    return kind


# --- the product's own ----------------------------------------------------------------------------


def _open_rows_api(opening: Opening) -> PageSource:
    # httpx: only for this source, and not for whoever only trains.
    from .dataset_server import RowsApiSource

    settings = opening.settings
    # Hugging Face's own convention, only for its hub, which HF_ENDPOINT may name: a network's file
    # may name any other server.
    token, asked = None, urlsplit(settings.rows_url)
    for hub in map(urlsplit, ("https://huggingface.co", HUB)):
        below = f".{asked.hostname}".endswith(f".{hub.hostname}")
        if below and asked.scheme == hub.scheme:
            token = os.environ.get("HF_TOKEN")
    return RowsApiSource(
        settings=settings,
        token=token,
        cache=opening.page_cache(),
        counts=opening.counts,
        shared=opening.cache,
    )


def _open_hub(opening: Opening) -> PageSource:
    from .hub import HubSource

    return HubSource(
        opening.settings,
        hub=HUB,
        token=os.environ.get("HF_TOKEN"),
        cache=opening.page_cache(),
        shared=opening.cache,
        counts=opening.counts,
    )


def _open_parquet(opening: Opening) -> PageSource:
    from .parquet import ParquetSource

    column = opening.settings.text_column
    return ParquetSource(opening.folder, text_column=column, counts=opening.counts)


def _open_lines(opening: Opening) -> PageSource:
    lines = load_optional("line_files", wanted_by=f"--data.source {opening.spec.text}")
    opened: PageSource = lines.open_lines(
        opening.spec,
        text_key=opening.settings.text_column,
        index=opening.cache,
        counts=opening.counts,
    )
    return opened


def _refuse_shards(opening: Opening) -> PageSource:
    raise ConfigError(
        f"--data.source {opening.spec.text} holds tokens instead of rows of text, so pages cannot "
        "be compared with other neurons': give another source here"
    )


def _open_shards(worker: Any, spec: SourceSpec, counts: Counts) -> Any:
    shards = load_optional("shard_source", wanted_by=f"--data.source {spec.text}")
    return shards.ShardTokens(worker, spec, counts)


def _refuse_own(opening: Opening) -> PageSource:
    raise ConfigError(
        "data.own of the network's file is true, so members train on text of their own, which "
        "nobody else reads: there are no pages to compare"
    )


def _open_own(worker: Any, spec: SourceSpec, counts: Counts) -> Any:
    from .own_text import OwnTokens

    return OwnTokens(worker, counts)


SOURCES.register("hf", SourceKind(_open_rows_api, checks_pin=True))
SOURCES.register("hub", SourceKind(_open_hub, checks_pin=True, caches_no_pages=True))
SOURCES.register("stdlib", SourceKind(lambda _: StdlibSource(), for_trials=True))
SOURCES.register("parquet", SourceKind(_open_parquet, in_folder=True))
SOURCES.register("jsonl", SourceKind(_open_lines, in_folder=True))
SOURCES.register("text", SourceKind(_open_lines, in_folder=True))
SOURCES.register("shards", SourceKind(_refuse_shards, in_folder=True, tokens=_open_shards))
SOURCES.register("own", SourceKind(_refuse_own, tokens=_open_own))
