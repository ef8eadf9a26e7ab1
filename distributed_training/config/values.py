"""From what an operator writes to typed values, and back to what is shown."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import SecretStr

from .flags import ConfigError, FlagSpec
from .units import parse_duration

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})

BOOLEAN_WORDS = (_TRUE | _FALSE) - {""}


def unwrap(hint: Any) -> tuple[Any, bool]:
    """``X | None`` -> (X, True); X -> (X, False). Other unions come back as they are."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [a for a in typing.get_args(hint) if a is not type(None)]
        optional = len(rest) < len(typing.get_args(hint))
        return (rest[0] if len(rest) == 1 else typing.Union[tuple(rest)]), optional  # noqa: UP007
    return hint, False


def is_switch(hint: Any) -> bool:
    return unwrap(hint)[0] is bool


def is_list(hint: Any) -> bool:
    return typing.get_origin(unwrap(hint)[0]) is tuple


def convert(spec: FlagSpec, hint: Any, raw: str | Sequence[str], *, source: str) -> Any:
    """``raw`` as the field's type.

    Raises ConfigError, naming ``source`` (the flag, the variable, the file), when it is not one.
    The message never holds the value of a secret.
    """
    try:
        value = _convert(spec, hint, raw)
    except ConfigError:
        raise
    except ValueError as error:
        shown = "its value" if spec.secret else repr(raw if isinstance(raw, str) else " ".join(raw))
        wanted = str(error) or type_name(hint)
        raise ConfigError(
            f"{source}: {shown} is not {wanted}, so nothing was started: correct {source}"
        ) from None
    return value


def _convert(spec: FlagSpec, hint: Any, raw: str | Sequence[str]) -> Any:
    kind, optional = unwrap(hint)
    if is_list(hint) and spec.parse is None:
        words = [raw] if isinstance(raw, str) else list(raw)
        if [w.strip().lower() for w in words] == ["none"]:
            return ()
        return tuple(w for word in words for w in word.replace(",", " ").split())
    text = raw if isinstance(raw, str) else " ".join(raw)
    if optional and text.strip().lower() in ("", "none"):
        return None
    if spec.choices is not None and text not in spec.choices:
        raise ValueError(f"one of {', '.join(spec.choices)}")
    if spec.parse is not None:
        return spec.parse(text)
    if kind is bool:
        word = text.strip().lower()
        if word not in _TRUE | _FALSE:
            raise ValueError("true or false")
        return word in _TRUE
    if kind is timedelta:
        return parse_duration(text)
    if kind is SecretStr:
        return SecretStr(text.strip())
    if kind is Path:
        return Path(text).expanduser()
    if kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            raise ValueError(type_name(hint)) from None
        # float() takes "nan" and "inf". Neither compares as a bound should: no stake is below nan.
        if not math.isfinite(number):
            raise ValueError(type_name(hint))
        return number
    if typing.get_origin(kind) is Literal:
        for word in typing.get_args(kind):
            if str(word) == text:
                return word
        raise ValueError(f"one of {', '.join(str(w) for w in typing.get_args(kind))}")
    if kind is str:
        return text
    raise TypeError(f"--{spec.name}: a field of type {hint} needs flag(..., parse=...)")


def type_name(hint: Any) -> str:
    """What to call the type in a message or in the help."""
    kind, _ = unwrap(hint)
    if is_list(hint):
        return "a list of words"
    names: dict[Any, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        timedelta: "a duration such as 90s or 15m",
        Path: "a path",
        SecretStr: "text",
        str: "text",
    }
    return names.get(kind, "a valid value")


def placeholder(spec: FlagSpec, hint: Any) -> str:
    """The metavariable of the help; empty for switches."""
    kind, _ = unwrap(hint)
    if spec.choices is not None:
        return "{" + ",".join(spec.choices) + "}"
    if is_list(hint):
        return "WORD..."
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(str(w) for w in typing.get_args(kind)) + "}"
    words: dict[Any, str] = {bool: "", int: "N", float: "X", timedelta: "TIME", Path: "PATH"}
    return words.get(kind, "TEXT" if kind is str else "VALUE")


def show(value: Any) -> str:
    """A value as an operator would write it; secrets masked."""
    if isinstance(value, SecretStr):
        return "********" if value.get_secret_value() else "(empty)"
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        return f"{seconds:g}s"
    if isinstance(value, tuple) and any(isinstance(v, float) for v in value):
        return ":".join(f"{v:g}" for v in value)  # LOW:HIGH
    if isinstance(value, tuple):
        return " ".join(str(v) for v in value) or "-"
    return str(value)
