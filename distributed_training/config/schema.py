"""Find settings by the names of their flags, and describe them for people.

A :class:`Schema` reads the declarations in ``settings.py``. What a start prints, ``config.txt`` and
the page of flags (docs/site/generated.py) are made from it. The loader uses it to look up names.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from annotated_types import Ge, Le
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from .model import TITLES, Config, Kind
from .settings import AllSettings
from .types import ConfigError, show

# How messages name each type, and the placeholder for its value in the help.
_TYPES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true|false"),
    timedelta: ("a duration such as 90s or 15m", "TIME"),
    Path: ("a path", "PATH"),
    int: ("a whole number", "N"),
    float: ("a number", "X"),
    str: ("at least one character", "TEXT"),
    SecretStr: ("at least one character", "TEXT"),
}


@dataclass(frozen=True)
class Setting:
    """One flag or rule, and the field that it sets.

    ``name``: the flag's name. A rule has no flag, so its name is its key in the network's file.
    """

    name: str
    field: FieldInfo
    group: str = ""
    place: tuple[str, str] = ("", "")  # package and field name
    default: Any = None
    env: str | None = None
    network: str = ""  # its key in the network's file
    is_rule: bool = False  # only the network's file sets it

    @property
    def help(self) -> str:
        return " ".join((self.field.description or "").split())

    @cached_property
    def parts(self) -> list[Any]:
        """The parts of the type, and its constraints."""
        return [*_parts(self.field.annotation), *self.field.metadata]

    @property
    def secret(self) -> bool:
        return SecretStr in self.parts

    @property
    def optional(self) -> bool:
        return NoneType in self.parts

    @property
    def many(self) -> bool:
        """Whether the flag takes several words."""
        return Ellipsis in self.parts

    @property
    def choices(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def bounds(self) -> str:
        """The allowed range, for example ``1 to 100``; empty for a setting that is not a number."""
        low = [show(part.ge) for part in self.parts if isinstance(part, Ge)]
        high = [show(part.le) for part in self.parts if isinstance(part, Le)]
        return f"{low[0]} to {high[0]}" if low and high else ""

    @property
    def wanted(self) -> str:
        """The kind of value that this flag takes, such as ``a whole number``."""
        words = ", ".join(self.choices)
        if words and not self.bounds:
            return f"one of {words}"
        return f"{self._type[0]} or {words}" if words else self._type[0]

    @property
    def metavar(self) -> str:
        """The placeholder for the value in the help."""
        if self.many:
            return "WORD"
        first = [self._type[1]] if self.bounds or not self.choices else []
        return "|".join(first + self.choices)

    @property
    def _type(self) -> tuple[str, str]:
        return next((_TYPES[part] for part in self.parts if part in _TYPES), _TYPES[str])


def _parts(hint: Any) -> Iterator[Any]:
    """Flatten ``int | Literal["auto"]`` to Union, int, Literal, "auto"; keep constraints."""
    yield typing.get_origin(hint) or hint
    for part in typing.get_args(hint):
        yield from part.metadata if isinstance(part, FieldInfo) else _parts(part)


class Schema:
    """The settings of one kind of neuron, which can be looked up by any spelling of their flags."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.classes: dict[str, Any] = typing.get_type_hints(AllSettings)
        self.settings: dict[str, Setting] = {}
        for package, settings_class in self.classes.items():
            if package != "validator" or kind == "validator":
                defaults = settings_class()
                for field_name, field in settings_class.__pydantic_fields__.items():
                    if declared := field.json_schema_extra:
                        self.settings[declared["name"]] = Setting(
                            **declared,
                            group="network" if declared.get("is_rule") else package,
                            field=field,
                            place=(package, field_name),
                            default=getattr(defaults, field_name),
                        )
        order = list(TITLES)
        grouped = sorted(self.settings.items(), key=lambda item: order.index(item[1].group))
        self.settings = dict(grouped)
        self.flags = [setting for setting in self if not setting.is_rule]
        self._spellings = {canonical(setting.name): setting for setting in self.flags}

    def find(self, name: str) -> Setting:
        """Find the setting of a flag, spelled with dashes or underscores.

        Raises ConfigError if the flag is unknown.
        """
        setting = self._spellings.get(canonical(name))
        if setting is None:
            # Also consider names without their section, such as --upload_steps.
            names = {spelling.rpartition(".")[2]: s for spelling, s in self._spellings.items()}
            names |= self._spellings
            close = difflib.get_close_matches(canonical(name), names, n=1, cutoff=0.8)
            hint = f"did you mean --{names[close[0]].name}?" if close else "see --help"
            raise ConfigError(f"--{name} is not a known flag, so nothing was started: {hint}")
        return setting

    def get(self, name: str) -> Setting | None:
        """Return the setting of a flag, or None if the flag is unknown."""
        return self._spellings.get(canonical(name))

    def __iter__(self) -> Iterator[Setting]:
        """Yield flags and rules by group, in the order of the help."""
        return iter(self.settings.values())


def canonical(name: str) -> str:
    """Return the canonical spelling of a flag: lower case, with underscores instead of dashes."""
    return name.replace("-", "_").lower()


@lru_cache
def schema(kind: Kind) -> Schema:
    return Schema(kind)


class Given(NamedTuple):
    """The text given for a setting, and where it was given."""

    text: str  # several words are separated by spaces
    source: str  # the place in an operator's words: --neuron.upload_steps, R2_ACCOUNT_ID


# --- what people read ---------------------------------------------------------------------------

SETTINGS_FILE = "config.txt"  # in the run folder
WARNING = "  warning: "  # start of each warning line


def describe(config: Config) -> list[str]:
    """Return the settings that were given, one per line with its source; secrets are masked.

    The log of every start begins with these lines. :data:`SETTINGS_FILE` has all settings.
    """
    place = config.general.network
    # Leave out values from the network's file, which this operator did not give.
    given = [
        s
        for s in schema(config.kind)
        if config.sources.get(s.name) not in (None, f"{s.network} in {place}")
    ]
    lines = [
        f"This is {config.network.line}",
        f"Configuration of this {config.kind}: {len(given)} settings are given; "
        f"all of them: {SETTINGS_FILE} in the run folder",
    ]
    lines += [_entry(config, setting) for setting in given]
    return lines + [f"{WARNING}{line}" for line in config.warnings]


def all_settings(config: Config) -> str:
    """Return the text of :data:`SETTINGS_FILE`: every setting, grouped by subject."""
    lines = [f"All settings of this {config.kind}, and where each comes from."]
    for group, settings in groupby(schema(config.kind), key=lambda setting: setting.group):
        lines += ["", TITLES[group], *(_entry(config, setting) for setting in settings)]
    return "\n".join(lines) + "\n"


def _entry(config: Config, setting: Setting) -> str:
    source = config.sources.get(setting.name, "")
    # The run folder is None by default, and is then derived from two other settings.
    value = config.run_folder if setting.name == "neuron.run_folder" else config.get(setting.name)
    label = "" if setting.is_rule else "--"
    label = str(setting.env) if setting.secret else label + setting.name
    on_argv = source == f"--{setting.name}"
    origin = f"   ({'command line' if on_argv else source or 'default'})"
    return f"  {label:<46} {show(value) or '-'}{origin}"


def read_settings(folder: Path) -> dict[str, str]:
    """Return the settings that a start wrote into a run folder: flag -> the text of its value."""
    try:
        text = (folder / SETTINGS_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found = re.findall(r"^  --(\S+) +(.*?)(?:   \(.*\))?$", text, re.M)
    return {name: value for name, value in found if value != "-"}
