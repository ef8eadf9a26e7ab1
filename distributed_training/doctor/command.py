"""Check machine, configuration, keys, chain and data before training; measure the step time.

    python -m distributed_training doctor [--json] [--model SIZE|config.json] [--uid N]
                                          [--offline] [flags of neurons/miner.py]...
    python -m distributed_training doctor --probe HOST[:PORT[,PORT]]

    ... doctor --probe 203.0.113.7               are that miner's ports open from here?
    ... doctor --probe 203.0.113.7:48091,48009   the same, at a rented container's outside ports

    ... doctor                                 the public network
    ... doctor --preset local --offline        this machine alone
    ... doctor --model 1b --nproc_per_node 4   another model, four ranks
    ... doctor --diagnostics.measure 0         without the 10-second measurement

Takes every flag of neurons/miner.py, .env and the environment, so its result holds for the miner
started the same way. scripts/diagnose.py is the same. Exit status: 0 nothing failed (warnings are
allowed), 1 something failed, 2 a flag is wrong, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distributed_training.common.exits import ExitStatus
from distributed_training.common.files import read_json_object
from distributed_training.common.memory import ModelShape
from distributed_training.config import (
    OPERATORS_FILE,
    Config,
    ConfigError,
    exit_with,
    load_config,
)
from distributed_training.config.loader import Parser, argument, ranged
from distributed_training.doctor.measure import check_step_time
from distributed_training.health import machine
from distributed_training.health.machine import Entry, Examination
from distributed_training.health.reach import probe, probed
from distributed_training.miner.launcher import default_ranks
from distributed_training.miner.run_folder import mark_of
from distributed_training.protocol.lines import counted
from distributed_training.protocol.types import Check

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red"), "skip": ("-", "dim")}
_WIDTH = 160  # where there is no terminal


def examine(
    examination: Examination, flags: Sequence[str], *, show: Callable[[str], None]
) -> list[Check]:
    """Make all checks. Each reports what went wrong itself, so there is nothing to catch.

    ``flags``: as the miner is started. ``show`` gets a line before what takes long.
    """
    entries = [*machine.CHECKS, *_outside(examination)]
    # Last: it takes seconds, and is left out where torch or memory failed above.
    entries.append(Entry(lambda e: check_step_time(e, flags, show=show)))
    for entry in entries:
        if entry.note:
            show(entry.note)
        examination.found += entry.check(examination)
    return examination.found


def _outside(examination: Examination) -> Sequence[Entry]:
    """Return the checks that ask others, or one that tells why these are left out."""
    if not examination.config.nodes.leads:
        reason = "node 0 alone asks chain, bucket and peers"
    elif examination.offline:
        reason = "--offline: chain, bucket, data are not asked"
    else:
        # Here: --help and a refusal are not to wait for torch and the chain's client.
        from distributed_training.health import outside

        return outside.CHECKS
    return [Entry(lambda e: [Check("network", "skip", reason)])]


def listening_ports(run_folder: Path) -> frozenset[int]:
    """Return the ports that the processes of a running miner listen at."""
    mark, ports = mark_of(run_folder), set()
    for process in mark.processes() if mark is not None else []:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr:
                    ports.add(connection.laddr.port)
    return frozenset(ports)


def model_config(config: Config, wanted: str | None) -> tuple[dict[str, Any], str]:
    """Return the model's ``config.json`` and its origin.

    Raises ConfigError.

    The origin is ``--model``, else the network's file, else the global state in the run folder,
    else an assumption that is named.
    """
    from distributed_training.training.memory_plan import named_config

    if wanted and not wanted.endswith(".json"):
        try:
            return named_config(wanted), f"--model {wanted}"
        except ValueError as error:
            raise ConfigError(
                f"--model: {error}, so nothing was checked: give one of them or a config.json"
            ) from None
    if wanted:
        try:
            content = read_json_object(Path(wanted))
            ModelShape.from_config(content or {})
        except ValueError as error:
            raise ConfigError(
                f"--model {wanted} is not the readable config.json of a Llama-like model ({error}),"
                " so its size is not known: correct the path"
            ) from None
        return content or {}, wanted
    if config.network is not None and config.network.model is not None:
        return dict(config.network.model), f"--network {config.network.place}"
    found = {}
    for path in machine.files_under(config.run_folder):
        with contextlib.suppress(OSError):  # a miner that runs deletes files meanwhile
            if path.name == "config.json":
                found[path] = path.stat().st_mtime
    # The newest: earlier global states stay in the run folder.
    for path in sorted(found, key=lambda path: found[path], reverse=True):
        if content := read_json_object(path):
            return content, str(path)
    name = "tiny" if config.preset == "local" else "4b"
    return named_config(name), f"assumed: {name}; --model tells otherwise"


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
            return report([probe(*p) for p in probed(options.probe)], as_json=options.json)
        config = load_config("miner", flags, file=OPERATORS_FILE, check=False)
        examination = Examination(
            config=config,
            ranks=config.miner.nproc_per_node or default_ranks(config),
            model=model_config(config, options.model),
            offline=options.offline,
            uid=options.uid,
            own_ports=listening_ports(config.run_folder),
        )
        return report(examine(examination, flags, show=_show), as_json=options.json)
    except ConfigError as error:
        return exit_with(error)
    except KeyboardInterrupt:
        print("interrupted, so nothing is known: run the same command again", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    finally:
        logging.disable(logging.NOTSET)


def _show(note: str) -> None:
    print(f"… {note}", file=sys.stderr, flush=True)


def report(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print them; the exit status."""
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
        return int(any(check.status == "fail" for check in checks))
    table = Table("", "check", "finding", box=None, pad_edge=False)
    for check in checks:
        mark, style = _MARKS[check.status]
        finding = Text(check.finding)
        if check.remedy and check.status != "ok":
            finding.append(f"\n→ {check.remedy}", style="bold" if check.status == "fail" else "")
        table.add_row(Text(f"{mark} {check.status}", style), Text(check.name), finding)
    # In a pipe rich would cut the findings at 80 columns.
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    console = Console(width=width, highlight=False)
    console.print(table)
    count = {status: sum(c.status == status for c in checks) for status in _MARKS}
    console.print(
        f"{count['ok']} ok, {counted(count['warn'], 'warning')}, {count['skip']} skipped, "
        f"{count['fail']} failed"
    )
    return int(any(check.status == "fail" for check in checks))
