"""Tokenize a source once into shards that train at memory speed.

    python scripts/pretokenize.py SOURCE OUT [--tokenizer NAME] [--sequence-length 1024]
    python scripts/pretokenize.py SOURCE OUT --check

SOURCE is as for --data.source: parquet:DIR, jsonl:DIR, text:DIR or stdlib. Then train with
--data.source shards:OUT. A run that was interrupted is gone on with by the same command; --check
reads every shard and compares its checksum instead.

Exit status: 0 done, 1 some shards are missing, damaged or could not be made, 2 bad input,
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from distributed_training.config import ConfigError, exit_with
from distributed_training.config.loader import Parser, argument, ranged
from distributed_training.config.settings import DataSettings, TrainingSettings, parse_sources
from distributed_training.config.types import File
from distributed_training.data.page_source import Counts, PageUnavailable
from distributed_training.data.tokenizer import build_tokenizer
from distributed_training.protocol.types import ExitStatus

from . import pretokenize as work


def build_parser() -> Parser:
    parser = Parser(description="Tokenize a source once into shards that train at memory speed.")
    add, text, data = parser.add_argument, argument(str), DataSettings()
    add("source", type=text, help="parquet:DIR, jsonl:DIR, text:DIR or stdlib")
    add("out", type=argument(File), help="folder for the shards; train with shards:OUT")
    about = "Hugging Face name or folder; 'bytes' as the local subnet (default %(default)s)"
    add("--tokenizer", type=text, default="dstrbtd/llama-1b", help=about)
    add("--text-column", type=text, default=data.text_column, metavar="NAME")

    def number(flag: str, low: int, high: int, default: int | None, about: str = "") -> None:
        add(flag, type=ranged(low, high), default=default, metavar="N", help=about or None)

    number("--sequence-length", 2, 1_000_000, TrainingSettings().sequence_length)
    about = "tokens of a row; the rest of it is dropped (default %(default)s)"
    number("--max-length", 1, 10_000_000, data.max_length, about)
    about = "the model's; rows with ids beyond are left out"
    number("--vocabulary", 2, 10_000_000, None, about)
    number("--rows-per-shard", 1, 100_000_000, 20_000)
    number("--processes", 1, 1024, len(os.sched_getaffinity(0)))
    add("--check", action="store_true", help="verify what is there, make nothing")
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
            "were made; those that were stay: make room and run the same command again",
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

    specs = parse_sources(args.source, "")
    if len(specs) != 1:
        raise ConfigError(
            f"{args.source} names several sources, so nothing was done: pretokenize each by itself"
        )
    work.check_source(specs[0])  # what can be refused at once, before the network is asked
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out {args.out} cannot be made ({error.strerror}), so nothing was tokenized: give a "
            "folder of yours"
        ) from None
    try:
        tokenizer, eos_id = build_tokenizer(args.tokenizer, args.out)
    except (ValueError, OSError) as error:
        text = str(error).replace("--neuron.global_tokenizer_name", "--tokenizer").splitlines()[0]
        raise ConfigError(
            f"the tokenizer {args.tokenizer} cannot be used, so nothing can be tokenized: {text}"
        ) from error
    plan = work.Plan(
        source=specs[0],
        text_column=args.text_column,
        tokenizer_path=tokenizer,
        eos_id=eos_id,
        sequence_length=args.sequence_length,
        max_length=args.max_length,
        rows_per_shard=args.rows_per_shard,
        vocabulary=args.vocabulary,
    )
    counts = Counts()
    table = work.open_rows_of(plan, counts).all_rows()
    units = work.units_of(table, plan.rows_per_shard)
    for name, count in sorted(counts.take().items()):
        print(f"{name.replace('_', ' ')}: {count}")
    if not units:
        raise ConfigError(
            f"{args.source} holds no rows, so there is nothing to tokenize: give another --source"
        )
    if args.check:
        return _check(args.out, units)
    # After the source was read: one that is refused must not claim the folder.
    work.take_folder(args.out, plan)
    with _Bar(sum(unit.rows for unit in units)) as bar:
        totals = work.pretokenize(
            plan, args.out, processes=args.processes, on_unit=bar.add, units=units
        )
    for problem in totals.problems or []:
        print(f"left out: {problem}", file=sys.stderr)
    for name, count in sorted((totals.counts or {}).items()):
        print(f"{name.replace('_', ' ')}: {count}")
    speed = totals.new_tokens / max(totals.seconds, 1e-9)
    print(
        f"{totals.shards} shards ({totals.kept} were there already), {totals.tokens} tokens in "
        f"{totals.seconds:.1f} s: {speed:.0f} new tokens/s, "
        f"{100 * totals.cpu_share:.0f} % of {args.processes} cores"
    )
    print(f"train from them with --data.source shards:{args.out}")
    return 1 if totals.problems else 0


def _check(out: Path, units: list[Any]) -> int:

    bad = tokens = 0
    with _Bar(sum(unit.rows for unit in units)) as bar:
        for unit in units:
            made = work.check(out, unit)
            bar.add(made)
            tokens += made.tokens
            if made.problem:
                bad += 1
                print(f"{out / unit.name}: {made.problem}", file=sys.stderr)
    print(f"{len(units) - bad} of {len(units)} shards are whole, {tokens} tokens")
    if bad:
        print("the same command without --check makes the others again", file=sys.stderr)
    return 1 if bad else 0


class _Bar:
    """Rows done, tokens a second and time left; a line now and then where it is no terminal."""

    def __init__(self, rows: int) -> None:
        from tqdm import tqdm

        terminal = sys.stderr.isatty()
        self._tokens = 0
        self._bar = tqdm(
            total=rows, unit="rows", unit_scale=True, mininterval=0.5 if terminal else 10.0
        )

    def add(self, made: Any) -> None:
        self._tokens += made.tokens
        seconds = self._bar.format_dict["elapsed"]
        self._bar.set_postfix_str(
            f"{self._tokens / max(seconds, 1e-9) / 1e6:.2f} M tokens/s", refresh=False
        )
        self._bar.update(made.unit.rows)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
