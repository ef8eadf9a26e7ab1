"""The settings for people: what a start prints, ``config.txt``, and docs/flags.md."""

from __future__ import annotations

from itertools import groupby

from .loader import NO_EFFECT, Setting, schema
from .model import PRESETS, TITLES, Config
from .types import show

PUBLIC_DOCUMENT = "docs/flags.md"


SETTINGS_FILE = "config.txt"  # in the run folder
WARNING = "  warning: "  # how the line of a warning begins


def describe(config: Config) -> list[str]:
    """Return the settings that were given, one a line, secrets masked, with where each came from.

    They begin the log of every start; all settings are in :data:`SETTINGS_FILE`.
    """
    preset, place = f"preset {config.preset}", config.general.network
    # What a preset or the network's file gave was not given by this operator.
    given = [
        s
        for s in schema(config.kind)
        if config.sources.get(s.name, preset) not in (preset, f"{s.network} in {place}")
    ]
    lines = [f"This is {config.network.line}"] if config.network else []
    lines += [
        f"Configuration of this {config.kind} ({preset}): {len(given)} settings are given; "
        f"all of them: {SETTINGS_FILE} in the run folder"
    ]
    lines += [_entry(config, setting) for setting in given]
    return lines + [f"{WARNING}{line}" for line in config.warnings]


def all_settings(config: Config) -> str:
    """Return every setting, by subject, as :data:`SETTINGS_FILE` holds them."""
    lines = [f"All settings of this {config.kind} (preset {config.preset}), as it last started."]
    for group, settings in groupby(schema(config.kind), key=lambda setting: setting.group):
        lines += ["", TITLES[group], *(_entry(config, setting) for setting in settings)]
    return "\n".join(lines) + "\n"


def _entry(config: Config, setting: Setting) -> str:
    source = config.sources.get(setting.name, "")
    # The setting is None by default: the folder is made of two others.
    value = config.run_folder if setting.name == "neuron.run_folder" else config.get(setting.name)
    label = str(setting.env) if setting.secret else f"--{setting.name}"
    on_argv = source == f"--{setting.name}"
    origin = f"   ({'command line' if on_argv else source})" if source else ""
    return f"  {label:<46} {show(value) or '-'}{origin}"


def markdown() -> str:
    """Write ``docs/flags.md``. The validator's schema holds the miner's, so it is documented."""
    lines = [
        "# Flags",
        "",
        "Written by `python -m distributed_training.config --markdown`; do not edit.",
        "",
        "Dashes and underscores in a flag are the same: `--neuron.upload-steps 60` and",
        "`--neuron.upload_steps=60`. Switches need no value; `--flag false` turns one off. What",
        "wins, strongest first: flags, environment variables, `.env` (with or without `export`),",
        "`miner.toml` beside it (or the TOML file of `--config`), the network's file, the preset,",
        "the default. Secrets come from the environment or `.env` only and are refused on the",
        "command line. Unknown flags are errors, and so are values outside the range. Without",
        "`--network` the network is the public one.",
    ]
    for group, settings in groupby(schema("validator"), key=lambda setting: setting.group):
        lines += ["", f"## {TITLES[group]}", ""]
        if group == "network":
            lines += [
                "All peers must agree on these, so [the network's file](network-file.md) sets",
                "them. Beside `--network` a flag with another value is refused.",
                "",
            ]
        if group == "validator":
            lines += ["Understood by `neurons/validator.py` only.", ""]
        lines += ["| Flag | Default | Range | Environment | Meaning |", "| --- " * 5 + "|"]
        lines += [_row(setting) for setting in settings]
    lines += ["", "## Accepted, without effect", ""]
    lines += ["A start script may still have them; one line says so at each start.", ""]
    lines += ["| Flag | Why |", "| --- | --- |"]
    lines += [f"| `--{name}` | {why} |" for name, why in sorted(NO_EFFECT.items())]
    lines += ["", "## Presets", ""]
    for preset, values in PRESETS.items():
        if not values:
            lines += [f"`--preset {preset}`: the network's file as it is.", ""]
            continue
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
    if setting.network:
        meaning += f" (in the file: `{setting.network}`)"
    cells = (name, default, setting.bounds, variable, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
