"""Join a network: get a uid, write a miner's settings and keys, and run the doctor.

    dt-join INVITATION [--folder FOLDER] [flags of the miner]
    dt-join FILE|URL   [--folder FOLDER] [flags of the miner]     without an invitation
    dt-join                                                       asks for the invitation

The invitation is the line that the founder's "dt-network invite" or "dt-network run" prints. It
names the network's file and its digest, and contains a secret. If other people use this machine,
leave the invitation out, and dt-join asks for it. The flags (see dt-miner --help) go into
miner.toml, and the secret into .env. If the network needs a bucket, put its keys into .env first.
If the command was interrupted, run it again.

Exit status 2: something is wrong on this machine. 1: something is wrong elsewhere. In both cases
one line says what to do. Otherwise the status is the doctor's.
"""

from __future__ import annotations

import argparse
import getpass
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from distributed_training import doctor
from distributed_training.chain.base import ChainError
from distributed_training.chain.kinds import how_to_register
from distributed_training.common.files import atomic_file, write_bytes
from distributed_training.config import OPERATORS_FILE, Config, ConfigError, exit_with, load_config
from distributed_training.config.loader import (
    WALLET,
    Parser,
    argument,
    argv_of,
    read_argv,
    read_dotenv,
    read_toml,
    unprintable,
)
from distributed_training.config.model import (
    check_addresses,
    check_installed,
    check_keys,
    check_values,
)
from distributed_training.config.schema import schema
from distributed_training.config.types import File
from distributed_training.health.gpus import visible_gpu_count
from distributed_training.health.machine import refuse_model
from distributed_training.network import BUILT_IN, to_toml
from distributed_training.network_place import save_copy
from distributed_training.node.buckets import open_own
from distributed_training.protocol.keys import miner_bucket
from distributed_training.protocol.types import ExitStatus
from distributed_training.store.errors import BucketMissingError, StoreError
from distributed_training.store.s3 import S3ObjectStore

_NOTHING = "so nothing was written"
_DOTENV, _INVITATION = Path(".env"), "DT_INVITATION"
_HEAD = """\
# A miner's settings, written by `dt-join`. Secrets belong in .env; flags override this file.
# Every flag of `dt-miner --help` can be set here, as [section] and name.
"""


class _Unfinished(RuntimeError):
    """A join failed when the hotkey may already have a uid. A second run uses the same hotkey."""


def build_parser() -> Parser:
    usage = "dt-join [INVITATION | FILE | URL] [--folder FOLDER] [flags of the miner]"
    parser = Parser.of_program("dt-join", __doc__, usage)
    parser.add_argument(
        "--folder",
        type=argument(File),
        default=Path(),
        help="folder of the miner, for miner.toml, .env and its runs [the current one]",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options, words = build_parser().parse_known_args(argv)
    try:
        return join(options, words)
    except ConfigError as error:
        return exit_with(error)
    except ChainError as error:
        print(f"error: {error} ({_NOTHING})", file=sys.stderr)
    except _Unfinished as error:
        print(f"error: {error}: run the same command again", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}: fix it and repeat", file=sys.stderr)
    except (EOFError, KeyboardInterrupt):
        print("error: interrupted: run the same command again", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    return ExitStatus.FAULT


def join(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Join, and return the doctor's status.

    Raises ConfigError, ChainError, OSError, _Unfinished.
    """
    config, _ = enter(options.folder, words)
    here = Path.cwd()
    # If members train on text of their own and no setting names it, a script may read it instead.
    by_script = config.data.own and not config.data.own_text and not config.takes_ports
    status = doctor.main(["--script"] if by_script else [])
    # Some of the doctor's checks fail if the network has not begun yet.
    when = "once nothing fails, start the miner with" if status else "start the miner with"
    go = f"cd {shlex.quote(str(here))} && " if options.folder != Path() else ""
    text = " --data.own_text FILES, or your script, which reads its own text" if by_script else ""
    print(f"{when}: {go}dt-miner{text}")
    return status


def enter(
    folder: Path, words: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[Config, int | None]:
    """Write a member's settings and keys into ``folder``, and make it the current folder.

    ``environ``: contains the keys of the member's bucket if it needs one. Returns the settings, and
    the member's uid or None if no registry gives one. Raises the same errors as :func:`join`.
    """
    others: list[str] = []
    found = read_argv(words, schema("miner"), others=others)
    if len(others) > 1:
        # Do not show the words: if the invitation was broken in two, one of them is the secret.
        raise ConfigError(f"{len(others)} words where one is expected, {_NOTHING}: see --help")
    text = others[0] if others else getpass.getpass("invitation: ")
    place, token = _parts(text)
    with ExitStack() as undo:
        _enter(folder, undo)
        texts = {name: entry.text for name, entry in found.items()}
        config, given = _settings(place, texts, environ)
        if token:
            config = replace(config, chain=replace(config.chain, invitation=SecretStr(token)))
        variables = {name: environ.get(name, "") for name in config.key_variables}
        secret = {_INVITATION: token} if token else {}
        _dotenv_with(variables | secret)  # raises if a value cannot be written
        uid, admitted = _register(config, undo)
        undo.pop_all()
    if admitted:  # otherwise, the registry has not checked the secret
        variables |= secret
    elif secret:
        print("this hotkey was already a member, so the invitation was neither used nor kept")
    config.run_folder.mkdir(parents=True, exist_ok=True)
    save_copy(config.network, config.run_folder)
    if not OPERATORS_FILE.exists():
        write_bytes(OPERATORS_FILE, _toml_of(given, ports=config.takes_ports).encode())
    with atomic_file(_DOTENV, private=True) as file:
        file.write(_dotenv_with(variables).encode())
    here = Path.cwd()
    secrets = "keys" if config.has_bucket else "invitation"
    print(f"{config.network.line}\nsettings {here / OPERATORS_FILE}, {secrets} {here / _DOTENV}")
    if not config.takes_ports:
        print(
            "your own script can join from here too: distributed_training.model_config() returns "
            "the model's config.json (docs/join-a-script.md)"
        )
    if uid is not None and config.has_bucket:
        _make_bucket(config, miner_bucket(config.store.global_model_name, uid))
    return config, uid


def _parts(text: str) -> tuple[str, str]:
    """Return the place of the network's file, and the secret or "". Raises ConfigError."""
    from distributed_training.chain.registry import INVITATION as LINE

    text = text.strip().removeprefix("dt-join ")
    if found := LINE.fullmatch(text):
        return found[1], found[2]
    if "#" in text or not text:  # do not show the text, which may contain most of a secret
        raise ConfigError(
            f"the invitation (URL#DIGEST.SECRET) is incomplete, {_NOTHING}: copy the whole line"
        )
    is_name = text in BUILT_IN or "://" in text
    return (text if is_name else str(Path(text).expanduser().absolute())), ""


def _enter(folder: Path, undo: ExitStack) -> None:
    """Make the miner's folder and change to it. ``undo`` removes a folder that was made."""
    try:
        if not folder.exists():
            folder.mkdir()
            undo.callback(_remove, folder.absolute())
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(
            f"--folder {folder} cannot be used ({error.strerror}), {_NOTHING}: choose another"
        ) from None
    if not os.access(".", os.W_OK):
        raise ConfigError(f"{Path().absolute()} is not writable, {_NOTHING}: use --folder")


def _settings(
    place: str, given: dict[str, str], environ: Mapping[str, str]
) -> tuple[Config, Mapping[str, str]]:
    """Return the configuration of the miner here, and the flags to write to ``miner.toml``.

    ``given``: the flags from the command line.

    Raises ConfigError.
    """
    argv = argv_of(given | {"network": place})
    given["network"] = place.partition("#")[0]
    file = OPERATORS_FILE if OPERATORS_FILE.exists() else None
    there = read_toml(file, schema("miner")) if file else {}
    for name, text in given.items():
        held = there[name].text if name in there else "missing"
        if file and held != text:
            raise ConfigError(
                f"{name} in {OPERATORS_FILE.absolute()} is {held} and not {text}, {_NOTHING}: "
                "change it with an editor, or use --folder for another miner"
            )
    config = load_config("miner", argv, environ=environ, file=file, check=False)
    # Use a separate wallet for each network unless the settings name one.
    if file is None and "wallet.name" not in config.sources:
        chain = replace(config.chain, wallet_name=config.network.head.name)
        config = replace(config, chain=chain)
    chain = config.chain
    wallet = (chain.wallet_path, chain.wallet_name, chain.wallet_hotkey)
    given |= dict(zip(WALLET, wallet, strict=True))
    _refuse([*check_installed(config), *check_addresses(config), *check_values(config)])
    # Check this before getting a uid, which would be wasted if the model does not fit here.
    refuse_model(config, ranks=config.miner.nproc_per_node or visible_gpu_count() or 1)
    return config, given


def _register(config: Config, undo: ExitStack) -> tuple[int | None, bool]:
    """Make the hotkey if it does not exist, and register it.

    Returns its uid, or None if no registry gives one, and whether the registry admitted it just
    now. Raises ConfigError, ChainError, _Unfinished. ``undo`` removes a hotkey that was made.
    """
    from distributed_training.chain.identity import create_wallet, hotkey_file, load_wallet

    settings, there = config.chain, OPERATORS_FILE.exists()
    folder = Path(settings.wallet_path).expanduser()
    path = hotkey_file(folder, settings.wallet_name, settings.wallet_hotkey)
    # This file names the folder for which the hotkey was made. Without it, a join that was
    # interrupted would leave no trace of that.
    user, here = path.with_name(f".{path.name}.folder"), str(Path.cwd())
    # If there are settings already, a missing hotkey was lost, which load_wallet reports.
    is_new = not path.exists() and not there
    if is_new:
        files = [user, path, path.with_name(f"{path.name}pub.txt"), *path.parents]
        undo.callback(_remove, *(each for each in files if not each.exists()))
        try:
            hotkey = create_wallet(folder, settings.wallet_name, settings.wallet_hotkey)
            user.write_text(here)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}), {_NOTHING}: use --wallet.path"
            ) from None
    else:
        hotkey = load_wallet(settings)
    if settings.kind != "registry":
        _refuse(check_keys(config))
        print(f"to get a uid for {hotkey.ss58}: {how_to_register(settings)}")
        return None, False
    from distributed_training.chain.registry import RefusedWrite, answering

    with answering(settings, hotkey, config.miner.master_ss58_address) as chain:
        uid = chain.uid(hotkey.ss58)
        named = {"wallet.name", "wallet.hotkey"} & set(config.sources)
        owner = ""
        with suppress(OSError, ValueError):
            owner = user.read_text()
        if not (is_new or named or there or owner == here):
            who, other = "no member of this network", ""
            if uid is not None:  # if two miners share a hotkey, only one counts at each close
                who = f"uid {uid} of this network"
                other = f", or use the folder that has it{owner and f' ({owner})'}"
            raise ConfigError(
                f"the hotkey {path} exists already and is {who}, {_NOTHING}: choose another name, "
                f"such as --wallet.name two{other}, or pass this one's name to use it"
            )
        _refuse(check_keys(config))
        admitted = uid is None
        if uid is None:
            # From now on the hotkey may have a uid, even if no answer arrives. So keep the hotkey:
            # without it, the uid and the invitation would be lost too.
            made = undo.pop_all()
            try:
                uid = chain.register()
            except RefusedWrite:
                made.close()
                raise
            except ChainError as error:
                raise _Unfinished(f"{error}, so the hotkey {path} may have a uid") from None
    print(f"hotkey {hotkey.ss58} with uid {uid}, {path}{': keep a backup of it' if is_new else ''}")
    return uid, admitted


def _refuse(lines: Iterable[str]) -> None:
    for line in lines:
        raise ConfigError(line)


def _make_bucket(config: Config, bucket: str) -> None:
    """Create the bucket if the key may do so. Otherwise, the doctor reports the missing bucket."""
    with suppress(StoreError, ConfigError), closing(open_own(config.store, bucket)) as store:
        if isinstance(store, S3ObjectStore):
            try:
                store.list_objects("metadata")
            except BucketMissingError:
                store.create_bucket()
                print(f"bucket {bucket} made")


def _remove(*paths: Path) -> None:
    """Remove files and empty folders."""
    for path in paths:
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


def _toml_of(given: Mapping[str, str], *, ports: bool) -> str:
    """Return the text of a ``--config`` file with the flags ``given``.

    ``ports``: also write the port, because other members connect to this machine.
    """
    found = {"dht.port": str(schema("miner").find("dht.port").default)} if ports else {}
    tables: dict[str, Any] = {}
    for name, text in {**found, **given}.items():
        section, _, key = name.rpartition(".")
        is_number = text.isdigit() and text == str(int(text))
        table = tables.setdefault(section, {}) if section else tables
        table[key] = int(text) if is_number else text
    return f"{_HEAD}{to_toml(tables)}"


def _dotenv_with(keys: Mapping[str, str]) -> str:
    """Return the text of ``.env`` with ``keys``. A key that it already has keeps its line.

    Raises ConfigError.
    """
    held = read_dotenv(_DOTENV)
    # Some editors begin a file with a byte order mark, which would become part of the first name.
    lines = _DOTENV.read_text(encoding="utf-8-sig").splitlines() if _DOTENV.exists() else []
    for name, value in keys.items():
        if value == held.get(name) or (not value and name in held):
            continue
        if (why := unprintable(value)) or "'" in value:
            raise ConfigError(f"{name} {why or 'holds a quotation mark'}: copy it again")
        line = f"{name}={value}" if value.isalnum() or not value else f"{name}='{value}'"
        own = [i for i, text in enumerate(lines) if re.match(rf"\s*(export\s+)?{name}\s*=", text)]
        lines[slice(own[-1], own[-1] + 1) if own else slice(len(lines), None)] = [line]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
