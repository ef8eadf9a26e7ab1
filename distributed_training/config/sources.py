"""Where settings are given: command line, environment, ``.env``, a TOML file. Each is read here
into text by flag; what the text means is the settings classes' matter.

Files are read up to a bound and may hold anything: what cannot be used is one line.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from .arguments import Given, Parser, refusal_of
from .flags import ConfigError
from .model import TITLES
from .schema import Schema, Setting, canonical
from .values import show

_FLAG = re.compile(r"(?<=^--)[^=]+")
_LARGEST_FILE = 1 << 20  # bytes; a complete configuration has about 20 thousand


# --- command line -------------------------------------------------------------------------------


class _Flags(Parser):
    def error(self, message: str) -> NoReturn:
        raise refusal_of(message)


@lru_cache
def parser_of(known: Schema) -> Parser:
    """The command line of one kind of neuron; ``format_help()`` is its ``--help``."""
    from distributed_training import __version__

    columns = min(110, shutil.get_terminal_size((100, 24)).columns)
    parser = _Flags(
        usage=f"neurons/{known.kind}.py [--flag value]...",
        description="Dashes and underscores in a flag are the same. Strongest first: flags, "
        "environment, .env, --config file, preset, default. Secrets come from the environment or "
        ".env only.",
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=8, width=columns
        ),
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=__version__)
    for title, settings in groupby(known, key=lambda setting: TITLES[setting.group]):
        group = parser.add_argument_group(title)
        for setting in settings:
            group.add_argument(
                *(f"--{name}" for name in (setting.name, *setting.aliases)),
                dest=setting.name,
                help=_help(setting).replace("%", "%%"),
                metavar=setting.metavar,
                **_arity(setting),
            )
    return parser


def _arity(setting: Setting) -> dict[str, Any]:
    if bool in setting.parts:
        return {"nargs": "?", "const": "true"}
    return {"nargs": "+", "action": "extend"} if setting.many else {}


def _help(setting: Setting) -> str:
    text = setting.help
    if setting.secret:
        return f"{text} (refused here: give {setting.env} in the environment or .env)"
    if setting.default is not None:
        text += f" [{show(setting.default)}]"
    if setting.bounds:
        text += f" ({setting.bounds})"
    return text + (f" (environment: {setting.env})" if setting.env else "")


def read_argv(argv: Sequence[str], known: Schema) -> dict[str, Given]:
    """Raises ConfigError; SystemExit(0) for ``--help`` and ``--version``, which print."""
    words = [_FLAG.sub(lambda match: canonical(match[0]), word) for word in argv]
    namespace, unknown = parser_of(known).parse_known_args(words)
    given: dict[str, Any] = vars(namespace)
    for name in given:
        _refuse_secret(known.find(name), "other users of this machine can read command lines")
    for word in unknown:
        if word.startswith("--") and len(word) > 2:
            known.find(word[2:].partition("=")[0])
        raise ConfigError(
            f"{word!r} is not a flag, so nothing was started: flags start with --; see --help"
        )
    return {
        name: Given(text if isinstance(text, str) else " ".join(text), f"--{name}")
        for name, text in given.items()
    }


def _refuse_secret(setting: Setting, why: str) -> None:
    if setting.secret:
        raise ConfigError(
            f"--{setting.name} is a secret, and {why}, so nothing was started: put "
            f"{setting.env}=... into .env"
        )


# --- environment and files ----------------------------------------------------------------------


def read_environment(environ: Mapping[str, str], known: Schema) -> dict[str, Given]:
    """Variables that name a setting; empty ones count as not set."""
    return {
        setting.name: Given(environ[setting.env], setting.env)
        for setting in known
        if setting.env and environ.get(setting.env)
    }


def read_dotenv(path: Path | None) -> dict[str, str]:
    """The variables of ``.env``; empty if there is none. Raises ConfigError."""
    if path is None or not path.is_file():
        return {}
    from dotenv import dotenv_values

    # No interpolation: a "$" in a secret is a "$".
    found = dotenv_values(stream=io.StringIO(_read_text(path, str(path))), interpolate=False)
    return {name: value for name, value in found.items() if value is not None}


def open_to_others(path: Path) -> str | None:
    """A warning if other users of this machine may read or change ``path``, which holds secrets."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o066:
        return None
    return (
        f"{path} has mode {mode:04o}, so other users of this machine can take the keys in it: "
        f"chmod 600 {path}"
    )


def read_toml(path: Path, known: Schema) -> dict[str, Given]:
    """The flags of a ``--config`` file. Raises ConfigError."""
    try:
        tree = tomllib.loads(_read_text(path, f"--config {path}"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(
            f"--config {path} is not TOML ({why}), so nothing was started: correct that line"
        ) from None
    found = {}
    for name, value in _flatten(tree, ""):
        setting = known.find(name)
        _refuse_secret(setting, f"does not belong into a configuration file such as {path}")
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        found[setting.name] = Given(text, f"{setting.name} in {path}")
    return found


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _at_once(path: str, flags: int) -> int:
    """A pipe without a writer, or a terminal, would be waited for, for ever."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_text(path: Path, name: str) -> str:
    """A small UTF-8 file. Raises ConfigError; ``name`` is what to call it."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.ESPIPE, "it is a pipe")
            data = file.read(_LARGEST_FILE + 1)
        if data is None:
            raise OSError(errno.EAGAIN, "it is no file, and has nothing to read now")
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read ({error.strerror}), so nothing was started: correct the path "
            "or its permissions"
        ) from None
    if len(data) > _LARGEST_FILE:
        raise ConfigError(
            f"{name} has more than {_LARGEST_FILE} bytes, so it is no configuration and nothing "
            "was started: correct the path"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start + 1}), so nothing was started: save it "
            "as UTF-8"
        ) from None
    if "\0" in text:
        raise ConfigError(
            f"{name} holds zero bytes, as UTF-16 text does, so nothing was started: save it as "
            "UTF-8"
        )
    return text
