"""Settings of the data room, and how ``--data.source`` and ``--data.mix`` are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pydantic.dataclasses import dataclass

from distributed_training.protocol import names

from .flags import DAY, HOUR, SECOND, SETTINGS, ConfigError, flag
from .values import Duration, File, Text, WebUrl

#: Kinds of ``--data.source``; those that are True need a folder after the colon.
SOURCE_KINDS = {
    "hf": False,
    "stdlib": False,
    "parquet": True,
    "jsonl": True,
    "text": True,
    "shards": True,
}


@dataclasses.dataclass(frozen=True)
class SourceSpec:
    """One source of a mixture; ``weight`` is its share of the sequences, all shares sum to 1."""

    name: str
    kind: str
    folder: Path | None
    weight: float = 1.0

    @property
    def text(self) -> str:
        return f"{self.kind}:{self.folder}" if self.folder else self.kind


def _parse_spec(name: str, text: str) -> SourceSpec:
    kind, colon, folder = text.partition(":")
    if kind not in SOURCE_KINDS:
        raise ConfigError(
            f"--data.source {text} is unknown, so there is nothing to train on: give "
            "hf, stdlib, parquet:DIR, jsonl:DIR, text:DIR or shards:DIR"
        )
    if SOURCE_KINDS[kind] != bool(folder):
        raise ConfigError(
            f"--data.source {text} {'names no folder' if SOURCE_KINDS[kind] else 'takes no folder'}"
            f", so there is nothing to train on: give {kind}{':DIR' if SOURCE_KINDS[kind] else ''}"
        )
    try:
        return SourceSpec(name, kind, Path(folder).expanduser() if colon else None)
    except RuntimeError:
        raise ConfigError(
            f"--data.source {text}: no user has this name, so there is nothing to train on: give "
            "the whole path"
        ) from None


def parse_sources(source: str, mix: str) -> tuple[SourceSpec, ...]:
    """``--data.source`` and ``--data.mix`` as specifications.

    ``source`` is one source (``jsonl:DIR``) or named ones (``web=hf,code=jsonl:DIR``), ``mix`` the
    weights of the named ones (``web=0.7,code=0.3``). Raises ConfigError.
    """
    entries = [entry.strip() for entry in source.split(",") if entry.strip()]
    if len(entries) == 1 and "=" not in entries[0].partition(":")[0]:
        if mix:
            raise ConfigError(
                f"--data.mix {mix} weighs several sources but --data.source names one, so the mix "
                "is not defined: give --data.source name=SOURCE,other=SOURCE"
            )
        return (_parse_spec("", entries[0]),)
    named: dict[str, SourceSpec] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals or not name or ":" in name or name in named:
            raise ConfigError(
                f"--data.source {source}: {entry!r} is not name=SOURCE with a name of its own, so "
                "there is nothing to train on: give e.g. web=hf,code=jsonl:DIR"
            )
        named[name] = _parse_spec(name, text)
    if not named:
        raise ConfigError("--data.source is empty, so there is nothing to train on: give e.g. hf")
    weights = _parse_weights(mix, named)
    total = sum(weights.values())
    return tuple(
        SourceSpec(spec.name, spec.kind, spec.folder, weights[name] / total)
        for name, spec in named.items()
        if weights[name] > 0
    )


def _parse_weights(mix: str, named: dict[str, SourceSpec]) -> dict[str, float]:
    if not mix:
        return dict.fromkeys(named, 1.0)
    weights: dict[str, float] = {}
    for entry in (entry.strip() for entry in mix.split(",") if entry.strip()):
        name, _, text = entry.partition("=")
        try:
            weights[name] = float(text)
        except ValueError:
            weights[name] = -1.0
        if not 0 <= weights[name] < float("inf"):
            raise ConfigError(
                f"--data.mix {entry!r} is not name=WEIGHT, so the mix is not defined: "
                "give e.g. web=0.7,code=0.3"
            )
    if set(weights) != set(named) or not any(weights.values()):
        raise ConfigError(
            f"--data.mix {mix} does not weigh exactly the sources {', '.join(named)}, so the mix "
            "is not defined: give each of them a weight, one at least above 0"
        )
    return weights


@dataclass(frozen=True, config=SETTINGS)
class DataSettings:
    """Where text comes from and how far ahead it is prepared."""

    source: str = flag("data.source", "hf")
    """'hf' (fineweb-edu over the Hugging Face rows API, as validators assign it), 'stdlib' (this
    machine's Python sources, for the local subnet), 'parquet:DIR', 'jsonl:DIR', 'text:DIR',
    'shards:DIR' (packed tokens), or several: 'web=hf,code=jsonl:DIR'"""
    mix: Text = flag("data.mix", "")
    """shares of several sources in the sequences: 'web=0.7,code=0.3'"""
    dataset: str = flag("data.dataset", names.DATASET)
    """dataset of --data.source hf"""
    rows_url: WebUrl = flag("data.rows_url", "https://datasets-server.huggingface.co")
    """server of the rows API"""
    text_column: str = flag("data.text_column", "text")
    """column or key that holds a row's text"""
    pages_per_block: int = flag("data.pages_per_block", 5, ge=1, le=1000)
    """pages of each block; validators look at the first two"""
    rows_per_page: int = flag("data.rows_per_page", 100, ge=1, le=100_000)
    """rows of a page"""
    max_length: int = flag("data.max_length", 1024, ge=1, le=10_000_000)
    """tokens of a row; the rest of it is dropped"""
    prefetch_blocks: int = flag("data.prefetch_blocks", 2, ge=1, le=1000)
    """blocks prepared ahead of the one in training"""
    max_prefetch_blocks: int = flag("data.max_prefetch_blocks", 8, ge=1, le=1000)
    """the most blocks ahead while the source is slow"""
    workers: int = flag("data.workers", 1, ge=1, le=256)
    """processes of each rank that fetch and tokenize; raise this if the log says that data is
    prepared more slowly than it is trained on"""
    request_timeout: Duration = flag("data.request_timeout", 20 * SECOND, ge=SECOND / 10, le=HOUR)
    """one HTTP request for rows, body included"""
    request_attempts: int = flag("data.request_attempts", 6, ge=1, le=1000)
    """attempts for a page, with growing waits, before it is left out"""
    page_deadline: Duration = flag("data.page_deadline", 120 * SECOND, ge=SECOND / 10, le=DAY)
    """all attempts for one page together, waits asked for by the server included"""
    connections: int = flag("data.connections", 4, ge=1, le=256)
    """pages of a block fetched at once"""
    cache_dir: File | None = flag("data.cache_dir", None)
    """folder for fetched pages; default: data/ in the run folder"""
    cache_gb: float = flag("data.cache_gb", 2.0, ge=0, le=1_000_000)
    """size bound of the fetched pages, GB; 0: no cache"""
    table_age: Duration = flag("data.table_age", 6 * HOUR, ge=SECOND, le=365 * DAY)
    """age at which the dataset's table of configs is asked for again"""

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """The sources with their shares of the sequences. Raises ConfigError."""
        return parse_sources(self.source, self.mix)
