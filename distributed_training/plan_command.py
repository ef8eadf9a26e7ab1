"""Plan a member of a network: time, bytes, memory, dollars, and what to change first.

    dt-plan --model 4b --gpu h100x8 --link 100/20 --peers 16
    dt-plan --network network.toml --gpu 4090x8 --link 500/50 --peers 8 --tokens 20e9

It computes everything and measures nothing, so run it before you rent. All members are taken to be
alike. docs/requirements.md says how well the figures were tested. Exit status 1: the model does not
fit; 2: an argument cannot be used.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from distributed_training import NO_HELP
from distributed_training.common.files import read_json_object
from distributed_training.common.gpus import CARDS, PRICED, Card
from distributed_training.common.kinds import UnknownKindError
from distributed_training.common.llama import named_config
from distributed_training.common.memory import (
    MOST_WORKERS,
    ModelShape,
    disk_space,
    host_memory,
)
from distributed_training.common.paper_step import (
    COMPILED,
    Machine,
    PaperStep,
    best_step,
    held_seconds,
    product_share,
)
from distributed_training.config import ConfigError, exit_with, load_config
from distributed_training.config.loader import Parser, argument, ranged
from distributed_training.config.settings import DataSettings, MinerSettings, TrainingSettings
from distributed_training.config.types import Text, no_such_kind
from distributed_training.health.machine import count_moments
from distributed_training.protocol.growth import (
    TOKENS_A_PARAMETER,
    Growth,
    amount,
    average_seconds,
    fitting_period,
    grace_seconds,
)
from distributed_training.protocol.network_report import span
from distributed_training.protocol.pages import JUDGED_OF_DOMAINS, JUDGED_PAGES
from distributed_training.protocol.round_plan import (
    PlannedMember,
    PlannedStep,
    over_hivemind,
    through_store,
)
from distributed_training.protocol.types import SMALLEST, UPDATE_CODEC

_GPU = re.compile(r"([a-z0-9]+?)(?:x([1-9]\d?))?(?:x([1-9]\d{0,2}))?")
_BASE = 1_000_000_000  # bytes of Python, torch and the text
_CHECKPOINTS = 2  # that are kept, by default
_VALIDATORS_LINK = 1000.0  # Mbit/s
_LATE, _IDLE, _CHEAPER = 0.15, 0.03, 0.9
_LONGEST = 14 * 86400.0  # seconds of a period that is proposed
_SMALLER = f'round.codec = "{SMALLEST}"'


@dataclass(frozen=True)
class PlanRules:
    """The rules of a network that a plan depends on; ``period`` and ``grace`` in seconds."""

    model: str
    shape: ModelShape
    exchange: str
    period: float
    sequences: int
    length: int
    moments: float = 2  # tensors that the inner optimizer keeps of a parameter, on average
    grace: float | None = None  # None: as dt-network init chooses it
    average_after: float | None = None  # None: as dt-network init chooses it
    codec: str = UPDATE_CODEC  # of an upload
    weights_every: int = 8
    keep_uploads: int = 8
    judged: int = 0  # tokens of one of the two texts that an upload is judged on, at most


@dataclass(frozen=True)
class Plan:
    """A member with a machine and a network link (Mbit/s down, up), of ``peers``."""

    rules: PlanRules
    machine: Machine
    down: float
    up: float
    peers: int
    price: float | None = None  # dollars a GPU and hour
    tokens: float = 0.0  # of all

    @property
    def step(self) -> PaperStep | None:
        rules = self.rules
        return best_step(
            rules.shape,
            self.machine,
            length=rules.length,
            sequences=rules.sequences,
            moments=rules.moments,
        )

    @property
    def grace(self) -> float:
        """Seconds of the grace: the file's, or what ``dt-network init`` computes."""
        return min(self._grace, self.rules.period / 3)

    @property
    def refused(self) -> bool:
        """True where ``dt-network init`` refuses the grace: it is above a third of the period."""
        return self.rules.grace is None and self._grace > self.rules.period / 3

    @property
    def _grace(self) -> float:
        rules = self.rules
        if rules.grace is not None:
            return rules.grace
        return self._sends + self._averages

    @property
    def _sends(self) -> float:
        rules = self.rules
        return grace_seconds(rules.shape.parameters, rules.codec, self.up, period=rules.period)

    @property
    def _averages(self) -> float:
        rules = self.rules
        if rules.exchange == "store":
            return 0.0
        return average_seconds(rules.shape.parameters, self.up, period=rules.period)

    @property
    def average_after(self) -> float:
        """Seconds from a close to its all-reduce: the file's, or as ``dt-network init`` has it."""
        after = self.rules.average_after
        return self._sends // 2 if after is None else after

    def outer_step(self, step: PaperStep) -> PlannedStep:
        rules, shape = self.rules, self.rules.shape
        held = held_seconds(shape, self.machine, step=step.seconds, moments=rules.moments)
        member = PlannedMember(step.seconds, self.up, self.down, held)
        if rules.exchange == "store":
            return through_store(
                shape.parameters,
                member,
                period=rules.period,
                grace=self.grace,
                codec=rules.codec,
            )
        return over_hivemind(
            shape.parameters,
            member,
            period=rules.period,
            grace=self.grace,
            average_after=self.average_after,
            peers=self.peers,
            codec=rules.codec,
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that one machine of the member takes."""
        step = self.step
        assert step is not None
        store = self.rules.exchange == "store"
        how = replace(
            step.how,
            workers=MOST_WORKERS * self.machine.gpus,
        )
        return host_memory(self.rules.shape, how) - store * 4 * self.rules.shape.parameters

    @property
    def disk_bytes(self) -> int:
        return disk_space(
            self.rules.shape,
            keep_checkpoints=_CHECKPOINTS,
            moments=self.rules.moments,
        )

    @property
    def growth(self) -> Growth:
        rules = self.rules
        return Growth(
            self.peers,
            rules.shape.parameters,
            rules.codec,
            weights_every=rules.weights_every,
            keep_uploads=rules.keep_uploads,
        )

    @property
    def validator(self) -> Validator:
        """The validator on one GPU: the member's if that is large enough, else the cheapest."""
        rules, count = self.rules, self.rules.shape.parameters
        # Weights in float32, a layer of them in bf16, and the logits of two sequences.
        device = round(4.5 * count + 2 * 8 * rules.length * rules.shape.vocab)
        cards = [self.machine.card, *sorted(CARDS.values(), key=lambda card: card.price)]
        card = next((each for each in cards if device < 0.9e9 * each.memory), None)
        price = 0.0 if card is None else card.price
        if card == self.machine.card and self.price is not None:
            price = self.price
        # The text that all share, with the upload, and the member's own, without and with it.
        work = 3 * 2 * count * rules.judged
        share = product_share(rules.shape) / COMPILED
        seconds = math.inf if card is None else work / (share * card.peak)
        return Validator(card, device, round(28 * count) + _BASE, seconds, 24 * price)

    @property
    def dollars_a_day(self) -> float:
        price = self.machine.card.price if self.price is None else self.price
        return 24 * price * self.machine.all_gpus

    @property
    def days(self) -> float:
        """Days until the tokens are trained and merged; infinite if none are."""
        if (step := self.step) is None:
            return math.inf
        speed = self.peers * step.tokens_per_second * self.outer_step(step).utilization
        return self.tokens / speed / 86400 if speed else math.inf

    @property
    def dollars(self) -> float:
        return self.days * self.dollars_a_day * self.peers


@dataclass(frozen=True)
class Validator:
    """The founder's share. ``seconds``: to judge an upload; ``card``: None where none holds it.

    ``host_bytes``: weights, momentum and residual of two outer steps, and the mean of the uploads.
    """

    card: Card | None
    device_bytes: int
    host_bytes: int
    seconds: float
    dollars_a_day: float


# --- what to change -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A proposed change. ``why``: the obstacle; ``what``: the change; ``effect``: its result."""

    why: str
    what: str
    effect: str


def changes(plan: Plan) -> Iterator[Change]:
    """Yield the proposed changes, the most urgent first."""
    step = plan.step
    if step is None:
        yield from _to_fit(plan)
        return
    outer = plan.outer_step(step)
    rules = plan.rules
    if not outer.in_time or plan.refused:
        yield from _to_be_in_time(plan, outer)
    elif rules.exchange == "hivemind" and not outer.averages:
        yield Change(
            _too_slow(outer), "--exchange store", "each update is the merge, as it would be here"
        )
    growth = plan.growth
    seconds = 8 * growth.validator_receives / (_VALIDATORS_LINK * 1e6)
    if seconds > plan.grace:
        why = (
            f"{_VALIDATORS_LINK:g} Mbit/s bring the validator {size(growth.validator_receives)}"
            f" in {span(seconds)}, and the grace is {span(plan.grace)}"
        )
        what = f"the validator's link: {_VALIDATORS_LINK * seconds / plan.grace:,.0f} Mbit/s"
        yield Change(why, what, "all uploads are there when the grace ends")
    held = 1 - outer.utilization
    if outer.in_time and held > _IDLE:
        after = replace(plan, rules=replace(rules, period=2 * rules.period))
        why = f"a round holds training for {held:.0%} of the period"
        yield _change(plan, after, why, "twice round.period")
    if outer.in_time and outer.late > _LATE * rules.period:
        yield from _to_be_sooner(plan, outer)
    if step.bound in ("reduction", "launches") or step.parts["reduction"] > 0.1 * step.seconds:
        share = step.parts["reduction"] / step.seconds
        after = replace(plan, rules=replace(rules, sequences=2 * rules.sequences))
        why = f"gathers and reductions between {plan.machine} take {share:.0%} of a step"
        yield _change(plan, after, why, "twice training.effective_batch")
    if outer.in_time and (found := _cheapest(plan)) is not None:
        why = "compute takes the rest, and other cards do it for less"
        yield _change(plan, found, why, str(found.machine))


def _change(plan: Plan, after: Plan, why: str, what: str) -> Change:
    return Change(why, what, f"{_worth(plan)} -> {_worth(after)}")


def _worth(plan: Plan) -> str:
    step = plan.step
    if step is None:
        return "it does not fit"
    found = plan.outer_step(step)
    words = f"utilization {found.utilization:.1%}"
    if math.isfinite(plan.dollars):
        words += f", MFU {step.mfu:.0%}, {money(plan.dollars)}"
    return words


def _to_fit(plan: Plan) -> Iterator[Change]:
    """Yield the fewest of these cards that hold the model, and the cheapest card."""
    why = f"{plan.rules.model} does not fit into {plan.machine}"
    machine = plan.machine
    counts = (n for n in (2, 4, 8) if n > machine.gpus)
    cards = sorted(CARDS.values(), key=lambda card: card.price)
    for kind in (
        [replace(plan, machine=replace(machine, gpus=n)) for n in counts],
        [replace(plan, machine=replace(machine, card=card), price=None) for card in cards],
        [replace(plan, machine=Machine(card, 8), price=None) for card in cards],
    ):
        fitting = [after for after in kind if after.step is not None]
        if found := next(filter(_in_time, fitting), next(iter(fitting), None)):
            yield _change(plan, found, why, str(found.machine))
            if kind[0].machine.gpus == machine.gpus:
                return


def _too_slow(outer: PlannedStep) -> str:
    return f"an all-reduce takes {span(outer.transfer)}, and the grace ends before"


def _to_be_in_time(plan: Plan, outer: PlannedStep) -> Iterator[Change]:
    """Yield changes by which an upload, or a round, ends in time."""
    rules, limit = plan.rules, plan.grace
    step = plan.step
    assert step is not None
    sending = PlannedMember(step.seconds, plan.up, plan.down).sending(plan.growth.upload)
    why = f"an upload takes {span(sending)}, and {span(limit)} are there"
    if sending < limit and outer.late > rules.period:
        why = f"the update comes {span(outer.late)} after the close, so the next one is missed"
    elif sending < limit and rules.exchange == "hivemind" and not outer.averages:
        why = _too_slow(outer)
    if plan.refused:
        why += "; dt-network init refuses that"
    ways = []
    if rules.codec != SMALLEST:
        ways += [(_SMALLER, replace(rules, codec=SMALLEST))]
    if rules.exchange == "hivemind":
        ways.append(
            ("--exchange store", replace(rules, exchange="store", codec=UPDATE_CODEC, grace=None))
        )
    period = rules.period
    while period < _LONGEST:
        period *= 1.25
        longer = replace(rules, period=period, grace=None)
        if _in_time(replace(plan, rules=longer)):
            words = f"a period of {span(period)} (round.period)"
            ways.append((words, longer))
            break
    for words, changed in ways:
        if _in_time(after := replace(plan, rules=changed)):
            yield _change(plan, after, why, words)
    faster = plan
    while not _in_time(faster) and faster.up < 1e6:
        faster = replace(faster, up=1.05 * faster.up, down=1.05 * faster.down)
    if _in_time(faster):
        words = f"a network link of {faster.down:,.3g}/{faster.up:,.3g} Mbit/s"
        yield _change(plan, faster, why, words)


def _in_time(plan: Plan) -> bool:
    step = plan.step
    return step is not None and plan.outer_step(step).in_time and not plan.refused


def _to_be_sooner(plan: Plan, outer: PlannedStep) -> Iterator[Change]:
    """Yield changes by which the update comes sooner after a close."""
    rules = plan.rules
    why = f"the update comes {span(outer.late)} after the close"
    ways = {
        _SMALLER: replace(plan, rules=replace(rules, codec=SMALLEST)),
        "twice the network link": replace(plan, up=2 * plan.up, down=2 * plan.down),
    }
    for words, after in ways.items():
        step = after.step
        if step is not None and (late := after.outer_step(step).late) < 0.95 * outer.late:
            shares = (f"{each / rules.period:.0%}" for each in (outer.late, late))
            effect = f"{' -> '.join(shares)} of an outer step are trained before its update"
            yield Change(why, words, effect)


def _cheapest(plan: Plan) -> Plan | None:
    """Return the plan with another card that costs least, if that is much less."""
    if plan.price is not None:
        return None
    others = [
        replace(plan, machine=replace(plan.machine, card=card))
        for card in CARDS.values()
        if card != plan.machine.card
    ]
    found = min(others, key=lambda other: other.dollars)
    return found if found.dollars < _CHEAPER * plan.dollars else None


# --- what is printed ------------------------------------------------------------------------------


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the rows of a plan whose model fits."""
    rules, step = plan.rules, plan.step
    assert step is not None
    how, outer = step.how, plan.outer_step(step)
    parts = ", ".join(
        f"{name} {seconds / step.seconds:.0%}"
        for name, seconds in step.parts.items()
        if seconds > 0.005 * step.seconds
    )
    yield "inner step", f"{step.seconds:.2f} s, MFU {step.mfu:.0%}: {parts}"
    words = [f"micro-batch {how.micro_batch}"]
    if how.checkpointing != "none":
        words.append(f"--neuron.activation_checkpointing {how.checkpointing}")
    words += [] if how.keep_unsharded else ["weights gathered each time"]
    words += [] if how.reduce_at_last else ["gradients reduced each time"]
    words += ["the optimizer's state in host memory"] if how.offload_optimizer else []
    of = f"{step.device_bytes / 1e9:.0f} of {plan.machine.card.memory:g} GB"
    yield "GPU memory", f"{of}: {', '.join(words)}"
    host = f"{plan.host_bytes / 1e9:.0f} GB"
    yield "host memory, disk", f"{host}, {plan.disk_bytes / 1e9:.0f} GB on each machine"
    tokens = outer.inner_steps * step.tokens
    yield (
        "an outer step",
        f"{outer.inner_steps:,.0f} inner steps, {amount(tokens)} tokens of a member",
    )
    yield "bytes of it", f"sends {size(outer.sent)}, receives {size(outer.received)}"
    sending = PlannedMember(step.seconds, plan.up, plan.down).sending(plan.growth.upload)
    late = f"the update comes {span(outer.late)} after the close"
    yield "upload", f"{span(sending)} of {span(plan.grace)} grace; {late}"
    if rules.exchange == "hivemind":
        begins = f"it begins {span(plan.average_after)} after the close"
        yield "all-reduce", f"{span(outer.transfer)}; {begins}"
    late = "" if outer.in_time else ": it comes too late and is not merged"
    yield "utilization", f"{outer.utilization:.1%}{late}"
    yield "validator", _describe_validator(plan)
    yield "store", plan.growth.describe_store()
    price = plan.machine.card.price if plan.price is None else plan.price
    dated = f" of {PRICED}, --price" if plan.price is None else ""
    yield (
        "dollars",
        f"{plan.dollars_a_day:,.0f} a day, of all {plan.dollars_a_day * plan.peers:,.0f} "
        f"({price:g} a GPU and hour{dated})",
    )
    if math.isfinite(plan.days):
        yield (
            amount(plan.tokens) + " tokens",
            f"{lasting(plan.days)}, {money(plan.dollars)} of all members",
        )


def _describe_validator(plan: Plan) -> str:
    found = plan.validator
    if found.card is None:
        return f"no GPU here holds the {found.device_bytes / 1e9:.0f} GB by which it judges"
    cost = f"{money(found.dollars_a_day)} a day"
    if math.isfinite(plan.days):
        cost += f", {money(plan.days * found.dollars_a_day)} in all"
    return (
        f"1 x {found.card.name} ({found.device_bytes / 1e9:.1f} GB of it), "
        f"{found.host_bytes / 1e9:.1f} GB of host memory; judges an upload in up to "
        f"{found.seconds:.1f} s, all {plan.peers} in {span(plan.peers * found.seconds)}; {cost}"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan's figures, in seconds, bytes and dollars; None: infinite, or does not fit."""
    step = plan.step
    if step is None:
        return {"fits": False}
    outer, finite, judge = plan.outer_step(step), math.isfinite(plan.days), plan.validator
    return {
        "fits": True,
        "step_seconds": step.seconds,
        "mfu": step.mfu,
        "micro_batch": step.how.micro_batch,
        "activation_checkpointing": step.how.checkpointing,
        "device_bytes": step.device_bytes,
        "host_bytes": plan.host_bytes,
        "disk_bytes": plan.disk_bytes,
        **asdict(outer),
        "dollars_a_day": plan.dollars_a_day,
        "tokens": plan.tokens,
        "days": plan.days if finite else None,
        "dollars": plan.dollars if finite else None,
        "validator": asdict(judge) | {"seconds": judge.seconds if judge.card else None},
        "stored": plan.growth.stored,
        "store_dollars_a_month": plan.growth.dollars_a_month,
    }


def money(dollars: float) -> str:
    """Return dollars, with cents where they count."""
    return f"{dollars:,.2f} $" if dollars < 100 else f"{dollars:,.0f} $"


def lasting(days: float) -> str:
    """Return a length of time in hours, or in days from the fourth on."""
    return f"{24 * days:,.1f} hours" if days < 4 else f"{days:,.1f} days"


def size(count: float) -> str:
    """Return bytes in MB or GB."""
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"


# --- arguments ------------------------------------------------------------------------------------


def machine_of(text: str) -> Machine:
    """Return the machine of ``h100``, ``h100x8``, or ``h100x8x2`` for two of them."""
    found = _GPU.fullmatch(text.lower())
    if found is None or found[1] not in CARDS:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is no GPU that is known, as in h100x8: {', '.join(CARDS)}"
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
            f"{text!r:.60} is no link in Mbit/s, as in 100/20 (down/up, each 0.001 to 1,000,000)"
        ) from None


def shape_of(wanted: str) -> ModelShape:
    """Return the shape of a named model or a config.json. Raises ConfigError."""
    try:
        if not wanted.endswith(".json"):
            return ModelShape.from_config(named_config(wanted))
        if (config := read_json_object(Path(wanted))) is None:
            raise ValueError("it is no file of a JSON object that can be read")
        return ModelShape.from_config(config)
    except ValueError as error:
        raise ConfigError(
            f"--model {wanted}: {error}, so nothing was planned: give tiny, 125m, 1b, 4b or the "
            "config.json of a Llama-like model"
        ) from None


def rules_of(options: argparse.Namespace) -> PlanRules:
    """Return the rules of the network's file, or of a new network. Raises ConfigError."""
    founded = options.network is None
    parts: Any = SimpleNamespace(
        training=TrainingSettings(), data=DataSettings(), miner=MinerSettings()
    )
    model, exchange, shape = options.model, options.exchange or "store", None
    period = parts.miner.period.total_seconds()
    if not founded:
        words = ["--network", options.network]
        parts = load_config("miner", words, environ={}, dotenv=None, check=False)
        period, head = parts.round_period.total_seconds(), parts.network.head
        model = model or head.name
        if options.exchange not in (None, parts.exchange):
            raise ConfigError(
                f"--exchange {exchange}, and {options.network} has {parts.exchange}, so nothing "
                "was planned: leave it out, or give --model in place of --network"
            )
        exchange = parts.exchange
        try:
            # The file for this machine has no more than the number of its parameters.
            like = parts.network.model or named_config("tiny")
            shape = ModelShape.from_config(like, head.parameters)
        except ValueError as error:
            raise ConfigError(
                f"{options.network}: {error}, so nothing was planned: give --model too"
            ) from None
    shape = shape or shape_of(options.model)
    training, data, miner = parts.training, parts.data, parts.miner
    if founded and exchange == "store":
        period = fitting_period(shape.parameters, miner.codec, options.link[1])
    judged = JUDGED_PAGES * data.rows_per_page * data.max_length
    if data.own:  # on the held-out text of all domains
        judged = JUDGED_OF_DOMAINS * training.sequence_length
    return PlanRules(
        model=model,
        shape=shape,
        exchange=exchange,
        period=period,
        sequences=training.local_batch_size_train_effective,
        length=training.sequence_length,
        moments=count_moments(training, shape),
        grace=None if founded else miner.grace.total_seconds(),
        average_after=None if founded else miner.average_after.total_seconds(),
        codec=miner.codec,
        weights_every=miner.weights_every,
        keep_uploads=miner.keep_uploads,
        judged=judged,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="dt-plan",
        description=(__doc__ or NO_HELP).splitlines()[0],
        epilog="\n".join((__doc__ or NO_HELP).splitlines()[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument(
        "--model",
        type=argument(Text),
        help="plan a new network with this model: tiny, 125m, 1b, 4b or a config.json",
    )
    of.add_argument(
        "--network",
        type=argument(Text),
        metavar="FILE|URL|NAME",
        help="plan by the model and rules of this network's file",
    )
    cards = ", ".join(CARDS)
    add(
        "--gpu",
        type=machine_of,
        required=True,
        metavar="NAMExN",
        help=f"GPUs of a member: h100, h100x8, or h100x8x2 for two machines ({cards})",
    )
    add(
        "--link",
        type=link_of,
        required=True,
        metavar="DOWN/UP",
        help="network link of a member, in Mbit/s",
    )
    add("--peers", type=ranged(1, 4096), default=4, metavar="N", help="members, all alike [4]")
    add(
        "--exchange",
        choices=("store", "hivemind"),
        help="how a new network exchanges; with --model [store]",
    )
    add(
        "--price",
        type=ranged(0.0, 1e6),
        metavar="DOLLARS",
        help=f"price of a GPU for an hour [the card's, of {PRICED}]",
    )
    add(
        "--tokens",
        type=ranged(1.0, 1e18),
        metavar="N",
        help=f"tokens that all members train together [{TOKENS_A_PARAMETER} a parameter]",
    )
    add("--json", action="store_true", help="print JSON, for programs")
    try:
        options = parser.parse_args(argv)
        rules = rules_of(options)
    except ConfigError as error:
        return exit_with(error)
    except UnknownKindError as error:
        return exit_with(no_such_kind(error, key="round.codec", done="planned"))
    down, up = options.link
    tokens = options.tokens or float(TOKENS_A_PARAMETER * rules.shape.parameters)
    plan = Plan(rules, options.gpu, down, up, options.peers, options.price, tokens)
    found = list(changes(plan))
    if options.json:
        listed = [{"why": c.why, "what": c.what, "effect": c.effect} for c in found]
        print(json.dumps(as_json(plan) | {"changes": listed}))
        return 0 if plan.step is not None else 1
    how = "through the store" if rules.exchange == "store" else "over hivemind too"
    print(
        f"{rules.model}, {rules.shape.parameters / 1e9:.3g} billion parameters; {options.peers} "
        f"members of {options.gpu}, {up:g} Mbit/s up and {down:g} down; rounds {how}, each "
        f"{span(rules.period)}"
    )
    fits = plan.step is not None
    rows = list(facts(plan)) if fits else [("GPU memory", "the model does not fit")]
    nothing = "nothing: the rest is compute" if fits else "the model: no machine here holds it"
    rows += [
        ("change first" if not number else "or then", f"{c.what}: {c.effect} ({c.why})")
        for number, c in enumerate(found)
    ] or [("change first", nothing)]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name.ljust(width)}  {text}")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
