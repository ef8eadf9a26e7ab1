"""Load the configuration: from flags, environment, files and presets to one frozen ``Config``.

Strongest first: flags, environment variables, ``.env``, ``miner.toml`` (or the ``--config`` file),
the network's file, preset, default. Secrets come from the environment or ``.env`` only. argparse
reads the command line, pydantic converts and checks; this module merges and remembers where each
value came from, so that an error names the place to correct. (pydantic-settings would merge as
well, but does not name the place, and reads lists as JSON and ``${...}`` in a secret.) Files are
read up to a bound and may hold anything: what cannot be used is one line.

Scripts declare their arguments with the same parser and types::

    parser = Parser(description=...)
    parser.add_argument("--uid", type=ranged(0, 65535))
    parser.add_argument("--folder", type=argument(File))

Retired flags are no settings: neither ``--help`` nor a settings class knows them. A flag without
effect is accepted with one line. A flag is refused if a run that relied on it would go wrong.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import os
import re
import shutil
import stat
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, NoReturn

from annotated_types import Ge, Le
from pydantic import ByteSize, ConfigDict, Field, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from distributed_training.common.files import parse_toml
from distributed_training.network import Network, NetworkAway, NetworkFileError, read_network

from .checks import problems
from .model import OPERATORS_FILE, PRESETS, TASKS, TITLES, USUAL, AllSettings, Config, Kind, frozen
from .types import ConfigAway, ConfigError, mask, show

# How an operator calls each type, and what stands for a value in the help.
_TYPES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true|false"),
    ByteSize: ("a size such as 2147483648, 2GiB or 500MB", "SIZE"),
    timedelta: ("a duration such as 90s or 15m", "TIME"),
    Path: ("a path", "PATH"),
    int: ("a whole number", "N"),
    float: ("a number", "X"),
    str: ("at least one character", "TEXT"),
    SecretStr: ("at least one character", "TEXT"),
}


@dataclass(frozen=True)
class Setting:
    """One flag and the fields it feeds (usually one; two packages may need the same value)."""

    name: str
    env: str | None
    group: str
    field: FieldInfo
    places: tuple[tuple[str, str], ...]  # (package, field name)
    default: Any = None
    network: str = ""  # its key in the network's file
    fixed: bool = False  # there: an operator may not give another value

    @property
    def help(self) -> str:
        return " ".join((self.field.description or "").split())

    @cached_property
    def parts(self) -> list[Any]:
        """The parts of the type, and the constraints upon it."""
        return [*_parts(self.field.annotation), *self.field.metadata]

    @property
    def secret(self) -> bool:
        return SecretStr in self.parts

    @property
    def optional(self) -> bool:
        return NoneType in self.parts

    @property
    def many(self) -> bool:
        """True if the flag takes several words."""
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
    def wanted(self) -> str:
        """The kind of value of this flag: ``a whole number``."""
        words = ", ".join(self.choices)
        if words and not self.bounds:
            return f"one of {words}"
        return f"{self._type[0]} or {words}" if words else self._type[0]

    @property
    def metavar(self) -> str:
        """The word that stands for the value in the help."""
        if self.many:
            return "WORD"
        first = [self._type[1]] if self.bounds or not self.choices else []
        return "|".join(first + self.choices)

    @property
    def _type(self) -> tuple[str, str]:
        return next((_TYPES[part] for part in self.parts if part in _TYPES), _TYPES[str])


def _parts(hint: Any) -> Iterator[Any]:
    """Flatten ``int | Literal["auto"]`` to Union, int, Literal, "auto"; constraints as they are."""
    yield typing.get_origin(hint) or hint
    for part in typing.get_args(hint):
        yield from part.metadata if isinstance(part, FieldInfo) else _parts(part)


class Schema:
    """The settings one kind of neuron understands, found by any spelling of their flags."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.classes: dict[str, Any] = typing.get_type_hints(AllSettings)
        self.settings: dict[str, Setting] = {}
        for package, settings_class in self.classes.items():
            if package != "validator" or kind == "validator":
                defaults = settings_class()
                for field_name in settings_class.__pydantic_fields__:
                    field = _declared(settings_class, field_name)
                    if field.json_schema_extra:  # else it has no flag: tests alone give it
                        self._add(package, field_name, field, getattr(defaults, field_name))
        self._spellings = {canonical(setting.name): setting for setting in self}

    def _add(self, package: str, field_name: str, field: FieldInfo, default: Any) -> None:
        declared: dict[str, Any] = field.json_schema_extra  # type: ignore[assignment]
        name, places, group = declared["name"], [(package, field_name)], package
        fixed = bool(declared["network"] and declared["fixed"])
        if fixed or name in USUAL:
            group = "network" if fixed else "usual"
        known = self.settings.get(name)
        if known is not None:
            places, group = [*known.places, *places], known.group
            # Or what --help shows would be true of one of the two packages only.
            if known.default != default:
                raise TypeError(f"--{name} has two defaults: {known.default!r}, {default!r}")
        self.settings[name] = Setting(
            name=name,
            env=declared["env"],
            group=group,
            field=field,
            places=tuple(places),
            default=default,
            network=declared["network"],
            fixed=fixed,
        )

    def find(self, name: str) -> Setting:
        """Find the setting of a flag, dashes or underscores alike.

        Raises ConfigError if unknown.
        """
        setting = self._spellings.get(canonical(name))
        if setting is None:
            nearest = self._nearest(canonical(name))
            hint = f"did you mean --{nearest}?" if nearest else "see --help"
            raise ConfigError(f"--{name} is not a known flag, so nothing was started: {hint}")
        return setting

    def get(self, name: str) -> Setting | None:
        """Return the setting of a flag; None if unknown."""
        return self._spellings.get(canonical(name))

    def _nearest(self, name: str) -> str | None:
        """Return the flag that a slip of the finger made into ``name``, if one is that near."""
        section = [spelling for spelling in self._spellings if spelling.startswith(f"{name}.")]
        if section:
            return self._spellings[section[0]].name
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
        """Yield the settings grouped, in the order of the help."""
        order = list(TITLES)
        return iter(sorted(self.settings.values(), key=lambda s: order.index(s.group)))


def _declared(settings_class: Any, name: str) -> FieldInfo:
    """Return a field as the class that declares it has it: no other has its help."""
    classes = [c.__pydantic_fields__ for c in settings_class.__mro__[-2::-1]]  # but object
    return next(fields[name] for fields in classes if name in fields)


def canonical(name: str) -> str:
    """Return one spelling for all: dashes are underscores, case does not count."""
    return name.replace("-", "_").lower()


@lru_cache
def schema(kind: Kind) -> Schema:
    return Schema(kind)


_LONGEST_TEXT = 4096  # characters of one value


class Given(NamedTuple):
    """The text for one setting in one place."""

    text: str  # several words are separated by spaces
    source: str  # as an operator calls the place: --neuron.upload_steps, R2_ACCOUNT_ID


class Parser(argparse.ArgumentParser):
    """Refuses in one line where argparse prints several, and takes no abbreviations."""

    def __init__(self, **options: Any) -> None:
        # An abbreviation of today is ambiguous, or another flag, once a flag was added.
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Exit status 2."""
        raise SystemExit(exit_with(refusal_of(message)))


def refusal_of(message: str) -> ConfigError:
    """Word argparse's complaint about an argument, with its consequence."""
    text = message.removeprefix("argument ")
    return ConfigError(f"{text}, so nothing was started: see --help")


def exit_with(error: ConfigError, *, of_service: bool = False) -> int:
    """Print the one line an operator sees for bad input. Return the exit status, usually 2.

    ``of_service``: the program is one that pm2 or systemd starts; where its output is no terminal
    the line gets the time, as the log's have it.
    """
    when = ""
    if of_service and not sys.stderr.isatty():
        when = datetime.now().astimezone().isoformat(" ", "milliseconds") + " | ERROR | "
    print(f"{when}error: {error}", file=sys.stderr, flush=True)
    return error.status


def argument(hint: Any) -> Callable[[str], Any]:
    """Return the ``type=`` of a script's argument: it converts text as ``hint`` declares.

    The function raises argparse's error for other text.
    """
    adapter = TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False, str_min_length=1))
    setting = Setting("", None, "", FieldInfo.from_annotation(hint), ())

    def convert(text: str) -> Any:
        why = unprintable(text)
        # Not before: what is refused is shown, and control characters forge lines of a terminal.
        if why is None:
            try:
                return adapter.validate_python(text)
            except ValidationError as refusal:
                why = fault(setting, text, refusal.errors()[0])
        raise argparse.ArgumentTypeError(f"{why} ({setting.bounds})" if setting.bounds else why)

    return convert


def ranged(low: float, high: float) -> Callable[[str], Any]:
    """Return the ``type=`` of a number within a range: whole if its bounds are."""
    return argument(Annotated[type(low), Field(ge=low, le=high)])


#: What names a hotkey, also to the commands that sign with it.
WALLET = ("wallet.path", "wallet.name", "wallet.hotkey")


def add_wallet(command: argparse.ArgumentParser) -> None:
    """Add the flags of a wallet to a command, with a miner's defaults and variables."""
    for name in WALLET:
        setting = schema("miner").settings[name]
        default = os.environ.get(str(setting.env), setting.default)
        command.add_argument(f"--{name}", default=default)


def unprintable(text: str) -> str | None:
    """Return the reason why ``text`` cannot stand in one log line; None if it can."""
    if len(text) > _LONGEST_TEXT:
        return f"has {len(text)} characters, more than {_LONGEST_TEXT}"
    return None if text.isprintable() else "holds characters that cannot be printed"


def fault(setting: Setting, text: str, error: Mapping[str, Any]) -> str:
    """Word the fault of ``text`` from pydantic's ``error``. Never shows a secret."""
    context = error.get("ctx", {})
    shown = mask(text)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    if error["type"] in ("greater_than_equal", "less_than_equal"):
        low, _, high = setting.bounds.partition(" to ")
        return f"{shown} is less than {low}" if "ge" in context else f"{shown} is more than {high}"
    wanted = context.get("error") or setting.wanted
    return f"{'its value' if setting.secret else repr(shown)} is not {wanted}"


_NO_INFLUX = "this miner does not send anything to InfluxDB"
_NO_QUANTIZATION = "gradients travel as float32 values and int16 indices; nothing is quantized"

#: Flags that nobody needed; their values are constants.
_CONSTANTS = """
axon.clock_skew axon.legacy_timeout_cap axon.read_timeout axon.requests_per_hotkey
chain.neurons_interval chain.poll_interval
chain.write_timeout clamp.allreduce_timeout clamp.min_group_size clamp.min_matchmaking_time
clamp.next_chunk_timeout clamp.request_timeout clamp.timeout data.page_deadline
data.request_attempts data.request_timeout data.table_age dht.start_timeout
diagnostics.expected_step_max diagnostics.expected_step_min diagnostics.low_gpu_memory_gb
neuron.fsdp_wrap neuron.gradient_sync neuron.keep_unsharded neuron.nan_limit neuron.nan_slow_steps
neuron.snapshot_timeout profile.start r2.checksum_mode r2.connect_timeout r2.part_size
r2.write_interval validator.alive_timeout validator.evaluation_ranks validator.held_out_sequences
validator.publication_budget validator.seed validator.sweep_patience validator.tick
validator.top_candidates
"""

#: Flag -> why it has no effect.
NO_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(_CONSTANTS.split(), "its value is fixed"),
    "axon.max_workers": "the signed server answers on one event loop; see --axon.max_connections",
    "neuron.dont_wandb_log": "Weights & Biases gets nothing unless --neuron.wandb asks for it",
    "neuron.global_batch_size_train": (
        "no peer reads it; the batch of a step is --neuron.local_batch_size_train_effective"
    ),
    "neuron.influxdb_bucket": _NO_INFLUX,
    "neuron.influxdb_org": _NO_INFLUX,
    "neuron.influxdb_token": _NO_INFLUX,
    "neuron.influxdb_url": _NO_INFLUX,
    "neuron.loss_kernel": "the built-in chunked cross-entropy is the only one",
    "neuron.quantization_bins": _NO_QUANTIZATION,
    "neuron.quantization_range": _NO_QUANTIZATION,
    "neuron.score_preview": "python scripts/score.py tells what a validator would score",
    "no_prompt": "this miner never asks questions",
    "strict": "unknown flags are always errors",
}
SECRETS = frozenset({"neuron.influxdb_token"})

#: Old name of a flag -> its name.
RENAMED: Mapping[str, str] = {
    "chain.local_url": "chain.registry_url",
    "neuron.nproc_per_node": "nproc_per_node",
    "show_all_rank_logs": "neuron.show_all_rank_logs",
    "validator.initial_seed": "neuron.seed",
    "validator.upload_age_limit": "neuron.repo_age_limit",
}

#: Flag -> what to do; refused unless its value is false.
REFUSED: Mapping[str, str] = {
    "neuron.shard_across_nodes": (
        "each node holds a copy of the model, so leave the flag out, and where the model does not "
        "fit one node's GPUs give --neuron.activation_checkpointing full or use larger GPUs"
    ),
}

#: Flag -> old value -> the value that took its place.
OLD_VALUES: Mapping[str, Mapping[str, str]] = {"neuron.error_feedback": {"round": "best"}}

FLAGS = frozenset({*NO_EFFECT, *REFUSED, *RENAMED})


def settle(given: Mapping[str, Given]) -> tuple[dict[str, Given], tuple[str, ...]]:
    """Return what is left for the settings, and a line for each thing that was settled here.

    Raises ConfigError for a flag whose function is gone and was relied on.
    """
    left: dict[str, Given] = {}
    lines = []
    for name, entry in given.items():
        text = entry.text.strip()
        if name in NO_EFFECT:
            lines.append(f"{entry.source} has no effect: {NO_EFFECT[name]}")
        elif name in REFUSED:
            if text.lower() not in ("false", "0", "no", "off"):
                raise ConfigError(
                    f"{entry.source} is not offered any more, so nothing was started: "
                    f"{REFUSED[name]}"
                )
            lines.append(f"{entry.source} has no effect: its function is not offered any more")
        elif name in RENAMED:
            lines.append(f"{entry.source} is an older name of --{RENAMED[name]}")
            # Where both names are given the new one counts.
            left.setdefault(RENAMED[name], entry)
        elif text in OLD_VALUES.get(name, ()):
            new = OLD_VALUES[name][text]
            lines.append(f"{entry.source} {text} is an older name of {new}, which takes its place")
            left[name] = Given(new, entry.source)
        else:
            left[name] = entry
    return left, tuple(lines)


# The name alone: in a value dashes and capitals count.
_FLAG = re.compile(r"(?<=^--)[^=]+")
_LARGEST_FILE = 1 << 20  # bytes; a complete configuration has about 20 thousand


# --- command line -------------------------------------------------------------------------------


class _Flags(Parser):
    def error(self, message: str) -> NoReturn:
        raise refusal_of(message)


class _HelpAll(argparse.Action):
    """Print the help with every flag, as ``--help`` does with the usual ones."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, *_: object) -> NoReturn:
        print(parser_of(self.const, everything=True).format_help(), end="")
        raise SystemExit(0)


@lru_cache
def parser_of(known: Schema, *, everything: bool = False) -> Parser:
    """Return the command line of one kind of neuron.

    ``format_help()`` is its ``--help``, or with ``everything`` its ``--help-all``.
    """
    from distributed_training import __version__

    columns = min(110, shutil.get_terminal_size((100, 24)).columns)
    own = f"{OPERATORS_FILE} (or the --config file)"
    file = own if known.kind == "miner" else "--config file"
    parser = _Flags(
        usage=f"neurons/{known.kind}.py [--flag value]...",
        description="Dashes and underscores in a flag are the same. Strongest first: flags, "
        f"environment, .env, {file}, the network's file, preset, default. Secrets come from the "
        "environment or .env only.",
        epilog=None if everything else f"All {len(known.settings)} flags: --help-all.",
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=8, width=columns
        ),
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=__version__)
    about = "show every flag and exit"
    parser.add_argument("--help_all", action=_HelpAll, nargs=0, const=known, help=about)
    for title, settings in _help_groups(known):
        group = parser.add_argument_group(title)
        for setting in settings:
            shown = everything or setting.group in ("usual", "validator")
            group.add_argument(
                f"--{setting.name}",
                dest=setting.name,
                help=_help(setting).replace("%", "%%") if shown else argparse.SUPPRESS,
                metavar=setting.metavar,
                **_arity(setting),
            )
    for name in sorted(FLAGS):
        # Some start scripts gave it a value, some did not.
        parser.add_argument(f"--{name}", dest=name, nargs="?", const="true", help=argparse.SUPPRESS)
    return parser


def _help_groups(known: Schema) -> Iterator[tuple[str, list[Setting]]]:
    """Yield the settings under the titles of the help: the usual ones by task, then the rest."""
    for group, settings in groupby(known, key=lambda setting: setting.group):
        if group != "usual":
            yield TITLES[group], list(settings)
            continue
        usual = {setting.name: setting for setting in settings}
        for task, names in TASKS.items():
            yield task, [usual[name] for name in names]


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
    """Read the command line.

    Raises ConfigError; SystemExit(0) for ``--help`` and ``--version``, which print.
    """
    words = [_FLAG.sub(lambda match: canonical(match[0]), word) for word in argv]
    # argparse itself would name all unknown words in one line and suggest nothing.
    namespace, unknown = parser_of(known).parse_known_args(words)
    given: dict[str, Any] = vars(namespace)
    for name in given:
        _refuse_secret(name, known, "other users of this machine can read command lines")
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


def _refuse_secret(name: str, known: Schema, why: str) -> None:
    setting = known.get(name)
    if setting is not None and setting.secret:
        remedy = f"put {setting.env}=... into .env"
    elif name in SECRETS:
        remedy = "leave it out"
    else:
        return
    raise ConfigError(f"--{name} is a secret, and {why}, so nothing was started: {remedy}")


# --- environment and files ----------------------------------------------------------------------


def read_environment(environ: Mapping[str, str], known: Schema) -> dict[str, Given]:
    """Read the variables that name a setting; empty ones count as not set."""
    return {
        setting.name: Given(environ[setting.env], setting.env)
        for setting in known
        if setting.env and environ.get(setting.env)
    }


def read_dotenv(path: Path | None) -> dict[str, str]:
    """Read the variables of ``.env``; empty if there is none. Raises ConfigError."""
    if path is None or not path.is_file():
        return {}
    from dotenv import dotenv_values

    # No interpolation: a "$" in a secret is a "$".
    found = dotenv_values(stream=io.StringIO(_read_text(path, str(path))), interpolate=False)
    return {name: value for name, value in found.items() if value is not None}


def unread_variables(names: Iterable[str], known: Schema) -> Iterator[str]:
    """Yield a line for each name of ``.env`` that looks like a setting's and is none.

    A misspelled key would otherwise only be missed as "not set".
    """
    read = [setting.env for setting in known if setting.env]
    for name in names:
        close = difflib.get_close_matches(name, read, n=1, cutoff=0.85)
        if name not in read and (close or name.startswith(("R2_", "BT_"))):
            hint = f"did you mean {close[0]}?" if close else "it can be removed"
            yield f"nothing reads {name} of .env: {hint}"


def open_to_others(path: Path) -> str | None:
    """Warn if other users of this machine may read or change ``path``, which holds secrets."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o066:
        return None
    return (
        f"{path} has mode {mode:04o}, so other users of this machine can take the keys in it: "
        f"chmod 600 {path}"
    )


def read_toml(path: Path, known: Schema) -> dict[str, Given]:
    """Read the flags of a ``--config`` file. Raises ConfigError."""
    text = _read_text(path, f"--config {path}")
    try:
        tree = parse_toml(text)
    except ValueError as error:
        raise ConfigError(
            f"--config {path} is not TOML ({error}), so nothing was started: correct that line"
        ) from None
    found = {}
    for name, value in _flatten(tree, ""):
        # Retired names are settled later, with those of the command line.
        name = canonical(name) if canonical(name) in FLAGS else known.find(name).name
        _refuse_secret(name, known, f"does not belong into a configuration file such as {path}")
        found[name] = Given(_words(value), f"{name} in {path}")
    return found


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_text(path: Path, name: str) -> str:
    """Read a small UTF-8 file. Raises ConfigError, which calls it ``name``."""
    try:
        if path.is_fifo():  # without a writer it would be waited for, for ever
            raise OSError(errno.ESPIPE, "it is a pipe")
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
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
        # Some editors begin a file with a byte order mark: it would be part of the first name.
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


def load_config(
    kind: Kind,
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    dotenv: Path | None = Path(".env"),
    file: Path | None = None,
    check: bool = True,
) -> Config:
    """Return the configuration of one neuron.

    ``argv`` without the program's name. ``environ`` is ``os.environ`` if None; ``dotenv`` need not
    exist. ``file``: TOML of flags that is read where there is one and ``--config`` names no other
    (:data:`~.model.OPERATORS_FILE`). ``check=False`` skips the checks across settings
    (``config.problems`` lists them).
    ``--help`` and ``--version`` print and raise SystemExit(0).
    Raises ConfigError: one line, nothing started.
    """
    known = schema(kind)
    flags = read_argv(argv, known)
    environment = read_environment(os.environ if environ is None else environ, known)
    lines_of_dotenv = read_dotenv(dotenv)
    from_dotenv = read_environment(lines_of_dotenv, known)
    # The later of a pair wins. A --config file is weaker than the flags beside it.
    given = {**from_dotenv, **environment, **flags}
    if file is not None and file.is_file() and "config" not in given:
        given["config"] = Given(str(file), str(file))
    if "config" in given:
        given = {**read_toml(Path(_text(given["config"])), known), **given}
    # After the file, which may name the preset.
    preset = _text(given["preset"]) if "preset" in given else "public"
    # One preset serves both kinds: a miner does not know the validator's flags.
    defaults = {
        name: Given(text, f"preset {preset}")
        for name, text in PRESETS.get(preset, {}).items()
        if known.get(name) is not None
    }
    # After the merge: an old flag that stands in several places is one line.
    given, warnings = settle(given)
    # Only if a setting came from it: another program's .env is its own affair.
    warning = open_to_others(dotenv) if dotenv and from_dotenv else None
    warnings += (warning,) if warning else ()
    unread = tuple(unread_variables(lines_of_dotenv, known))
    warnings += unread
    # Twice where a network is named: its place is a setting, and its values rank below settings.
    config = _build(known, {**defaults, **given}, warnings=warnings)
    if config.general.network is not None:
        config = _of_network(known, config, defaults, given)
    if check:
        _refuse(problems(config), hints=[line for line in unread if "did you mean" in line])
    return config


def _of_network(
    known: Schema, alone: Config, defaults: Mapping[str, Given], given: Mapping[str, Given]
) -> Config:
    """Return the configuration with the values of the network's file between preset and operator.

    ``alone``: it without them. Raises ConfigError, ConfigAway.
    """
    place, warnings = str(alone.general.network), list(alone.warnings)
    try:
        network = read_network(
            place,
            # Of the validator, for a miner too: one file serves both.
            keys={setting.network for setting in schema("validator") if setting.network},
            kept=alone.run_folder,
            tell=warnings.append,
        )
    except NetworkFileError as error:
        raise ConfigError(
            f"--network {place}: {error}, so nothing was started: {error.remedy}"
        ) from None
    except NetworkAway as error:
        raise ConfigAway(
            f"--network: {error}, so its rules are not known and nothing was started: check the "
            "network, or give a file"
        ) from None
    rules = {
        setting.name: Given(
            _words(network.values[setting.network]), f"{setting.network} in {place}"
        )
        for setting in known
        if setting.network in network.values
    }
    # Values are compared and not texts: 1m and 60s are the same rule.
    shared = _build(known, {**defaults, **rules})
    ours = _build(known, {**defaults, **rules, **given}, warnings=tuple(warnings), network=network)
    _refuse(
        [
            f"{given[setting.name].source} {show(ours.get(setting.name))} is not what "
            f"{setting.network} in {place} says ({show(shared.get(setting.name))}), so no peer of "
            "this network would have the same rules and nothing was started: leave it out"
            for setting in known
            if setting.fixed
            and setting.name in given
            and ours.get(setting.name) != shared.get(setting.name)
        ]
    )
    return ours


def _words(value: Any) -> str:
    """Return the value of a TOML file as the text of a flag."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _refuse(found: Sequence[str], hints: Sequence[str] = ()) -> None:
    """Raise ConfigError for the first problem. ``hints``: what may have caused it."""
    if found:
        more = f" (and {len(found) - 1} more: dt-doctor lists all)" if len(found) > 1 else ""
        raise ConfigError("; ".join((found[0] + more, *hints)))


def _build(
    known: Schema,
    given: Mapping[str, Given],
    *,
    warnings: tuple[str, ...] = (),
    network: Network | None = None,
) -> Config:
    arguments: dict[str, dict[str, Any]] = {package: {} for package in known.classes}
    for name, entry in given.items():
        setting = known.settings[name]
        text = _text(entry)
        empty = setting.optional and text.strip().lower() in ("", "none")
        for package, field in setting.places:
            arguments[package][field] = None if empty else text
    packages: dict[str, Any] = {}
    wrong: dict[str, str] = {}  # flag -> problem
    places = {place: setting for setting in known for place in setting.places}
    for package, settings_class in known.classes.items():
        try:
            packages[package] = settings_class(**arguments[package])
        except ValidationError as refusal:
            for error in reversed(refusal.errors(include_url=False)):  # a field's first counts
                setting = places[package, str(error["loc"][0])]
                text, source = given[setting.name]
                remedy = f"give {setting.bounds}" if setting.bounds else f"correct {source}"
                wrong[setting.name] = (
                    f"{source}: {fault(setting, text, error)}, so nothing was started: {remedy}"
                )
    # After all packages: the line tells how many more are wrong.
    _refuse(list(wrong.values()))
    values = {s.name: getattr(packages[s.places[0][0]], s.places[0][1]) for s in known}
    return Config(
        kind=known.kind,
        values=frozen(values),
        sources=frozen({name: entry.source for name, entry in given.items()}),
        warnings=warnings,
        network=network,
        **packages,
    )


def _text(given: Given) -> str:
    """Return the text. Raises ConfigError if it cannot be shown in one line."""
    text = given.text.strip()
    why = unprintable(text)
    if why is not None:
        raise ConfigError(f"{given.source} {why}, so nothing was started: correct {given.source}")
    return text
