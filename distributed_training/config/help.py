"""The settings for people: ``--help``, the resolved configuration, docs/flags.md."""

from __future__ import annotations

import shutil
import textwrap
from itertools import groupby

from pydantic import SecretStr

from .checks import notices
from .loader import Config
from .schema import TITLES, Schema, Setting, schema
from .values import placeholder, show

PUBLIC_DOCUMENT = "docs/flags.md"


def help_text(known: Schema, *, width: int | None = None) -> str:
    """All flags by group, with type, default and environment variable."""
    columns = width or min(110, shutil.get_terminal_size((100, 24)).columns)
    lines = [
        f"usage: neurons/{known.kind}.py [--flag value]...",
        "",
        "Dashes and underscores in a flag are the same. Strongest first: flags, environment, .env,",
        "--config file, preset, default. Secrets come from the environment or .env only.",
        "",
        "  -h, --help      this text",
        "  --version       the version",
    ]
    for group, settings in groupby(known, key=lambda s: s.group):
        lines += ["", f"{TITLES[group]}:"]
        for setting in settings:
            lines += _help_entry(setting, columns)
    return "\n".join(lines)


def _help_entry(setting: Setting, columns: int) -> list[str]:
    spec = setting.spec
    if spec.secret:
        head = f"  {spec.env} (environment or .env)"
    else:
        head = f"  --{spec.name} {placeholder(spec, setting.hint)}".rstrip()
    text = spec.help
    if not spec.secret:
        if setting.default is not None:
            text += f" [{show(setting.default)}]"
        if spec.env:
            text += f" (environment: {spec.env})"
    indent = " " * 8
    return [head, *textwrap.wrap(text, columns, initial_indent=indent, subsequent_indent=indent)]


def describe(config: Config) -> list[str]:
    """The resolved configuration, one setting a line, secrets masked, with where each came from.

    Printed by the launcher at every start.
    """
    lines = [f"Configuration of this {config.kind} (preset {config.preset}):"]
    known = schema(config.kind)
    for group, settings in groupby(known, key=lambda s: s.group):
        if group == "general":
            continue
        entries = []
        for setting in settings:
            name = setting.spec.name
            source = config.sources.get(name, "")
            if setting.no_effect:
                if source:
                    entries.append(f"    --{name}: no effect: {setting.no_effect}")
                continue
            value = config.run_folder if name == "neuron.run_folder" else config.values[name]
            if setting.spec.secret:
                value = value if isinstance(value, SecretStr) or value is None else SecretStr("?")
                label = setting.spec.env or name
            else:
                label = f"--{name}"
            origin = f"   ({source})" if source and source != f"--{name}" else ""
            mark = " *" if source == f"--{name}" else "  "
            entries.append(f"  {mark}{label:<46} {show(value)}{origin}")
        if entries:
            lines += [f"  {TITLES[group]}", *entries]
    lines.append("  (*: given on the command line)")
    lines += [f"  note: {line}" for line in notices(config)]
    return lines


def markdown() -> str:
    """``docs/flags.md``. The validator's schema holds the miner's, so it is the one documented."""
    known = schema("validator")
    lines = [
        "# Flags",
        "",
        "Written by `python -m distributed_training.config --markdown`; do not edit.",
        "",
        "Dashes and underscores in a flag are the same: `--neuron.upload-steps 60` and",
        "`--neuron.upload_steps=60`. Switches need no value; `--flag false` turns one off. What",
        "wins, strongest first: flags, environment variables, `.env` (with or without `export`),",
        "the `--config` TOML file, the preset, the default. Secrets come from the environment or",
        "`.env` only and are refused on the command line. Unknown flags are errors.",
    ]
    for group, settings in groupby(known, key=lambda s: s.group):
        lines += ["", f"## {TITLES[group]}", ""]
        if group == "validator":
            lines += ["Understood by `neurons/validator.py` only.", ""]
        lines += ["| Flag | Default | Environment | Meaning |", "| --- | --- | --- | --- |"]
        for setting in settings:
            spec = setting.spec
            name = "(environment only)" if spec.secret else f"`--{spec.name}`"
            default = "" if setting.default in (None, "", ()) else f"`{show(setting.default)}`"
            variable = f"`{spec.env}`" if spec.env else ""
            meaning = spec.help
            if spec.choices:
                meaning += f" ({', '.join(spec.choices)})"
            cells = [cell.replace("|", "\\|") for cell in (name, default, variable, meaning)]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Presets", ""]
    from .presets import PRESETS

    for preset, values in PRESETS.items():
        lines += [f"`--preset {preset}`:", ""]
        lines += [f"- `--{name} {value}`" for name, value in values.items()] + [""]
    return "\n".join(lines).rstrip() + "\n"
