"""Check machine, configuration, keys, chain and data before training; measure the step time.

    python -m distributed_training doctor [--json] [--model SIZE|config.json] [--uid N]
                                          [--offline] [flags of neurons/miner.py]...
    python -m distributed_training doctor --probe HOST:PORT    is that miner's port open from here?

    ... doctor                                 the public network
    ... doctor --preset local --offline        this machine alone
    ... doctor --model 1b --nproc_per_node 4   another model, four ranks
    ... doctor --diagnostics.measure 0         without the 10-second measurement

Takes every flag of neurons/miner.py, .env and the environment, so its result holds for the miner
started the same way. scripts/diagnose.py is the same. Exit status: 0 nothing failed (warnings are
allowed), 1 something failed, 2 a flag is wrong, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distributed_training.common.exits import ExitStatus
from distributed_training.config import ConfigError, exit_with, load_config
from distributed_training.config.loader import Parser, argument, ranged
from distributed_training.diagnostics.checks import Check, failed
from distributed_training.doctor.examination import Examination, model_config
from distributed_training.doctor.reach import host_and_port, probe
from distributed_training.miner.launcher import default_ranks

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red"), "skip": ("-", "dim")}
_WIDTH = 160  # where there is no terminal


def build_parser() -> Parser:
    parser = Parser(add_help=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=argument(str))
    parser.add_argument("--uid", type=ranged(0, 65535))
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--probe", type=argument(str))
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options, flags = build_parser().parse_known_args(argv)
    if options.help:
        print(__doc__)
        return 0
    logging.disable(logging.CRITICAL)  # libraries that retry; the findings say what came of it
    try:
        if options.probe:
            return report([probe(*host_and_port(options.probe))], as_json=options.json)
        config = load_config("miner", flags, check=False)
        examination = Examination(
            config=config,
            flags=flags,
            ranks=config.miner.nproc_per_node or default_ranks(config),
            model=model_config(config, options.model),
            offline=options.offline,
            uid=options.uid,
            tell=lambda text: print(f"… {text}", file=sys.stderr, flush=True),
        )
        return report(examination.run(), as_json=options.json)
    except ConfigError as error:
        return exit_with(error)
    except KeyboardInterrupt:
        print("interrupted, so nothing is known: run the same command again", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    finally:
        logging.disable(logging.NOTSET)


def report(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print them; the exit status."""
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
        return int(failed(checks))
    table = Table("", "check", "finding", box=None, pad_edge=False)
    for check in checks:
        mark, style = _MARKS[check.status]
        finding = Text(check.finding)
        if check.remedy and check.status != "ok":
            finding.append(f"\n→ {check.remedy}", style="bold" if check.status == "fail" else "")
        table.add_row(Text(f"{mark} {check.status}", style), Text(check.name), finding)
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    console = Console(width=width, highlight=False)
    console.print(table)
    count = {status: sum(c.status == status for c in checks) for status in _MARKS}
    console.print(
        f"{count['ok']} ok, {count['warn']} warnings, {count['skip']} skipped, "
        f"{count['fail']} failed"
    )
    return int(failed(checks))
