"""Compare outer rules by held-out loss, bytes and time over several seeds: picture, table, JSON.

    python examples/compare.py                       takes seven minutes on one core
    python examples/compare.py nesterov my_rule.py   a rule from a file, next to the network's own
    python examples/compare.py nesterov:lr=0.4 my_rule.py:lr=1.6,mu=0    each at its own rates
    python examples/compare.py my_rule.py --sweep 0.4,0.8,1.6            each at several rates
    python examples/compare.py --speeds 1,1,0.5 --lost 0.1    unequal workers, uploads that are lost
    python examples/compare.py my_rule.py --subnet   the same in real processes with slow network
                                                     links; one of them is killed every minute

A rule is a name, or a file that registers a rule (docs/research.md). Four workers train a byte
model of 115,000 parameters in this process. The program's own code encodes, clips, merges and
applies what they exchange. The baseline is one worker that exchanges nothing. All rules see the
same batches. ``--subnet`` needs root, for the network namespaces of bench.exchange.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import parser, table
from distributed_training.config.loader import exit_with
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError
from distributed_training.protocol.types import UPDATE_CODEC
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)
from distributed_training.training.outer_rule import (
    OUTER_RULES,
    UploadFacts,
    find_rule,
    outer_rule_of,
)
from distributed_training.validator.merge import (
    HISTORY,
    Measured,
    OuterState,
    Rule,
    clip_factor,
    longest_norm,
    merge,
    norm_of,
    whole_uploads,
)
from examples.byte_model import (
    BATCH,
    CONTEXT,
    HELD_OUT_BYTES,
    LAYERS,
    WIDTH,
    Weights,
    held_out_losses,
    initial,
    losses,
    stack,
    text,
)

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "examples" / "rules"
DEFAULT = ("nesterov", f"{RULES / 'sparse_uploads.py'}:lr=3,mu=0", str(RULES / "pairs.py"))
BASELINE = "one worker"
WORKERS = 4  # workers for each rule and seed
RATE, WARMUP = 1e-3, 30  # learning rate of AdamW; inner steps of its warm-up
SUBNET_PERIOD, SUBNET_STEPS, KILL_EVERY = 80, 5, 60.0  # seconds, outer steps, seconds


class Inner:
    """Run AdamW on all models at once. A slow worker takes only a share of the steps.

    ``speeds``: that share, for the models in turn.
    """

    def __init__(self, weights: Weights, speeds: Sequence[float] = (1.0,)) -> None:
        self._weights, self._speeds = weights, speeds
        betas = (0.9, 0.95)
        self._adam = torch.optim.AdamW(weights.values(), lr=RATE, betas=betas, weight_decay=0.1)

    def step(self, number: int, tokens: Tensor) -> None:
        """Take inner step ``number``, which counts from 1, for each model."""
        models = len(tokens)
        self._adam.param_groups[0]["lr"] = RATE * min(1.0, number / WARMUP)
        speeds = [self._speeds[model % len(self._speeds)] for model in range(models)]
        rests = [m for m, s in enumerate(speeds) if int(number * s) == int((number - 1) * s)]
        self._adam.zero_grad()
        losses(self._weights, tokens).sum().backward()
        kept = [(each, each[rests].clone()) for each in self._tensors()] if rests else []
        self._adam.step()
        with torch.no_grad():
            for each, before in kept:
                each[rests] = before

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the weights and AdamW's averages. Their first dimension is that of the models."""
        for weight in self._weights.values():
            state = self._adam.state[weight]
            yield from (weight.data, *(state[n] for n in ("exp_avg", "exp_avg_sq") if n in state))


@dataclass
class Ruled:
    """Run the rounds of one store network with any outer rule. Uploads may be lost.

    Uploads and updates are the program's own files (``protocol/update_file.py``), merged as a
    validator merges them (``validator/merge.py``). All workers share one state; with a rule that
    forms groups, each worker has its own. If a rule selects what is sent, an upload's size is its
    size after zlib. ``judged``: the text that uploads are judged on. ``sent`` and ``received``:
    bytes of one worker in all outer steps.
    """

    rule: Rule
    names: Sequence[str]
    state: OuterState
    workers: int
    judged: Tensor
    sent: float = 0.0
    received: float = 0.0
    residuals: dict[int, Sequence[Tensor]] = field(default_factory=dict)  # worker -> residual
    states: list[OuterState] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)  # norms merged in each outer step

    def __post_init__(self) -> None:
        if OUTER_RULES[self.rule.name].groups is not None:
            self.states = [self.state] * self.workers

    def state_of(self, worker: int) -> OuterState:
        """Return the state with which a worker begins its inner steps."""
        return self.states[worker] if self.states else self.state

    def exchange_and_carry(
        self, own: Sequence[Tensor], folder: Path, outer_step: int, lost: Collection[int]
    ) -> list[Tensor]:
        """Take an outer step. Return the new weights, plus the training of lost uploads."""
        before = [self.state_of(worker) for worker in range(self.workers)]
        uploads = {
            worker: self.upload(worker, [each[worker] for each in own], folder, outer_step)
            for worker in range(self.workers)
            if worker not in lost
        }
        groups = OUTER_RULES[self.rule.name].groups
        if groups is None:
            self.merge_all([*uploads.values()], folder, outer_step)
        for group in groups(self.workers, outer_step) if groups is not None else ():
            if there := [worker for worker in group if worker in uploads]:
                self._average(before, there, [uploads[worker] for worker in there])
        found = []
        for index, each in enumerate(own):
            new = torch.stack([self.state_of(w).weights[index] for w in range(self.workers)])
            for worker in lost:
                new[worker] += each[worker] - before[worker].weights[index]
            found.append(new)
        return found

    def merge_all(self, uploads: Sequence[UpdateFile], folder: Path, outer_step: int) -> None:
        """Clip uploads as a validator does, and judge them if the rule merges by judgements."""
        facts, norms = list[UploadFacts](), [norm_of(upload) for upload in uploads]
        found = [Measured(norm, 1.0, 0.0) for norm in norms]  # treat all as if they gained the same
        past = [Measured(norm, 1.0, 0.0) for some in self.norms[-HISTORY:] for norm in some]
        longest = longest_norm([*past, *found], [])
        factors = [clip_factor(norm, longest) for norm in norms]
        self.norms.append([n * f for n, f in zip(norms, factors, strict=True)])
        if OUTER_RULES[self.rule.name].merge is not None:
            gains = self._gains(uploads, self.judged)
            tokens = [upload.header.tokens for upload in uploads]
            facts = [UploadFacts(*each) for each in zip(tokens, norms, gains, strict=True)]
        path, layout = folder / "update", self._layout("update", outer_step)
        path.unlink(missing_ok=True)
        _, self.state = merge(
            uploads, factors, self.state, self.rule, path=path, layout=layout,
            sign=lambda _: bytes(64), divisor=whole_uploads(found), facts=facts,
        )  # fmt: skip
        self.sent += sum(map(self._bytes_of, uploads)) / self.workers
        self.received += layout.body_bytes

    def upload(
        self, worker: int, weights: Sequence[Tensor], folder: Path, outer_step: int
    ) -> UpdateFile:
        """Write one worker's upload as a member does, and keep the values that it left out."""
        rule = OUTER_RULES[self.rule.name]
        moved = [s - w for s, w in zip(self.state_of(worker).weights, weights, strict=True)]
        if (residual := self.residuals.get(worker)) is not None:
            moved = [m + r * rule.feedback for m, r in zip(moved, residual, strict=True)]
        path = folder / f"upload-{worker}"
        path.unlink(missing_ok=True)
        layout = self._layout("upload", outer_step)
        for index, tensor in enumerate(moved):
            rows = tensor.reshape(rows_and_columns(tensor.shape))
            write_rows(path, layout, index, 0, rows if rule.select is None else rule.select(rows))
        finish(path, layout, lambda _: bytes(64))
        upload = UpdateFile.reopen(path, layout.schema)
        self.residuals[worker] = [
            m - upload.decode(name, m.shape) for name, m in zip(self.names, moved, strict=True)
        ]
        return upload

    def _layout(self, kind: Literal["upload", "update"], outer_step: int) -> UpdateLayout:
        header = Header(
            kind=kind, run_id="bench", outer_step=outer_step, serial=0, hotkey="bench",
            start="0" * 64, codec=UPDATE_CODEC, inner_steps=1, tokens=1,
        )  # fmt: skip
        shapes = [tuple(weight.shape) for weight in self.state.weights]
        return UpdateLayout.of(list(zip(self.names, shapes, strict=True)), header)

    def _gains(self, uploads: Sequence[UpdateFile], data: Tensor) -> list[float]:
        """Return how much each upload lowers the loss on ``data``, in nats per byte."""
        stacked = {
            name: torch.stack(
                [weight, *(weight - upload.decode(name, weight.shape) for upload in uploads)]
            )
            for name, weight in zip(self.names, self.state.weights, strict=True)
        }
        before, *after = held_out_losses(stacked, data)
        return [before - each for each in after]

    def _average(
        self, before: Sequence[OuterState], group: Sequence[int], uploads: Sequence[UpdateFile]
    ) -> None:
        """Take the outer step of a group, whose members send everything to each other."""
        step = OUTER_RULES[self.rule.name].step
        lr, mu = self.rule.learning_rate, self.rule.mu
        starts, gradients = [], []
        for index, name in enumerate(self.names):
            own = torch.stack([before[worker].weights[index] for worker in group])
            starts.append(own.mean(0))
            sent = [upload.decode(name, starts[-1].shape) for upload in uploads]
            gradients.append(torch.stack(sent).mean(0))
        for worker in group:
            momenta: Sequence[Tensor | None] = before[worker].momentum or [None] * len(starts)
            every = zip(starts, gradients, momenta, strict=True)
            found = [step(*each, lr=lr, mu=mu) for each in every]
            self.states[worker] = OuterState([w for w, _ in found], [m for _, m in found])
        whole = sum(start.numel() * start.itemsize for start in starts)
        each = sum(self._bytes_of(upload) + whole for upload in uploads) / self.workers
        self.sent += each * (len(group) - 1)
        self.received += each * (len(group) - 1)

    def _bytes_of(self, upload: UpdateFile) -> int:
        if OUTER_RULES[self.rule.name].select is None:
            return upload.layout.body_bytes
        return len(zlib.compress(upload.path.read_bytes()[upload.layout.body :]))


@dataclass
class Curve:
    """Hold a rule's bytes per parameter and losses by outer step. No rule: the baseline."""

    label: str
    rule: Rule | None
    sent: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)

    def hours(self, options: argparse.Namespace) -> list[float]:
        """Return the hours of the outer steps of a worker that does not train while it sends."""
        down, up = (each * 1e6 / 8 for each in options.link)
        trained = options.steps * options.step_seconds
        return [
            (number * trained + options.parameters * (sent / up + received / down)) / 3600
            for number, (sent, received) in enumerate(zip(self.sent, self.received, strict=True), 1)
        ]


def batches(data: Tensor, options: argparse.Namespace) -> Iterator[Tensor]:
    """Yield the tokens of each inner step, (seeds x workers, batch, context + 1).

    Each seed has its own order, which is the same for all rules and for any number of seeds.
    """
    orders = [options.order_seed + seed * options.vary_order for seed in range(options.seeds)]
    generators = [torch.Generator().manual_seed(order) for order in orders]
    window, size = torch.arange(options.context + 1), (options.workers, options.batch, 1)
    last = len(data) - options.context
    while True:
        yield data[torch.cat([torch.randint(last, size, generator=g) for g in generators]) + window]


def train(curves: Sequence[Curve], options: argparse.Namespace, save: Callable[[], None]) -> None:
    """Train the workers of each rule and each seed; call ``save`` after each outer step."""
    data = text(options.text)
    held, rest = data[:HELD_OUT_BYTES], data[HELD_OUT_BYTES:]
    if len(rest) < HELD_OUT_BYTES:
        raise ConfigError(f"--text has {len(data)} bytes: it needs at least {2 * HELD_OUT_BYTES}")
    sizes = options.width, options.layers, options.context
    places = [options.weights_seed + s * options.vary_weights for s in range(options.seeds)]
    starts = [initial(seed, *sizes) for seed in places]
    parameters = sum(each.numel() for each in starts[0].values())
    networks = [
        None if curve.rule is None else Ruled(
            curve.rule, [*start], OuterState([*start.values()]),
            workers=options.workers, judged=rest[:HELD_OUT_BYTES],
        )
        for curve in curves
        for start in starts
    ]  # fmt: skip
    weights = stack(starts * len(curves), options.workers, torch.device(options.device))
    inner, fed = Inner(weights, options.speeds), batches(rest, options)
    drawn = random.Random(options.order_seed)
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        for outer_step in range(1, options.rounds + 1):
            for number in range(1, options.steps + 1):
                tokens = next(fed).to(options.device).repeat(len(curves), 1, 1)
                inner.step((outer_step - 1) * options.steps + number, tokens)
            lost = [w for w in range(options.workers) if drawn.random() < options.lost]
            lost = lost[: options.workers - 1]  # at least one upload arrives
            with torch.no_grad():
                place = Path(folder), outer_step, lost, held
                found = [
                    _take(network, n * options.workers, weights, *place)
                    for n, network in enumerate(networks)
                ]
            for n, curve in enumerate(curves):
                network = networks[n * options.seeds]
                curve.sent.append(network.sent / parameters if network else 0.0)
                curve.received.append(network.received / parameters if network else 0.0)
                curve.losses.append(found[n * options.seeds : (n + 1) * options.seeds])
            save()
            means = (f"{c.label} {statistics.mean(c.losses[-1]):.4f}" for c in curves)
            print(f"outer step {outer_step}: {', '.join(means)}", flush=True)


def _take(
    network: Ruled | None, first: int, weights: Weights, folder: Path, outer_step: int,
    lost: Sequence[int], held: Tensor,
) -> float:  # fmt: skip
    """Take the outer step of one network; return the mean held-out loss of its states."""
    if network is None:
        return held_out_losses({n: w[first : first + 1] for n, w in weights.items()}, held)[0]
    mine = slice(first, first + network.workers)
    own = [each[mine].cpu() for each in weights.values()]
    new = network.exchange_and_carry(own, folder, outer_step, lost)
    for each, values in zip(weights.values(), new, strict=True):
        each[mine] = values.to(each.device)
    states = zip(*(s.weights for s in network.states or [network.state]), strict=True)
    stacked = (torch.stack(each) for each in states)
    return statistics.mean(held_out_losses(dict(zip(network.names, stacked, strict=True)), held))


def write(curves: Sequence[Curve], options: argparse.Namespace) -> None:
    """Write everything known so far, so that the file is complete at any time."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    plain = {name: value for name, value in vars(options).items() if name != "rules"}
    content: dict[str, Any] = {
        "command": sys.argv,
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "text_sha256": hashlib.sha256(bytes(text(options.text).to(torch.uint8))).hexdigest(),
        "options": json.loads(json.dumps(plain, default=str)),
        "curves": [asdict(curve) | {"hours": curve.hours(options)} for curve in curves],
    }
    aside = options.out.with_name(f"{options.out.name}.new")
    aside.write_text(json.dumps(content, indent=1))
    os.replace(aside, options.out)


def draw(curves: Sequence[Curve], options: argparse.Namespace) -> None:
    """Draw the picture. A line is the mean of the seeds, and the area around it is their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (by_bytes, by_time) = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for curve in curves:
        gigabytes = [each * options.parameters / 1e9 for each in curve.sent]
        means = [statistics.mean(each) for each in curve.losses]
        lows, highs = ([of(each) for each in curve.losses] for of in (min, max))
        for axes, places in ((by_bytes, gigabytes), (by_time, curve.hours(options))):
            if axes is by_bytes and not curve.sent[-1]:
                axes.axhline(means[-1], color="gray", linestyle=":", label=f"{curve.label} at last")
                continue
            (line,) = axes.plot(places, means, marker=".", label=curve.label)
            axes.fill_between(places, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)
    by_bytes.set(xlabel="GB that a worker has sent", ylabel="held-out loss, nats per byte")
    by_time.set(xlabel="hours, if a worker waits while it sends and receives")
    for axes in (by_bytes, by_time):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.grid(alpha=0.3, which="major")
        axes.legend(fontsize=8)
    figure.suptitle(
        f"{options.workers} workers, {options.seeds} seeds, outer steps of {options.steps} inner "
        f"steps. Bytes and hours for {options.parameters / 1e9:g} billion parameters,\n"
        f"{options.link[0]:g} Mbit/s down and {options.link[1]:g} up, {options.step_seconds:g} s "
        "per inner step",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(options.picture, dpi=110)
    print(f"picture: {options.picture}")


def tell(curves: Sequence[Curve], options: argparse.Namespace) -> None:
    """Print a table of the last outer step, and the best rates of each rule that has several."""
    first = statistics.mean(curves[0].losses[-1])
    rows = []
    for curve in curves:
        counted, last = len(curve.losses), curve.losses[-1]
        moved = (f"{each[-1] / counted:.3f}" for each in (curve.sent, curve.received))
        shown = (f"{loss:.4f}" for loss in last)
        apart = f"{statistics.mean(last) / first - 1:+.2%}"
        rows.append((curve.label, *moved, f"{curve.hours(options)[-1]:.1f}", *shown, apart))
    seeds = [f"seed {seed}" for seed in range(options.seeds)]
    table(("rule", "sent", "received", "hours", *seeds, "against the first"), rows)
    print("sent, received: bytes per parameter, for one worker in one outer step")
    for name in dict.fromkeys(c.rule.name for c in curves if c.rule is not None):
        of_rule = [c for c in curves if c.rule is not None and c.rule.name == name]
        best = min(of_rule, key=lambda curve: statistics.mean(curve.losses[-1]))
        if len(of_rule) > 1:
            print(f"best rates of {name}: {best.label} {statistics.mean(best.losses[-1]):.4f}")


def run_subnets(names: Sequence[str]) -> int:
    """Run each rule in a local subnet with slow network links, whose miners are killed."""
    from bench import exchange as measured

    for name in names:
        outer_rule_of(TrainingSettings(outer_rule=name), "store")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a normal exit runs all clean-up
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="compare-") as folder:
            found = measured.measure(
                "store", Path(folder), SUBNET_PERIOD, SUBNET_STEPS,
                of_big=(20.0, 100.0), rules={"training.outer_rule": name}, kill_every=KILL_EVERY,
            )  # fmt: skip
        if not (members := found.members):
            continue
        sent, received = (
            statistics.mean(statistics.mean(getattr(member, way)) for member in members)
            for way in ("sent", "received")
        )
        busy = statistics.mean(member.by_held for member in members)
        at_last = " ".join(f"{loss:.4f}" for _, loss in found.losses)
        rows.append((name, len(members), f"{sent:.3f}", f"{received:.3f}", f"{busy:.1%}", at_last))
    table(("rule", "members", "sent", "received", "training", "held-out loss"), rows)
    return int(len(rows) < len(names))


def curves_of(options: argparse.Namespace) -> list[Curve]:
    """Return an empty curve for each rule and rate, and the baseline. Raises ConfigError."""
    found: dict[str, Curve] = {}
    find = functools.cache(find_rule)  # import a file only once, even if it has several rates
    for given in options.rules:
        place, _, rates = given.partition(":")
        name, own = find(place), dict[str, float]()
        for rate in filter(None, rates.split(",")):
            if not (written := re.fullmatch(r"(lr|mu)=(\d+\.?\d*|\.\d+)", rate)):
                raise ConfigError(f"{given}: write rates as in NAME:lr=0.8,mu=0.9")
            own[written[1]] = float(written[2])
        outer_rule_of(TrainingSettings(outer_rule=name), None)
        several = [own["lr"]] if "lr" in own else options.sweep or [options.outer_learning_rate]
        for lr in several:
            mu = own.get("mu", options.outer_momentum)
            label = f"{name} lr={lr:g} mu={mu:g}" if own or options.sweep else name
            found.setdefault(label, Curve(label, Rule(name, lr, mu)))
    baseline = [Curve(BASELINE, None)] if options.baseline else []
    return [*found.values(), *baseline]


def numbers(least: float, most: float, between: str = ",") -> Callable[[str], list[float]]:
    def read(words: str) -> list[float]:
        found = [float(word) for word in words.split(between)]
        if not all(least <= each <= most for each in found) or (between, len(found)) == ("/", 1):
            raise ValueError(words)
        return found

    read.__name__ = f"numbers from {least:g} to {most:g}"
    return read


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    torch.set_num_threads(1)
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--seeds", type=int, default=3)
    add("--rounds", type=int, default=20)
    add("--steps", type=int, default=30, help="inner steps per round")
    add("rules", nargs="*", default=DEFAULT, metavar="NAME|FILE.py[:lr=X,mu=X]")
    add("--workers", type=int, default=WORKERS, help=f"workers for each rule and seed [{WORKERS}]")
    add("--outer-learning-rate", type=float, default=0.8, help="for rules that set no rate [0.8]")
    add("--outer-momentum", type=float, default=0.9, help="for rules that set no momentum [0.9]")
    add("--sweep", type=numbers(0, 1e3), help="outer learning rates: each rule is run at each")
    add("--no-baseline", dest="baseline", action="store_false", help="without the one worker")
    add("--speeds", type=numbers(0, 1), default=[1.0], help="workers' speeds, as 1,1,0.5 [1]")
    add("--lost", type=float, default=0.0, help="share of the uploads that are lost [0]")
    add("--weights-seed", type=int, default=0, help="seed of the first weights [0]")
    add("--order-seed", type=int, default=1, help="seed of the first order of the text [1]")
    add("--vary", choices=("both", "weights", "order"), default="both", help="by seed [both]")
    add("--text", type=Path, help="a file, or a folder of files [Python's own library]")
    sizes = {"width": WIDTH, "layers": LAYERS, "context": CONTEXT, "batch": BATCH}
    for size, usual in sizes.items():
        add(f"--{size}", type=int, default=usual, help=f"of the model [{usual}]")
    add("--device", default="cpu", help="for inner steps, such as cuda [cpu]")
    add("--parameters", type=float, default=1e9, help="of the model to show bytes and hours for")
    of_link = numbers(1e-3, 1e6, "/")
    add("--link", type=of_link, default=[100, 20], metavar="DOWN/UP", help="Mbit/s [100/20]")
    add("--step-seconds", type=float, default=5.0, help="of an inner step of that model [5]")
    add("--picture", type=Path, default=Path("compare.png"), help="[compare.png]")
    add("--out", type=Path, default=Path("compare.json"), help="results in JSON [compare.json]")
    add("--subnet", action="store_true", help="real processes, kills and slow network links")
    options = arguments.parse_args(argv)
    counts = options.workers, options.seeds, options.rounds, options.steps, options.layers
    if min(*counts, options.context, options.batch) < 1 or options.width % 16 or options.width < 16:
        arguments.error("sizes must be at least 1, and the width must be a multiple of 16")
    if not 0 <= options.lost < 1:
        arguments.error("--lost must be a share from 0 to below 1")
    for place in (options.picture, options.out):
        if not place.absolute().parent.is_dir():
            arguments.error(f"there is no folder for {place}")
    if options.text is not None and not options.text.exists():
        arguments.error(f"there is no text {options.text}")
    options.vary_weights, options.vary_order = (
        int(options.vary in ("both", what)) for what in ("weights", "order")
    )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = read_options(argv)
    try:
        curves = curves_of(options)
        if options.subnet:
            return run_subnets([*dict.fromkeys(c.rule.name for c in curves if c.rule)])
        try:
            train(curves, options, lambda: write(curves, options))
        except KeyboardInterrupt:
            print("interrupted: the results are of the outer steps so far", file=sys.stderr)
    except ConfigError as error:
        return exit_with(error)
    except (OSError, subprocess.CalledProcessError) as error:
        if not options.subnet:
            raise
        print(
            f"error: machines with their own network links cannot be made here ({error}), so "
            'nothing was compared: run as root, or make run ARGS="--exchange store --outer-rule '
            f'{options.rules[0]}"',
            file=sys.stderr,
        )
        return 2
    if not curves[0].losses:
        return 130
    tell(curves, options)
    try:
        draw(curves, options)
    except ImportError as error:
        print(f"no picture: {error}; install the extra 'local'", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
