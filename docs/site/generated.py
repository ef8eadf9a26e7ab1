"""Write the pages of the site that follow from the code: commands, flags, metrics.

``hooks.py`` calls :data:`PAGES` while it builds the site: the repository has none of these pages.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import sys
import tomllib
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from distributed_training.config.model import TITLES  # noqa: E402
from distributed_training.config.schema import Setting, schema  # noqa: E402
from distributed_training.config.types import show  # noqa: E402
from distributed_training.telemetry.metrics import CHAIN_COUNTS, METRICS  # noqa: E402

_COMMANDS = """# Commands

Each program prints this text for `--help`, and a command of `dt-network` prints its own.
"""
#: Another name of ``dt-network``.
_ALIASES = ("dt-registry",)
_FLAGS = """# Flags

A setting of the miner or the validator can be given in several places. The strongest comes first:

1. the command line: `--neuron.upload_steps 60` and `--neuron.upload-steps=60` are the
    same, and a switch needs no value (`--logging.debug`, `--logging.debug false`);
2. an environment variable, where the table names one;
3. the same variable in `.env`;
4. `miner.toml`, or the TOML file that `--config` names;
5. [the network's file](network-file.md);
6. the default.

Secrets are read from the environment or `.env` only. A start refuses unknown flags and
values outside of the range, and says what to do about a flag of an earlier version.
`dt-miner config` prints every setting and its origin.
"""
_METRICS = """# Metrics

The dashboard serves these metrics at `/metrics`; the file `metrics.prom` in the run folder has the
latest. A name with `_total` is a counter, any other a gauge; timestamps are Unix seconds. A value
that could not be measured is absent. Counts of bad data are in [data](data.md#bad-input).
"""
_CHAIN = "If a count of failures keeps rising, set `--subtensor.chain_endpoint`.\n"
#: Title of each section, and the beginnings of its metrics' names; the first that fits counts.
_SECTIONS = {
    "Does it run?": ("start", "launcher", "last_step", "build", "metrics"),
    "Training": ("train_",),
    "Uploads": ("last_pub", "publication", "upload"),
    "Does it count?": ("counts", "registered"),
    "Rounds": ("round", "next_round", "global", "clock"),
    "Machine and GPUs": ("gpu", "rank", "disk", "memory"),
    "A validator's network": ("network_",),
}


def commands() -> str:
    """Return the page with the help of each program and of each of its commands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = _COMMANDS
    for name, place in sorted(project["scripts"].items()):
        if name in _ALIASES:
            continue
        whole = _help(place, name)
        text += f"\n## {name}\n\n```text\n{whole}\n```\n"
        listed = re.search(r"\{([\w,-]+)\}\s+\.\.\.", whole)
        for command in listed[1].split(",") if listed else ():
            text += f"\n### {name} {command}\n\n```text\n{_help(place, name, command)}\n```\n"
    return text


def _help(place: str, *words: str) -> str:
    """Return what the program at ``place`` (``module:function``) prints for ``--help``."""
    module, _, function = place.partition(":")
    main = getattr(importlib.import_module(module), function)
    handler = signal.getsignal(signal.SIGINT)  # dt-score sets its own
    said = io.StringIO()
    try:
        with (
            patch.object(sys, "argv", [*words, "--help"]),
            patch.dict(os.environ, {"COLUMNS": "100"}),
            redirect_stdout(said),
            suppress(SystemExit),
        ):
            main()
    finally:
        signal.signal(signal.SIGINT, handler)
    return said.getvalue().strip()


def flags() -> str:
    """Return the page of the flags of miner and validator, a table for each group."""
    text = _FLAGS
    for group, settings in groupby(schema("validator").flags, key=lambda each: each.group):
        text += f"\n## {TITLES[group]}\n\n"
        text += "Only the validator knows these flags.\n\n" if group == "validator" else ""
        text += f"| Flag | Meaning | Default and range |\n{'| --- ' * 3}|\n"
        text += "".join(f"{_row(setting)}\n" for setting in settings)
    return text


def _row(setting: Setting) -> str:
    names = [] if setting.secret else [f"`--{setting.name}`"]
    names += [f"`{setting.env}`"] if setting.env else []
    default = "" if setting.default in (None, "", ()) else f"`{show(setting.default)}`"
    if setting.network:
        default = "the file's"
    meaning = setting.help
    if setting.choices and not setting.bounds:
        meaning += f" ({', '.join(setting.choices)})"
    limits = [text for text in (default, setting.bounds.replace(" to ", "–")) if text]
    cells = ("<br>".join(names), meaning, "<br>".join(limits))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def metrics() -> str:
    """Return the page of the metrics: a table for each task, then the chain's."""
    left = {name: METRICS[name].about for name in METRICS}
    text = _METRICS
    for title, beginnings in _SECTIONS.items():
        found = {name: about for name, about in left.items() if name.startswith(beginnings)}
        text += f"\n## {title}\n{_table(found)}"
        left = {name: about for name, about in left.items() if name not in found}
    return f"{text}\n## The chain\n\n{_CHAIN}{_table({**left, **CHAIN_COUNTS})}"


def _table(rows: Mapping[str, str]) -> str:
    lines = [f"| `dt_{name}` | {text} |\n" for name, text in rows.items()]
    return "\n| Name | Meaning |\n| --- | --- |\n" + "".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "flags.md": flags,
    "metrics.md": metrics,
}
