"""From flags, environment, files and presets to one frozen :class:`Config`.

What wins, strongest first: flags, environment variables, ``.env``, ``--config`` file, preset,
default. Secrets come from the environment or ``.env`` only.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .flags import ConfigError
from .presets import PRESETS
from .schema import Kind, Schema, schema
from .values import BOOLEAN_WORDS, convert, is_list, is_switch

if TYPE_CHECKING:
    from .chain import ChainSettings
    from .data import DataSettings
    from .diagnostics import DiagnosticsSettings
    from .miner import MinerSettings
    from .store import StoreSettings
    from .swarm import SwarmSettings
    from .telemetry import TelemetrySettings
    from .training import TrainingSettings
    from .validator import ValidatorSettings


@dataclass(frozen=True)
class Config:
    """The resolved configuration. Secrets inside are SecretStr, so ``repr`` is safe to log."""

    kind: Kind
    preset: str
    miner: MinerSettings
    training: TrainingSettings
    data: DataSettings
    store: StoreSettings
    swarm: SwarmSettings
    chain: ChainSettings
    diagnostics: DiagnosticsSettings
    telemetry: TelemetrySettings
    validator: ValidatorSettings
    values: Mapping[str, Any] = field(repr=False)  # flag name -> value
    sources: Mapping[str, str] = field(repr=False)  # flag name -> where it was given, if anywhere

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a flag by its name (``neuron.upload_steps``)."""
        return self.values.get(name, default)

    @property
    def run_folder(self) -> Path:
        """Where this neuron keeps what it must not lose; the default names wallet and neuron."""
        if self.miner.run_folder is not None:
            return self.miner.run_folder
        hotkey = self.get("wallet.hotkey") or "default"
        return Path("runs") / f"{self.miner.name}-{hotkey}"


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
    given = parse_argv(argv, known)
    environment = {**_read_dotenv(dotenv), **(os.environ if environ is None else environ)}

    raw: dict[str, tuple[str | Sequence[str], str]] = {}  # flag -> (text, source), weakest first

    file = given.get("config")
    from_file = _read_toml(Path(str(file)), known) if file else {}
    preset = str(
        given.get("preset") or environment.get("DT_PRESET") or from_file.get("preset") or "public"
    )
    if preset not in PRESETS:
        raise ConfigError(
            f"--preset {preset} is unknown, so nothing was started: use one of {', '.join(PRESETS)}"
        )
    raw |= {
        name: (text, f"preset {preset}")
        for name, text in PRESETS[preset].items()
        if known.get(name) is not None
    }
    raw |= {name: (words, f"{name} in {file}") for name, words in from_file.items()}
    for setting in known:
        variable = setting.spec.env
        if variable and environment.get(variable):
            raw[setting.spec.name] = (environment[variable], variable)
    raw |= {name: (words, f"--{name}") for name, words in given.items()}

    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting in known:
        name = setting.spec.name
        values[name] = setting.default
        if name in raw:
            words, sources[name] = raw[name]
            values[name] = convert(setting.spec, setting.hint, words, source=sources[name])
    config = _build(known, preset, values, sources)
    if check:
        from .checks import problems

        found = problems(config)
        if found:
            more = f" (and {len(found) - 1} more: scripts/diagnose.py lists all)"
            raise ConfigError(found[0] + (more if len(found) > 1 else ""))
    return config


def _build(
    known: Schema, preset: str, values: Mapping[str, Any], sources: Mapping[str, str]
) -> Config:
    arguments: dict[str, dict[str, Any]] = {room: {} for room in known.classes}
    for setting in known:
        for room, field_name in setting.fields:
            arguments[room][field_name] = values[setting.spec.name]
    rooms: dict[str, Any] = {r: c(**arguments[r]) for r, c in known.classes.items()}
    return Config(
        kind=known.kind,
        preset=preset,
        values=MappingProxyType(dict(values)),
        sources=MappingProxyType(dict(sources)),
        **rooms,
    )


def parse_argv(argv: Sequence[str], known: Schema) -> dict[str, str | list[str]]:
    """Flag name -> text as given. ``--flag value``, ``--flag=value``, switches with or without a
    value, lists over several words or repeated. Raises ConfigError, SystemExit for ``--help``."""
    given: dict[str, str | list[str]] = {}
    words = list(argv)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word in ("-h", "--help"):
            from .help import help_text

            print(help_text(known))
            raise SystemExit(0)
        if word == "--version":
            from distributed_training import __version__

            print(__version__)
            raise SystemExit(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(
                f"{word!r} is not a flag, so nothing was started: flags start with --; see --help"
            )
        name, equals, value = word[2:].partition("=")
        setting = known.find(name)
        name = setting.spec.name
        if setting.spec.secret:
            raise ConfigError(
                f"--{name} is a secret, and other users of this machine can read command lines, "
                f"so nothing was started: put {setting.spec.env}=... into .env"
            )
        following = words[at] if at < len(words) else None
        if is_switch(setting.hint):
            if not equals and following is not None and following.lower() in BOOLEAN_WORDS:
                value = following
                at += 1
            given[name] = value if equals or value else "true"
            continue
        items = [value] if equals else []
        while not (items and not is_list(setting.hint)) and at < len(words):
            if words[at].startswith("--"):
                break
            items.append(words[at])
            at += 1
        if not items:
            raise ConfigError(f"--{name} needs a value, so nothing was started: see --help")
        if is_list(setting.hint):
            before = given.get(name, [])
            given[name] = [*before, *items]
        else:
            given[name] = items[0]
    return given


def _read_dotenv(path: Path | None) -> dict[str, str]:
    if path is None or not path.is_file():
        return {}
    from dotenv import dotenv_values

    # No interpolation: a "$" in a secret is a "$".
    found = dotenv_values(path, interpolate=False)
    return {name: value for name, value in found.items() if value is not None}


def _read_toml(path: Path, known: Schema) -> dict[str, str | list[str]]:
    try:
        with path.open("rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"--config {path} cannot be read ({error.strerror}), so nothing was started: "
            "correct the path"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"--config {path} is not TOML ({error}), so nothing was started: correct that line"
        ) from None
    found: dict[str, str | list[str]] = {}
    for name, value in _flatten(tree, ""):
        setting = known.find(name)
        if setting.spec.secret:
            raise ConfigError(
                f"{name} in {path} is a secret and does not belong into a configuration file, so "
                f"nothing was started: put {setting.spec.env}=... into .env"
            )
        if isinstance(value, list):
            found[setting.spec.name] = [str(v) for v in value]
        else:
            found[setting.spec.name] = str(value).lower() if value in (True, False) else str(value)
    return found


def _flatten(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat += _flatten(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return flat


def exit_with(error: ConfigError) -> int:
    """Print the one line an operator sees for bad input; the exit status 2."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 2
