"""Create a network, run it, sign its file, and check what it has published.

    dt-network init FOLDER --name NAME (--registry URL | --netuid N) [options]
    dt-network succeed FOLDER --of FILE --name NAME ... [options of init]
    dt-network try SCRIPT.py [--members N] [--rounds N] [options]
    dt-network run FOLDER [--print]
    dt-network sign FILE [--at STEP]
    dt-network decay FILE --steps N [--from STEP] [--at STEP]
    dt-network show FILE|URL
    dt-network audit FOLDER|FILE|URL [--from COPY]
    dt-network rewind FOLDER --to STEP
    dt-network recover FOLDER [--above STEP]
    dt-network invite|allow|expel|members|serve|backup|restore ...   members (docs/registry.md)

``init`` makes the master's hotkey, writes ``network.toml`` with the usual rules and what the
options change, signs it, and prints the next commands. ``run`` (:mod:`.founder`) starts everything
that the founder's machine needs. ``--set KEY=VALUE`` changes any other rule, with the keys of
docs/network-file.md; rules can also be changed later in the file, which ``sign`` then signs as the
next version. `dt-registry` is another name of this program.
"""

from __future__ import annotations

import argparse
import shlex
import sqlite3
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distributed_training import NO_HELP, founding, signing
from distributed_training.chain.base import ChainError
from distributed_training.common.kinds import UnknownKindError
from distributed_training.config import ConfigError, exit_with, rules_at
from distributed_training.config.loader import Parser, argument, import_named, ranged
from distributed_training.config.types import EndpointUrl, File, NetworkName, Text, no_such_kind
from distributed_training.network import NetworkFileError, toml_value
from distributed_training.protocol.growth import TOKENS_A_PARAMETER
from distributed_training.protocol.types import ExitStatus
from distributed_training.registry import command as registry
from distributed_training.registry.store import StoreFault
from distributed_training.store.errors import StoreError


def _add_init_options(init: argparse.ArgumentParser) -> None:
    """Add the options of ``init`` and ``succeed``, in the order in which the help shows them."""
    text, path, add = argument(Text), argument(File), init.add_argument
    slowest = "{store:g}; over hivemind {hivemind:g}".format(**founding.SLOWEST_LINK)
    add("folder", type=path, help="new folder for network.toml and the founder's keys")
    name = "name of 3 to 59 lower-case letters, digits and '-'"
    add("--name", type=argument(NetworkName), required=True, help=name)
    exchange = (
        "exchange pseudo-gradients through a store, which needs no open port, or among peers over "
        f"hivemind [{founding.EXCHANGE}; succeed: as before]"
    )
    add("--exchange", choices=("store", "hivemind"), help=exchange)
    link = f"Mbit/s of the slowest member, which decides the time for uploads [{slowest}]"
    add("--slowest-link", type=ranged(0.001, 1e5), metavar="MBIT", help=link)
    host = "address of this machine, where peers over hivemind find the validator [the registry's]"
    add("--host", type=text, help=host)
    port = "port of the validator for peers over hivemind [8009]"
    add("--dht-port", type=ranged(1, 65535), default=8009, metavar="PORT", help=port)
    chain = init.add_mutually_exclusive_group(required=True).add_argument
    url = "URL of the registry that serves as the chain"
    chain("--registry", type=text, metavar="URL", help=url)
    netuid = "number of a subnet of Bittensor (another chain than finney: --set chain.endpoint=)"
    chain("--netuid", type=ranged(0, 65535), metavar="N", help=netuid)
    _add_rules(init, source="hub")
    unpinned = "let data and tokenizer change later, and publish neither"
    add("--unpinned", action="store_true", help=unpinned)
    store = (
        "S3 endpoint of the network's store; 'embedded' is a folder on this machine, which the "
        "registry serves [hivemind: R2, an account for each member]"
    )
    add("--store", type=_store, metavar="URL|embedded", help=store)
    miners = "members expected at first [2]"
    add("--miners", type=ranged(1, 4096), default=2, metavar="N", help=miners)
    tokens = (
        "tokens that all members train on together, over which the learning rate falls "
        f"[{TOKENS_A_PARAMETER} for each parameter]"
    )
    add("--tokens", type=ranged(1.0, 1e18), metavar="N", help=tokens)


def _add_rules(command: argparse.ArgumentParser, *, source: str) -> None:
    """Add the options for the model and its text. ``source``: the default source of text."""
    text, path = argument(Text), argument(File)
    model = command.add_mutually_exclusive_group().add_argument
    shape = "config.json of a Llama-like model, or 125m, 1b, 4b [one of 2 million parameters]"
    model("--model", type=path, metavar="FILE", help=shape)
    weights = "transformers model to start from, a folder or NAME[@COMMIT] at Hugging Face [random]"
    model("--from", type=path, metavar="DIR|NAME", dest="weights", help=weights)
    add = command.add_argument
    lora = (
        "train only adapters (LoRA) on --from: r=16,alpha=32,targets=all-linear,train=both (or B), "
        "or a folder written by PEFT [all weights are trained]"
    )
    add("--lora", type=text, metavar="RULES|DIR", help=lora)
    tokenizer = "tokenizer at Hugging Face or in a folder [the one of --from, else bytes]"
    add("--tokenizer", type=text, metavar="NAME|DIR", help=tokenizer)
    about = f"where members read text: hub, stdlib or parquet:DIR [{source}]"
    add("--data-source", type=text, metavar="SOURCE", help=about)
    of_file = "set a rule of the file, such as training.learning_rate=3e-4; may be repeated"
    more: dict[str, Any] = {"action": "append", "default": [], "dest": "more", "help": of_file}
    add("--set", type=_assignment, metavar="KEY=VALUE", **more)


def _add_try_options(add: Callable[..., Any]) -> None:
    add("script", type=argument(File), metavar="SCRIPT.py", help="your training script")
    add("--members", type=ranged(1, 64), default=3, metavar="N", help="how many run it [3]")
    rounds = "end after this many outer steps [2]"
    add("--rounds", type=ranged(1, 10**6), default=2, metavar="N", help=rounds)
    words = (
        "the script's arguments, in quotes; NETWORK becomes the network's file, and {member} in a "
        "word the member's number: 0, 1, 2 [NETWORK]"
    )
    add("--args", type=shlex.split, default="NETWORK", metavar="WORDS", help=words)
    of_folder: dict[str, Any] = {"type": argument(File), "default": Path("runs/try")}
    add("--folder", **of_folder, help="folder for all files, which is emptied first [runs/try]")
    longest = "end after this many seconds without an outer step [300; five periods if longer]"
    add("--timeout", type=ranged(1.0, 1e6), metavar="S", help=longest)


def build_parser() -> Parser:
    parser = Parser(prog="dt-network", description=(__doc__ or NO_HELP).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    text, path = argument(Text), argument(File)
    outer_step: dict[str, Any] = {"type": ranged(0, 10**9 - 2), "metavar": "STEP"}
    inner_step = ranged(1, 10**9)
    made: list[argparse.ArgumentParser] = []

    def command(name: str, run: Callable[[Any], int | None], about: str) -> Callable[..., Any]:
        made.append(commands.add_parser(name, help=about))
        made[-1].set_defaults(run=run)
        add: Callable[..., Any] = made[-1].add_argument
        return add

    command("init", founding.init, "write and sign the file of a new network")
    _add_init_options(made[-1])
    about = "continue as a new network, after the founder's key was lost"
    add = command("succeed", founding.succeed, about)
    _add_init_options(made[-1])
    of = "file of the network to continue"
    add("--of", type=path, required=True, metavar="FILE", help=of)
    of_init = {"type": path, "help": "folder that dt-network init made"}
    add = command("run", _run, "start what a founder runs, and keep it running")
    add("folder", **of_init)
    add("--print", action="store_true", help="print the commands and start nothing")
    takes = "lead the network at once, even if another validator does: that one stops"
    add("--take-over", action="store_true", help=takes)
    add("--validator-script", type=path, metavar="FILE", help="program to run as the validator")
    add = command("try", _try, "run a script that calls join() as every member of a network here")
    _add_try_options(add)
    _add_rules(made[-1], source="stdlib")
    made[-1].set_defaults(data_source="stdlib")
    at = (
        "outer step from which the version is in force [the newest one in the validator's run "
        "folder next to the file, plus 2]"
    )
    for name, run, about in (
        ("sign", signing.sign, "sign a changed file as the next version"),
        ("decay", signing.decay, "let a constant learning rate fall to 0, and sign"),
    ):
        add = command(name, run, about)
        add("file", type=path, help="the network's file")
        add("--at", **outer_step, help=at)
    steps = "inner steps that the decay takes"
    add("--steps", type=inner_step, required=True, metavar="N", help=steps)
    begins = "inner step of the network at which the decay begins [the one reached at --at]"
    add("--from", type=inner_step, dest="begins", metavar="STEP", help=begins)
    add = command("show", _show, "verify a network's file and print its rules")
    add("place", type=text, help="file, its URL, or local")
    add = command("audit", _of_chain, "recompute and check what a network has published")
    add("place", type=text, help="the founder's folder, or the network's file")
    copy = "folder with a copy of the global bucket [the bucket itself]"
    add("--from", type=path, dest="source", metavar="COPY", help=copy)
    about = "continue from the weights of an earlier outer step"
    add = command("rewind", _of_chain, about)
    add("folder", **of_init)
    to = "outer step to continue from, one whose weights the store has"
    add("--to", **outer_step, required=True, help=to)
    about = "continue after the bucket was restored from a backup, or emptied"
    add = command("recover", _of_chain, about)
    add("folder", **of_init)
    seen = "an outer step that a member has seen [what the bucket and this machine show]"
    add("--above", **outer_step, help=seen)
    for each in made:
        own: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "MODULE"}
        each.add_argument("--plugins", **own, help="your own modules to import first [none]")
    registry.add_commands(commands)
    return parser


def _store(word: str) -> Any:
    return word if word == founding.EMBEDDED else argument(EndpointUrl)(word)


def _assignment(word: str) -> tuple[str, Any]:
    """Return the key and the value of ``KEY=VALUE``. A value that is not TOML is taken as text."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{word!r:.100} is not KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _show(options: argparse.Namespace) -> None:
    """Print a network's line and each of its rules. Raises ConfigError."""
    network = rules_at(options.place).network
    assert network is not None
    print(network.line)
    for key, value in network.values.items():
        print(f"  {key} = {toml_value(value)}")


def _of_chain(options: argparse.Namespace) -> int:
    from distributed_training import chain_command  # imports torch, which other commands can spare

    status: int = getattr(chain_command, options.command)(options)
    return status


def _try(options: argparse.Namespace) -> int:
    from distributed_training.localnet import trial

    return trial.run(options)


def _run(options: argparse.Namespace) -> int:
    """Run a network, or print the commands that run it. Raises ConfigError."""
    from distributed_training import founder

    if not options.print:
        script = options.validator_script
        return founder.run(options.folder, take_over=options.take_over, script=script)
    plan = founder.FounderPlan.of(options.folder)
    for program in plan.words:
        print(plan.line(program))
    if "registry" in plan.words:
        print(f"dt-network {shlex.join(plan.invite)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        import_named(getattr(options, "plugins", []))
        return options.run(options) or ExitStatus.STOPPED
    except ConfigError as error:
        return exit_with(error, of_service=options.command in ("run", "serve"))
    except (ChainError, StoreError, StoreFault, OSError, sqlite3.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitStatus.FAULT
    except UnknownKindError as error:
        return exit_with(no_such_kind(error, key="round.codec", done="written"))
    except NetworkFileError as error:
        return exit_with(ConfigError(f"{error}, so nothing was signed: {error.remedy}"))
    except KeyboardInterrupt:
        print("interrupted: run the same command again", file=sys.stderr)
        return ExitStatus.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
