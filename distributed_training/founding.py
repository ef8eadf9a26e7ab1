"""Create a network: its rules, its keys and its signed file, in the founder's folder."""

from __future__ import annotations

import argparse
import ipaddress
import math
import shlex
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distributed_training.common.addresses import Reach, reach
from distributed_training.common.files import write_bytes
from distributed_training.config import Config, ConfigError
from distributed_training.config.installed import require
from distributed_training.config.settings import ChainSettings
from distributed_training.config.types import parse_duration
from distributed_training.config.types import show as show_value
from distributed_training.founder import INVITATION, MASTER, RUN_FILE, STORE
from distributed_training.founding_checks import (
    adapter_rules,
    begin_adapters,
    check_model,
    choose_pages,
    find_base,
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
    flatten,
    needless_keys,
    read_text,
    signed,
    to_toml,
    toml_value,
    tree_of,
)
from distributed_training.protocol.growth import (
    Growth,
    amount,
    average_seconds,
    file_bytes,
    fitting_period,
    fitting_schedule,
    grace_seconds,
)
from distributed_training.protocol.keys import CONFIG
from distributed_training.protocol.metadata import LONGEST_KEY
from distributed_training.protocol.types import SMALLEST, UPDATE_CODEC
from distributed_training.signing import write_file

EMBEDDED = "embedded"  # instead of a store's URL
EXCHANGE = "store"  # exchange of a network whose founder does not choose one
#: Mbit/s at which the slowest member sends. An all-reduce sends 4 bytes per parameter, but an
#: upload only half a byte.
SLOWEST_LINK = {"store": 20.0, "hivemind": 500.0}
_CARRIED = ("data", "training", "round", "limits", "stop")
_CARRIED_OF_MODEL = ("model.kind", "model.settings", "model.trainable")
ADAPTERS = "adapters"  # folder, next to the file, of the adapters that the network starts with
_SAMPLE = "sample/100BT"  # part of the usual dataset; the whole dataset repeats some texts
_MANY_WORDS = 32_000  # with a smaller vocabulary, the loss can rise less


def init(options: argparse.Namespace) -> None:
    """Create a network. Raises ConfigError or NetworkFileError, in which case no folder is left."""
    folder: Path = options.folder.absolute()
    if folder.exists():
        raise ConfigError(
            f"{folder} exists already, so no network was created: choose a folder that does not "
            "exist, or change its network.toml and run dt-network sign"
        )
    if options.lora and options.weights is None:
        raise ConfigError(
            "--lora without --from has no base to adapt, so no network was created: set --from "
            "to the folder of a transformers model, or to its name at the hub"
        )
    base = ""
    if options.weights is not None:
        from distributed_training.data.tokenizer import name_of_folder

        options.weights, base = find_base(options.weights)
        options.model = options.weights / CONFIG
        options.tokenizer = options.tokenizer or name_of_folder(options.weights)
    options.tokenizer = options.tokenizer or "bytes"
    options.exchange = options.exchange or EXCHANGE
    _refuse_options(options)
    wanted = {"hivemind": "a network over hivemind"} if options.exchange == "hivemind" else {}
    require(**wanted | ({"lora": "a network that trains adapters"} if options.lora else {}))
    if options.lora:
        options.more = [*options.more, *adapter_rules(options.lora, options.model, base)]
    rules = rules_of(options)
    # Read the data before the folder is made, because its source may not answer. If members use
    # text of their own, nobody reads a source.
    if rules["data"].get("own") is not True:
        pin_data(rules["data"], unpinned=options.unpinned)
    old = getattr(options, "of", None)
    held_out = choose_pages(rules["data"], beside=None if old is None else old.absolute().parent)
    if not options.unpinned:
        pin_tokenizer(rules["tokenizer"])
    model = rules["model"].get("config")
    refuse_vocabulary(rules["tokenizer"], model)
    try:
        # Only the founder may read the folder, because the keys in it control the network.
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"cannot create {folder} ({error.strerror}), so no network was created: choose another"
        ) from None
    with ExitStack() as stack:
        # If anything fails, or after Ctrl-C, remove what was just created.
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        from distributed_training.chain.identity import create_wallet

        master = create_wallet(folder / "wallets", MASTER)
        # If git picked up a key, it would be in every clone.
        (folder / "wallets" / ".gitignore").write_text("*\n")
        secret = ("wallets", INVITATION, "registry", "store", "validator")
        (folder / ".gitignore").write_text("".join(f"/{name}\n" for name in secret))
        for name, content in held_out.items():
            (folder / HELD_OUT).mkdir(exist_ok=True)
            write_bytes(folder / HELD_OUT / name, content)
        rules["chain"].setdefault("master_hotkey", master.ss58)
        published = folder / "validator" / "published"
        published.parent.mkdir()
        start = options.weights
        if options.lora:
            start = begin_adapters(folder / ADAPTERS, rules["model"], options.lora)
        pin_weights(rules["model"], published, options.weights, start)
        _refuse_another_base(rules["model"], options)
        if not options.unpinned:
            publish_folders(rules, published)
        text = (
            f"# The rules of the network {options.name} (docs/network-file.md). After a change:\n"
            f"# dt-network sign {FILE}\n" + to_toml(rules)
        )
        config = write_file(folder / FILE, signed(text, master.hotkey))
        write_bytes(folder / RUN_FILE, _run_file(options).encode())
        if options.store == EMBEDDED:
            (folder / STORE / rules["store"]["global_bucket"]).mkdir(parents=True)
        stack.pop_all()
    print(_describe_training(config, options.miners))
    print(_what_to_run(options, folder))


def _describe_training(config: Config, members: int) -> str:
    """Describe the network, its schedule, what members send, and what the store keeps."""
    rounds, training = config.rounds, config.training
    tokens = members * config.tokens_of_step * training.total_steps
    schedule = (
        f"learning rate {training.learning_rate:g} after {training.warmup_steps} inner steps; its "
        f"schedule ends at inner step {training.total_steps}, after {amount(tokens)} tokens of "
        f"{members} members together (--tokens, --miners)"
    )
    growth = Growth(
        members,
        config.network.head.exchanged,
        codec=rounds.codec,
        weights_every=rounds.weights_every,
        keep_uploads=rounds.keep_uploads,
    )
    return (
        f"{config.network.line}\n{schedule}\n"
        f"every {show_value(config.rounds.period)} a member sends {growth.upload / 1e6:.1f} MB "
        f"within {show_value(rounds.grace)} and receives {growth.update / 1e6:.1f} MB; "
        f"{growth.describe_store()}"
    )


def _refuse_another_base(model: dict[str, Any], options: argparse.Namespace) -> None:
    """Raise ConfigError if adapters would continue on a different base from their first one."""
    wanted = getattr(options, "frozen", None)
    if wanted is not None and model.get("frozen") != wanted:
        raise ConfigError(
            f"--from {options.weights} is not the base of {options.of} (the digests of the frozen "
            "tensors differ), and its adapters are useless on another one, so no network was "
            "created: set --from to the base that it started with"
        )


def succeed(options: argparse.Namespace) -> None:
    """Create a network from another one's last weights and rules. Raises like :func:`init`."""
    from distributed_training.scoring import export

    old = flatten(tree_of(read_text(options.of)))
    options.exchange = options.exchange or str(old.get("exchange"))
    # The new network pins these again, except data.rows_url, which only earlier editions had, and
    # stop.loss, which would end it at once because the old network has reached that loss.
    own = {"data.source", "data.files", "tokenizer.files", "data.rows_url", "stop.loss"}
    needless = needless_keys(options.exchange)
    carried = [
        (key, value)
        for key, value in old.items()
        if (key.partition(".")[0] in _CARRIED or key in _CARRIED_OF_MODEL)
        and key not in own | needless
    ]
    options.more = [*carried, *options.more]
    options.data_source = options.data_source or old.get("data.source", "hub")
    adapters = old.get("model.settings") if old.get("model.kind") == "lora" else None
    if adapters and options.weights is None:
        raise ConfigError(
            f"{options.of} trains adapters and --from is missing, so there is no base and no "
            "network was created: set --from to the base that it started with"
        )
    with ExitStack() as stack:
        if options.weights is None or (adapters and not options.lora):
            exported = options.folder.absolute().with_name(f"{options.folder.name}-weights")
            words = [str(exported), "--network", str(options.of)]
            kept = options.of.absolute().parent / "validator"
            words += ["--from", str(kept)] if (kept / "global").is_dir() else []
            if status := export.main(words):
                raise SystemExit(status)
            # If this attempt fails, the folder would be in the way of the next one.
            stack.callback(shutil.rmtree, exported, ignore_errors=True)
            if adapters:
                rules = (f"{key}={adapters[key]}" for key in ("train", "dtype") if key in adapters)
                options.lora = ",".join([str(exported), *rules])
                options.frozen = old.get("model.frozen")
            else:
                options.weights = exported
        init(options)
        stack.pop_all()


def _is_private(options: argparse.Namespace) -> bool:
    """Return whether the founder's address is in a private network. Raises ConfigError."""
    # The registry runs on the founder's machine.
    host = options.host or urlsplit(options.registry or "").hostname or ""
    try:
        found = reach(host)
    except ValueError:  # a host name is taken to be public, unless --set private=true is given
        return False
    if found > ChainSettings(private=True, registry_url=options.registry).narrowest:
        raise ConfigError(
            f"--host {host} cannot be reached from other machines, so no network was "
            "created: use this machine's address in the network that its peers share; for a trial "
            "on one machine, use 127.0.0.1 in --registry too"
        )
    return found is not Reach.EVERYWHERE


def _refuse_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that are missing, or do not fit this exchange."""
    if _own_buckets(options):
        return
    if options.registry is None:
        raise ConfigError(
            "--exchange store without --registry leaves nobody to give members access to the "
            "store, so no network was created: add --registry, or --set store.access=own, with "
            "which each member has a bucket of its own"
        )
    if options.store is None:
        raise ConfigError(
            "--store is missing, so no member could upload and no network was created: name the "
            "URL of an S3 store (R2's: https://ACCOUNT.r2.cloudflarestorage.com), or embedded"
        )


def _own_buckets(options: argparse.Namespace) -> bool:
    embedded = options.store == EMBEDDED
    default = "own" if options.exchange == "hivemind" and not embedded else "registry"
    return bool(dict(options.more).get("store.access", default) == "own")


def _choose_schedule(rules: dict[str, Any], options: argparse.Namespace) -> None:
    """Fill in the training rules that are not given, so that they fit the model and the tokens.

    For the exchange ``store``, the period is filled in too, and for a model with a small vocabulary
    ``round.held_out_rise``.
    """
    given, training, of_round = dict(options.more), rules["training"], rules["round"]
    sizes = [training.get(key) for key in ("effective_batch", "sequence_length")]
    # A value of the wrong type is refused later, when the whole file is checked.
    if not all(type(size) is int and size > 0 for size in sizes):
        return
    parameters, words = rules["model"]["parameters"], rules["model"]["config"].get("vocab_size")
    trained = rules["model"].get("trainable_parameters", parameters)
    fits = fitting_schedule(
        parameters,
        options.miners * math.prod(sizes),
        options.tokens,
        trained=trained,
        warmup=given.get("training.warmup_steps"),
        total=given.get("training.total_steps"),
    )
    # A high rate would first undo what given weights have learned; new adapters have learned
    # nothing yet.
    if options.weights is not None and not options.lora:
        fits["learning_rate"] /= 10
    training |= {k: v for k, v in fits.items() if f"training.{k}" not in given}
    if type(words) is int and 1 < words < _MANY_WORDS and "round.held_out_rise" not in given:
        # The loss can fall by at most the logarithm of the vocabulary's size. Allow the usual share
        # of that.
        of_round["held_out_rise"] = round(0.25 * math.log(words) / math.log(_MANY_WORDS), 3)
    if options.exchange == "store" and "round.period" not in given:
        codec = of_round.get("codec", UPDATE_CODEC)
        period = fitting_period(
            parameters, trained, codec, options.slowest_link or SLOWEST_LINK["store"]
        )
        of_round["period"] = f"{period / 60:g}m"


def _choose_grace(rules: dict[str, Any], link: float | None) -> None:
    """Set ``round.grace`` to the time that the slowest member's upload takes, unless it is given.

    Raises ConfigError if that time is above a third of the period.
    """
    of_round, model = rules["round"], rules["model"]
    parameters = model.get("trainable_parameters", model["parameters"])
    codec, period = of_round.get("codec", UPDATE_CODEC), seconds_of(of_round.get("period"))
    if "grace" in of_round or period is None:
        return
    link = link or SLOWEST_LINK[rules["exchange"]]
    grace = grace_seconds(parameters, codec, link, period=period)
    # The error suggests a longer period, so compute with the margins that it would have.
    most = grace_seconds(parameters, codec, link, period=math.inf)
    if rules["exchange"] == "hivemind":
        # The all-reduce begins only after the uploads have been written.
        of_round.setdefault("average_after", f"{grace // 2}s")
        grace += average_seconds(parameters, link, period=period)
        most += average_seconds(parameters, link, period=math.inf)
    if grace > period / 3:
        raise ConfigError(
            f"an upload of {file_bytes(parameters, codec) / 1e6:.0f} MB at {link:g} Mbit/s and "
            f"the checkpoint before it take {grace} s, more than a third of the period of "
            f"{period:g} s, so no network was created: use --set "
            f"round.period={math.ceil(3 * most)}s, or a faster "
            f"--slowest-link, or --set round.codec={SMALLEST}"
        )
    of_round["grace"] = f"{grace}s"


def seconds_of(value: Any) -> float | None:
    """Return the seconds of a duration in a file; None if a later check will refuse it."""
    try:
        return parse_duration(str(value)).total_seconds()
    except ValueError:
        return None


def rules_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the usual rules, changed as the options say.

    Raises ConfigError for a key that takes no value, or a host that other machines cannot reach.
    """
    rules: dict[str, Any] = {}
    for key, value in USUAL.items():
        section, _, name = key.partition(".")
        rules.setdefault(section, {})[name] = value
    chain: dict[str, Any] = {"kind": "registry", "url": options.registry}
    if options.registry is None:
        chain = {"kind": "bittensor", "endpoint": "finney", "netuid": options.netuid}
    rules |= {"format": FORMATS[-1], "name": options.name, "version": 1}
    if _is_private(options):
        rules["private"] = True
    rules |= {"chain": chain, "model": {}, "tokenizer": {"name": options.tokenizer}}
    rules["data"]["source"] = options.data_source or "hub"
    rules["store"] = {"global_bucket": options.name}
    if options.store == EMBEDDED:
        rules["store"] |= {"endpoint": options.registry, "access": "registry"}
    elif options.store:
        rules["store"]["endpoint"] = options.store
    rules["training"]["weight_decay_on"] = "matrices"
    rules["exchange"] = options.exchange
    rules["training"]["late_overlap"] = "dropped"  # see docs/performance.md
    for key, value in options.more:
        table, name = rules, key
        if "." in key:
            section, _, name = key.partition(".")
            table = rules.setdefault(section, {})
        # Refuse such a key here, because later code would read a rule of the wrong type.
        if not isinstance(table, dict) or (key in rules and isinstance(rules[key], dict)):
            raise ConfigError(
                f"--set {key}: the file has no such key, so no network was created: "
                "docs/network-file.md lists all keys"
            )
        table[name] = value
    if options.store == EMBEDDED:
        if options.registry is None:
            raise ConfigError(
                "--store embedded with --netuid leaves nobody to serve the store, so no network "
                "was created: use --registry, or set --store to a URL"
            )
        if _own_buckets(options):
            raise ConfigError(
                "--store embedded with store.access=own needs many buckets, but a registry serves "
                "one, so no network was created: leave store.access out, or set --store to a URL"
            )
    data = rules["data"]
    as_built_in = data["source"] == "hub" and data["dataset"] == USUAL["data.dataset"]
    if "data.dataset" not in dict(options.more) and data["source"] != "hub":
        # Other sources do not use the name of a dataset at the hub.
        data["dataset"] = str(data["source"]).partition(":")[0]
    if as_built_in and not {"folder", "revision", "rows"} & set(data):
        data["folder"] = _SAMPLE
    # Values that are given take precedence over those of the model. If they include the number of
    # parameters, check_model compares it with the model's.
    config = read_model(options.model, tokenizer=options.tokenizer)
    rules["model"] = {"config": config} | rules["model"]
    check_model(rules["model"], rules["training"].get("sequence_length"))
    _choose_schedule(rules, options)
    _choose_grace(rules, options.slowest_link)
    return rules


def _run_file(options: argparse.Namespace) -> str:
    """Return the text of ``run.toml``, the flags that do not follow from the network's file."""
    flags: dict[str, Any] = {}
    if options.exchange == "hivemind":
        flags["dht.port"] = options.dht_port
        with suppress(ValueError):  # the validator looks up a host name itself
            flags["dht.ip"] = str(ipaddress.IPv4Address(options.host or ""))
    if options.weights:
        flags["validator.model"] = str(options.folder.absolute() / ADAPTERS)
        if not options.lora:
            flags["validator.model"] = str(options.weights)
    if options.plugins:
        flags["plugins"] = options.plugins
    return (
        "# Flags that `dt-network run` adds to those that it finds itself (--print shows all),\n"
        '# without the dashes: "neuron.device" = "cuda:1" below [validator], or below [registry].\n'
        "[validator]\n"
        + "".join(f'"{name}" = {toml_value(value)}\n' for name, value in flags.items())
    )


def _what_to_run(options: argparse.Namespace, folder: Path) -> str:
    lines = [
        f"{folder / 'wallets'} controls the network: keep a backup, and never give it away.",
    ]
    if options.store != EMBEDDED:
        bucket = dict(options.more).get("store.global_bucket", options.name)
        keys = "two keys"
        if not _own_buckets(options):
            keys = "a key that reads, writes and deletes objects"
        lines.append(f"\nPut into .env here {keys} of the global bucket {bucket}; create it first.")
        lengths = f"of up to {LONGEST_KEY} characters, and no account"
        if options.registry is None:
            lengths = "as long as R2's (account 32, key 32, secret 64), as a public chain requires"
        lines += [f"Keys of {options.store}: {lengths}."] if options.store else []
    lines += [
        "\nThen, on this machine (--print shows what that starts):",
        f"  dt-network run {shlex.quote(str(options.folder))}",
    ]
    words, what = "the file, published for example over https", FILE
    if options.registry is not None:
        place = options.folder / INVITATION
        lines.append(f"Its first start writes an invitation for five members to {place}")
        words, what = "the invitation from that file", "INVITATION"
    lines.append(f"\nOn every other machine, with {words}:\n  dt-join {what}\n  dt-miner")
    return "\n".join(lines)
