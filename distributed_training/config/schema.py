"""Every setting there is, collected from the rooms' dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from .compat import NO_EFFECT, NoEffect
from .flags import ConfigError, FlagSpec
from .presets import PRESETS

Kind = Literal["miner", "validator"]

# Room -> settings class, in the order of the help.
ROOMS: Mapping[str, str] = {
    "miner": "MinerSettings",
    "training": "TrainingSettings",
    "data": "DataSettings",
    "store": "StoreSettings",
    "swarm": "SwarmSettings",
    "chain": "ChainSettings",
    "diagnostics": "DiagnosticsSettings",
    "telemetry": "TelemetrySettings",
    "validator": "ValidatorSettings",
}

TITLES: Mapping[str, str] = {
    "general": "General",
    "miner": "Loop and launcher",
    "training": "Training",
    "data": "Data",
    "store": "Object store",
    "swarm": "Swarm",
    "chain": "Chain and wallet",
    "diagnostics": "Diagnostics",
    "telemetry": "Log and events",
    "validator": "Validator",
    "no effect": "Accepted, without effect",
}


@dataclass(frozen=True)
class Setting:
    """One flag and the fields it feeds (usually one; two rooms may need the same value)."""

    spec: FlagSpec
    hint: Any
    default: Any
    group: str
    fields: tuple[tuple[str, str], ...]  # (room, field name)
    no_effect: str = ""  # why, for compat flags


GENERAL: tuple[Setting, ...] = (
    Setting(
        FlagSpec(
            "preset",
            "defaults for the public network, or for a subnet on this machine",
            env="DT_PRESET",
            choices=tuple(PRESETS),
        ),
        str,
        "public",
        "general",
        (),
    ),
    Setting(
        FlagSpec(
            "config", "TOML file of flags, e.g. [neuron] upload_steps = 60; flags win over it"
        ),
        Path | None,
        None,
        "general",
        (),
    ),
)


class Schema:
    """The settings one kind of neuron understands, found by any spelling of their flags."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.classes: dict[str, type] = {}
        self.settings: dict[str, Setting] = {s.spec.name: s for s in GENERAL}
        for room, class_name in ROOMS.items():
            module = importlib.import_module(f"{__package__}.{room}")
            settings_class: type = getattr(module, class_name)
            self.classes[room] = settings_class
            if room != "validator" or kind == "validator":
                self._collect(room, settings_class)
        for entry in NO_EFFECT:
            if entry.name not in self.settings:
                self.settings[entry.name] = _from_compat(entry)
        self._spellings: dict[str, Setting] = {}
        for setting in self.settings.values():
            for name in (setting.spec.name, *setting.spec.aliases):
                self._spellings[canonical(name)] = setting

    def _collect(self, room: str, settings_class: type) -> None:
        hints = typing.get_type_hints(settings_class)
        for field in dataclasses.fields(settings_class):
            spec: FlagSpec | None = field.metadata.get("flag")
            if spec is None:
                raise TypeError(f"{settings_class.__name__}.{field.name} is not declared by flag()")
            known = self.settings.get(spec.name)
            place = (room, field.name)
            if known is None:
                hint = hints[field.name]
                self.settings[spec.name] = Setting(spec, hint, field.default, room, (place,))
            elif known.default != field.default:
                raise TypeError(
                    f"--{spec.name} has two defaults: {known.default!r} in {known.group}, "
                    f"{field.default!r} in {room}"
                )
            else:
                fields = (*known.fields, place)
                self.settings[spec.name] = dataclasses.replace(known, fields=fields)

    def find(self, name: str) -> Setting:
        """The setting of a flag, dashes or underscores alike. Raises ConfigError if unknown."""
        setting = self._spellings.get(canonical(name))
        if setting is None:
            nearest = self._nearest(canonical(name))
            hint = f"did you mean --{nearest}?" if nearest else "see --help"
            raise ConfigError(f"--{name} is not a known flag, so nothing was started: {hint}")
        return setting

    def get(self, name: str) -> Setting | None:
        return self._spellings.get(canonical(name))

    def _nearest(self, name: str) -> str | None:
        last = name.rpartition(".")[2]
        for spelling, setting in self._spellings.items():
            if spelling.rpartition(".")[2] == last:
                return setting.spec.name
        for spelling, setting in self._spellings.items():
            if len(last) > 3 and spelling.rpartition(".")[2].startswith(last):
                return setting.spec.name
        close = difflib.get_close_matches(name, self._spellings, n=1, cutoff=0.5)
        if not close:
            tails = {s.rpartition(".")[2]: s for s in self._spellings}
            close = [tails[t] for t in difflib.get_close_matches(last, tails, n=1, cutoff=0.6)]
        return self._spellings[close[0]].spec.name if close else None

    def __iter__(self) -> Iterator[Setting]:
        order = list(TITLES)
        return iter(sorted(self.settings.values(), key=lambda s: order.index(s.group)))


def canonical(name: str) -> str:
    return name.replace("-", "_").lower()


@lru_cache
def schema(kind: Kind) -> Schema:
    return Schema(kind)


def _from_compat(entry: NoEffect) -> Setting:
    spec = FlagSpec(
        entry.name,
        f"no effect: {entry.why}",
        env=entry.secret_env,
        secret=entry.secret_env is not None,
    )
    return Setting(spec, entry.hint, entry.default, "no effect", (), no_effect=entry.why)
