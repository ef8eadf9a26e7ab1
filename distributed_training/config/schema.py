"""Every setting there is, read from the fields of the rooms' settings classes."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from pathlib import Path
from types import NoneType
from typing import Any

from annotated_types import Ge, Le
from pydantic import ByteSize, SecretStr
from pydantic.fields import FieldInfo

from .flags import ConfigError
from .model import Kind, Rooms
from .values import show

# How an operator calls each type, and what stands for a value in the help.
_TYPES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true|false"),
    ByteSize: ("a size such as 2147483648, 2GiB or 500MB", "SIZE"),
    timedelta: ("a duration such as 90s or 15m", "TIME"),
    Path: ("a path", "PATH"),
    tuple: ("two numbers LOW:HIGH", "LOW:HIGH"),
    int: ("a whole number", "N"),
    float: ("a number", "X"),
    str: ("at least one character", "TEXT"),
    SecretStr: ("at least one character", "TEXT"),
}


@dataclass(frozen=True)
class Setting:
    """One flag and the fields it feeds (usually one; two rooms may need the same value)."""

    name: str
    env: str | None
    aliases: tuple[str, ...]
    group: str
    field: FieldInfo
    places: tuple[tuple[str, str], ...]  # (room, field name)

    @property
    def default(self) -> Any:
        return self.field.default

    @property
    def help(self) -> str:
        text = " ".join((self.field.description or "").split())
        return f"no effect: {text}" if self.group == "no_effect" else text

    @cached_property
    def parts(self) -> list[Any]:
        """What the type is made of, and the constraints upon it."""
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
        """``1 to 100``; empty for what is no number."""
        low = [show(part.ge) for part in self.parts if isinstance(part, Ge)]
        high = [show(part.le) for part in self.parts if isinstance(part, Le)]
        return f"{low[0]} to {high[0]}" if low and high else ""

    @property
    def remedy(self) -> str:
        """What to give: ``1 to 100``, of two numbers ``LOW:HIGH within 1 to 100``, or nothing."""
        within = "LOW:HIGH within " if tuple in self.parts and not self.many else ""
        return self.bounds and within + self.bounds

    @property
    def wanted(self) -> str:
        """What a value of this flag is: ``a whole number``."""
        words = ", ".join(self.choices)
        if words and not self.bounds:
            return f"one of {words}"
        return f"{self._type[0]} or {words}" if words else self._type[0]

    @property
    def metavar(self) -> str:
        """What stands for the value in the help."""
        if self.many:
            return "WORD"
        first = [self._type[1]] if self.bounds or not self.choices else []
        return "|".join(first + self.choices)

    @property
    def _type(self) -> tuple[str, str]:
        return next((_TYPES[part] for part in self.parts if part in _TYPES), _TYPES[str])


def _parts(hint: Any) -> Iterator[Any]:
    """``int | Literal["auto"]`` -> Union, int, Literal, "auto"; constraints as they are."""
    yield typing.get_origin(hint) or hint
    for part in typing.get_args(hint):
        yield from part.metadata if isinstance(part, FieldInfo) else _parts(part)


class Schema:
    """The settings one kind of neuron understands, found by any spelling of their flags."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.classes: dict[str, Any] = typing.get_type_hints(Rooms)
        self.settings: dict[str, Setting] = {}
        for room, settings_class in self.classes.items():
            if room != "validator" or kind == "validator":
                for field_name, field in settings_class.__pydantic_fields__.items():
                    self._add(room, field_name, field)
        self._spellings = {
            canonical(name): setting
            for setting in self
            for name in (setting.name, *setting.aliases)
        }

    def _add(self, room: str, field_name: str, field: FieldInfo) -> None:
        declared: dict[str, Any] = field.json_schema_extra  # type: ignore[assignment]
        name, places, group = declared["name"], [(room, field_name)], room
        known = self.settings.get(name)
        if known is not None:
            places, group = [*known.places, *places], known.group
            if known.default != field.default:
                raise TypeError(f"--{name} has two defaults: {known.default!r}, {field.default!r}")
        self.settings[name] = Setting(
            name, declared["env"], tuple(declared["aliases"]), group, field, tuple(places)
        )

    def find(self, name: str) -> Setting:
        """The setting of a flag, dashes or underscores alike. Raises ConfigError if unknown."""
        setting = self._spellings.get(canonical(name))
        if setting is None:
            nearest = self._nearest(canonical(name))
            hint = f"did you mean --{nearest}?" if nearest else "see --help"
            raise ConfigError(f"--{name} is not a known flag, so nothing was started: {hint}")
        return setting

    def get(self, name: str) -> Setting | None:
        """The setting of a flag by its own name or an alias; None if unknown."""
        return self._spellings.get(canonical(name))

    def _nearest(self, name: str) -> str | None:
        """The flag that a slip of the finger made into ``name``, if one is that near."""
        tails = {spelling.rpartition(".")[2]: s for spelling, s in self._spellings.items()}
        last = name.rpartition(".")[2]
        longer = [tail for tail in tails if len(last) > 3 and tail.startswith(last)]
        if last in tails or longer:
            return tails[last if last in tails else longer[0]].name
        close = difflib.get_close_matches(name, self._spellings, n=1, cutoff=0.8)
        if close:
            return self._spellings[close[0]].name
        close = difflib.get_close_matches(last, tails, n=1, cutoff=0.75)
        return tails[close[0]].name if close else None

    def __iter__(self) -> Iterator[Setting]:
        """Grouped, in the order of the help."""
        return iter(self.settings.values())


def canonical(name: str) -> str:
    """One spelling for all: dashes are underscores, case does not count."""
    return name.replace("-", "_").lower()


@lru_cache
def schema(kind: Kind) -> Schema:
    return Schema(kind)
