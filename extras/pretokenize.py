"""A source's rows, tokenized once into shards that train at memory speed.

Each config's rows are cut into units of equally many rows; a unit becomes one shard, named by its
config and first row, whatever process makes it and in whatever order. A run that was killed goes on
with the units whose shards are not there or not whole.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from distributed_training.common.files import write_json
from distributed_training.config.settings import DataSettings, SourceSpec
from distributed_training.config.types import ConfigError
from distributed_training.data.block_builder import check_folder, open_rows
from distributed_training.data.page_source import Counts, PageUnavailable, StdlibSource
from distributed_training.data.parquet import FolderSource
from distributed_training.data.shards import SUFFIX, ShardError, open_shard, write_shard
from distributed_training.data.tokenizer import TextTokenizer

MANIFEST = "pretokenize.json"
_ROWS_AT_ONCE = 256  # tokenized together


@dataclass(frozen=True)
class Plan:
    """Everything that a shard's content depends on. Two plans that are equal make equal shards."""

    source: SourceSpec
    text_column: str
    tokenizer_path: Path
    eos_id: int
    sequence_length: int
    max_length: int
    rows_per_shard: int
    vocabulary: int | None = None

    def facts(self, tokenizer: str) -> dict[str, Any]:
        # Its content counts, by hash: the path may be another in each run.
        facts = asdict(self)
        del facts["tokenizer_path"]
        source = facts.pop("source")
        return facts | {
            "source": f"{source['kind']}:{source['folder'] or ''}",
            "tokenizer": tokenizer,
        }


@dataclass(frozen=True)
class Unit:
    """``rows`` rows of ``config`` from ``first`` on."""

    config: str
    first: int
    rows: int

    @property
    def name(self) -> str:
        """Readable, and different for configs that only differ in what a file name cannot hold."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self.config)[:60]
        if plain != self.config:
            plain += "-" + hashlib.sha256(self.config.encode()).hexdigest()[:8]
        return f"{plain}-{self.first:012d}{SUFFIX}"


@dataclass(frozen=True)
class Made:
    """A unit that is done. ``problem``: why it is not (then the rest is empty)."""

    unit: Unit
    tokens: int = 0
    counts: dict[str, int] | None = None
    kept: bool = False
    problem: str = ""


def check_source(spec: SourceSpec) -> None:
    """Raise ConfigError for a source whose rows cannot be read from one end to the other."""
    check_folder(spec)
    if spec.kind in ("hf", "shards"):
        raise ConfigError(
            f"{spec.text} cannot be pretokenized, so no shards are made: give stdlib, parquet:DIR, "
            "jsonl:DIR or text:DIR (a Hugging Face dataset can be downloaded as Parquet files)"
        )


def open_rows_of(plan: Plan, counts: Counts) -> StdlibSource | FolderSource:
    """Open a source that :func:`check_source` lets pass. Raises ConfigError."""
    settings, spec = DataSettings(text_column=plan.text_column), plan.source
    try:
        opened = open_rows(settings, spec, cache=None, counts=counts)
        return cast("StdlibSource | FolderSource", opened)
    except PageUnavailable as error:
        raise ConfigError(
            f"{spec.text}: {error}, so there is nothing to tokenize: correct it"
        ) from error


def units_of(table: dict[str, int], rows_per_shard: int) -> list[Unit]:
    return [
        Unit(config, first, min(rows_per_shard, rows - first))
        for config, rows in sorted(table.items())
        for first in range(0, rows, rows_per_shard)
    ]


def take_folder(out: Path, plan: Plan) -> None:
    """Make ``out`` this plan's folder, and clear away what a killed run left half-written.

    Raises ConfigError when it holds shards of another plan.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = TextTokenizer(plan.tokenizer_path, eos_id=plan.eos_id).hash
    facts, path = plan.facts(tokenizer), out / MANIFEST
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        before = None
    except ValueError:
        before = {}
    if before is not None and before != facts:
        names = sorted(
            k for k in facts if not isinstance(before, dict) or before.get(k) != facts[k]
        )
        raise ConfigError(
            f"{out} holds shards made with other settings ({', '.join(names)}), which do not go "
            "together with these: give another folder, or delete that one"
        )
    for left in out.glob(f".*{SUFFIX}.*.tmp"):
        left.unlink(missing_ok=True)
    write_json(path, facts)


def check(out: Path, unit: Unit) -> Made:
    """Read the unit's shard and compare its checksum."""
    try:
        header, _ = open_shard(out / unit.name)
    except FileNotFoundError:
        return Made(unit, problem="it is not there")
    except (OSError, ShardError) as error:
        return Made(unit, problem=str(error))
    if header.extra.get("rows") != unit.rows:
        return Made(unit, problem=f"{out / unit.name} was made when the source had other rows")
    return Made(unit, header.sequences * header.sequence_length, kept=True)


class Maker:
    """Makes shards, one at a time; each process has its own."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self._plan = plan
        self._out = out
        self._counts = Counts()
        self._source = open_rows_of(plan, self._counts)
        self._tokenizer = TextTokenizer(plan.tokenizer_path, eos_id=plan.eos_id)
        self._source.all_rows()
        self._counts.take()  # what the scan found is the parent's to tell

    def make(self, unit: Unit) -> Made:
        """Make the shard of ``unit``, unless it is there and whole. Raises OSError: the disk's."""
        kept = check(self._out, unit)
        if not kept.problem:
            return kept
        plan, pieces = self._plan, []
        for first in range(unit.first, unit.first + unit.rows, _ROWS_AT_ONCE):
            limit = min(_ROWS_AT_ONCE, unit.first + unit.rows - first)
            try:
                rows = self._source.rows(unit.config, first, split="train", limit=limit)
            except PageUnavailable as error:
                self._counts.take()
                return Made(unit, problem=str(error))
            tokens = self._tokenizer.encode_rows(
                rows, max_length=plan.max_length, vocabulary=plan.vocabulary, counts=self._counts
            )
            pieces.append(tokens)
        tokens = np.concatenate(pieces)
        count = len(tokens) // plan.sequence_length
        used = count * plan.sequence_length
        self._counts.add("tokens_after_the_last_sequence", len(tokens) - used)
        write_shard(
            self._out / unit.name,
            tokens[:used].reshape(count, plan.sequence_length),
            tokenizer=self._tokenizer.hash,
            eos_id=plan.eos_id,
            vocabulary=self._tokenizer.vocabulary,
            # By these a later run knows that the source has changed since.
            extra={"config": unit.config, "first": unit.first, "rows": unit.rows},
        )
        return Made(unit, used, self._counts.take())


_maker: Maker | None = None


def _start(plan: Plan, out: Path) -> None:
    global _maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _maker = Maker(plan, out)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # a killed parent leaves the pool's queues open: nothing else would tell
    os._exit(1)


def _make(unit: Unit) -> Made:
    assert _maker is not None
    return _maker.make(unit)


@dataclass
class Totals:
    """The result of a run. ``cpu_share``: the processes' share of all cores' time."""

    shards: int = 0
    kept: int = 0  # that were there already
    tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    cpu_share: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def run(plan: Plan, out: Path, *, processes: int, units: list[Unit]) -> Iterator[Made]:
    """Make what is missing, in ``processes`` processes; yields each unit as it is done.

    Raises OSError when shards cannot be written, ConfigError when a process cannot start or is
    killed. What was finished stays.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Not fork: the tokenizer's library has threads, whose locks a copy would keep for ever.
    context = multiprocessing.get_context("spawn")
    waiting: set[Future[Made]] = set()
    todo = iter(units)
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_start, initargs=(plan, out)
    ) as pool:
        try:
            while True:
                # Not all at once: of a large data set the futures alone would fill memory.
                while len(waiting) < 4 * processes and (unit := next(todo, None)) is not None:
                    waiting.add(pool.submit(_make, unit))
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise ConfigError(
                "a tokenizing process ended unexpectedly (out of memory?); finished shards stay: "
                "run again, with fewer --processes or --rows-per-shard"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def pretokenize(
    plan: Plan, out: Path, *, processes: int, on_unit: Any, units: list[Unit]
) -> Totals:
    """Run to the end; ``on_unit`` gets each :class:`Made`. Raises as :func:`run` does."""
    totals = Totals()
    began, before = time.monotonic(), os.times()
    for made in run(plan, out, processes=processes, units=units):
        on_unit(made)
        if made.problem:
            totals.problems.append(made.problem)
            continue
        totals.shards += 1
        totals.kept += made.kept
        totals.tokens += made.tokens
        totals.new_tokens += 0 if made.kept else made.tokens
        totals.counts.update(made.counts or {})
    totals.seconds = time.monotonic() - began
    cores = min(processes, len(os.sched_getaffinity(0)))
    after = os.times()  # its children's: of those that have ended
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    totals.cpu_share = cpu / (totals.seconds * cores)
    return totals
