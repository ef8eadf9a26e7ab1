"""From flags, environment, files and presets to one frozen :class:`Config`.

What wins, strongest first: flags, environment variables, ``.env``, ``--config`` file, preset,
default. Secrets come from the environment or ``.env`` only.

argparse reads the command line, pydantic converts and checks; this module only merges. It remembers
where each value came from, so that an error names the place to correct. (pydantic-settings would
merge as well, but does not say where from, and reads lists as JSON and ``${...}`` in a secret.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from .checks import problems
from .flags import ConfigError
from .model import Config, Kind
from .presets import PRESETS
from .schema import Schema, Setting, schema
from .sources import Given, open_to_others, read_argv, read_dotenv, read_environment, read_toml
from .values import mask

_LONGEST_TEXT = 4096  # characters of one value


def load_config(
    kind: Kind,
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    dotenv: Path | None = Path(".env"),
    check: bool = True,
) -> Config:
    """The configuration of one neuron.

    ``argv`` without the program's name. ``environ`` is ``os.environ`` if None; ``dotenv`` need not
    exist. ``check=False`` skips the checks across settings (``config.problems`` lists them).
    ``--help`` and ``--version`` print and raise SystemExit(0).
    Raises ConfigError: one line, nothing started.
    """
    known = schema(kind)
    flags = read_argv(argv, known)
    environment = read_environment(os.environ if environ is None else environ, known)
    from_dotenv = read_environment(read_dotenv(dotenv), known)
    given = {**from_dotenv, **environment, **flags}
    if "config" in given:
        given = {**read_toml(Path(_text(given["config"])), known), **given}
    preset = _text(given["preset"]) if "preset" in given else "public"
    defaults = {
        name: Given(text, f"preset {preset}")
        for name, text in PRESETS.get(preset, {}).items()
        if known.get(name) is not None
    }
    warning = open_to_others(dotenv) if dotenv and from_dotenv else None
    config = _build(known, {**defaults, **given}, warnings=(warning,) if warning else ())
    if check:
        _refuse(problems(config))
    return config


def _refuse(found: Sequence[str]) -> None:
    if found:
        more = f" (and {len(found) - 1} more: scripts/diagnose.py lists all)"
        raise ConfigError(found[0] + (more if len(found) > 1 else ""))


def _build(known: Schema, given: Mapping[str, Given], *, warnings: tuple[str, ...]) -> Config:
    arguments: dict[str, dict[str, Any]] = {room: {} for room in known.classes}
    for name, entry in given.items():
        setting = known.settings[name]
        text = _text(entry)
        empty = setting.optional and text.strip().lower() in ("", "none")
        for room, field in setting.places:
            arguments[room][field] = None if empty else text
    rooms: dict[str, Any] = {}
    wrong: dict[str, str] = {}  # flag -> problem
    places = {place: setting for setting in known for place in setting.places}
    for room, settings_class in known.classes.items():
        try:
            rooms[room] = settings_class(**arguments[room])
        except ValidationError as refusal:
            for error in refusal.errors(include_url=False):
                setting = places[room, str(error["loc"][0])]
                wrong.setdefault(setting.name, _wording(setting, given[setting.name], error))
    _refuse(list(wrong.values()))
    values = {s.name: getattr(rooms[s.places[0][0]], s.places[0][1]) for s in known}
    return Config(
        kind=known.kind,
        values=MappingProxyType(values),
        sources=MappingProxyType({name: entry.source for name, entry in given.items()}),
        warnings=warnings,
        **rooms,
    )


def _text(entry: Given) -> str:
    """What was given, if it can be shown in one line at all. Raises ConfigError."""
    text = entry.text.strip()
    if len(text) > _LONGEST_TEXT:
        what = f"has {len(text)} characters, more than {_LONGEST_TEXT}"
    elif not text.isprintable():
        what = "holds characters that cannot be printed"
    else:
        return text
    raise ConfigError(f"{entry.source} {what}, so nothing was started: correct {entry.source}")


def _wording(setting: Setting, entry: Given, error: Mapping[str, Any]) -> str:
    """One line for the operator. It never holds the value of a secret."""
    text = mask(entry.text)
    text = text if len(text) <= 100 else f"{text[:100]}..."
    context = error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, ConfigError):
        return f"{entry.source}: {cause}"
    if error["type"] in ("greater_than_equal", "less_than_equal"):
        low, _, high = setting.bounds.partition(" to ")
        what = f"less than {low}" if "ge" in context else f"more than {high}"
        return f"{entry.source} {text} is {what}, so nothing was started: give {low} to {high}"
    shown = "its value" if setting.secret else repr(text)
    wanted = str(cause or setting.wanted)
    remedy = f"give {setting.bounds}" if setting.bounds else f"correct {entry.source}"
    return f"{entry.source}: {shown} is not {wanted}, so nothing was started: {remedy}"


def exit_with(error: ConfigError) -> int:
    """Print the one line an operator sees for bad input; the exit status 2."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 2
