"""How a setting is declared: once, with its flag, default, range and help.

Each room has one frozen pydantic dataclass of settings in this package. A field of it reads

    upload_steps: int = flag("neuron.upload_steps", 5, ge=1, le=100_000)
    "publish at most every so many inner steps"

and this is all there is to write: the command line, ``--help``, docs/flags.md, the environment
variable, the conversion from text and the check of type and range follow from it. pydantic applies
type and range whenever a settings object is made, so a test or a script cannot step around them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pydantic import ConfigDict, Field


class ConfigError(ValueError):
    """Bad input from the operator: one line naming cause, consequence and remedy. Exit status 2."""


#: The ``config=`` of every settings class. The string below a field is its help text.
SETTINGS = ConfigDict(
    extra="forbid", allow_inf_nan=False, str_min_length=1, use_attribute_docstrings=True
)

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def flag(
    name: str,
    default: Any,
    *,
    ge: Any = None,
    le: Any = None,
    env: str | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare a field as a setting that the flag ``--name`` gives (``neuron.upload_steps``).

    ``ge`` and ``le`` are the smallest and largest value; every number, duration and size has both,
    here or in its type. ``env`` names an environment variable that may give the value as well. A
    field of type ``Secret`` comes from ``env`` only.
    """
    return Field(
        default,
        ge=ge,
        le=le,
        json_schema_extra={"name": name, "env": env, "aliases": list(aliases)},
    )
