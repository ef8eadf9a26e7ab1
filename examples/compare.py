"""Compare outer rules: held-out loss against bytes and time, three seeds, as a picture and a table.

    python examples/compare.py                       five minutes of a core
    python examples/compare.py nesterov my_rule.py   one of a file, next to the network's own
    python examples/compare.py my_rule.py --subnet   the same in real processes; one of them is
                                                     killed each minute, behind thin network links

A rule is a name, or a file that registers one (docs/research.md). Four workers train a byte model
of 115,000 parameters in this process. What they exchange is encoded, merged and applied by the
program's own code. ``--subnet`` needs root, for the network namespaces of bench.exchange.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import table
from bench.workers import (
    WORKERS,
    Network,
    arguments_of,
    held_out_losses,
    initial,
    inner_steps,
    stack,
)
from distributed_training.config.loader import exit_with
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError
from distributed_training.training.outer_rule import find_rule, outer_rule_of
from distributed_training.validator.merge import OuterState, Rule

RULES = Path(__file__).resolve().parent / "rules"
DEFAULT = ("nesterov", str(RULES / "sparse_uploads.py"), str(RULES / "pairs.py"))
SUBNET_PERIOD, SUBNET_STEPS, KILL_EVERY = 80, 5, 60.0  # seconds, outer steps, seconds


@dataclass
class Curve:
    """One rule, after each outer step: bytes of a worker for each parameter, losses by seed."""

    sent: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)

    def hours(self, options: argparse.Namespace) -> list[float]:
        """Return when each outer step was taken by a worker that waits while it sends."""
        down, up = (each * 1e6 / 8 for each in options.link)
        trained = options.steps * options.step_seconds
        return [
            (number * trained + options.parameters * (sent / up + received / down)) / 3600
            for number, (sent, received) in enumerate(zip(self.sent, self.received, strict=True), 1)
        ]


def train(names: Sequence[str], options: argparse.Namespace) -> dict[str, Curve]:
    """Train the workers of each rule and each seed on the same batches."""
    starts = [initial(seed) for seed in range(options.seeds)]
    parameters = sum(each.numel() for each in starts[0].values())
    rates = options.outer_learning_rate, options.outer_momentum
    networks = [
        Network(
            Rule(name, *rates),
            [*start],
            [OuterState([*start.values()])],
            workers=options.workers,
        )
        for name in names
        for start in starts
    ]
    workers = options.workers
    weights = stack(starts * len(names), workers)
    curves = {name: Curve() for name in names}
    steps = inner_steps(weights, options.rounds * options.steps, options.seeds * workers)
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        for step, _ in steps:
            if step % options.steps:
                continue
            outer_step = step // options.steps
            with torch.no_grad():
                for number, network in enumerate(networks):
                    mine = slice(number * workers, (number + 1) * workers)
                    own = [each[mine] for each in weights.values()]
                    network.exchange(own, Path(folder), outer_step)
                    for index, each in enumerate(own):
                        new = [network.state_of(w).weights[index] for w in range(workers)]
                        each.copy_(torch.stack(new))
            for number, curve in enumerate(curves.values()):
                of_rule = networks[number * options.seeds : (number + 1) * options.seeds]
                curve.sent.append(of_rule[0].sent / parameters)
                curve.received.append(of_rule[0].received / parameters)
                curve.losses.append([held_out_loss(network) for network in of_rule])
            means = (f"{n} {statistics.mean(c.losses[-1]):.4f}" for n, c in curves.items())
            print(f"outer step {outer_step}: {', '.join(means)}", flush=True)
    return curves


def held_out_loss(network: Network) -> float:
    """Return the mean loss of the models that the members of a network have."""
    values = zip(*(state.weights for state in network.states), strict=True)
    stacked = (torch.stack(each) for each in values)
    return statistics.mean(held_out_losses(dict(zip(network.names, stacked, strict=True))))


def draw(curves: dict[str, Curve], options: argparse.Namespace) -> None:
    """Write the picture: a line is the mean of the seeds, the area around it their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_bytes, by_time) = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for name, curve in curves.items():
        gigabytes = [each * options.parameters / 1e9 for each in curve.sent]
        means = [statistics.mean(each) for each in curve.losses]
        lows, highs = ([of(each) for each in curve.losses] for of in (min, max))
        for axes, places in ((by_bytes, gigabytes), (by_time, curve.hours(options))):
            (line,) = axes.plot(places, means, marker=".", label=name)
            axes.fill_between(places, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)
    by_bytes.set(
        xscale="log", xlabel="GB that a worker has sent", ylabel="held-out loss, nats a byte"
    )
    by_time.set(xscale="log", xlabel="hours, if a worker waits while it sends and receives")
    for axes in (by_bytes, by_time):
        axes.grid(alpha=0.3, which="both")
    by_bytes.legend()
    figure.suptitle(
        f"{options.workers} workers, {options.seeds} seeds, {options.rounds} outer steps of "
        f"{options.steps} inner steps. Bytes and hours for {options.parameters / 1e9:g} billion "
        f"parameters,\n{' down and '.join(f'{each:g}' for each in options.link)} Mbit/s up, "
        f"{options.step_seconds:g} s an inner step",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(options.picture, dpi=110)
    print(f"picture: {options.picture}")


def tell(curves: dict[str, Curve], options: argparse.Namespace) -> None:
    """Print the table of the last outer step."""
    first = statistics.mean(next(iter(curves.values())).losses[-1])
    rows = []
    for name, curve in curves.items():
        counted, last = len(curve.losses), curve.losses[-1]
        moved = (f"{each[-1] / counted:.3f}" for each in (curve.sent, curve.received))
        losses = (f"{loss:.4f}" for loss in last)
        apart = f"{statistics.mean(last) / first - 1:+.2%}"
        rows.append((name, *moved, f"{curve.hours(options)[-1]:.1f}", *losses, apart))
    seeds = [f"seed {seed}" for seed in range(options.seeds)]
    table(("rule", "sent", "received", "hours", *seeds, "against the first"), rows)
    print("sent, received: bytes a parameter, of a worker in an outer step")


def run_subnets(names: Sequence[str]) -> int:
    """Run each rule in a local subnet whose miners are killed, behind thin network links."""
    from bench import exchange

    for name in names:
        outer_rule_of(TrainingSettings(outer_rule=name), "store")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing is left behind
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="compare-") as folder:
            results[name] = exchange.measure(
                "store",
                Path(folder),
                SUBNET_PERIOD,
                SUBNET_STEPS,
                rules={"training.outer_rule": name},
                kill_every=KILL_EVERY,
            )
    rows = []
    for name, found in results.items():
        members = found.members
        if not members:
            continue
        sent, received = (
            statistics.mean(statistics.mean(getattr(member, way)) for member in members)
            for way in ("sent", "received")
        )
        held = statistics.mean(member.by_held for member in members)
        losses = " ".join(f"{loss:.4f}" for _, loss in found.losses)
        rows.append((name, len(members), f"{sent:.3f}", f"{received:.3f}", f"{held:.1%}", losses))
    table(("rule", "members", "sent", "received", "training", "held-out loss"), rows)
    return int(len(rows) < len(names))


def link(text: str) -> tuple[float, float]:
    down, up = map(float, text.split("/"))
    if not min(down, up) > 0:
        raise ValueError(text)
    return down, up


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(__doc__, rounds=20)
    add = arguments.add_argument
    add("rules", nargs="*", default=DEFAULT, metavar="NAME|FILE.py", help="[the three there are]")
    add("--workers", type=int, default=WORKERS, help=f"of each rule and seed [{WORKERS}]")
    add("--outer-learning-rate", type=float, default=0.8, help="[0.8]")
    add("--outer-momentum", type=float, default=0.9, help="[0.9]")
    add("--parameters", type=float, default=1e9, help="of the model that bytes and hours are for")
    add("--link", type=link, default=link("100/20"), metavar="DOWN/UP", help="Mbit/s [100/20]")
    add("--step-seconds", type=float, default=5.0, help="of an inner step of that model [5]")
    add("--picture", type=Path, default=Path("compare.png"), help="[compare.png]")
    add("--subnet", action="store_true", help="real processes, kills and thin network links")
    options = arguments.parse_args(argv)
    if min(options.workers, options.seeds, options.rounds, options.steps) < 1:
        arguments.error("workers, seeds, rounds and steps are 1 at the least")
    if not options.picture.absolute().parent.is_dir():
        arguments.error(f"there is no folder for the picture {options.picture}")
    try:
        names = list(dict.fromkeys(find_rule(rule) for rule in options.rules))
        for name in names:
            outer_rule_of(TrainingSettings(outer_rule=name), None)
        if options.subnet:
            return run_subnets(names)
    except ConfigError as error:
        return exit_with(error)
    except (OSError, subprocess.CalledProcessError) as error:
        print(
            f"error: no machines with network links of their own can be made here ({error}), so "
            'nothing was compared: be root, or try make run ARGS="--exchange store --outer-rule '
            f'{options.rules[0]}"',
            file=sys.stderr,
        )
        return 2
    curves = train(names, options)
    tell(curves, options)
    try:
        draw(curves, options)
    except ImportError as error:
        print(f"no picture: {error}; install the extra 'local'", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
