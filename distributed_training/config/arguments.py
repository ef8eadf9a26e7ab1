"""What is given as text, and the one line that refuses it; the same for flags and for scripts.

A script declares its arguments with argparse and this module's parser and types:

    parser = Parser(description=...)
    parser.add_argument("--uid", type=ranged(0, 65535))
    parser.add_argument("--folder", type=argument(File))
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, NoReturn

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from distributed_training.common.exits import ExitStatus

from .flags import ConfigError
from .schema import Setting
from .values import mask

_LONGEST_TEXT = 4096  # characters of one value


class Given(NamedTuple):
    """What stands in one place for one setting."""

    text: str  # several words are separated by spaces
    source: str  # as an operator calls the place: --neuron.upload_steps, R2_ACCOUNT_ID


class Parser(argparse.ArgumentParser):
    """Refuses in one line where argparse prints several, and takes no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Exit status 2."""
        raise SystemExit(exit_with(refusal_of(message)))


def refusal_of(message: str) -> ConfigError:
    """What argparse says of an argument, with what follows from it."""
    text = message.removeprefix("argument ")
    return ConfigError(f"{text}, so nothing was started: see --help")


def exit_with(error: ConfigError) -> int:
    """Print the one line an operator sees for bad input; the exit status 2."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return ExitStatus.BAD_CONFIGURATION


def argument(hint: Any) -> Callable[[str], Any]:
    """``type=`` of a script's argument: text becomes what ``hint`` declares, or is refused."""
    adapter = TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False, str_min_length=1))
    setting = Setting("", None, (), "", FieldInfo.from_annotation(hint), ())

    def convert(text: str) -> Any:
        why = unprintable(text)
        if why is None:
            try:
                return adapter.validate_python(text)
            except ValidationError as refusal:
                why = fault(setting, text, refusal.errors()[0])
        raise argparse.ArgumentTypeError(f"{why} ({setting.bounds})" if setting.bounds else why)

    return convert


def ranged(low: float, high: float) -> Callable[[str], Any]:
    """``type=`` of a number within a range: whole if its bounds are."""
    return argument(Annotated[type(low), Field(ge=low, le=high)])


def unprintable(text: str) -> str | None:
    """Why ``text`` cannot stand in one line of a log; None if it can."""
    if len(text) > _LONGEST_TEXT:
        return f"has {len(text)} characters, more than {_LONGEST_TEXT}"
    return None if text.isprintable() else "holds characters that cannot be printed"


def fault(setting: Setting, text: str, error: Mapping[str, Any]) -> str:
    """What is wrong with ``text``, of which pydantic says ``error``. Never shows a secret."""
    context = error.get("ctx", {})
    shown = mask(text)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    if error["type"] in ("greater_than_equal", "less_than_equal"):
        low, _, high = setting.bounds.partition(" to ")
        return f"{shown} is less than {low}" if "ge" in context else f"{shown} is more than {high}"
    wanted = context.get("error") or setting.wanted
    return f"{'its value' if setting.secret else repr(shown)} is not {wanted}"
