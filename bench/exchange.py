"""Compare rounds through the store with rounds over hivemind, at links as members have them.

    python -m bench.exchange                      both, 20 minutes
    python -m bench.exchange --exchange store --link 20 100 --period 100 --outer-steps 4

Four miners of a local subnet have a machine (a network namespace) and a network link each;
validator, registry and store share another machine, whose link has no bound. A transfer takes as
much of a round period as one of 4 billion parameters takes of 80 minutes at 200 Mbit/s both ways,
which leave time for an all-reduce. It begins 0.15 of a period after the close.

Bytes are what a member's interface counted from one outer step to the next. The validator's are
those of the store and of its peer. Utilization is said twice. *Inner steps* are compared with a
lone miner's, which takes its median step again and again. *Not held* is 1 - the time between inner
steps / wall, from the events. Inner steps are paced, mostly asleep, so that programs on few cores
do not measure each other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.common import folder_or_temporary, parser, table
from distributed_training.common.llama import llama_config
from distributed_training.common.memory import ModelShape
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalNeuron, LocalSubnet, SubnetFailure
from distributed_training.protocol import keys
from distributed_training.protocol.growth import Growth, grace_seconds
from distributed_training.protocol.manifest import Manifest
from distributed_training.telemetry import read_events
from testbed.namespaces import Machine, ip, join, run, shape

KINDS = ("hivemind", "store")  # the first is the baseline
MINERS = 4
MODEL = llama_config(
    hidden=640, layers=2, heads=10, kv_heads=10, intermediate=1728, vocab=264, max_positions=64
)
PARAMETERS = ModelShape.from_config(MODEL).parameters
FIRST = 1  # outer step from which on bytes and time are counted: at the start all load the model
GOAL_BYTES, GOAL_UTILIZATION = 0.55, 0.945
_PACED = Path(__file__).parents[1] / "testbed" / "paced_miner.py"
_STEP = 2.5  # seconds of a paced inner step
_FLAGS = (*("--neuron.local_batch_size_train", "1", "--data.prefetch_blocks", "1"),)
_BIG = 4e9, 4800.0  # parameters, seconds from close to close
_LINK = (200.0, 200.0)  # Mbit/s of its members, up and down

#: Programs find store and registry at loopback, as in any local subnet.
_OF_MEMBER = """
table ip way {{
    chain out {{
        type nat hook output priority -100;
        ip daddr 127.0.0.1 tcp dport {{ {ports} }} dnat to {founder}
    }}
    chain from {{ type nat hook postrouting priority 100; oifname "eth0" masquerade; }}
}}
"""
_OF_FOUNDER = """
table ip way {{
    chain in {{
        type nat hook prerouting priority -100;
        iifname "eth0" tcp dport {{ {ports} }} dnat to 127.0.0.1
    }}
    counter sent {{ }}
    counter received {{ }}
    chain out {{
        type filter hook output priority 0;
        oifname "lo" tcp dport {store} counter name sent
        oifname "lo" tcp sport {store} counter name received
        oifname "eth0" tcp sport != {{ {ports} }} counter name sent
    }}
    chain peers {{
        type filter hook input priority 0;
        iifname "eth0" tcp dport != {{ {ports} }} counter name received
    }}
}}
"""


@contextlib.contextmanager
def machines(links: Sequence[tuple[float, float]]) -> Iterator[list[Machine]]:
    """Yield the founder's machine, and a miner's for each of the ``links``: Mbit/s up and down.

    Raises OSError or subprocess.CalledProcessError.
    """
    tag = f"dt{os.getpid() % 100000}"
    made = [Machine(f"{tag}m{i}", f"10.215.0.{i + 1}") for i in range(len(links) + 1)]
    switch = f"{tag}switch"
    try:
        for name in (switch, *(machine.name for machine in made)):
            ip("netns", "add", name)
        join("port", {m.name: m.address for m in made}, switch=switch)
        for number, machine in enumerate(made):
            run(*machine.prefix, "sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1")
            if number:
                up, down = links[number - 1]  # what it sends and receives, in Mbit/s
                shape(machine.name, "eth0", up)
                shape(switch, f"port{number}", down)
        yield made
    finally:
        for name in (switch, *(machine.name for machine in made)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


class ApartSubnet(LocalSubnet):
    """A local subnet whose miners have a machine each, and the rest the first one."""

    def __init__(self, made: Sequence[Machine], options: SubnetOptions) -> None:
        super().__init__(options=options, tell=lambda line: print(line, flush=True))
        self._made = made

    def _start_neuron(self, neuron: LocalNeuron) -> None:
        """Start it at its place; the validator, which is the first, when all can be reached."""
        place = self._made[0]
        if neuron is self.validator:
            self._open_ways()
        else:
            place = self._made[1 + self.miners.index(neuron)]
            if self.options.exchange == "hivemind":
                neuron.command += ("--dht.ip", place.address)
        with place.inside():
            super()._start_neuron(neuron)

    def _open_ways(self) -> None:
        """Lead what members send to store and registry to the founder's machine."""
        urls = (self.store.endpoint, self.chain_endpoint)
        served = [url.rpartition(":")[2] for url in urls]
        founder, *others = self._made
        ports = ", ".join(served)
        _filter(founder, _OF_FOUNDER.format(ports=ports, store=served[0]))
        for machine in others:
            _filter(machine, _OF_MEMBER.format(ports=ports, founder=founder.address))


def _filter(machine: Machine, rules: str) -> None:
    subprocess.run([*machine.prefix, "nft", "-f", "-"], input=rules, text=True, check=True)


def validators_bytes(founder: Machine) -> tuple[int, int]:
    """Return the bytes that the validator has sent to the store and peers, and received."""
    listed = json.loads(run(*founder.prefix, "nft", "-j", "list", "counters").stdout)["nftables"]
    found = {each["counter"]["name"]: each["counter"]["bytes"] for each in listed[1:]}
    return found["sent"], found["received"]


@dataclass(frozen=True)
class Count:
    """The bytes of an interface at the end of a member's outer step."""

    outer_step: int
    at: float  # Unix seconds
    sent: int
    received: int


def counters(pid: int) -> tuple[int, int]:
    """Return the bytes sent and received at the machine where a process runs."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    fields = line.partition(":")[2].split()
    return int(fields[8]), int(fields[0])


@dataclass
class Member:
    """What one miner did from outer step ``FIRST``; bytes are a parameter, in an outer step."""

    sent: list[float]
    received: list[float]
    uploaded: float
    by_steps: float  # utilization
    by_held: float
    held: float = 0.0  # seconds in an outer step


@dataclass
class Found:
    """The figures of a run of one kind."""

    members: list[Member] = field(default_factory=list)
    seconds: float = 0.0  # of an outer step
    validator: tuple[float, ...] = ()  # sent and received, bytes per parameter in an outer step
    losses: list[tuple[int, float]] = field(default_factory=list)  # tokens of all, held-out loss
    sources: list[str] = field(default_factory=list)  # of the updates from FIRST on


def link(period: int, of_big: Sequence[float] = _LINK) -> tuple[float, float]:
    """Return the Mbit/s up and down that take as much of ``period`` as the large model's."""
    up, down = (each * PARAMETERS / _BIG[0] * _BIG[1] / period for each in of_big)
    return up, down


def measure(
    exchange: Any,
    folder: Path,
    period: int,
    last: int,
    *,
    of_big: Sequence[float] = _LINK,
    rules: Mapping[str, Any] | None = None,
    kill_every: float = math.inf,
) -> Found:
    """Run a subnet until all miners have taken outer step ``last``, or time is over.

    ``of_big``: link of the large model's members. ``rules``: more keys of the network's file.
    ``kill_every``: seconds after which the next miner gets ``kill -9`` and starts again.
    """
    up, down = link(period, of_big)
    print(f"{exchange}: links of {up:.2f} Mbit/s up and {down:.2f} down", flush=True)
    options = SubnetOptions(
        folder=folder / exchange,
        ranks=(1,) * MINERS,
        exchange=exchange,
        outer_steps=last,
        period=period,
        least_miners=MINERS - 1,
        miner_script=_PACED,
        miner_flags=_FLAGS,
        rules={**_rules(exchange, period, up), **(rules or {})},
    )
    os.environ["PACED_STEP"] = str(_STEP)
    with machines([(up, down)] * MINERS) as made, made[0].inside():
        if exchange == "hivemind":
            options = replace(options, validator_flags=("--dht.ip", made[0].address))
        counted: dict[str, list[Count]] = {}
        by_step: dict[int, tuple[int, int]] = {}  # validator's when the first miner took the step
        killed = itertools.count()
        next_kill = time.monotonic() + kill_every

        def reached() -> bool:
            nonlocal next_kill
            trained = all(miner.state.losses for miner in subnet.miners)
            if trained and time.monotonic() > next_kill:
                number = next(killed) % MINERS
                print(f"kill -9 {subnet.miners[number].name}", flush=True)
                subnet.kill_miner(number)
                subnet.restart_miner(number)
                next_kill = time.monotonic() + kill_every
            for miner in subnet.miners:
                seen, taken = counted.setdefault(miner.name, []), miner.state.outer_steps
                if not taken or (seen and seen[-1].outer_step == taken[-1][0]):
                    continue
                step, at = taken[-1]
                assert miner.pid is not None
                seen.append(Count(step, at, *counters(miner.pid)))
                by_step.setdefault(step, validators_bytes(made[0]))
            return all(seen and seen[-1].outer_step >= last for seen in counted.values())

        with ApartSubnet(made, options) as subnet:
            try:
                subnet.wait_until(reached, 1.5 * options.longest, f"outer step {last}")
            except SubnetFailure as failure:
                print(failure, flush=True)
            sources = list(_sources(subnet, max(by_step, default=0)))
        return _found(subnet, counted, by_step, sources)


def _sources(subnet: LocalSubnet, last: int) -> Iterator[str]:
    """Yield what each update after ``FIRST`` follows from, as its manifest says."""
    with contextlib.closing(subnet.open_bucket()) as bucket:
        for step in range(FIRST + 1, last + 1):
            data = bucket.get(keys.outer_key(step, keys.MANIFEST), limit=Manifest.most_bytes)
            averaging = json.loads(data or "{}").get("averaging") or {"source": "merge", "why": ""}
            print(f"outer step {step}: {averaging['source']} {averaging['why']}", flush=True)
            yield averaging["source"]


def _rules(exchange: str, period: int, up: float) -> dict[str, Any]:
    grace = grace_seconds(PARAMETERS, "4-bit", up, period=float(period))
    rules: dict[str, Any] = {
        "private": True,
        "model.config": {key: value for key, value in MODEL.items() if value is not None},
        "model.parameters": PARAMETERS,
        "training.sequence_length": 64,
        "training.effective_batch": 2,
        "data.max_length": 128,  # otherwise the validator judges on more text than all train on
    }
    if exchange == "hivemind":
        # Of these short periods, an encoding takes as much of a core as of long ones.
        rules["round.average_after"] = f"{period * 0.15:.1f}s"
        grace = period // 3
    return {**rules, "round.grace": f"{grace}s"}


def _found(
    subnet: LocalSubnet,
    counted: dict[str, list[Count]],
    by_step: dict[int, tuple[int, int]],
    sources: list[str],
) -> Found:
    """Return the figures of a subnet that has stopped."""
    found, lengths = Found(sources=sources), []
    trained: list[tuple[int, int]] = []  # outer step, tokens
    for miner in subnet.miners:
        seen = [count for count in counted[miner.name] if count.outer_step >= FIRST]
        events = list(read_events(miner.folder / "events.jsonl"))
        trained += [(e["outer_step"], e["tokens"]) for e in events if e["kind"] == "step"]
        if len(seen) < 2:
            print(f"{miner.name} took {len(seen)} outer steps: it is left out", flush=True)
            continue
        first, final = seen[0], seen[-1]
        wall = final.at - first.at
        steps = [step for step in miner.state.steps if first.at < step.time <= final.at]
        sizes = [
            e["bytes_sent"]
            for e in events
            if e["kind"] == "publication" and first.at < e["time"] <= final.at
        ]
        pairs = list(pairwise(seen))
        median = statistics.median(step.seconds for step in steps)
        held = sum(step.between_seconds or 0.0 for step in steps)
        lengths += [(b.at - a.at) / (b.outer_step - a.outer_step) for a, b in pairs]
        member = Member(
            sent=[(b.sent - a.sent) / PARAMETERS for a, b in pairs],
            received=[(b.received - a.received) / PARAMETERS for a, b in pairs],
            uploaded=sum(sizes) / len(pairs) / PARAMETERS,
            by_steps=len(steps) * median / wall,
            by_held=1 - held / wall,
            held=held / (final.outer_step - first.outer_step),
        )
        found.members.append(member)
        ways = member.sent, member.received
        sent, received = (" ".join(f"{value:.3f}" for value in values) for values in ways)
        print(
            f"{miner.name}: {len(steps)} inner steps, median {median:.2f} s, held {held:.1f} "
            f"of {wall:.0f} s, sent {sent}, received {received}",
            flush=True,
        )
    found.seconds = statistics.mean(lengths) if lengths else 0.0
    if FIRST in by_step and (final_step := max(by_step)) > FIRST:
        moved = zip(by_step[FIRST], by_step[final_step], strict=True)
        found.validator = tuple((b - a) / (final_step - FIRST) / PARAMETERS for a, b in moved)
    for event in subnet.validator.state.tables["held_out"]:
        tokens = sum(count for step, count in trained if step < event["outer_step"])
        found.losses.append((tokens, event["after"]))
    return found


def rows(results: dict[str, Found]) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows: a column for each kind, the ratio to the first, the goal."""
    growth = Growth(MINERS, PARAMETERS)
    kinds = list(results.values())

    def row(name: str, values: Sequence[float], form: str, goal: str = "") -> tuple[str, ...]:
        ratio = f"{values[-1] / values[0]:.2f}" if len(values) > 1 and values[0] else ""
        return (name, *(format(value, form) for value in values), ratio, goal)

    def mean(pick: Callable[[Member], float]) -> list[float]:
        return [statistics.mean(map(pick, each.members)) for each in kinds]

    bound, update = f"store: <={GOAL_BYTES}", growth.update / PARAMETERS
    sent = mean(lambda member: statistics.mean(member.sent))
    uploaded = mean(lambda member: member.uploaded)
    yield row("sent", sent, ".3f", bound)
    yield row("its uploads", uploaded, ".3f", f"{growth.upload / PARAMETERS:.3f} computed")
    rest = [a - b for a, b in zip(sent, uploaded, strict=True)]
    yield row("with them: the round, polls", rest, ".3f")
    received = mean(lambda member: statistics.mean(member.received))
    yield row("received", received, ".3f", bound)
    yield row("received beyond the update", [a - update for a in received], ".3f")
    ways: dict[str, Callable[[Member], float]] = {
        "utilization, inner steps": lambda member: member.by_steps,
        "utilization, not held": lambda member: member.by_held,
    }
    for name, pick in ways.items():
        yield row(name, mean(pick), ".1%", f">={GOAL_UTILIZATION:.1%}")
        yield row(f"{name}, the least", [min(map(pick, e.members)) for e in kinds], ".1%")
    held = mean(lambda member: member.held)
    yield row("seconds held in an outer step", held, ".1f")
    yield row("seconds of an outer step", [each.seconds for each in kinds], ".0f")
    averages = (f"{each.sources.count('average')} of {len(each.sources)}" for each in kinds)
    yield ("updates from an average", *averages, "", "")
    if all(each.validator for each in kinds):
        growth = Growth(MINERS, PARAMETERS, weights_every=sys.maxsize)  # without its state
        ways_of = {"sends": growth.validator_sends, "receives": growth.validator_receives}
        for number, (name, computed) in enumerate(ways_of.items()):
            moved = [each.validator[number] for each in kinds]
            yield row(f"validator {name}", moved, ".3f", f"store: {computed / PARAMETERS:.3f}")


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--exchange", choices=KINDS, help="[both]")
    arguments.add_argument("--period", type=int, default=150, help="seconds [150]")
    arguments.add_argument("--outer-steps", type=int, default=3, help="[3]")
    what = "Mbit/s up and down of a member with 4 billion parameters [200 200]"
    arguments.add_argument("--link", type=float, nargs=2, default=_LINK, help=what)
    arguments.add_argument("--folder", type=Path, help="keep the run folders there")
    given = arguments.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing is left behind
    results = {}
    with folder_or_temporary(given.folder) as folder:
        for kind in (given.exchange,) if given.exchange else KINDS:
            last, of_big = given.outer_steps, given.link
            results[kind] = measure(kind, folder.absolute(), given.period, last, of_big=of_big)
    print(f"{PARAMETERS / 1e6:.1f} M parameters; means over {MINERS} miners, bytes per parameter")
    if not all(each.members for each in results.values()):
        print("no two outer steps were taken, so there is no table")
        return 1
    ratio = "store / hivemind" if len(results) > 1 else ""
    table(("", *results, ratio, "goal"), list(rows(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
