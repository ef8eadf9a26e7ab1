"""Show whether this machine's miners run and their uploads count, and what to do if they do not.

    dt-status                        the miner of the settings here, and others below this folder
    dt-status FOLDER...              the miners of these run folders, a row each if several
    dt-status --watch                again every 2 s; in a pipe or file, one line for each change
    dt-status --json                 one object per miner, each on a line, for programs

It reads only files in the run folder, so it needs no port and works over ssh, under any load, and
while no miner runs. Exit status (for several miners, the first that applies to any of them):

    2    an argument or a folder cannot be used
    1    an operator must act, as the line ``do`` says
    3    the miner does not run
    0    its uploads count, or there is nothing to do

For a single miner that does not run, the status is 3 even if an operator must act.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from distributed_training.common.processes import limit_resources
from distributed_training.config import (
    OPERATORS_FILE,
    ConfigError,
    exit_with,
    load_config,
    run_folder_of,
)
from distributed_training.config.loader import Parser, argument
from distributed_training.config.schema import read_settings
from distributed_training.config.types import File
from distributed_training.protocol.network_report import span
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry.neuron_state import NeuronState
from distributed_training.telemetry.run_state import LAUNCHER_FILE, is_run_folder, observe
from distributed_training.telemetry.verdict import MUST_ACT, NOT_RUNNING, judge

_SAME = 1.0  # seconds by which a step's event and the same step in the facts may differ
_EVERY = 2.0  # seconds between two checks with --watch
_TAIL = 2**20  # bytes of events to read, which cover hours of inner steps


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser.of_program("dt-status", __doc__)
    parser.add_argument("folders", nargs="*", type=argument(File), metavar="FOLDER")
    parser.add_argument("--watch", action="store_true", help="again every 2 s")
    parser.add_argument("--json", action="store_true", help="for programs")
    try:
        options = parser.parse_args(argv)
        folders = [require_run_folder(folder) for folder in options.folders] or find_own()
        return show(folders, as_json=options.json, watch=options.watch)
    except ConfigError as error:
        return exit_with(error)
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:  # raised by `dt-status --watch | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.STOPPED


def require_run_folder(folder: Path) -> Path:
    """Return ``folder`` if a miner has run there. Raises ConfigError."""
    try:
        next(folder.iterdir(), None)
    except OSError as error:
        closed = isinstance(error, PermissionError)
        raise ConfigError(
            f"{folder} cannot be read ({error.strerror}), so nothing is known about its miner: "
            + ("run this as the miner's user" if closed else _NAME_ONE)
        ) from None
    if not is_run_folder(folder):
        raise ConfigError(f"no miner has run in {folder}, so there is nothing to show: {_NAME_ONE}")
    return folder


_NAME_ONE = "name the run folder that the miner logs at its start"


def find_own() -> list[Path]:
    """Return the run folder that the settings here name, and those of miners below this folder.

    Raises ConfigError if no miner has run.
    """
    refused = None
    try:
        own = [load_config("miner", [], file=OPERATORS_FILE, check=False).run_folder]
    except ConfigError as error:
        # Continue, because refused settings may be the reason why an operator looks at the miner.
        own, refused = [run_folder_of([])], error
    # A second miner of pm2 has a folder of its own (DT_NAME).
    places = [f"runs/*/{LAUNCHER_FILE}", f"*/runs/*/{LAUNCHER_FILE}"]
    below = sorted(path.parent for place in places for path in Path().glob(place))
    found = {path.resolve(): path for path in [*own, *below] if path.is_dir()}
    if found:
        return list(found.values())
    if refused is not None:
        raise refused
    raise ConfigError(
        f"no miner has run here ({own[0]} does not exist; a start takes seconds): {_NAME_ONE}"
    )


# --- the state of a miner ------------------------------------------------------------------------


def describe(neuron: NeuronState, now: float) -> dict[str, Any]:
    """Return the facts about a miner, with the keys that ``--json`` shows.

    Times are in Unix seconds, and sizes in bytes. An unknown fact is None.
    """
    folder = neuron.folder
    with contextlib.suppress(OSError):  # if the disk fails, use the events that were read before
        neuron.poll()
    settings = read_settings(folder)
    facts = observe(folder, now)
    found = judge(facts, now)
    launch, due = facts.launch, facts.expected_round(now)
    upload = facts.uploads[-1] if facts.uploads else None
    # A step's event is written together with its log line, up to 15 s before the facts. If the disk
    # is full, only the facts are written.
    reached, last = facts, neuron.known.step
    if last is not None and (facts.step is None or last.at >= facts.step.at - _SAME):
        reached = neuron.known
    step = reached.step
    return {
        "time": now,
        "name": facts.name or settings.get("neuron.name") or folder.absolute().name,
        "folder": str(folder),
        "uid": facts.uid,
        "verdict": found.verdict.value,
        "cause": found.cause,
        "remedy": found.remedy,
        "bad": found.bad,
        "counts": found.counts,
        "status": found.status,
        "state": launch.state if launch else None,
        "state_at": launch.at if launch else None,
        "stage": launch.stage if launch else "",
        "eta_seconds": launch.seconds_left(now) if launch and launch.stage else None,
        "attempt": launch.attempt if launch else 0,
        "next_try_at": launch.next_try_at if launch else None,
        "mode": facts.mode,
        "outer_step": reached.outer_step,
        "inner_step": step.value if step else None,
        "step_at": step.at if step else None,
        "last_upload": asdict(upload) if upload else None,
        "next_upload_at": due,
        "next_round_at": due,
        "missed_closes": facts.missed_until(now),
        "pays": facts.pays,
        "disk": asdict(facts.disk.value) if facts.disk else None,
        "chain_answered_at": facts.chain_at,
        "store_silent_since": facts.store_silent_since,
        "restarts": launch.restarts if launch else 0,
        "last_crash": asdict(launch.last_crash) if launch and launch.last_crash.text else None,
        "tokens_a_day": neuron.tokens_a_day(now),
    }


def show(folders: Sequence[Path], *, as_json: bool, watch: bool) -> int:
    """Print the state of each miner, repeatedly with ``watch``. Return the exit status."""
    limit_resources()  # raises the limit of open files: one stays open for each folder
    neurons = [NeuronState(folder).catch_up(at_most=_TAIL) for folder in folders]
    redraws = watch and not as_json and sys.stdout.isatty()
    shown: dict[str, tuple[Any, ...]] = {}
    while True:
        rows = [describe(neuron, time.time()) for neuron in neurons]
        if redraws:
            print("\x1b[H\x1b[2J", end="")
        if as_json or (watch and not redraws):
            for row in rows:
                key = row["verdict"], row["bad"], row["stage"]
                if shown.get(row["folder"]) != key:
                    shown[row["folder"]] = key
                    print(json.dumps(row) if as_json else line_of(row), flush=True)
        else:
            print(text_of(rows[0]) if len(rows) == 1 else table_of(rows), flush=True)
        if not watch:
            found = {row["status"] for row in rows}
            return next((status for status in (MUST_ACT, NOT_RUNNING) if status in found), 0)
        time.sleep(_EVERY)


def line_of(row: dict[str, Any]) -> str:
    """Return the state of a miner as one line for a log."""
    at = datetime.fromtimestamp(row["time"]).astimezone().isoformat(" ", "seconds")
    do = f"; {row['remedy']}" if row["remedy"] else ""
    return printable(f"{at} {row['name']}: {row['verdict']}: {row['cause']}{do}")


def text_of(row: dict[str, Any]) -> str:
    """Return the state of one miner, with one known fact per line."""
    now, uid = row["time"], "" if row["uid"] is None else f" (uid {row['uid']})"
    lines = [f"{row['name']}{uid}: {row['verdict'].upper()}", f"  {row['cause']}"]
    runs = _trains(row)

    def add(name: str, text: str | None) -> None:
        if text:
            lines.append(f"  {name:<13} {text}")

    add("do", row["remedy"])
    if row["state"] == "stopped":
        add("stopped", ago(row["state_at"], now))
    if row["outer_step"] is not None:
        step = f"outer step {row['outer_step']}"
        if row["step_at"] is not None:
            step += f", inner step {row['inner_step']}, {ago(row['step_at'], now)}"
        add("training" if runs else "last step", step)
    if upload := row["last_upload"]:
        tag = f"{upload['tag']}, " if upload["tag"] else ""
        fate = upload["fate"] or "not judged yet"
        cause = f" ({upload['cause']})" if upload["cause"] else ""
        at = ago(upload["at"], now)
        add("last upload", f"{tag}of outer step {upload['outer_step']}, {at}, {fate}{cause}")
    for name, key in (("next upload", "next_upload_at"), ("next round", "next_round_at")):
        if row[key] is not None and runs:
            add(name, when(row[key], now))
    if disk := row["disk"]:
        needed = f", {disk['needed'] / 1e9:.1f} GB needed" if disk["needed"] else ""
        free, total = disk["free"] / 1e9, disk["total"] / 1e9
        add("disk", f"{free:.1f} of {total:.1f} GB free{needed}")
    if row["chain_answered_at"] is not None and runs:
        silent = row["store_silent_since"]
        store = "answers" if silent is None else f"has not answered for {span(now - silent)}"
        chain = "chain" if row["pays"] else "registry"
        add("link", f"{chain} answered {ago(row['chain_answered_at'], now)}, store {store}")
    crash = row["last_crash"]
    if row["restarts"] or crash:
        last = f", last crash {ago(crash['at'], now)}: {crash['text']}" if crash else ""
        add("restarts", f"{row['restarts']}{last}")
    if runs and row["tokens_a_day"] is not None:
        add("a day", f"{row['tokens_a_day'] / 1e6:.1f} million tokens")
    return "\n".join(map(printable, lines))


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each miner."""
    cells = [("MINER", "UID", "VERDICT", "LAST UPLOAD", "NEXT ROUND", "CAUSE")]
    for row in rows:
        upload, due = row["last_upload"], row["next_round_at"]
        cells.append(
            (
                row["name"],
                "" if row["uid"] is None else str(row["uid"]),
                row["verdict"],
                ago(upload["at"], row["time"]) if upload else "-",
                when(due, row["time"]) if due and _trains(row) else "-",
                row["cause"] + (f"; {row['remedy']}" if row["remedy"] else ""),
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
    return "\n".join(map(printable, lines))


def _trains(row: dict[str, Any]) -> bool:
    # Under torchrun there is no launcher, and so no state.
    return row["status"] != NOT_RUNNING and row["state"] in (None, "running")


def ago(at: float, now: float) -> str:
    return f"{span(now - at)} ago" if at <= now else "just now"  # the clock may have been set back


def when(at: float, now: float) -> str:
    if at <= now:
        return f"due for {span(now - at)}"
    with contextlib.suppress(ValueError, OverflowError, OSError):  # datetime has no such year
        return f"in {span(at - now)} ({datetime.fromtimestamp(at):%H:%M:%S})"
    return f"in {span(at - now)}"


def printable(text: str) -> str:
    """Replace control characters in ``text``, because parts of it came from outside."""
    return "".join(c if c.isprintable() else "?" for c in text)


if __name__ == "__main__":
    sys.exit(main())
