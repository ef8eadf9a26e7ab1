"""From flags, environment, files and presets to one frozen :class:`Config`.

What wins, strongest first: flags, environment variables, ``.env``, ``--config`` file, preset,
default. Secrets come from the environment or ``.env`` only.

argparse reads the command line, pydantic converts and checks; this module only merges. It remembers
where each value came from, so that an error names the place to correct. (pydantic-settings would
merge as well, but does not say where from, and reads lists as JSON and ``${...}`` in a secret.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from .arguments import Given, fault, unprintable
from .checks import problems
from .flags import ConfigError
from .model import Config, Kind
from .presets import PRESETS
from .schema import Schema, schema
from .sources import open_to_others, read_argv, read_dotenv, read_environment, read_toml


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
            for error in reversed(refusal.errors(include_url=False)):  # a field's first counts
                setting = places[room, str(error["loc"][0])]
                text, source = given[setting.name]
                remedy = f"give {setting.remedy}" if setting.remedy else f"correct {source}"
                wrong[setting.name] = (
                    f"{source}: {fault(setting, text, error)}, so nothing was started: {remedy}"
                )
    _refuse(list(wrong.values()))
    values = {s.name: getattr(rooms[s.places[0][0]], s.places[0][1]) for s in known}
    return Config(
        kind=known.kind,
        values=MappingProxyType(values),
        sources=MappingProxyType({name: entry.source for name, entry in given.items()}),
        warnings=warnings,
        **rooms,
    )


def _text(given: Given) -> str:
    """Raises ConfigError if it cannot be shown in one line."""
    text = given.text.strip()
    why = unprintable(text)
    if why is not None:
        raise ConfigError(f"{given.source} {why}, so nothing was started: correct {given.source}")
    return text
