"""Tokenize a source once into shards that train at memory speed.

    python scripts/pretokenize.py SOURCE OUT --tokenizer NAME [--sequence-length 1024]
    python scripts/pretokenize.py SOURCE OUT --tokenizer NAME --check

SOURCE is parquet:DIR, jsonl:DIR, text:DIR or stdlib. Then train with
--plugins examples.shard_source --data.source shards:OUT. The same command continues a run that was
interrupted; --check reads every shard and compares its checksum instead.

Exit status: 0 done, 1 some shards are missing, damaged or could not be made, 2 bad input,
130 interrupted.

Each config's rows are cut into units with the same number of rows. A unit becomes one shard, named
after its config and first row, whichever process makes it and in whatever order. After a kill, the
next run continues with the units whose shards are missing or incomplete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from distributed_training.common.control_groups import usable_cores
from distributed_training.common.files import write_json
from distributed_training.config import ConfigError, exit_with
from distributed_training.config.loader import Parser, argument, ranged
from distributed_training.config.settings import (
    DataSettings,
    SourceSpec,
    TrainingSettings,
    parse_source,
)
from distributed_training.config.types import File
from distributed_training.data.page_source import Counts, PageUnavailable, StdlibSource
from distributed_training.data.parquet import FolderSource
from distributed_training.data.sources import Opening, check_folder, kind_of
from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer
from distributed_training.protocol.types import ExitStatus
from examples import line_files
from examples.shards import SUFFIX, ShardError, open_shard, write_shard

MANIFEST = "pretokenize.json"
_ROWS_AT_ONCE = 256  # rows that are tokenized together


def build_parser() -> Parser:
    parser = Parser(description="Tokenize a source once into shards that train at memory speed.")
    add, text, data = parser.add_argument, argument(str), DataSettings()
    add("source", type=text, help="parquet:DIR, jsonl:DIR, text:DIR or stdlib")
    add("out", type=argument(File), help="folder for the shards; train with shards:OUT")
    about = "Hugging Face name or folder; 'bytes' as in the local subnet"
    add("--tokenizer", type=text, required=True, help=about)
    add("--text-column", type=text, default=data.text_column, metavar="NAME")

    def number(flag: str, low: int, high: int, default: int | None, about: str = "") -> None:
        add(flag, type=ranged(low, high), default=default, metavar="N", help=about or None)

    number("--sequence-length", 2, 1_000_000, TrainingSettings().sequence_length)
    about = "most tokens of a row; the rest is dropped (default %(default)s)"
    number("--max-length", 1, 10_000_000, data.max_length, about)
    about = "the model's vocabulary; rows with ids beyond it are left out"
    number("--vocabulary", 2, 10_000_000, None, about)
    number("--rows-per-shard", 1, 100_000_000, 20_000)
    number("--processes", 1, 1024, usable_cores())
    add("--check", action="store_true", help="verify the existing shards and make none")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except ConfigError as error:
        return exit_with(error)
    except OSError as error:
        print(
            f"error: {error.filename or args.out}: {error.strerror or error}, so not all shards "
            "were made; finished shards stay: check the disk and run the same command again",
            file=sys.stderr,
        )
        return 1
    except PageUnavailable as error:
        print(f"error: {error}, so not all shards were made: run it again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished shards stay: run the same command again", file=sys.stderr)
        return ExitStatus.INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    spec = parse_source(args.source)
    check_source(spec)  # refuse what can be refused at once, before using the network
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out {args.out} cannot be made ({error.strerror}), so nothing was tokenized: choose "
            "a folder of yours"
        ) from None
    try:
        tokenizer, eos_id = build_tokenizer(args.tokenizer, args.out)
    except (ValueError, OSError) as error:
        text = str(error).replace("tokenizer.name", "--tokenizer").splitlines()[0]
        raise ConfigError(
            f"the tokenizer {args.tokenizer} cannot be used, so nothing can be tokenized: {text}"
        ) from error
    plan = Plan(
        source=spec,
        text_column=args.text_column,
        tokenizer_path=tokenizer,
        eos_id=eos_id,
        sequence_length=args.sequence_length,
        max_length=args.max_length,
        rows_per_shard=args.rows_per_shard,
        vocabulary=args.vocabulary,
    )
    counts = Counts()
    table = open_rows_of(plan, counts).all_rows()
    units = units_of(table, plan.rows_per_shard)
    for name, count in sorted(counts.drain().items()):
        print(f"{name.replace('_', ' ')}: {count}")
    if not units:
        raise ConfigError(
            f"{args.source} holds no rows, so there is nothing to tokenize: use another SOURCE"
        )
    if args.check:
        return _check(args.out, units)
    # Do this after reading the source: a source that is refused must not claim the folder.
    claim_folder(args.out, plan)
    return _make_shards(plan, args.out, units, args.processes)


def _make_shards(plan: Plan, out: Path, units: list[Unit], processes: int) -> int:
    began, before = time.monotonic(), os.times()
    counts: Counter[str] = Counter()
    problems: list[str] = []
    shards = kept = tokens = new_tokens = 0
    for made in _shown(make_all(plan, out, units, processes), units):
        if made.problem:
            problems.append(made.problem)
            continue
        shards += 1
        kept += made.kept
        tokens += made.tokens
        new_tokens += 0 if made.kept else made.tokens
        counts.update(made.counts)
    seconds, after = max(time.monotonic() - began, 1e-9), os.times()
    # The CPU time of the processes, which are children and have ended.
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    share = cpu / (seconds * min(processes, usable_cores()))
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    for name, count in sorted(counts.items()):
        print(f"{name.replace('_', ' ')}: {count}")
    print(
        f"{shards} shards ({kept} existed already), {tokens} tokens in {seconds:.1f} s: "
        f"{new_tokens / seconds:.0f} new tokens/s, {100 * share:.0f} % of {processes} cores"
    )
    print(f"train from them with --plugins examples.shard_source --data.source shards:{out}")
    return 1 if problems else 0


def _check(out: Path, units: list[Unit]) -> int:
    bad = tokens = 0
    for made in _shown((check(out, unit) for unit in units), units):
        tokens += made.tokens
        if made.problem:
            bad += 1
            print(f"{out / made.unit.name}: {made.problem}", file=sys.stderr)
    print(f"{len(units) - bad} of {len(units)} shards are complete, {tokens} tokens")
    if bad:
        print("the same command without --check makes the others again", file=sys.stderr)
    return 1 if bad else 0


def _shown(made: Iterable[Made], units: list[Unit]) -> Iterator[Made]:
    """Yield each unit, and show the rows done, the tokens per second and the time left.

    If the output is not a terminal, print a line now and then instead.
    """
    from tqdm import tqdm

    interval, tokens = 0.5 if sys.stderr.isatty() else 10.0, 0
    rows = sum(unit.rows for unit in units)
    with tqdm(total=rows, unit="rows", unit_scale=True, mininterval=interval) as bar:
        for each in made:
            tokens += each.tokens
            speed = tokens / max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"{speed / 1e6:.2f} M tokens/s", refresh=False)
            bar.update(each.unit.rows)
            yield each


@dataclass(frozen=True)
class Plan:
    """Hold everything on which a shard's content depends. Equal plans make equal shards."""

    source: SourceSpec
    text_column: str
    tokenizer_path: Path
    eos_id: int
    sequence_length: int
    max_length: int
    rows_per_shard: int
    vocabulary: int | None = None

    def facts(self, tokenizer: str) -> dict[str, Any]:
        # The tokenizer is identified by its hash, since its path may differ in each run.
        facts = asdict(self)
        del facts["tokenizer_path"]
        source = facts.pop("source")
        return facts | {
            "source": f"{source['kind']}:{source['folder'] or ''}",
            "tokenizer": tokenizer,
        }


@dataclass(frozen=True)
class Unit:
    """The ``rows`` rows of ``config`` that begin with row ``first``."""

    config: str
    first: int
    rows: int

    @property
    def name(self) -> str:
        """A readable name, unique even if configs differ only in what a file name cannot hold."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self.config)[:60]
        if plain != self.config:
            plain += "-" + hashlib.sha256(self.config.encode()).hexdigest()[:8]
        return f"{plain}-{self.first:012d}{SUFFIX}"


@dataclass(frozen=True)
class Made:
    """Hold a processed unit. ``problem``: why it has no shard; then the other fields are empty."""

    unit: Unit
    tokens: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    kept: bool = False
    problem: str = ""


def check_source(spec: SourceSpec) -> None:
    """Raise ConfigError for a source whose rows cannot be read from the first to the last."""
    if spec.kind not in ("stdlib", "parquet", *line_files.KINDS):
        raise ConfigError(
            f"{spec.text} cannot be pretokenized, so no shards are made: use stdlib, parquet:DIR, "
            "jsonl:DIR or text:DIR (a Hugging Face dataset can be downloaded as Parquet files)"
        )
    kind_of(spec)
    check_folder(spec)


def open_rows_of(plan: Plan, counts: Counts) -> StdlibSource | FolderSource:
    """Open a source that :func:`check_source` accepts. Raises ConfigError."""
    settings, kind = DataSettings(text_column=plan.text_column), kind_of(plan.source)
    assert kind.open is not None
    try:
        opened = kind.open(Opening(settings, plan.source, None, counts))
        return cast("StdlibSource | FolderSource", opened)
    except PageUnavailable as error:
        raise ConfigError(
            f"{plan.source.text}: {error}, so there is nothing to tokenize: fix that source"
        ) from error


def units_of(table: dict[str, int], rows_per_shard: int) -> list[Unit]:
    return [
        Unit(config, first, min(rows_per_shard, rows - first))
        for config, rows in sorted(table.items())
        for first in range(0, rows, rows_per_shard)
    ]


def claim_folder(out: Path, plan: Plan) -> None:
    """Claim ``out`` for this plan, and delete files that a killed run left half-written.

    Raises ConfigError if the folder holds shards of another plan.
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
            f"{out} holds shards made with other settings ({', '.join(names)}), which cannot be "
            "mixed with these: choose another folder, or delete that one"
        )
    for left in out.glob(f".*{SUFFIX}.*.tmp"):
        left.unlink(missing_ok=True)
    write_json(path, facts)


def check(out: Path, unit: Unit) -> Made:
    """Read the unit's shard and compare its checksum."""
    try:
        header, _ = open_shard(out / unit.name)
    except FileNotFoundError:
        return Made(unit, problem="it is missing")
    except (OSError, ShardError) as error:
        return Made(unit, problem=str(error))
    if header.extra.get("rows") != unit.rows:
        return Made(unit, problem=f"{out / unit.name} was made when the source had other rows")
    return Made(unit, header.sequences * header.sequence_length, kept=True)


class Maker:
    """Make shards one after another. Each process has its own maker."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self._plan = plan
        self._out = out
        self._counts = Counts()
        self._source = open_rows_of(plan, self._counts)
        self._tokenizer = TextTokenizer(plan.tokenizer_path, eos_id=plan.eos_id)
        self._source.all_rows()
        self._counts.drain()  # the parent reports what the scan found

    def make(self, unit: Unit) -> Made:
        """Make the shard of ``unit``, unless a complete one exists. Raises the disk's OSError."""
        kept = check(self._out, unit)
        if not kept.problem:
            return kept
        plan, pieces = self._plan, []
        for first in range(unit.first, unit.first + unit.rows, _ROWS_AT_ONCE):
            limit = min(_ROWS_AT_ONCE, unit.first + unit.rows - first)
            try:
                rows = self._source.rows(unit.config, first, split="train", limit=limit)
            except PageUnavailable as error:
                self._counts.drain()
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
            # A later run finds out by these whether the source has changed since.
            extra={"config": unit.config, "first": unit.first, "rows": unit.rows},
        )
        return Made(unit, used, self._counts.drain())


_maker: Maker | None = None


def _start(plan: Plan, out: Path) -> None:
    global _maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _maker = Maker(plan, out)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # a killed parent leaves the pool's queues open, so nothing else would show it
    os._exit(1)


def _make(unit: Unit) -> Made:
    assert _maker is not None
    return _maker.make(unit)


def make_all(plan: Plan, out: Path, units: list[Unit], processes: int) -> Iterator[Made]:
    """Make the missing units in ``processes`` processes; yield each as it is done.

    Raises OSError if shards cannot be written, ConfigError if a process cannot start or is killed.
    Finished shards stay.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Do not fork: the tokenizer's library has threads, whose locks a copy would keep forever.
    context = multiprocessing.get_context("spawn")
    waiting: set[Future[Made]] = set()
    todo = iter(units)
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_start, initargs=(plan, out)
    ) as pool:
        try:
            while True:
                # Do not submit all units at once, because their futures would fill the memory.
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
