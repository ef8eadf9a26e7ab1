"""Ways to make groups out of a network's peers, each played in the simulation.

- ``today``: the validator calls the 64 best, who are one group; others take its result later.
- ``one group``: all are called and meet under one key of the DHT.
- ``grid``: hivemind's group bits: groups of 64 that meet under keys of their own, and as many
  rounds one after the other as it takes to mix all (Moshpit averaging).
- ``rows and columns``: rows of 64 only sum, columns average the sums, rows hand the averages back.
  Not on hivemind's wire: what it would take is in docs/scale.md.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import simpy

from bench.scale_calibration import Calibration
from bench.scale_model import Costs, Peer, Round, Rules

SIDE = 64  # peers of a group
RULES = Rules(min_group=32)


@dataclass(frozen=True)
class World:
    """What the network's peers are like. Rates in Mbit/s with how many have them."""

    name: str
    rates: tuple[tuple[float, float], ...] = ((2000.0, 0.2), (1000.0, 0.6), (500.0, 0.2))
    late: float = 3.0  # seconds within which a miner hears of the call between two micro-batches
    vanish: float = 0.0  # share of the peers that vanish in mid-transfer, without a word
    slow: float = 0.0  # share with a line that does not move the model before the deadline
    slow_rate: float = 100.0


WORLDS = (
    World("mixed lines"),
    World("1 % vanish", vanish=0.01),
    World("0.5 % at 100 Mbit/s", slow=0.005),
)


@dataclass(frozen=True)
class Outcome:
    """Means over seeds. ``clock``: until the last had its average, the deadline if nobody had."""

    design: str
    world: str
    peers: int
    took_part: float  # share of all peers
    clock: float  # seconds
    bytes: float  # sent by a peer that was called
    messages: float  # of the DHT, asked by a peer that was called


def population(count: int, world: World, dice: random.Random) -> list[Peer]:
    rates, weights = zip(*world.rates, strict=True)
    made = []
    for rate in dice.choices(rates, weights, k=count):
        peer = Peer(rate, late=dice.uniform(0, world.late))
        if dice.random() < world.slow:
            peer.rate = world.slow_rate
        if dice.random() < world.vanish:
            peer.dies = dice.random()
        made.append(peer)
    return made


Design = Callable[[list[Peer], Costs, Rules], tuple[list[Peer], float]]


def today(peers: list[Peer], costs: Costs, rules: Rules) -> tuple[list[Peer], float]:
    return one_group(peers[:SIDE], costs, rules)


def one_group(
    peers: list[Peer], costs: Costs, rules: Rules, *, known: bool = False
) -> tuple[list[Peer], float]:
    """Those with an average, and when the last had it."""
    env = simpy.Environment()
    Round(env, peers, costs, rules, known=known)
    env.run(until=2 * rules.round_deadline)
    done = [peer for peer in peers if peer.ended is not None]
    return done, max((p.ended or 0.0 for p in done), default=rules.round_deadline)


def grid(peers: list[Peer], costs: Costs, rules: Rules) -> tuple[list[Peer], float]:
    left, clock = peers, 0.0
    for hop in range(_dimensions(len(peers))):
        done: list[Peer] = []
        ends = [clock]
        for group in _lines(left, peers, hop):
            came, ended = _again(group, costs, replace(rules, min_group=2))
            done += came
            ends.append(ended)
        if not done:
            return [], rules.round_deadline
        left, clock = done, max(ends)
    return left, clock


def rows_and_columns(peers: list[Peer], costs: Costs, rules: Rules) -> tuple[list[Peer], float]:
    if len(peers) <= SIDE:
        return one_group(peers, costs, rules)
    # Columns gather while rows do, so only the rows' matchmaking takes time.
    rules = replace(rules, min_group=2)
    half = replace(rules, passes=1.0)
    columns = replace(rules, values=rules.values // SIDE)
    left, clock = peers, 0.0
    for hop, (line, terms) in enumerate(((0, half), (1, columns), (0, half))):
        done = []
        for group in _lines(left, peers, line):
            came, ended = _again(group, costs, terms, known=hop > 0)
            done += came
            clock = max(clock, ended)
        left = done
    return left, clock if left else rules.round_deadline


DESIGNS: dict[str, Design] = {
    "today": today,
    "one group": one_group,
    "grid": grid,
    "rows and columns": rows_and_columns,
}


def _dimensions(count: int) -> int:
    return max(1, math.ceil(round(math.log(count, SIDE), 6)))


def _lines(left: Sequence[Peer], peers: Sequence[Peer], dimension: int) -> Iterable[list[Peer]]:
    """Those left of each line of the grid along a dimension, lines of one peer left out."""
    place = {id(peer): i for i, peer in enumerate(peers)}
    lines: dict[int, list[Peer]] = {}
    step = SIDE**dimension
    for peer in left:
        number = place[id(peer)]
        coordinate = number // step % SIDE
        first = number - coordinate * step  # the place in its line where the coordinate is 0
        lines.setdefault(first, []).append(peer)
    return [line for line in lines.values() if len(line) > 1]


def _again(
    group: list[Peer], costs: Costs, rules: Rules, *, known: bool = False
) -> tuple[list[Peer], float]:
    """A round of peers that come from one before. Those with an average, when the last had it."""
    start = min(peer.ended or 0.0 for peer in group)
    for peer in group:
        if peer.ended is not None:  # it goes on as soon as it has its average
            peer.late, peer.dies, peer.ended = peer.ended - start, None, None
    done, ended = one_group(group, costs, rules, known=known)
    for peer in done:
        peer.ended = (peer.ended or 0.0) + start
    return done, start + ended


def play(sizes: Sequence[int], calibration: Calibration, seeds: int) -> list[Outcome]:
    played = []
    for world, name, size in itertools.product(WORLDS, DESIGNS, sizes):
        played.append(outcome(name, world, size, calibration.network(size), seeds))
        print(f"played: {played[-1]}", file=sys.stderr, flush=True)
    return played


def outcome(design: str, world: World, count: int, costs: Costs, seeds: int) -> Outcome:
    """Of a network of ``count`` peers; large ones play fewer seeds, since more peers vary less."""
    taken: list[tuple[float, float, float, float]] = []
    most = 4 * seeds
    for seed in range(most if design == "today" else max(1, min(most, seeds * 512 // count))):
        peers = population(count, world, random.Random(f"{seed} {count} {world.name}"))
        rules = replace(RULES, min_group=min(RULES.min_group, count // 2))
        done, clock = DESIGNS[design](peers, costs, rules)
        called = [peer for peer in peers if peer.messages] or peers
        sent = sum(p.sent + p.messages * costs.message_bytes for p in called)
        messages = sum(p.messages for p in called)
        taken.append((len(done) / count, clock, sent / len(called), messages / len(called)))
    return Outcome(design, world.name, count, *map(statistics.mean, zip(*taken, strict=True)))


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [f"{'world':20} {'groups':17} {'peers':>6} {'took part':>10} {'round':>8} "
            f"{'GB a peer':>10} {'DHT calls':>10}"]  # fmt: skip
    rows += [
        f"{o.world:20} {o.design:17} {o.peers:6} {o.took_part:10.1%} {o.clock:6.0f} s "
        f"{o.bytes / 1e9:10.1f} {o.messages:10.0f}"
        for o in outcomes
    ]
    return "\n".join(rows)
