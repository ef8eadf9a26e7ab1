"""Write ``miner.toml`` and ``.env`` of a new miner in this folder, by asking or from flags.

    dt-miner init                                 asks; Enter takes what stands in brackets
    dt-miner init --yes --wallet.name mine ...    takes the miner's flags, asks nothing
    dt-miner init --force ...                     where there is a miner.toml: keeps it under
                                                  another name and writes a new one

Secrets are typed without an echo, or taken from the environment, and go only
into ``.env`` (mode 600). What ``.env`` holds already stays, but a key that a start would refuse is
asked for again. Exit status 2: a flag is refused or miner.toml is there; nothing was written then.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from distributed_training.common.files import atomic_file, write_bytes
from distributed_training.config import (
    OPERATORS_FILE,
    Config,
    ConfigError,
    exit_with,
    load_config,
    problems,
)
from distributed_training.config.loader import Parser, read_argv, read_dotenv, unprintable
from distributed_training.config.model import (
    KEY_VARIABLES,
    check_addresses,
    check_installed,
    check_values,
    key_faults,
)
from distributed_training.config.schema import schema
from distributed_training.config.types import NoNetworkNamed
from distributed_training.network import BUILT_IN
from distributed_training.protocol.types import ExitStatus

DOTENV = Path(".env")
INVITATION = "DT_INVITATION"
#: Asked first: the others are judged by the network's rules.
NETWORK = (
    "network",
    f"Network: its file, the https:// URL of it, or a name ({', '.join(BUILT_IN)})",
)
#: Flag, and what to ask for it. An empty answer leaves the flag out, or takes its default.
QUESTIONS = (
    ("wallet.name", "Wallet"),
    ("wallet.hotkey", "Hotkey of it"),
    ("dht.port", "Port for DHT peers"),
    ("dht.external_port", "Outside port for DHT peers, where a router or container maps another"),
    ("nproc_per_node", "GPUs to use (empty: all)"),
    ("preset", "Preset for the memory of one GPU"),
)
_HEAD = """\
# The settings of a miner, by `dt-miner init`. Secrets belong in .env; flags win over this file.
# Every flag of `dt-miner --help-all` may stand here: [section] and name.
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="dt-miner init",
        usage="dt-miner init [--yes] [--force] [--network FILE|URL|NAME] [flags of the miner]",
        description="Write miner.toml and .env of a new miner in this folder. It asks for the "
        "network, the wallet and the keys; Enter takes what stands in brackets.",
        epilog="A flag of the miner (dt-miner --help) answers its question and goes into "
        "miner.toml. Secrets go into .env only. An .env that is there keeps its keys.",
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="ask nothing: take the given flags and the defaults [off]",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="write a new miner.toml and keep the old one under another name [off]",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    options, flags = build_parser().parse_known_args(argv)
    try:
        return _write_both_files(
            options, {n: g.text for n, g in read_argv(flags, schema("miner")).items()}
        )
    except ConfigError as error:
        return exit_with(error)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}: see its folder", file=sys.stderr)
        return ExitStatus.FAULT
    except (EOFError, KeyboardInterrupt):
        print("\nno more answers, so nothing was written: give flags and --yes", file=sys.stderr)
        return ExitStatus.BAD_CONFIGURATION


def _write_both_files(options: argparse.Namespace, given: dict[str, str]) -> int:
    """Ask, write, and print what comes next. Raises ConfigError, OSError, EOFError."""
    try:
        _config_of(given)
    except NoNetworkNamed:
        if options.yes:
            raise
        _ask(*NETWORK, given, others={})
        # Before any other question: a wrong flag must not cost the answers.
        _config_of(given)
    if OPERATORS_FILE.exists() and not options.force:
        question = (
            f"{OPERATORS_FILE} is there. Keep it under another name and write a new one? [no]: "
        )
        if options.yes or input(question).strip().lower() not in ("y", "yes"):
            raise ConfigError(
                f"{OPERATORS_FILE} is there already, so nothing was written: change it with an "
                "editor, or give --force, which keeps the old one under another name"
            )
    config = _config_of(given)
    wanted = config.key_variables
    held = read_dotenv(DOTENV)
    keys = {
        name: held.get(name) or os.environ.get(name, "")
        for name in KEY_VARIABLES
        if config.has_bucket
    }
    if not options.yes:
        for name, question in QUESTIONS:
            if name not in given and (config.takes_ports or "port" not in name):
                # With all answers before: two ports that are right may be the same.
                _ask(name, question, given, others=given)
        # The keys that neither the environment nor .env has, or that a start would refuse.
        for name in wanted:
            keys[name] = _ask_key(name, given, keys)
    # It may refuse a key: nothing is renamed or written before.
    dotenv = dotenv_with(keys)
    old = None
    if OPERATORS_FILE.exists():
        old = OPERATORS_FILE.with_name(f"{OPERATORS_FILE.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        OPERATORS_FILE.rename(old)
    write_bytes(OPERATORS_FILE, toml_of(given, ports=config.takes_ports).encode())
    print(f"wrote {OPERATORS_FILE}" + (f"; the old one is {old}" if old else ""))
    # Only for its owner from the first byte on: a chmod afterwards leaves a moment.
    with atomic_file(DOTENV, private=True) as file:
        file.write(dotenv.encode())
    print(f"wrote {DOTENV} (mode 600)")
    # Only by the two files: a service has none of this shell's variables.
    config = load_config("miner", [], environ={}, file=OPERATORS_FILE, check=False)
    if config.has_bucket:
        bucket = config.store.global_model_name
        print(f"the bucket to make: {bucket}-<uid in three digits>, e.g. {bucket}-007")
    for line in problems(config):
        print(f"still to do: {line}")
    print("then:\n  dt-doctor\n  dt-miner            # or: pm2 start app.config.js")
    return 0


def _ask(name: str, question: str, given: dict[str, str], *, others: Mapping[str, str]) -> None:
    """Ask until the answer, with the flags ``others``, is one that the miner takes. Keep it."""
    default = _default_of(name)
    prompt = f"{question}{f' [{default}]' if default else ''}: "
    while answer := input(prompt).strip() or default:
        try:
            _config_of({**others, name: answer})
        except ConfigError as error:
            print(f"  {error}")
        else:
            given[name] = answer
            return


def _ask_key(name: str, given: Mapping[str, str], known: Mapping[str, str]) -> str:
    """Return a key that a start takes with the ``known`` ones; one of these is not asked for."""
    read: Callable[[str], str] = input if name == "R2_ACCOUNT_ID" else getpass.getpass
    answer = known.get(name, "")
    while not answer or (fault := _fault_of(name, given, {**known, name: answer})):
        if answer:
            print(f"  {fault}")
        answer = read(f"{name} (empty: later, in .env): ").strip()
        if not answer:
            break
    return answer


def _fault_of(name: str, given: Mapping[str, str], keys: Mapping[str, str]) -> str:
    known = {n: keys[n] for n in KEY_VARIABLES if keys.get(n)}
    try:
        config = load_config("miner", argv_of(given), environ=known, dotenv=None, check=False)
    except ConfigError as error:
        return str(error)
    return next((line for line in key_faults(config) if name in line), "")


def argv_of(given: Mapping[str, str]) -> list[str]:
    """Return the words of a command line with these flags."""
    known, argv = schema("miner"), []
    for name, text in given.items():
        setting = known.get(name)
        many = setting is not None and setting.many
        argv += [f"--{name}", *text.split()] if many else [f"--{name}={text}"]
    return argv


def _config_of(given: Mapping[str, str]) -> Config:
    """Return the configuration with only these flags. Raises ConfigError for what they say."""
    config = load_config("miner", argv_of(given), environ={}, dotenv=None, check=False)
    for check in (check_installed, check_addresses, check_values):
        for line in check(config):
            raise ConfigError(line)
    return config


def _default_of(name: str) -> str:
    if name == "preset":  # for the memory of the first GPU; the plain one where there is none
        from distributed_training.config.model import CARDS
        from distributed_training.health.gpus import sample_gpu

        sample = sample_gpu()
        fitting = [size for size in CARDS if sample is not None and size <= sample.memory_total_gb]
        return f"public-{max(fitting)}gb" if fitting else "public"
    default = schema("miner").find(name).default
    return "" if default is None else str(default)


def toml_of(given: Mapping[str, str], *, ports: bool) -> str:
    """Return the text of a ``--config`` file with the flags ``given``.

    Settings that an operator looks for are there too, in the order of the help. ``ports``: other
    members connect to this machine.
    """
    shown = ["wallet.name", "wallet.hotkey"]
    shown += ["dht.port"] if ports else []
    found = {name: _default_of(name) for name in shown} | dict(given)
    # By section, those without one first; an older spelling before the rest of its section.
    places = {setting.name: place for place, setting in enumerate(schema("miner"))}
    lines, section = [_HEAD], ""
    for name in sorted(found, key=lambda name: (name.rpartition(".")[0], places.get(name, 0))):
        text = found[name]
        part, _, key = name.rpartition(".")
        if part != section:
            section = part
            lines.append(f"\n[{section}]\n")
        value = text if text.isdigit() and text == str(int(text)) else json.dumps(text)
        lines.append(f"{key} = {value}\n")
    return "".join(lines)


def dotenv_with(keys: Mapping[str, str]) -> str:
    """Return the text of ``.env`` with ``keys``, each in its line if it has one there.

    Raises ConfigError.
    """
    held = read_dotenv(DOTENV)
    # Some editors begin a file with a mark, which would become part of the first name.
    lines = DOTENV.read_text(encoding="utf-8-sig").splitlines() if DOTENV.exists() else []
    for name, value in keys.items():
        if value == held.get(name) or (not value and name in held):
            continue
        if (why := unprintable(value)) or "'" in value:
            raise ConfigError(f"{name} {why or 'holds a quotation mark'}: copy it again")
        line = f"{name}={value}" if value.isalnum() or not value else f"{name}='{value}'"
        own = [i for i, text in enumerate(lines) if re.match(rf"\s*(export\s+)?{name}\s*=", text)]
        lines[slice(own[-1], own[-1] + 1) if own else slice(len(lines), None)] = [line]
    return "".join(f"{line}\n" for line in lines)
