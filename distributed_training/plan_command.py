"""Plan for a network's members: bytes, hours and dollars, and whether the model fits.

    dt-plan --model 4b --gpu h100x8 --link 100/20 --peers 16
    dt-plan --network network.toml --gpu 4090x8 --link 500/50 --peers 8 --tokens 20e9

It measures nothing. A GPU is assumed to reach 40 % of its peak. `make gpu`, or the first hour of a
miner, shows the tokens per second to give as --speed. All members are assumed to be alike. Exit
status 1: the model does not fit, or its uploads come too late; 2: an argument cannot be used.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from distributed_training.common.gpus import CARDS, PRICED, Card
from distributed_training.common.kinds import UnknownKindError
from distributed_training.common.llama import named_config, read_config
from distributed_training.common.memory import (
    MARGIN,
    MOST_WORKERS,
    Arrangement,
    ModelShape,
    device_memory,
    disk_space,
    host_memory,
)
from distributed_training.config import ConfigError, exit_with, rules_at
from distributed_training.config.loader import Parser, argument, import_named, ranged
from distributed_training.config.settings import RoundSettings, StoreSettings, TrainingSettings
from distributed_training.config.types import Text, no_such_kind
from distributed_training.protocol.growth import (
    TOKENS_A_PARAMETER,
    Growth,
    amount,
    average_seconds,
    fitting_period,
    grace_seconds,
)
from distributed_training.protocol.metadata import with_rules
from distributed_training.protocol.network_report import span

_GPU = re.compile(r"([a-z0-9]+?)(?:x([1-9]\d?))?(?:x([1-9]\d{0,2}))?")
_MFU = 0.4  # a card is assumed to reach this fraction of its peak if no speed is given
_FLOPS = 6  # per parameter and token, forward and backward (arxiv.org/abs/2001.08361)
_FROZEN_FLOPS = 4  # the same for a parameter that gets no gradient
_VALIDATOR = 28  # bytes of a validator's host memory per trained parameter
# Bytes of host memory in each rank or validator for Python, torch, their buffers and the text.
_PROCESS = 1_000_000_000


@dataclass(frozen=True)
class Machine:
    """Hold one copy of the model on each of ``machines``, sharded over ``gpus`` of a ``card``."""

    card: Card
    gpus: int = 1
    machines: int = 1

    def __str__(self) -> str:
        copies = f"{self.machines} x " if self.machines > 1 else ""
        return f"{copies}{self.gpus} x {self.card.name}"


def figures(options: argparse.Namespace) -> dict[str, Any]:
    """Return a plan's figures in seconds, bytes and dollars. Raises ConfigError."""
    rules, shape, exchange = _rules_of(options)
    training, rounds = rules.training, rules.rounds
    machine, (down, up) = options.gpu, options.link
    count, trained, frozen_bytes = shape.parameters, shape.trained, shape.frozen_bytes
    length, members = training.sequence_length, options.peers
    founded, gpus = options.network is None, machine.gpus * machine.machines
    period, grace = (each.total_seconds() for each in (rounds.period, rounds.grace))
    average = average_seconds(trained, up, period=period) if exchange == "hivemind" else 0
    if founded:  # choose both as dt-network init does
        period = fitting_period(count, trained, rounds.codec, up) if exchange == "store" else period
        grace = grace_seconds(trained, rounds.codec, up, period=period) + average
    # The arrangement that needs the least GPU memory.
    least = Arrangement(
        machine.gpus,
        1,
        length,
        checkpointing="full",
        reduce_at_last=False,
        offload_optimizer=True,
        workers=MOST_WORKERS * machine.gpus,
        peer_process=exchange == "hivemind",
    )
    flops = _FLOPS * trained + _FROZEN_FLOPS * (count - trained)
    speed = options.speed or _MFU * machine.card.peak * gpus / flops
    step_seconds = training.local_batch_size_train_effective * length / speed
    inner_steps = period / step_seconds
    tokens = options.tokens or float(TOKENS_A_PARAMETER * trained)
    growth = Growth(members, trained, rounds.codec, rounds.weights_every, rounds.keep_uploads)
    days = tokens / (members * speed) / 86400
    price = machine.card.price if options.price is None else options.price
    sent, received = growth.upload, growth.update
    upload = 8 * sent / (up * 1e6)
    moves = 4 * trained if average else 0
    device = device_memory(shape, least)
    return {
        "parameters": count,
        "trained": trained,
        "exchange": exchange,
        "period": period,
        "grace": grace,
        "fits": device <= MARGIN * machine.card.memory * 1e9,
        "in_time": upload <= grace <= period / 3,
        "fast_enough": inner_steps >= rules.store.minimum_valid_inner_step,
        "step_seconds": step_seconds,
        "inner_steps": inner_steps,
        "least_inner_steps": rules.store.minimum_valid_inner_step,
        "tokens_per_second": speed,
        "device_bytes": device,
        # All ranks read the file of a frozen base through host memory; a script loads it there.
        "host_bytes": host_memory(shape, least) + machine.gpus * _PROCESS + frozen_bytes,
        "disk_bytes": disk_space(shape, keep_checkpoints=2),
        "sent": sent + moves,
        "received": received + moves,
        "upload_seconds": upload,
        "average_seconds": average,
        "update_seconds": 8 * received / (down * 1e6),
        "validator_device_bytes": round(4.5 * trained + frozen_bytes + 16 * length * shape.vocab),
        "validator_host_bytes": _VALIDATOR * trained + frozen_bytes + _PROCESS,
        "validator_receives": growth.validator_receives,
        "stored": growth.stored,
        "store": growth.describe_store(),
        "store_dollars_a_month": growth.dollars_a_month,
        "price": price,
        "dollars_a_day": 24 * price * gpus,
        "tokens": tokens,
        "days": days,
        "dollars": days * 24 * price * gpus * members,
    }


def lines(plan: dict[str, Any], options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the rows to print."""
    card, members, period = options.gpu.card, options.peers, plan["period"]
    how = "--speed" if options.speed else f"{_MFU:.0%} of the peak, --speed"
    yield "inner step", f"{plan['step_seconds']:.1f} s ({how})"
    fits = "" if plan["fits"] else ": the model does not fit"
    yield "GPU memory", f"at least {plan['device_bytes'] / 1e9:.0f} of {card.memory:g} GB{fits}"
    host, disk = plan["host_bytes"] / 1e9, plan["disk_bytes"] / 1e9
    yield "host memory, disk", f"{host:.0f} GB, {disk:.0f} GB and up to 10 of data on each machine"
    steps, tokens = plan["inner_steps"], period * plan["tokens_per_second"]
    few = f": an upload needs {plan['least_inner_steps']}; a longer --set round.period helps"
    few = "" if plan["fast_enough"] else few
    yield "an outer step", f"{steps:,.0f} inner steps, {amount(tokens)} tokens per member{few}"
    yield "bytes of it", f"sends {size(plan['sent'])}, receives {size(plan['received'])}"
    late = "" if plan["in_time"] else ": too late to be merged; a longer --set round.period helps"
    yield "upload", f"{plan['upload_seconds']:,.0f} s of {plan['grace']:,.0f} s grace{late}"
    if plan["average_seconds"]:
        yield "all-reduce", span(plan["average_seconds"])
    needs = (plan[f"validator_{kind}_bytes"] / 1e9 for kind in ("device", "host"))
    yield (
        "validator",
        "{:.1f} GB of a GPU, {:.1f} GB of host memory".format(*needs)
        + f"; receives {size(plan['validator_receives'])} in each grace",
    )
    yield "store", plan["store"]
    dated = f" of {PRICED}, --price" if options.price is None else ""
    day = plan["dollars_a_day"]
    yield (
        "dollars",
        f"{day:,.0f} a day, of all {day * members:,.0f} ({plan['price']:g} a GPU and hour{dated})",
    )
    lasting = f"{plan['days']:,.1f} days"
    if plan["days"] < 4:
        lasting = f"{24 * plan['days']:,.1f} hours"
    dollars = f"{plan['dollars']:,.{2 if plan['dollars'] < 100 else 0}f} $"
    yield f"{amount(plan['tokens'])} tokens", f"{lasting}, {dollars} of all members"


def size(count: float) -> str:
    """Return a number of bytes in MB or GB, as text."""
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"


# --- arguments ------------------------------------------------------------------------------------


def machine_of(text: str) -> Machine:
    """Return the machine of ``h100``, ``h100x8``, or ``h100x8x2`` for two of them."""
    found = _GPU.fullmatch(text.lower())
    if found is None or found[1] not in CARDS:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not a known GPU, as in h100x8: {', '.join(CARDS)}"
        )
    return Machine(CARDS[found[1]], int(found[2] or 1), int(found[3] or 1))


def link_of(text: str) -> tuple[float, float]:
    """Return Mbit/s down and up of ``100/20``, or of ``100`` for both."""
    down, slash, up = text.partition("/")
    convert = ranged(0.001, 1e6)
    try:
        return convert(down), convert(up if slash else down)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not a link in Mbit/s, like 100/20 (down/up, each 0.001 to 1,000,000)"
        ) from None


def _rules_of(options: argparse.Namespace) -> tuple[Any, ModelShape, str]:
    """Return the settings, the model's shape and the exchange of the network, or of a new one.

    Raises ConfigError.
    """
    rules: Any
    like: Any
    part, itemsize = None, 4
    if options.network is not None:
        rules = rules_at(options.network)
        # The built-in network's file has the number of parameters, but not the model itself.
        like = rules.network.model or named_config("tiny")
        head = rules.network.head
        given, count = options.network, head.parameters
        part, itemsize = head.trained, head.frozen_itemsize
    else:
        given, count = f"--model {options.model}", None
        rules = SimpleNamespace(
            training=TrainingSettings(),
            rounds=RoundSettings(codec=options.codec),
            store=StoreSettings(),
        )
    try:
        if options.network is None:
            like = read_config(options.model)
        shape = ModelShape.from_config(like, count, part=part, itemsize=itemsize)
    except ValueError as error:
        raise ConfigError(
            f"{given}: {error}, so nothing was planned: set --model to tiny, 125m, 1b, 4b or "
            "the config.json of a Llama-like model"
        ) from None
    if options.lora and options.network is None:
        from distributed_training.training.lora import LORA, read_rules  # this imports torch
        from distributed_training.training.model import build_meta_model, count_parameters

        settings = read_rules(options.lora, like)
        count, part = count_parameters(build_meta_model(with_rules(like, LORA, None, settings)))
        itemsize = 4 if settings["dtype"] == "float32" else 2
        shape = ModelShape.from_config(like, count, part=part, itemsize=itemsize)
    return rules, shape, getattr(rules, "exchange", options.exchange)


def build_parser() -> Parser:
    parser = Parser.of_program("dt-plan", __doc__)
    add, number = parser.add_argument, ranged(1.0, 1e18)
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument(
        "--model", type=argument(Text), help="a new network's model: tiny, 125m, 1b, 4b or a file"
    )
    of_file = "plan for this network's file"
    of.add_argument("--network", type=argument(Text), metavar="FILE|URL|NAME", help=of_file)
    of_lora = "adapters of a new network, as --lora of dt-network init; with --model [none]"
    add("--lora", type=argument(Text), default="", metavar="RULES", help=of_lora)
    of_member = f"GPUs of a member: h100, h100x8, or h100x8x2 for two machines ({', '.join(CARDS)})"
    add("--gpu", type=machine_of, required=True, metavar="NAMExN", help=of_member)
    link = "network link of a member, in Mbit/s"
    add("--link", type=link_of, required=True, metavar="DOWN/UP", help=link)
    add("--peers", type=ranged(1, 4096), default=4, metavar="N", help="members, all alike [4]")
    of_new = "exchange of a new network; with --model [store]"
    add("--exchange", choices=("store", "hivemind"), default="store", help=of_new)
    of_codec = "codec of a new network's uploads; with --model [4-bit]"
    add("--codec", type=argument(Text), default="4-bit", metavar="NAME", help=of_codec)
    own = "your own modules to import first [none]"
    add("--plugins", nargs="+", default=[], metavar="MODULE", help=own)
    speed = f"tokens per second of a member [{_MFU * 100:.0f} %% of the GPUs' peak]"
    add("--speed", type=number, metavar="N", help=speed)
    price = f"price of a GPU per hour [the card's price of {PRICED}]"
    add("--price", type=ranged(0.0, 1e6), metavar="DOLLARS", help=price)
    trained = f"tokens that all members train on together [{TOKENS_A_PARAMETER} per parameter]"
    add("--tokens", type=number, metavar="N", help=trained)
    add("--json", action="store_true", help="print JSON, for programs")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = build_parser().parse_args(argv)
        import_named(options.plugins)
        plan = figures(options)
    except ConfigError as error:
        return exit_with(error)
    except UnknownKindError as error:
        return exit_with(no_such_kind(error, key="round.codec", done="planned"))
    status = 0 if plan["fits"] and plan["in_time"] and plan["fast_enough"] else 1
    if options.json:
        print(json.dumps(plan))
        return status
    down, up = options.link
    how = "through the store" if plan["exchange"] == "store" else "over hivemind too"
    part = f", {amount(plan['trained'])} trained" if plan["trained"] < plan["parameters"] else ""
    print(
        f"{plan['parameters'] / 1e9:.3g} billion parameters{part}; {options.peers} members of "
        f"{options.gpu}, {up:g} Mbit/s up and {down:g} down; rounds {how}, each "
        f"{span(plan['period'])}"
    )
    rows = list(lines(plan, options))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name.ljust(width)}  {text}")
    return status


if __name__ == "__main__":
    sys.exit(main())
