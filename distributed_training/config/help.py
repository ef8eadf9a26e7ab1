"""The settings for people: the configuration printed at each start, and docs/flags.md."""

from __future__ import annotations

from itertools import groupby

from .checks import notices
from .model import TITLES, Config
from .presets import PRESETS
from .schema import Setting, schema
from .values import show

PUBLIC_DOCUMENT = "docs/flags.md"


def describe(config: Config) -> list[str]:
    """The resolved configuration, one setting a line, secrets masked, with where each came from.

    Printed by the launcher at every start.
    """
    lines = [f"Configuration of this {config.kind} (preset {config.preset}):"]
    for group, settings in groupby(schema(config.kind), key=lambda setting: setting.group):
        entries = [line for setting in settings if (line := _entry(config, setting))]
        if entries and group != "general":
            lines += [f"  {TITLES[group]}", *entries]
    lines.append("  (*: given on the command line)")
    lines += [f"  warning: {line}" for line in config.warnings]
    return lines + [f"  note: {line}" for line in notices(config)]


def _entry(config: Config, setting: Setting) -> str:
    source = config.sources.get(setting.name, "")
    if setting.group == "no_effect":
        return f"    --{setting.name}: {setting.help}" if source else ""
    value = config.run_folder if setting.name == "neuron.run_folder" else config.get(setting.name)
    label = str(setting.env) if setting.secret else f"--{setting.name}"
    on_argv = source == f"--{setting.name}"
    origin = f"   ({source})" if source and not on_argv else ""
    return f"  {' *' if on_argv else '  '}{label:<46} {show(value)}{origin}"


def markdown() -> str:
    """``docs/flags.md``. The validator's schema holds the miner's, so it is the one documented."""
    lines = [
        "# Flags",
        "",
        "Written by `python -m distributed_training.config --markdown`; do not edit.",
        "",
        "Dashes and underscores in a flag are the same: `--neuron.upload-steps 60` and",
        "`--neuron.upload_steps=60`. Switches need no value; `--flag false` turns one off. What",
        "wins, strongest first: flags, environment variables, `.env` (with or without `export`),",
        "the `--config` TOML file, the preset, the default. Secrets come from the environment or",
        "`.env` only and are refused on the command line. Unknown flags are errors, and so are",
        "values outside the range.",
    ]
    for group, settings in groupby(schema("validator"), key=lambda setting: setting.group):
        lines += ["", f"## {TITLES[group]}", ""]
        if group == "validator":
            lines += ["Understood by `neurons/validator.py` only.", ""]
        lines += ["| Flag | Default | Range | Environment | Meaning |", "| --- " * 5 + "|"]
        lines += [_row(setting) for setting in settings]
    lines += ["", "## Presets", ""]
    for preset, values in PRESETS.items():
        lines += [f"`--preset {preset}`:", ""]
        lines += [f"- `--{name} {value}`" for name, value in values.items()] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _row(setting: Setting) -> str:
    name = "(environment only)" if setting.secret else f"`--{setting.name}`"
    default = "" if setting.default in (None, "", ()) else f"`{show(setting.default)}`"
    variable = f"`{setting.env}`" if setting.env else ""
    meaning = setting.help
    if setting.choices:
        meaning += f" ({', '.join(setting.choices)})"
    cells = (name, default, setting.bounds, variable, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
