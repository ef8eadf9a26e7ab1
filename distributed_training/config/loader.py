"""Load the configuration from flags, environment and files into one frozen ``Config``.

Strongest first: flags, environment variables, ``.env``, ``miner.toml`` (or the ``--config`` file),
the network's file, defaults. Secrets come only from the environment or ``.env``. argparse reads the
command line; pydantic converts and checks the values. This module merges them and remembers where
each came from, so that an error can name the place to correct. (pydantic-settings could merge them
too, but it does not name the place, parses lists as JSON and expands ``${...}`` in a secret.) Only
the first part of a file is read, up to a limit. Whatever a file contains, an error is one line.

Scripts declare their arguments with the same parser and types::

    parser = Parser(description=...)
    parser.add_argument("--uid", type=ranged(0, 65535))
    parser.add_argument("--folder", type=argument(File))
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from distributed_training import NO_HELP
from distributed_training.common.files import parse_toml
from distributed_training.common.kinds import PluginError, import_plugins
from distributed_training.network import (
    LAST_OF_SUBNET_38,
    Network,
    NetworkAway,
    NetworkFileError,
    needless_keys,
)
from distributed_training.network_place import read_network

from .model import OPERATORS_FILE, TITLES, Config, Kind, problems
from .removed import REFUSED, RENAMED, RULES, is_removed
from .schema import Given, Schema, Setting, canonical, schema
from .settings import AllSettings
from .types import ConfigAway, ConfigError, NoNetworkNamed, hide_user, show

_LONGEST_TEXT = 4096  # characters of one value
#: The name that ``--network`` had for subnet 38, whose file came with the program.
_SUBNET_38 = "sn38"


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports an error in one line and accepts no abbreviations."""

    def __init__(self, **options: Any) -> None:
        # Allow no abbreviations: a new flag may make one ambiguous, or change its meaning.
        super().__init__(allow_abbrev=False, **options)

    @classmethod
    def of_program(cls, name: str, text: str | None, usage: str | None = None) -> Parser:
        """Return the parser of a program whose docstring is ``text``."""
        lines = (text or NO_HELP).splitlines()
        form = argparse.RawDescriptionHelpFormatter
        about: dict[str, Any] = {"description": lines[0], "epilog": "\n".join(lines[2:])}
        return cls(prog=name, usage=usage, formatter_class=form, **about)

    def error(self, message: str) -> NoReturn:
        """Exit status 2."""
        raise SystemExit(exit_with(refusal_of(message)))


def refusal_of(message: str) -> ConfigError:
    """Turn argparse's message about an argument into an error that names the consequence."""
    text = message.removeprefix("argument ")
    if len(text) > 600:  # argparse repeats an invalid choice in full
        text = f"{text[:300]}...{text[-300:]}"
    return ConfigError(f"{text}, so nothing was started: see --help")


def exit_with(error: ConfigError, *, of_service: bool = False) -> int:
    """Print the one line an operator sees for bad input. Return the exit status, usually 2.

    ``of_service``: the program is one that pm2 or systemd starts. If stderr is not a terminal, the
    line then begins with the time, like the lines of the log.
    """
    when = ""
    if of_service and not sys.stderr.isatty():
        when = datetime.now().astimezone().isoformat(" ", "milliseconds") + " | ERROR | "
    print(f"{when}error: {error}", file=sys.stderr, flush=True)
    return error.status


def argument(hint: Any) -> Callable[[str], Any]:
    """Return the ``type=`` for a script's argument: it converts text to the type ``hint``.

    The returned function raises argparse's error if the text does not fit.
    """
    adapter = TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False, str_min_length=1))
    setting = Setting("", FieldInfo.from_annotation(hint))

    def convert(text: str) -> Any:
        why = unprintable(text)
        # Check this before the text is converted, because an error would show the text, and control
        # characters could forge lines in a terminal.
        if why is None:
            try:
                return adapter.validate_python(text)
            except ValidationError as refusal:
                why = fault(setting, text, refusal.errors()[0])
        raise argparse.ArgumentTypeError(f"{why} ({setting.bounds})" if setting.bounds else why)

    return convert


def ranged(low: float, high: float) -> Callable[[str], Any]:
    """Return the ``type=`` for a number in a range: an integer if the bounds are integers."""
    return argument(Annotated[type(low), Field(ge=low, le=high)])


#: Settings that name a hotkey, also for the commands that sign with it.
WALLET = ("wallet.path", "wallet.name", "wallet.hotkey")


def add_wallet(command: argparse.ArgumentParser) -> None:
    """Add the flags of a wallet to a command, with a miner's defaults and variables."""
    for name in WALLET:
        setting = schema("miner").settings[name]
        default = os.environ.get(str(setting.env), setting.default)
        about = setting.help.replace("%", "%%")
        command.add_argument(
            f"--{name}", default=default, metavar="TEXT", help=f"{about} [{setting.default}]"
        )


def unprintable(text: str) -> str | None:
    """Return why ``text`` cannot be shown in one log line, or None if it can."""
    if len(text) > _LONGEST_TEXT:
        return f"has {len(text)} characters, more than {_LONGEST_TEXT}"
    return None if text.isprintable() else "has characters that cannot be printed"


def fault(setting: Setting, text: str, error: Mapping[str, Any]) -> str:
    """Describe what pydantic's ``error`` says is wrong with ``text``. Never show a secret."""
    context = error.get("ctx", {})
    shown = hide_user(text)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    if error["type"] in ("greater_than_equal", "less_than_equal"):
        low, _, high = setting.bounds.partition(" to ")
        return f"{shown} is less than {low}" if "ge" in context else f"{shown} is more than {high}"
    wanted = context.get("error") or setting.wanted
    return f"{'its value' if setting.secret else repr(shown)} is not {wanted}"


_OURS = ("R2_", "BT_", "DT_")  # prefixes of our variables' names
_LARGEST_FILE = 1 << 20  # bytes; a complete configuration has about 20 thousand


# --- command line -------------------------------------------------------------------------------


class _Flags(Parser):
    def error(self, message: str) -> NoReturn:
        raise refusal_of(message)


_COMMANDS = (
    "Without a command it trains. `dt-join` writes miner.toml and .env for a new miner, "
    "`dt-miner config` shows every setting and where it comes from, `dt-miner check` checks "
    "the settings as a start would. "
)


@lru_cache
def parser_of(known: Schema) -> Parser:
    """Return the command line of one kind of neuron."""
    from distributed_training import __version__

    own = f"{OPERATORS_FILE} (or the --config file)"
    file = own if known.kind == "miner" else "--config file"
    parser = _Flags(
        prog=f"dt-{known.kind}",
        usage=f"%(prog)s {'[COMMAND] ' if known.kind == 'miner' else ''}[--flag value]...",
        description=(_COMMANDS if known.kind == "miner" else "")
        + "Dashes and underscores in flags are interchangeable. Strongest first: flags, "
        f"environment, .env, {file}, the network's file, default. Secrets come from the "
        "environment or .env only.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=8),
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=__version__)
    # Files and notes of operators name it; it was the help that showed every flag.
    parser.add_argument("--help_all", action="help", help=argparse.SUPPRESS)
    for group, found in groupby(known.flags, key=lambda setting: setting.group):
        arguments = parser.add_argument_group(TITLES[group])
        for setting in found:
            arity: dict[str, Any] = {"nargs": "+", "action": "extend"} if setting.many else {}
            if bool in setting.parts:
                arity = {"nargs": "?", "const": "true"}
            arguments.add_argument(
                f"--{setting.name}",
                dest=setting.name,
                help=_help(setting).replace("%", "%%"),
                metavar=setting.metavar,
                **arity,
            )
    return parser


def _help(setting: Setting) -> str:
    text = setting.help
    if setting.secret:
        return f"{text} (refused here: give {setting.env} in the environment or .env)"
    if setting.network:
        text += " [the network's file]"
    elif setting.default not in (None, ()):
        text += f" [{show(setting.default)}]"
    if setting.bounds:
        text += f" ({setting.bounds})"
    return text + (f" (environment: {setting.env})" if setting.env else "")


def read_argv(
    argv: Sequence[str], known: Schema, *, others: list[str] | None = None
) -> dict[str, Given]:
    """Read the command line.

    ``others`` receives the words that are not flags; if it is None, such words are an error.

    Raises ConfigError, or SystemExit(0) after ``--help`` or ``--version`` has printed its text.
    """
    given: dict[str, str] = {}
    words: list[str] = []
    at = ""  # the removed flag that the next words belong to, since some scripts gave it a value
    for word in argv:
        if word.startswith("--"):
            name, separate, text = word[2:].partition("=")
            name = RENAMED.get(canonical(name), canonical(name))
            word = f"--{name}{separate}{text}"
            at = name if known.get(name) is None and is_removed(name) else ""
            if at:
                given[at] = text
                continue
        if at:
            given[at] = f"{given[at]} {word}".strip()
        else:
            words.append(word)
    # argparse itself would list all unknown words in one line and suggest no correction.
    namespace, unknown = parser_of(known).parse_known_args(words)
    for name, value in vars(namespace).items():
        _refuse_secret(name, known, "other users of this machine can read command lines")
        given[name] = value if isinstance(value, str) else " ".join(value)
    for word in unknown:
        if word.startswith("--") and len(word) > 2:
            known.find(word[2:].partition("=")[0])
        if others is not None and not word.startswith("-"):
            others.append(word)
            continue
        raise ConfigError(
            f"{word!r} is not a flag, so nothing was started: flags start with --; see --help"
        )
    return {name: Given(text, f"--{name}") for name, text in given.items()}


def argv_of(given: Mapping[str, str]) -> list[str]:
    """Return the words of a miner's command line with these flags."""
    known, argv = schema("miner"), []
    for name, text in given.items():
        setting = known.get(name)
        many = setting is not None and setting.many
        argv += [f"--{name}", *text.split()] if many else [f"--{name}={text}"]
    return argv


def _refuse_secret(name: str, known: Schema, why: str) -> None:
    setting = known.get(name)
    if setting is not None and setting.secret:
        raise ConfigError(
            f"--{name} is a secret, and {why}, so nothing was started: put {setting.env}=... into "
            ".env"
        )


# --- environment and files ----------------------------------------------------------------------


def read_environment(environ: Mapping[str, str], known: Schema) -> dict[str, Given]:
    """Read the variables that belong to a setting; an empty one counts as not set."""
    names = {setting.env: setting.name for setting in known if setting.env}
    names["DT_PRESET"] = "preset"  # its name in the previous edition
    return {name: Given(environ[env], env) for env, name in names.items() if environ.get(env)}


def read_dotenv(
    path: Path | None, warn: Callable[[str], object] = lambda line: None
) -> dict[str, str]:
    """Return the variables in ``.env``; empty if there is no such file.

    Calls ``warn`` with a message about each bad line that may belong to another program. Raises
    ConfigError if the file cannot be read, or if a bad line names one of our variables.
    """
    if path is None or not path.is_file():
        return {}
    from dotenv.parser import parse_stream

    found: dict[str, str] = {}
    places: dict[str, int] = {}
    # Expand no variables, since a "$" in a secret is just a "$".
    for binding in parse_stream(io.StringIO(_read_text(path, str(path)))):
        text = binding.original.string
        line = binding.original.line + len(text) - len(text.lstrip("\r\n"))
        where = f"{path}, line {line}"
        if binding.error or (binding.key is not None and binding.value is None):
            # Show only the name, and only if the variable is ours, since the rest may be a secret.
            found_name = re.match(r"[\s{\"']*(?:(?:export|set)\s+)?(\w*)", text)
            name = found_name[1] if found_name else ""
            ours = name.upper().startswith(_OURS)
            what = f"{where}: {f'{name} ' if ours else ''}is not NAME=value on one line"
            quoted = re.match(r"[^=\n]*=\s*(['\"])([^\n]*)", text)
            if quoted and quoted[1] not in quoted[2]:
                what = f"{where}: the value of {name if ours else 'a name'} begins with {quoted[1]}"
                what += " and no second one closes it"
            if ours:
                raise ConfigError(f"{what}, so nothing was started: correct it")
            warn(f"{what}, so it is ignored: correct that line, or remove it")
        elif binding.key is not None:
            assert binding.value is not None
            if binding.key in found:
                both = f"{path}, lines {places[binding.key]} and {line}"
                warn(f"{both}: {binding.key} is given twice, and the later one counts: remove one")
            found[binding.key], places[binding.key] = binding.value, line
    return found


def unread_variables(names: Iterable[str], known: Schema) -> Iterator[str]:
    """Yield a line for each name in ``.env`` that looks like a setting's variable but is not one.

    Otherwise a misspelled key would only be reported as "not set".
    """
    read = [setting.env for setting in known if setting.env]
    for name in names:
        # Variable names are case-sensitive, and people may not expect that.
        close = difflib.get_close_matches(name.upper(), read, n=1, cutoff=0.85)
        if name not in read and (close or name.upper().startswith(("R2_", "BT_"))):
            hint = f"did you mean {close[0]}?" if close else "it can be removed"
            yield f"nothing reads {name} of .env: {hint}"


def read_toml(path: Path, known: Schema) -> dict[str, Given]:
    """Read the flags of a ``--config`` file. Raises ConfigError."""
    text = _read_text(path, f"--config {path}")
    try:
        tree = parse_toml(text)
    except ValueError as error:
        raise ConfigError(
            f"--config {path} is not TOML ({error}), so nothing was started: fix that line"
        ) from None
    found = {}
    for name, value in _flatten(tree, ""):
        name = RENAMED.get(canonical(name), canonical(name))
        # Removed settings are handled later, together with those on the command line.
        if known.get(name) is not None or not is_removed(name):
            name = known.find(name).name
        _refuse_secret(name, known, f"must not stand in a configuration file such as {path}")
        found[name] = Given(_words(value), f"{name} in {path}")
    return found


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_text(path: Path, name: str) -> str:
    """Read a small UTF-8 file. ConfigError refers to it as ``name``."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read ({error.strerror}), so nothing was started: correct the path "
            "or its permissions"
        ) from None
    if len(data) > _LARGEST_FILE:
        raise ConfigError(
            f"{name} has more than {_LARGEST_FILE} bytes, so it is not a configuration and nothing "
            "was started: correct the path"
        )
    try:
        if b"\0" in data:  # UTF-16
            raise ValueError
        # Some editors put a byte order mark at the start of a file, which would become part of the
        # first name.
        return data.decode("utf-8-sig")
    except ValueError:
        raise ConfigError(
            f"{name} is not UTF-8 text, so nothing was started: save it as UTF-8"
        ) from None


def import_named(modules: Sequence[str], source: str = "--plugins") -> None:
    """Import the plug-ins that ``source`` names. Raises ConfigError."""
    try:
        import_plugins(modules)
    except PluginError as error:
        raise ConfigError(f"{source}: {error}") from None


def rules_at(place: str | Path, kind: Kind = "miner") -> Config:
    """Return the configuration from a network's file and nothing else. Raises ConfigError."""
    return load_config(kind, ["--network", str(place)], environ={}, dotenv=None, check=False)


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

    ``argv`` does not include the program's name. ``environ`` is ``os.environ`` if None; ``dotenv``
    need not exist. ``file``: a TOML file of flags (:data:`~.model.OPERATORS_FILE`), which is read
    if it exists and ``--config`` names no other. ``check=False`` skips the checks across settings,
    whose results ``config.problems`` lists. ``--help`` and ``--version`` print and raise
    SystemExit(0). Raises ConfigError with one line, before anything is started.
    """
    known = schema(kind)
    flags = read_argv(argv, known)
    environment = read_environment(os.environ if environ is None else environ, known)
    odd: list[str] = []
    lines_of_dotenv = read_dotenv(dotenv, odd.append)
    from_dotenv = read_environment(lines_of_dotenv, known)
    # Later entries of the mapping win. A --config file is weaker than the flags given with it.
    given = {**from_dotenv, **environment, **flags}
    if file is not None and file.is_file() and "config" not in given:
        given["config"] = Given(str(file), str(file))
    if "config" in given:
        given = {**read_toml(Path(_text(given["config"])), known), **given}
    # Do this after the merge, so that a removed flag given in several places counts once.
    removed = {n: given.pop(n) for n in list(given) if known.get(n) is None}
    rules = {key: removed.pop(name) for name, key in RULES.items() if name in removed}
    _refuse(
        [
            f"{removed[name].source} is no longer a setting, so nothing was started: {remedy}"
            for name, (same, remedy) in REFUSED.items()
            if name in removed and _text(removed[name]).lower() not in same
        ]
    )
    warnings = []
    if removed:
        sources = ", ".join(sorted(entry.source for entry in removed.values()))
        warnings += [f"no settings any more, without effect, and can be taken out: {sources}"]
    # Load plug-ins first, since other values may name a kind that they register.
    if "plugins" in given:
        import_named(_text(given["plugins"]).split(), given["plugins"].source)
    # Check this only if a setting came from the file, which may belong to another program.
    if dotenv and from_dotenv and (mode := stat.S_IMODE(dotenv.stat().st_mode)) & 0o066:
        warnings.append(
            f"{dotenv} has mode {mode:04o}, so other users of this machine can access the keys in "
            f"it: chmod 600 {dotenv}"
        )
    unread = tuple(unread_variables(lines_of_dotenv, known))
    warnings += (*odd, *unread) if from_dotenv else unread
    config = _with_rules(known, given, rules, warnings)
    node = (os.environ if environ is None else environ).get("GROUP_RANK", "")  # torchrun's
    config = replace(config, node=int(node) if node.isdecimal() and len(node) < 6 else 0)
    if check:
        _refuse(problems(config), hints=[line for line in unread if "did you mean" in line])
    return config


def _with_rules(
    known: Schema, given: Mapping[str, Given], yielding: Mapping[str, Given], warnings: list[str]
) -> Config:
    """Return the configuration: the network's rules, overridden by the operator's settings.

    ``yielding``: the operator's settings that the network's file overrides, keyed by the key in
    that file. Raises NoNetworkNamed, ConfigError, ConfigAway.
    """
    # Build without the file's values first, since the file's place is a setting itself.
    alone = AllSettings(**_packages(known, given))
    place = alone.general.network
    named = given.get("network")
    if place in (None, _SUBNET_38):
        why = "no network is named"
        if named:
            why = f"{named.source} is empty" if place is None else f"{named.source} is {place}"
        raise NoNetworkNamed(
            f"{why}, so nothing was started: join a network with dt-join, or give --network FILE, "
            "--network https://URL (its founder's) or --network local; subnet 38, the default up "
            f"to 0.2.0, has ended: commit {LAST_OF_SUBNET_38} was the last to speak its protocol"
        )
    source = given["network"].source
    try:
        network = read_network(
            place,
            # Use the validator's settings for a miner too, since both read the same file.
            keys={setting.network for setting in schema("validator") if setting.network},
            kept=alone.run_folder,
            tell=warnings.append,
        )
    except NetworkFileError as error:
        raise ConfigError(
            f"{source} {place}: {error}, so nothing was started: {error.remedy}"
        ) from None
    except NetworkAway as error:
        raise ConfigAway(
            f"{source}: {error}, so its rules are unknown and nothing was started: check the "
            "connection, or name a file"
        ) from None
    rules = _given_by(network, known, place=f" in {place}")
    ours = _build(known, {**rules, **given}, network)
    store, of_file = given.get("r2.endpoint_url"), network.values.get("store.endpoint")
    if store and _text(store) != of_file and not (network.built_in or ours.in_folder):
        raise ConfigError(
            f"{store.source} {show(_text(store))} differs from store.endpoint in {place} "
            f"({show(of_file)}), so no peer of this network would find the uploads and "
            "nothing was started: leave it out"
        )
    because = {
        entry.source: f"{place} says {key} = {show(ours.get(key))} for all members: "
        # The network's file names the chain, but the operator may choose one of its nodes.
        + ("give --subtensor.chain_endpoint, or " if key == "chain.endpoint" else "")
        for key, entry in yielding.items()
    }
    if not ours.has_bucket and "neuron.upload_steps" in given:
        because[given["neuron.upload_steps"].source] = "members upload once for each close there: "
    warnings += [f"{name} has no effect, because {because[name]}leave it out" for name in because]
    return at_published(replace(ours, warnings=tuple(warnings)))


def run_folder_of(argv: Sequence[str]) -> Path:
    """Return the run folder that a miner would use, even if other settings are wrong.

    Up to ten lines of the TOML file that cannot be parsed are ignored. Raises nothing.
    """
    known, flags = schema("miner"), dict[str, str]()
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name, separate, text = word.partition("=")
        if name.startswith("--"):
            flags[canonical(name[2:])] = text if separate else following
    given, dotenv = dict[str, str](), dict[str, str]()
    with contextlib.suppress(ConfigError, ValueError):
        tree = _parse_sound_lines(_read_text(Path(flags.get("config", OPERATORS_FILE)), "it"))
        given = {canonical(name): _words(value) for name, value in _flatten(tree, "")}
    with contextlib.suppress(ConfigError):
        dotenv = read_dotenv(Path(".env"))
    for variables in (dotenv, os.environ):
        given |= {name: each.text for name, each in read_environment(variables, known).items()}
    given |= flags
    name, hotkey = (
        given.get(each) or str(known.settings[each].default)
        for each in ("neuron.name", "wallet.hotkey")
    )
    return Path(given.get("neuron.run_folder") or Path("runs") / f"{name}-{hotkey}")


def _parse_sound_lines(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text, without up to ten lines that are not valid TOML.

    Raises ValueError if there are more such lines.
    """
    lines = text.split("\n")
    for _ in range(10):
        try:
            return parse_toml("\n".join(lines))
        except ValueError as error:
            # tomllib says "(at line 3, column 8)", or "(at end of document)".
            place = re.search(r"\(at line (\d+), ", str(error))
            del lines[int(place[1]) - 1 if place else -1]
    return parse_toml("\n".join(lines))


def at_published(config: Config) -> Config:
    """Replace the founder's folders by the local folders of the network's published files.

    The folders need not exist yet: a start fetches the files.
    """
    places = config.published
    if "tokenizer" in places:
        miner = replace(config.miner, global_tokenizer_name=str(places["tokenizer"]))
        config = replace(config, miner=miner)
    if "data" in places:
        kind = config.data.source.partition(":")[0]
        data = replace(config.data, source=f"{kind}:{places['data']}")
        config = replace(config, data=data)
    return config


def rules_of(config: Config, network: Network) -> Config:
    """Return a configuration of the same kind as ``config``, from the rules of ``network`` only.

    Raises ConfigError.
    """
    known = schema(config.kind)
    return _build(known, _given_by(network, known), network)


def _given_by(network: Network, known: Schema, *, place: str = "") -> dict[str, Given]:
    """Return the rules as settings. ``place`` is appended to a key when an error names it."""
    return {
        setting.name: Given(_words(network.values[setting.network]), f"{setting.network}{place}")
        for setting in known
        if setting.network in network.values
    }


def _words(value: Any) -> str:
    """Return a TOML value as the text of a flag."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _refuse(found: Sequence[str], hints: Sequence[str] = ()) -> None:
    """Raise ConfigError for the first problem, if any. ``hints``: possible causes."""
    if found:
        more = f" (and {len(found) - 1} more: dt-doctor lists all)" if len(found) > 1 else ""
        raise ConfigError("; ".join((found[0] + more, *hints)))


def _packages(known: Schema, given: Mapping[str, Given]) -> dict[str, Any]:
    """Return the settings object of each package. Raises ConfigError."""
    arguments: dict[str, dict[str, Any]] = {package: {} for package in known.classes}
    for name, entry in given.items():
        text = _text(entry)
        setting = known.settings[name]
        empty = setting.optional and text.strip().lower() in ("", "none")
        package, field = setting.place
        arguments[package][field] = None if empty else text
    packages: dict[str, Any] = {}
    wrong: dict[str, str] = {}  # flag -> problem
    places = {setting.place: setting for setting in known}
    for package, settings_class in known.classes.items():
        try:
            packages[package] = settings_class(**arguments[package])
        except ValidationError as refusal:
            for error in reversed(refusal.errors(include_url=False)):  # a field's first error wins
                setting = places[package, str(error["loc"][0])]
                text, source = given[setting.name]
                remedy = f"give {setting.bounds}" if setting.bounds else f"correct {source}"
                wrong[setting.name] = (
                    f"{source}: {fault(setting, text, error)}, so nothing was started: {remedy}"
                )
    # Refuse only after all packages are checked, since the line says how many more are wrong.
    _refuse(list(wrong.values()))
    return packages


def _build(known: Schema, given: Mapping[str, Given], network: Network) -> Config:
    packages = _packages(known, given)
    # Leave out the keys of the other exchange, so that nothing reads their defaults by mistake.
    absent = needless_keys(network.head.exchange)
    values = {
        s.name: getattr(packages[s.place[0]], s.place[1]) for s in known if s.network not in absent
    }
    return Config(
        kind=known.kind,
        values=values,
        sources={name: entry.source for name, entry in given.items()},
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
