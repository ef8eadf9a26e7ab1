"""Create a network, run it, sign its file, and check what it has published.

    dt-network init FOLDER --name NAME (--registry URL | --netuid N) [options]
    dt-network succeed FOLDER --of FILE --name NAME ... [options of init]
    dt-network run FOLDER [--print]
    dt-network sign FILE [--at STEP] [--wallets FOLDER]
    dt-network decay FILE --steps N [--from STEP] [--at STEP] [--wallets FOLDER]
    dt-network show FILE|URL
    dt-network audit FOLDER|FILE|URL [--from COPY]
    dt-network rewind FOLDER --to STEP
    dt-network recover FOLDER [--above STEP]
    dt-network invite|allow|expel|members|backup|restore ...   the members (docs/registry.md)

``init`` makes the master's hotkey and, for a swarm, the validator's identity in it. It writes
``network.toml`` with the built-in network's rules and what the options change, signs it, and prints
what to run; ``run`` (:mod:`.founder`) starts everything that the founder's machine needs. Every
other rule is changed by ``--set KEY=VALUE`` with the keys of docs/network-file.md, or later in the
file, which ``sign`` then signs as the next version. ``audit``, ``rewind`` and
``recover`` (:mod:`.chain_command`) are for networks with ``exchange = "store"``.
"""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distributed_training import NO_HELP
from distributed_training.chain.base import ChainError
from distributed_training.common.addresses import Reach, reach
from distributed_training.common.files import write_bytes
from distributed_training.common.kinds import PluginError, UnknownKindError, import_plugins
from distributed_training.config import ConfigError, exit_with, load_config
from distributed_training.config.installed import require
from distributed_training.config.loader import Parser, argument, ranged
from distributed_training.config.model import check_exchange, check_schedule
from distributed_training.config.settings import ChainSettings
from distributed_training.config.types import (
    EndpointUrl,
    File,
    GlobalBucket,
    NetworkName,
    Text,
    no_such_kind,
    parse_duration,
    show,
)
from distributed_training.config.versions import describe, parse_version
from distributed_training.founder import (
    INVITATION,
    MASTER,
    RUN_FILE,
    STORE,
)
from distributed_training.founding import (
    check_model,
    choose_pages,
    pin_data,
    pin_tokenizer,
    pin_weights,
    publish_folders,
    read_model,
    refuse_vocabulary,
)
from distributed_training.network import (
    FILE,
    FORMATS,
    HELD_OUT,
    USUAL,
    VERSION_KEYS,
    VERSIONS,
    NetworkFileError,
    digest_of,
    flatten,
    is_identity,
    load_model,
    needless_keys,
    read_text,
    signed,
    to_toml,
    toml_value,
    tree_of,
    without_blocks,
)
from distributed_training.protocol.growth import (
    TOKENS_A_PARAMETER,
    Growth,
    amount,
    average_seconds,
    file_bytes,
    fitting_period,
    fitting_schedule,
    grace_seconds,
)
from distributed_training.protocol.keys import CONFIG
from distributed_training.protocol.metadata import LONGEST_KEY, parse_config
from distributed_training.protocol.types import UPDATE_CODEC, ExitStatus
from distributed_training.registry.__main__ import FIXED
from distributed_training.store.errors import StoreError

_CARRIED = ("data", "training", "round", "limits", "stop")
_SAMPLE = "sample/100BT"  # of the usual dataset, which has its texts several times
_EMBEDDED = "embedded"  # instead of a store's URL
_EXCHANGE = "store"  # of a network whose founder names none
#: Mbit/s up, of a member. An all-reduce sends 4 bytes a parameter, an upload half a byte.
_SLOWEST_LINK = {"store": 20.0, "hivemind": 500.0}
_SWARM_PORT = 8009
_LONGEST_PERIOD = 7 * 86400.0  # seconds
_HIGHEST_RATE = 0.1  # of AdamW and Muon
_MANY_WORDS = 32_000  # of a tokenizer; with fewer, less can be learned and lost


def _add_init_options(init: argparse.ArgumentParser) -> None:
    """Add the options of ``init`` and ``succeed``, group by group, in the order of their help."""
    _add_exchange(init)
    _add_chain(init)
    _add_model_and_text(init)
    _add_store(init)


def _add_exchange(init: argparse.ArgumentParser) -> None:
    text, path = argument(Text), argument(File)
    add = init.add_argument
    add("folder", type=path, help="new folder for network.toml and the founder's keys")
    add(
        "--name",
        type=argument(NetworkName),
        required=True,
        help="name of 3 to 59 lower-case letters, digits and '-'",
    )
    add(
        "--exchange",
        choices=("store", "hivemind"),
        help="exchange pseudo-gradients through a store, for which no member opens a port, or "
        f"among peers over hivemind [{_EXCHANGE}; succeed: as before]",
    )
    add(
        "--slowest-link",
        type=ranged(0.001, 1e5),
        metavar="MBIT",
        help="Mbit/s that the slowest member can send, from which the time for uploads is "
        f"computed [{_SLOWEST_LINK['store']:g}; over hivemind {_SLOWEST_LINK['hivemind']:g}]",
    )
    add(
        "--host",
        type=text,
        help="address of this machine, where peers over hivemind find the validator [the "
        "registry's; hivemind needs it]",
    )
    add(
        "--dht-port",
        type=ranged(1, 65535),
        metavar="PORT",
        help=f"port of the validator for peers over hivemind [{_SWARM_PORT}]",
    )


def _add_chain(init: argparse.ArgumentParser) -> None:
    text, add = argument(Text), init.add_argument
    chain = init.add_mutually_exclusive_group(required=True)
    chain.add_argument(
        "--registry", type=text, metavar="URL", help="URL of the registry that serves as the chain"
    )
    chain.add_argument(
        "--netuid", type=ranged(0, 65535), metavar="N", help="number of a subnet of Bittensor"
    )
    add(
        "--chain-endpoint",
        type=text,
        default="finney",
        metavar="URL|NAME",
        help="Bittensor's chain; with --netuid [finney]",
    )


def _add_model_and_text(init: argparse.ArgumentParser) -> None:
    text, path, add = argument(Text), argument(File), init.add_argument
    model = init.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        type=path,
        metavar="FILE",
        help="config.json of a Llama-like model, or 125m, 1b, 4b [one of 2 million parameters]",
    )
    model.add_argument(
        "--from",
        type=path,
        metavar="DIR",
        dest="weights",
        help="folder of a transformers model to begin with [random weights]",
    )
    add(
        "--tokenizer",
        type=text,
        metavar="NAME|DIR",
        help="tokenizer at Hugging Face or in a folder [the one of --from, else bytes]",
    )
    add(
        "--data-source",
        type=text,
        metavar="SOURCE",
        help="where members read text: hub, hf, stdlib or parquet:DIR [hub]",
    )
    add(
        "--unpinned",
        action="store_true",
        help="let data and tokenizer change later, and publish neither",
    )


def _add_store(init: argparse.ArgumentParser) -> None:
    add = init.add_argument
    add(
        "--bucket",
        type=argument(GlobalBucket),
        help="global bucket, or BUCKET/PREFIX [the network's name]",
    )
    add(
        "--store",
        type=lambda word: word if word == _EMBEDDED else argument(EndpointUrl)(word),
        metavar="URL|embedded",
        help="S3 endpoint of the network's store; 'embedded' is a folder on this machine, which "
        "the registry serves [hivemind: R2, an account for each member]",
    )
    add(
        "--miners",
        type=ranged(1, 4096),
        default=2,
        metavar="N",
        help="members expected at first [2]",
    )
    add(
        "--tokens",
        type=ranged(1.0, 1e18),
        metavar="N",
        help="tokens that all members train together, by which the learning rate falls "
        f"[{TOKENS_A_PARAMETER} for each parameter]",
    )
    add(
        "--set",
        type=_assignment,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="more",
        help="set another rule of the file, such as training.learning_rate=3e-4; may be repeated",
    )


def _add_signing(commands: argparse._SubParsersAction[Parser]) -> list[Parser]:
    """Add the commands that sign a version of a network's file, and return them."""
    path = argument(File)
    sign = commands.add_parser("sign", help="sign a changed file as the next version")
    decay = commands.add_parser("decay", help="let a constant learning rate fall to 0, and sign")
    add = decay.add_argument
    add(
        "--steps",
        type=ranged(1, 10**9),
        required=True,
        metavar="N",
        help="inner steps that the decay takes",
    )
    add(
        "--from",
        type=ranged(1, 10**9),
        dest="begins",
        metavar="STEP",
        help="inner step of the network at which it begins [the one at the outer step of --at]",
    )
    for command in (sign, decay):
        add = command.add_argument
        add("file", type=path, help="the network's file")
        add(
            "--wallets",
            type=path,
            metavar="DIR",
            help="folder of the founder's wallet [wallets, next to the file]",
        )
        add(
            "--at",
            type=ranged(0, 10**9 - 1),
            metavar="STEP",
            help="outer step from which the version holds [the newest one in the validator's run "
            "folder next to the file, plus 2]",
        )
    return [sign, decay]


def build_parser() -> Parser:
    parser = Parser(prog="dt-network", description=(__doc__ or NO_HELP).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    text, path = argument(Text), argument(File)
    init = commands.add_parser("init", help="write and sign the file of a new network")
    _add_init_options(init)
    succeed = commands.add_parser(
        "succeed",
        parents=[init],
        add_help=False,
        help="continue as a new network, after the founder's key was lost",
    )
    succeed.add_argument(
        "--of", type=path, required=True, metavar="FILE", help="file of the network to continue"
    )
    run = commands.add_parser("run", help="start what a founder runs, and keep it running")
    run.add_argument("folder", type=path, help="folder that dt-network init made")
    run.add_argument("--print", action="store_true", help="print the commands and start nothing")
    run.add_argument(
        "--take-over",
        action="store_true",
        help="lead the network at once, although another validator may: that one stops",
    )
    signing = _add_signing(commands)
    show = commands.add_parser("show", help="verify a network's file and print its rules")
    show.add_argument("place", type=text, help="file, its URL, or local")
    audit = commands.add_parser("audit", help="compute again what a network has published")
    audit.add_argument("place", type=text, help="folder of the founder, or the network's file")
    audit.add_argument(
        "--from",
        type=path,
        dest="source",
        metavar="COPY",
        help="folder with a copy of the global bucket [the bucket itself]",
    )
    rewind = commands.add_parser(
        "rewind", help="continue from the weights of an earlier outer step"
    )
    rewind.add_argument("folder", type=path, help="folder that dt-network init made")
    rewind.add_argument(
        "--to",
        type=ranged(0, 10**9 - 1),
        required=True,
        metavar="STEP",
        help="outer step to continue from, one whose weights the store has",
    )
    recover = commands.add_parser(
        "recover", help="continue after the bucket was put back from a copy, or emptied"
    )
    recover.add_argument("folder", type=path, help="folder that dt-network init made")
    recover.add_argument(
        "--above",
        type=ranged(0, 10**9 - 2),
        metavar="STEP",
        help="an outer step that a member has seen [what bucket, run folder and registry show]",
    )
    for command in (init, succeed, run, *signing, show, audit, rewind, recover):
        command.add_argument(
            "--plugins",
            nargs="+",
            default=[],
            metavar="MODULE",
            help="your own modules to import first [none]",
        )
    return parser


def _assignment(word: str) -> tuple[str, Any]:
    """Return key and value of ``KEY=VALUE``; the value as TOML reads it, else as text."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{word!r:.100} is no KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


#: Commands about the members, by their names in the registry's own program.
_OF_MEMBERS = {
    "members": "status",
    **{name: name for name in ("invite", "allow", "expel", "backup", "restore")},
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["join"]:  # its name up to 0.2.0
        from distributed_training import join_command

        return join_command.main(argv[1:])
    if argv and argv[0] in _OF_MEMBERS:
        from distributed_training.registry import __main__ as registry

        return registry.main([_OF_MEMBERS[argv[0]], *argv[1:]])
    options = build_parser().parse_args(argv)
    try:
        import_plugins(options.plugins)
        if options.command == "run":
            return _run(options)
        if options.command in ("audit", "rewind", "recover"):
            from distributed_training import chain_command  # torch, which the others need not

            status: int = getattr(chain_command, options.command)(options)
            return status
        commands = {"init": _init, "succeed": _succeed, "sign": _sign, "decay": _decay}
        {**commands, "show": _show}[options.command](options)
    except ConfigError as error:
        return exit_with(error, of_service=options.command == "run")
    except (ChainError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitStatus.FAULT
    except PluginError as error:
        return exit_with(ConfigError(f"--plugins: {error}"))
    except UnknownKindError as error:
        return exit_with(no_such_kind(error, key="round.codec", done="written"))
    except NetworkFileError as error:
        return exit_with(ConfigError(f"{error}, so nothing was signed: {error.remedy}"))
    except KeyboardInterrupt:
        print("interrupted: give the same command again", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    return 0


def _init(options: argparse.Namespace) -> None:
    """Create a network. Raises ConfigError, NetworkFileError; no folder is left then."""
    folder: Path = options.folder.absolute()
    if folder.exists():
        raise ConfigError(
            f"{folder} exists already, so no network was created: give a folder that is not there, "
            "or change its network.toml and run dt-network sign"
        )
    if options.weights is not None:
        from distributed_training.data.tokenizer import name_of_folder

        options.weights = options.weights.absolute()
        options.model = options.weights / CONFIG
        options.tokenizer = options.tokenizer or name_of_folder(options.weights)
    options.tokenizer = options.tokenizer or "bytes"
    options.exchange = options.exchange or _EXCHANGE
    _refuse_options(options)
    wanted = {"hivemind": "a network over hivemind"} if options.exchange == "hivemind" else {}
    require(**wanted)
    rules = _rules(options)
    # Before the folder is made: the source of the data may be away.
    if rules["data"].get("own") is not True:  # else nobody reads them
        pin_data(rules["data"], unpinned=options.unpinned)
    old = getattr(options, "of", None)
    held_out = choose_pages(rules["data"], beside=None if old is None else old.absolute().parent)
    if not options.unpinned:
        pin_tokenizer(rules["tokenizer"])
    model = rules["model"].get("config")
    refuse_vocabulary(rules["tokenizer"], model)
    try:
        # For the founder only: the keys in it are the network's authority.
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made ({error.strerror}), so no network was created: give another"
        ) from None
    with ExitStack() as stack:
        # Of what was made just now; Ctrl-C too.
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        from distributed_training.chain.identity import create_wallet

        master = create_wallet(folder / "wallets", MASTER)
        # What git picked up would be in every clone.
        (folder / "wallets" / ".gitignore").write_text("*\n")
        secret = ("wallets", INVITATION, "registry", "store", "validator")
        (folder / ".gitignore").write_text("".join(f"/{name}\n" for name in secret))
        for name, content in held_out.items():
            (folder / HELD_OUT).mkdir(exist_ok=True)
            write_bytes(folder / HELD_OUT / name, content)
        rules["chain"].setdefault("master_hotkey", master.ss58)
        published = folder / "validator" / "published"
        published.parent.mkdir()
        pin_weights(rules["model"], published, options.weights)
        if not options.unpinned:
            publish_folders(rules, published)
        text = (
            f"# The rules of the network {options.name} (docs/network-file.md). After a change:\n"
            f"# dt-network sign {FILE}\n" + to_toml(rules)
        )
        _write(folder / FILE, signed(text, master.hotkey, nearby=_no_file_nearby))
        write_bytes(folder / RUN_FILE, _run_file(options).encode())
        if options.store == _EMBEDDED:
            (folder / STORE / rules["store"]["global_bucket"]).mkdir(parents=True)
        stack.pop_all()
    _show(argparse.Namespace(place=str(folder / FILE)), rules=False)
    print(_describe_training(folder / FILE, options.miners))
    print(_what_to_run(options, folder))


def _describe_training(file: Path, members: int) -> str:
    """Return the schedule and, with a store, the bytes that members send and the store keeps."""
    config = load_config(
        "validator", ["--network", str(file)], environ={}, dotenv=None, check=False
    )
    rounds, training = config.validator, config.training
    assert config.network is not None
    tokens = members * config.tokens_of_step * training.total_steps
    schedule = (
        f"learning rate {training.learning_rate:g} after {training.warmup_steps} inner steps; its "
        f"schedule ends at inner step {training.total_steps}, after {amount(tokens)} tokens of "
        f"{members} members (--tokens, --miners)"
    )
    growth = Growth(
        members,
        config.network.head.exchanged,
        codec=rounds.codec,
        weights_every=rounds.weights_every,
        keep_uploads=rounds.keep_uploads,
    )
    return (
        f"{schedule}\n"
        f"each {show(config.round_period)} a member sends {growth.upload / 1e6:.1f} MB within "
        f"{show(rounds.grace)} and receives {growth.update / 1e6:.1f} MB; "
        f"{growth.describe_store()}"
    )


def _succeed(options: argparse.Namespace) -> None:
    """Create a network with the last weights and the rules of another. Raises as :func:`_init`."""
    from distributed_training.scoring import export

    old = flatten(tree_of(read_text(options.of)))
    options.exchange = options.exchange or str(old.get("exchange"))
    own = {"data.source", "data.files", "tokenizer.files"}  # pinned again, as its members read them
    needless = needless_keys(options.exchange)
    carried = [
        (key, value)
        for key, value in old.items()
        if (key.partition(".")[0] in _CARRIED or key in ("model.kind", "model.trainable"))
        and key not in own | needless
    ]
    options.more = [*carried, *options.more]
    options.data_source = options.data_source or old.get("data.source", "hf")
    if options.weights is None:
        options.weights = options.folder.absolute().with_name(f"{options.folder.name}-weights")
        words = [str(options.weights), "--network", str(options.of)]
        kept = options.of.absolute().parent / "validator"
        words += ["--from", str(kept)] if (kept / "global").is_dir() else []
        if status := export.main(words):
            raise SystemExit(status)
    _init(options)


def _is_private(options: argparse.Namespace) -> bool:
    """Return whether the founder's address is one of a private network. Raises ConfigError."""
    host = _host_of(options)
    try:
        found = reach(host)
    except ValueError:  # a name counts as public: --set private=true
        return False
    if found > ChainSettings(private=True, registry_url=options.registry).narrowest:
        raise ConfigError(
            f"--host {host} cannot be reached from other machines, so no network was "
            "created: give this machine's address in the network of all its peers; for a trial on "
            "one machine the --registry's too is 127.0.0.1"
        )
    return found is not Reach.EVERYWHERE


def _host_of(options: argparse.Namespace) -> str:
    """Return the address of the founder's machine: ``--host``, or where its registry is."""
    return options.host or urlsplit(options.registry or "").hostname or ""


def _refuse_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that are missing, or do not fit this exchange."""
    if options.exchange != "hivemind" and options.dht_port is not None:
        raise ConfigError(
            "--dht-port is of --exchange hivemind, so no network was created: leave it out, no "
            "peer of this one listens"
        )
    if _own_buckets(options):
        return
    if options.registry is None:
        raise ConfigError(
            "--exchange store without --registry, so nobody would give members access to the store "
            "and no network was created: give --registry, or --set store.access=own, by which each "
            "member has a bucket of its own"
        )
    if options.store is None:
        raise ConfigError(
            "--store is missing, so no member could upload and no network was created: give the "
            "URL of an S3 store (of R2 https://ACCOUNT.r2.cloudflarestorage.com), or embedded"
        )


def _own_buckets(options: argparse.Namespace) -> bool:
    embedded = options.store == _EMBEDDED
    default = "own" if options.exchange == "hivemind" and not embedded else "registry"
    return bool(dict(options.more).get("store.access", default) == "own")


def _choose_schedule(rules: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the rules of training that fit the model and the tokens, unless they are given.

    With a store the period too, and a held-out rise for models of few words.
    """
    given, training, of_round = dict(options.more), rules["training"], rules["round"]
    sizes = [training.get(key) for key in ("effective_batch", "sequence_length")]
    # What is of another type is refused with the whole file.
    if not all(type(size) is int and size > 0 for size in sizes):
        return
    parameters, words = rules["model"]["parameters"], rules["model"]["config"].get("vocab_size")
    fits = fitting_schedule(
        parameters,
        options.miners * math.prod(sizes),
        options.tokens,
        warmup=given.get("training.warmup_steps"),
        total=given.get("training.total_steps"),
    )
    if options.weights is not None:  # a higher rate first undoes what low rates have learned
        fits = replace(fits, learning_rate=fits.learning_rate / 10)
    training |= {k: v for k, v in asdict(fits).items() if f"training.{k}" not in given}
    if type(words) is int and 1 < words < _MANY_WORDS and "round.held_out_rise" not in given:
        # The same share of all that can be learned, which is the logarithm of the words.
        of_round["held_out_rise"] = round(0.25 * math.log(words) / math.log(_MANY_WORDS), 3)
    if options.exchange == "store" and "round.period" not in given:
        codec = of_round.get("codec", UPDATE_CODEC)
        period = fitting_period(parameters, codec, options.slowest_link or _SLOWEST_LINK["store"])
        of_round["period"] = f"{period / 60:g}m"


def _choose_grace(rules: dict[str, Any], link: float | None) -> None:
    """Add the time in which the slowest member has uploaded, unless the rules have it.

    Raises ConfigError where it is above a third of the period.
    """
    of_round, parameters = rules["round"], rules["model"]["parameters"]
    codec, period = of_round.get("codec", UPDATE_CODEC), _seconds_of(of_round.get("period"))
    if "grace" in of_round or period is None:
        return
    link = link or _SLOWEST_LINK[rules["exchange"]]
    grace = grace_seconds(parameters, codec, link, period=period)
    # With the whole margins, which a longer period has.
    most = grace_seconds(parameters, codec, link, period=math.inf)
    if rules["exchange"] == "hivemind":
        # The all-reduce comes when uploads are written.
        of_round.setdefault("average_after", f"{grace // 2}s")
        grace += average_seconds(parameters, link, period=period)
        most += average_seconds(parameters, link, period=math.inf)
    if grace > period / 3:
        raise ConfigError(
            f"an upload of {file_bytes(parameters, codec) / 1e6:.0f} MB with {link:g} Mbit/s, and "
            f"the checkpoint before it, take {grace} s, above a third of the period of "
            f"{period:g} s, so no network was created: --set "
            f"round.period={math.ceil(3 * most)}s, or a faster "
            "--slowest-link, or --set round.codec={SMALLEST}"
        )
    of_round["grace"] = f"{grace}s"


def _rules(options: argparse.Namespace) -> dict[str, Any]:
    """Return the usual rules, with what the options say in their place.

    Raises ConfigError for a key that is no place for a value, or a host that no other reaches.
    """
    rules: dict[str, Any] = {}
    for key, value in USUAL.items():
        section, _, name = key.partition(".")
        rules.setdefault(section, {})[name] = value
    chain: dict[str, Any] = {"kind": "registry", "url": options.registry}
    if options.registry is None:
        chain = {"kind": "bittensor", "endpoint": options.chain_endpoint, "netuid": options.netuid}
    rules |= {"format": FORMATS[-1], "name": options.name, "version": 1}
    if _is_private(options):
        rules["private"] = True
    rules |= {"chain": chain, "model": {}, "tokenizer": {"name": options.tokenizer}}
    rules["data"]["source"] = options.data_source or "hub"
    rules["store"] = {"global_bucket": options.bucket or options.name}
    if options.store == _EMBEDDED:
        rules["store"] |= {"endpoint": options.registry, "access": "registry"}
    elif options.store:
        rules["store"]["endpoint"] = options.store
    rules["training"]["weight_decay_on"] = "matrices"
    rules["exchange"] = options.exchange
    rules["training"]["late_overlap"] = "dropped"  # see bench.store_loss
    for key, value in options.more:
        table, name = rules, key
        if "." in key:
            section, _, name = key.partition(".")
            table = rules.setdefault(section, {})
        # What is read of the rules later would not be of the kind that it has to be.
        if not isinstance(table, dict) or (key in rules and isinstance(rules[key], dict)):
            raise ConfigError(
                f"--set {key}: the file has no such key, so no network was created: "
                "docs/network-file.md lists all"
            )
        table[name] = value
    if options.store == _EMBEDDED:
        if options.registry is None:
            raise ConfigError(
                "--store embedded with --netuid, so nobody would serve it and no network was "
                "created: give --registry, or --store the URL of another"
            )
        if _own_buckets(options):
            raise ConfigError(
                "--store embedded with store.access=own, and the registry serves one bucket, so no "
                "network was created: leave store.access out, or give --store the URL of another"
            )
    data = rules["data"]
    as_built_in = data["source"] == "hub" and data["dataset"] == USUAL["data.dataset"]
    if "data.dataset" not in dict(options.more) and data["source"] not in ("hub", "hf"):
        data["dataset"] = str(data["source"]).partition(":")[0]  # no dataset of the hub is read
    if as_built_in and not {"folder", "revision", "rows"} & set(data):
        data["folder"] = _SAMPLE
    # What is given counts for the model too; a number of its parameters is compared with it.
    config = read_model(options.model, tokenizer=options.tokenizer)
    rules["model"] = {"config": config} | rules["model"]
    check_model(rules["model"], rules["training"].get("sequence_length"))
    _choose_schedule(rules, options)
    _choose_grace(rules, options.slowest_link)
    return rules


def _no_file_nearby(name: str) -> str:
    raise NetworkFileError(f"model.config_file {name} is not supported here", "use model.config")


def _write(path: Path, text: str) -> None:
    """Write a network's file if a miner accepts it. Raises ConfigError and keeps the old file."""
    _refuse_period(flatten(tree_of(text)))
    # Next to the file: a model's file is looked for in the same folder.
    trial = path.with_name(f".{path.name}")
    write_bytes(trial, text.encode())
    try:
        given = ["--network", str(trial)]
        config = load_config("miner", given, environ={}, dotenv=None, check=False)
        problems = [*check_schedule(config), *check_exchange(config)]
        rate = config.training.learning_rate
        name = {"adamw": "AdamW", "muon": "Muon"}.get(config.training.optimizer)
        if name and rate > _HIGHEST_RATE:
            problems.append(
                f"training.learning_rate {rate} is above {_HIGHEST_RATE}, at which {name} trains "
                "no model, so nothing was signed: give a rate such as 2.5e-4"
            )
        if problems:
            raise ConfigError(problems[0])
        if config.network:
            kept = path.absolute().parent / VERSIONS
            kept.mkdir(exist_ok=True)
            # First: a version that is not there could be signed a second time, otherwise.
            write_bytes(kept / f"{config.network.head.version}.toml", text.encode())
        os.replace(trial, path)
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(trial), str(path))) from None
    finally:
        trial.unlink(missing_ok=True)


def _decay(options: argparse.Namespace) -> None:
    """Write the two keys into the file, and sign it as the next version. Raises ConfigError."""
    path, begins = options.file, options.begins
    outer_step, inner_steps = _place_of_the_validator(path)
    text = read_text(path)
    flat = flatten(tree_of(text))
    before = flat.get("from_outer_step", 0)
    if not isinstance(before, int):
        raise ConfigError(f"from_outer_step {before!r:.50} of {path} is no number: remove the line")
    at = _first_outer_step(options, outer_step, before)
    if begins is None and outer_step and inner_steps:
        begins = round(inner_steps * max(1.0, at / outer_step))  # at the pace until now
    if not begins:
        raise ConfigError(
            f"{path.absolute().parent / 'validator'} does not say at which inner step the network "
            "is, so nothing was signed: give --from with total_inner_steps of config.json in the "
            "global bucket"
        )
    added = {"training.decay_from": begins, "training.decay_steps": options.steps}
    wanted = flat | added
    text = re.sub(r"(?m)^[ \t]*decay_(from|steps)[ \t]*=.*\n", "", text)
    lines = "".join(f"{key.partition('.')[2]} = {value}\n" for key, value in added.items())
    text = re.sub(r"(?m)^\[training\].*\n", lambda head: head[0] + lines, text, count=1)
    # Of every layout that TOML allows: not all is found by such patterns.
    if flatten(tree_of(text)) != wanted:
        raise ConfigError(
            f"{path} is not laid out as dt-network init writes it, so nothing was signed: write "
            f"{' and '.join(f'{key} = {value}' for key, value in added.items())} into it, and run "
            "dt-network sign"
        )
    _sign(options, text)
    print(
        f"the learning rate falls to 0 from inner step {begins} of the network on, until "
        f"{begins + options.steps}. Weights, outer step and the place in the schedule stay"
    )


def _place_of_the_validator(path: Path) -> tuple[int | None, int | None]:
    """Return outer step and inner steps of the newest global state that the founder's machine has.

    None where the validator's run folder next to the file does not say; outer step -1 where that
    folder is as ``init`` made it.
    """
    from distributed_training.store.bucket_reader import states

    folder = path.absolute().parent / "validator"
    found = []
    with suppress(OSError):
        found = states(folder / "global")
    if not found:
        return (-1 if folder.is_dir() and not (folder / "ledger.json").exists() else None), None
    with suppress(OSError, ValueError):
        config = (found[-1][1] / CONFIG).read_bytes()
        return found[-1][0], parse_config(config)[1].total_inner_steps
    return found[-1][0], None


def _first_outer_step(options: argparse.Namespace, now: int | None, before: int) -> int:
    """Return the outer step from which a new version holds, as the one ``before`` it does.

    Raises ConfigError.
    """
    if options.at is None and now is None:
        raise ConfigError(
            f"the validator's run folder is not next to {options.file}, so nothing was signed: "
            "give --at with the outer step from which the new version is to hold, later than the "
            "network's"
        )
    if options.at is None:
        # A round may be under way. What the version before is to change later comes no earlier.
        return max(0 if now == -1 else int(now or 0) + 2, before)
    if now is not None and options.at <= now:
        raise ConfigError(
            f"--at {options.at} is past, the network is at outer step {now}, so nothing was "
            f"signed: give {now + 1} or later"
        )
    return int(options.at)


def _next_version(
    options: argparse.Namespace, flat: Mapping[str, Any], nearby: Callable[[str], str]
) -> dict[str, Any]:
    """Return the first lines by which a file follows the version before it. Raises ConfigError."""
    path: Path = options.file
    folder = path.absolute().parent / VERSIONS
    kept = {int(p.stem): p for p in folder.glob("*.toml") if p.stem.isdecimal()}
    if not kept:
        if flat.get("version") != 1:
            raise ConfigError(
                f"{path} is version {flat.get('version')} and {folder} has none before it, so "
                "nothing was signed: restore that folder, or set version = 1 for a new network"
            )
        return dict.fromkeys(VERSION_KEYS) | {"version": 1}
    newest = max(kept)
    before = flatten(tree_of(read_text(kept[newest])))
    load_model(before, nearby)
    if flat.get("exchange") != before.get("exchange"):
        raise ConfigError(
            f"exchange is another one than in version {newest}, and members of the two cannot "
            "meet, so nothing was signed: create that network with dt-network succeed"
        )
    apart = {*VERSION_KEYS, "signature"}
    changed = {k for k in flat.keys() | before.keys() if flat.get(k) != before.get(k)} - apart
    for key in sorted(filter(is_identity, changed)):
        raise ConfigError(
            f"{key} is another one than in version {newest}, so this would be another network and "
            "nothing was signed: create that one with dt-network init"
        )
    if flat.get("chain.kind") == "registry" and (fixed := changed & {*FIXED.values()}):
        raise ConfigError(
            f"{min(fixed)} is another one than in version {newest}, and a registry keeps for good "
            "what it was created with, so nothing was signed: set it back there"
        )
    # Nothing would publish the new files, and members read those that they have.
    if "data.files" in changed or ("data.files" in flat and "data.source" in changed):
        raise ConfigError(
            f"the data are others than in version {newest}, and those of data.files are published "
            "when a network is created, so nothing was signed: set data.source and data.files back "
            "there, or continue with the new data by dt-network succeed"
        )
    holds = before.get("from_outer_step", 0)
    if not changed and options.at in (None, holds):
        return {key: before.get(key) for key in VERSION_KEYS}
    if not changed and options.at > holds:
        raise ConfigError(
            f"version {newest} has these rules and holds from outer step {holds} on, so one from "
            f"{options.at} on would put nothing off and nothing was signed: take the change back "
            f"with --at {holds}, and make it again with --at {options.at}"
        )
    return {
        "version": newest + 1,
        "previous": f"sha256:{digest_of(before)}",
        "from_outer_step": _first_outer_step(options, _place_of_the_validator(path)[0], holds),
    }


def _seconds_of(value: Any) -> float | None:
    """Return the seconds of a duration in a file; None for what is refused with the whole file."""
    try:
        return parse_duration(str(value)).total_seconds()
    except ValueError:
        return None


def _refuse_period(flat: Mapping[str, Any]) -> None:
    """Raise ConfigError for a period that the grace does not fit into, or of over a week."""
    period, grace = (_seconds_of(flat.get(f"round.{key}")) for key in ("period", "grace"))
    if period is None or grace is None or 3 * grace <= period <= _LONGEST_PERIOD:
        return
    why = f"round.grace {flat['round.grace']} is above a third of the period of {period:g} s"
    if period > _LONGEST_PERIOD:
        why = f"round.period {flat['round.period']} is longer than a week"
    raise ConfigError(
        f"{why}, so nothing was signed: set round.period to {3 * grace:g}s, the smallest that fits "
        "round.grace, or to more, and at most to 7d"
    )


def _sign(options: argparse.Namespace, text: str | None = None) -> None:
    """Sign the file, with ``text`` in its place if there is any. Raises ConfigError."""
    from distributed_training.chain.identity import load_wallet

    path: Path = options.file

    def nearby(name: str) -> str:
        return read_text(path.with_name(name))

    wallets = options.wallets or path.absolute().parent / "wallets"
    master = load_wallet(ChainSettings(wallet_path=str(wallets), wallet_name=MASTER))
    text = without_blocks(text or read_text(path))
    flat = flatten(tree_of(text))
    named = flat.get("chain.master_hotkey")
    if named != master.ss58:
        raise ConfigError(
            f"{path} names the master {named} and the wallet in {wallets} is {master.ss58}, so "
            "nothing was signed: give --wallets with the master's"
        )
    load_model(flat, nearby)
    if "model.config" in flat:
        model = {key.removeprefix("model."): flat[key] for key in flat if key.startswith("model.")}
        check_model(model, flat.get("training.sequence_length"))
    head = None
    # What is of subnet 38, or of no known format, is refused with the whole file.
    if flat.get("format") == 3 or (flat.get("format"), flat.get("exchange")) == (2, "store"):
        flat["format"] = FORMATS[-1]  # the same network in the newest format
        head = {"format": flat["format"], **_next_version(options, flat, nearby)}
    _write(path, signed(text, master.hotkey, nearby=nearby, head=head))
    _show(argparse.Namespace(place=str(path)), rules=False)
    if head is not None and head["previous"] is not None:
        given = ["--network", str(path)]
        after = load_config("miner", given, environ={}, dotenv=None, check=False).network
        assert after is not None
        before = read_text(path.absolute().parent / VERSIONS / f"{after.head.version - 1}.toml")
        print(describe(parse_version(before, after), after))


def _show(options: argparse.Namespace, *, rules: bool = True) -> None:
    given = ["--network", str(options.place)]
    config = load_config("miner", given, environ={}, dotenv=None, check=False)
    assert config.network is not None
    print(config.network.line)
    if rules:
        for key, value in config.network.values.items():
            print(f"  {key} = {toml_value(value)}")


def _run_file(options: argparse.Namespace) -> str:
    """Return the text of the file of flags that do not follow from the network's file."""
    flags: dict[str, Any] = {}
    if options.exchange == "hivemind":
        flags["dht.port"] = options.dht_port or _SWARM_PORT
        with suppress(ValueError):  # a name is looked up by the validator itself
            flags["dht.ip"] = str(ipaddress.IPv4Address(options.host or ""))
    if options.weights:
        flags["validator.weights"] = str(options.weights)
    if options.plugins:
        flags["plugins"] = options.plugins
    return (
        "# More flags than those that `dt-network run` finds itself (--print shows all), without\n"
        '# the dashes: "neuron.device" = "cuda:1" below [validator]. [registry] and [store] too.\n'
        "[validator]\n"
        + "".join(f'"{name}" = {toml_value(value)}\n' for name, value in flags.items())
    )


def _run(options: argparse.Namespace) -> int:
    """Run a network, or print the commands that run it. Raises ConfigError."""
    from distributed_training import founder

    if not options.print:
        return founder.run(options.folder, take_over=options.take_over)
    plan = founder.FounderPlan.of(options.folder)
    for program in plan.words:
        print(plan.line(program))
    if "registry" in plan.words:
        print(f"dt-network {shlex.join(plan.invite)}")
    return 0


def _what_to_run(options: argparse.Namespace, folder: Path) -> str:
    lines = [
        f"{folder / 'wallets'} is the network's authority: keep a copy, never give it away.",
    ]
    if options.store != _EMBEDDED:
        bucket, keys = options.bucket or options.name, "two keys"
        if not _own_buckets(options):
            keys = "a key that reads, writes and deletes objects"
        lines.append(f"\nInto .env here: {keys} of the global bucket {bucket}, which you make.")
        lengths = f"of up to {LONGEST_KEY} characters, and no account"
        if options.registry is None:
            lengths = "of R2's lengths (account 32, key 32, secret 64): a public chain has no other"
        lines += [f"Keys of {options.store}: {lengths}."] if options.store else []
    lines += [
        "\nThen, on this machine (--print shows what that starts):",
        f"  dt-network run {shlex.quote(str(options.folder))}",
    ]
    words, what = "the file, published for example over https", FILE
    if options.registry is not None:
        place = options.folder / INVITATION
        lines.append(f"Its first start makes an invitation for five who join: {place}")
        words, what = "what that says", "INVITATION"
    lines.append(f"\nEvery other machine, with {words}:\n  dt-join {what}\n  dt-miner")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
