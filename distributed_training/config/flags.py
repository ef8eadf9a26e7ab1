"""How a setting is declared: once, with its flag, default, help and environment variable.

Each room has one frozen dataclass of settings in this package (``config/training.py`` and so on).
A field is declared with :func:`flag`; the loader builds the command line, reads ``.env`` and the
environment, checks, and hands each room its own dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


class ConfigError(ValueError):
    """Bad input from the operator: one line naming cause, consequence and remedy. Exit status 2."""


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """What :func:`flag` stores in a field's metadata under ``"flag"``."""

    name: str  # without the leading dashes, e.g. "neuron.upload_steps"
    help: str
    env: str | None = None
    secret: bool = False
    choices: tuple[str, ...] | None = None
    parse: Callable[[str], Any] | None = None
    aliases: tuple[str, ...] = ()


def flag(
    name: str,
    default: Any,
    help: str,
    *,
    env: str | None = None,
    secret: bool = False,
    choices: tuple[str, ...] | None = None,
    parse: Callable[[str], Any] | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare a dataclass field that is a setting.

    ``name`` is the flag as operators know it (``neuron.upload_steps``; dashes and underscores are
    the same to the loader). Types understood without ``parse``: bool (a switch), int, float, str,
    ``pathlib.Path``, ``datetime.timedelta`` (given in seconds), ``X | None``, and tuples of str.
    Settings with ``secret=True`` are typed ``pydantic.SecretStr | None`` and are never on argv:
    they come from the environment variable ``env`` (or ``.env``) only.
    """
    spec = FlagSpec(name, help, env, secret, choices, parse, aliases)
    if isinstance(default, (list, dict, set)):
        raise TypeError(f"{name}: mutable default")
    return dataclasses.field(default=default, metadata={"flag": spec})
