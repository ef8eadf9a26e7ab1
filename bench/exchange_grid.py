"""Measure utilization and bytes of a member on a grid of inner steps a round and network links.

    python -m bench.exchange_grid FILE.json                     20 minutes

The results are compared with ``dt-plan``. As in ``bench.exchange`` each miner has a machine (a
network namespace) and a network link of its own, and inner steps are paced. A subnet for each
period: its four miners have a link each, and a point is two outer steps of one, through the store.
A point is written to FILE as soon as it is measured.

Utilization is what was trained and merged, in steps of the median time, over the wall time.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench import exchange as bench
from bench.common import parser, table
from bench.exchange import ApartSubnet, Count, counters, machines
from distributed_training.common.files import write_json
from distributed_training.common.memory import ModelShape
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalNeuron, LocalSubnet, SubnetFailure
from distributed_training.protocol.round_plan import PlannedMember, PlannedStep, through_store
from distributed_training.telemetry import read_events

MODEL = bench.MODEL | {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
SHAPE = ModelShape.from_config(MODEL)
PARAMETERS = SHAPE.parameters
STEP = 1.0  # seconds of a paced inner step
PERIODS = (60, 40, 27, 18)  # seconds
UP = (19.7, 7.9, 2.86, 1.12)  # Mbit/s
DOWN = 5  # times as much as up
_STORE_STEPS = 2  # outer steps of a point
#: Seconds of a round in which these miners take no inner step, a pause left out: of this
#: machine, as a step's length is.
HELD = 0.5
TITLES = (
    *("rounds", "period", "up, Mbit/s", "step", "inner steps", "utilization", "computed"),
    *("sent, MB", "computed", "received, MB", "computed"),
)


def options_of(folder: Path, period: int) -> SubnetOptions:
    (model := folder / "config.json").write_text(json.dumps(MODEL))
    flags = ["--neuron.local_batch_size_train", "1", "--data.prefetch_blocks", "1"]
    flags += ["--data.max_prefetch_blocks", "1"]
    rules: dict[str, Any] = {
        "private": True,
        "model.parameters": PARAMETERS,
        "training.sequence_length": 64,
        "training.effective_batch": 2,
        "data.max_length": 128,
        "round.minimum_valid_inner_step": 2,
        "round.grace": f"{period / 3.01:.2f}s",
    }
    # A newcomer is not waited for at each close, so all in time begin together.
    in_time = [computed(period, up, STEP).in_time for up in UP]
    return SubnetOptions(
        folder=folder / str(period),
        ranks=(1,) * len(in_time),
        exchange="store",
        outer_steps=len(UP) + 2,
        period=period,
        least_miners=sum(in_time),
        miner_script=bench._PACED,
        miner_flags=tuple(flags),
        validator_flags=("--validator.model_config", str(model)),
        rules=rules,
    )


class Grid:
    """The subnet of one period: its points, one after the other."""

    def __init__(self, folder: Path, period: int, until: float) -> None:
        self.period, self._until = period, until
        self._options = options_of(folder, period)
        self._links = [(up, DOWN * up) for up in UP]
        self._counted: dict[str, list[Count]] = {}

    def measure(self) -> Iterator[dict[str, Any]]:
        """Yield the points. Raises SubnetFailure."""
        links = self._links
        os.environ["PACED_STEP"] = str(STEP)
        with machines(links) as made, made[0].inside(), ApartSubnet(made, self._options) as subnet:
            self._wait(subnet, 1, "an outer step of all", 240 + 3 * self.period)
            first = self._reached + 1  # who came last has caught up by then
            longest = 60 + (_STORE_STEPS + 3) * self.period
            self._wait(subnet, first + _STORE_STEPS, "the last outer step", longest)
            for miner, link in zip(subnet.miners, links, strict=True):
                yield self._point(subnet, miner, link, first)

    @property
    def _reached(self) -> int:
        """The outer step that all have taken, and were live in."""
        return min((seen[-1].outer_step for seen in self._counted.values() if seen), default=0)

    def _wait(self, subnet: LocalSubnet, step: int, what: str, longest: float) -> None:
        """Wait until all miners have taken an outer step, and count bytes at each. Raises
        SubnetFailure."""

        def reached() -> bool:
            for miner in subnet.miners:
                seen, taken = self._counted.setdefault(miner.plan.name, []), miner.state.outer_steps
                if taken and not (seen and seen[-1].outer_step == taken[-1][0]):
                    assert miner.child.pid is not None
                    seen.append(Count(*taken[-1], *counters(miner.child.pid)))
            return all(self._counted.values()) and self._reached >= step

        longest = min(longest, self._until - time.monotonic())
        subnet.wait_until(reached, timedelta(seconds=max(0.0, longest)), what)

    def _point(
        self, subnet: LocalSubnet, miner: LocalNeuron, link: tuple[float, float], first: int
    ) -> dict[str, Any]:
        """Return what one miner did from its outer step ``first`` to its last one."""
        seen = self._counted[miner.plan.name]
        begin = next(count for count in seen if count.outer_step >= first)
        end, wall = seen[-1], seen[-1].at - begin.at
        rounds = end.outer_step - begin.outer_step
        events = [e for e in read_events(miner.plan.events) if begin.at < e["time"] <= end.at]
        steps = [step for step in miner.state.steps if begin.at < step.time <= end.at]
        of_rounds = [e for e in events if e["kind"] == "round"]
        uploaded = sum(e["bytes_sent"] for e in events if e["kind"] == "publication")
        merged = min(rounds, sum(e["base"] == "merged" for e in of_rounds))
        led = subnet.validator.state.tables["round"]
        failed = sum(not e["ok"] and begin.at < e["time"] <= end.at + self.period / 2 for e in led)
        return {
            "parameters": PARAMETERS,
            "members": len(subnet.miners),
            "period": self.period,
            "grace": self._options.rules.get("round.grace"),
            "up": link[0],
            "down": link[1],
            "step": round(statistics.median(step.seconds for step in steps), 3),
            "held": round(sum(step.between_seconds or 0.0 for step in steps) / rounds, 2),
            "rounds": rounds,
            "failed": failed + sum(not e["ok"] for e in of_rounds),
            "merged": merged,
            "steps": len(steps) / rounds,
            "seconds": round(wall / rounds, 2),
            "sent": (end.sent - begin.sent) // rounds,
            "uploaded": uploaded // rounds,
            "received": (end.received - begin.received) // rounds,
            "round_seconds": _mean([e.get("seconds") for e in of_rounds]),
            "upload": _mean([e["seconds"] for e in events if e["kind"] == "publication"]),
        }


def computed(period: float, up: float, step: float) -> PlannedStep:
    """Return what ``dt-plan`` computes for a point."""
    member = PlannedMember(step, up, DOWN * up, HELD)
    return through_store(PARAMETERS, member, period=period, grace=period / 3.01)


def rows(points: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each point, of two miners with one link their mean.

    Without those in which a round failed for the validator.
    """
    places: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for point in points:
        if not point["failed"]:
            places.setdefault((point["period"], point["up"]), []).append(point)
    for (period, up), found in places.items():
        step, steps, sent, received = (
            statistics.mean(each[name] for each in found)
            for name in ("step", "steps", "sent", "received")
        )
        trained = statistics.mean(
            p["steps"] * p["step"] / p["seconds"] * p["merged"] / p["rounds"] for p in found
        )
        plan = computed(period, up, round(step, 2))
        yield (
            *("store", f"{period} s", f"{up:g}", f"{step:.2f} s", f"{steps:.1f}"),
            *(f"{trained:.1%}", f"{plan.utilization:.1%}"),
            *(f"{sent / 1e6:.3f}", f"{plan.sent / 1e6:.3f}"),
            *(f"{received / 1e6:.3f}", f"{plan.received / 1e6:.3f}"),
        )


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return round(statistics.mean(found), 3) if found else None


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("file", type=Path, metavar="FILE", help="for the points, as JSON")
    arguments.add_argument("--periods", type=int, nargs="+", help="seconds [60 40 27 18]")
    arguments.add_argument("--minutes", type=float, default=20.0, help="of all [20]")
    arguments.add_argument("--folder", type=Path, help="keep the run folders there")
    given = arguments.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing is left behind
    until, points = time.monotonic() + 60 * given.minutes, []
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        for period in given.periods or PERIODS:
            if time.monotonic() > until:
                break
            print(f"{period} s from close to close", flush=True)
            try:
                for point in Grid(folder, period, until).measure():
                    print(json.dumps(point), flush=True)
                    points.append(point)
                    write_json(given.file, points)
            except SubnetFailure as failure:
                print(failure, flush=True)
    table(TITLES, rows(points))
    return 0 if points else 1


if __name__ == "__main__":
    sys.exit(main())
