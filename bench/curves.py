"""Draw the held-out loss of methods that train on the same tokens, with bands over seeds.

    python -m bench.curves                              one seed of 1 million parameters
    python -m bench.curves --seeds 2 --minutes 20       adds two seeds to the same CSV
    python -m bench.curves --arms 4-bit,hivemind        over hivemind, against the store
    python -m bench.curves --device cuda --text text.xz --minutes 10     30 million, on a GPU

Each arm begins at the same weights and takes the same inner steps on the same batches. Four members
exchange after each --steps of them; the one synchronous worker has the batches of all four in one.
The model is the byte model of ``bench.workers``: a token is a byte. Muon, schedule, codecs, update
files, merge and outer rule are the product's own. ``late``: updates of 4 bits that come a tenth of
a round after the close, of which late training keeps what does not lie along them. ``hivemind``:
the members' average by real peer processes on loopback; an outer step whose all-reduce fails uses
the merge.

``diloco`` is written here from the formula of its paper (Douillard et al. 2023, arXiv 2311.08105),
with its rates and with pseudo-gradients in float16 (OpenDiLoCo, Jaghouar et al. 2024, arXiv
2407.07852). A ring sends and receives them; the other float32 arms send all and receive all.

The CSV has a row for each arm, seed and outer step, and gets it at once. Bytes are those of one
member since its start. It is *held* for as long as a link of --link takes for them, unless it
trains meanwhile, as the late one does. An arm that was interrupted begins again in the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bench.common import parser, some_of, table
from bench.workers import (
    HELD_OUT_BYTES,
    WARMUP,
    WORKERS,
    Network,
    Weights,
    held_out_losses,
    initial,
    losses,
    stack,
    text,
)
from distributed_training.common.kinds import import_plugins
from distributed_training.protocol.average_file import Average
from distributed_training.protocol.update_file import UpdateFile
from distributed_training.training.inner_optimizer import Schedule
from distributed_training.training.muon import MatrixRows, Muon
from distributed_training.training.outer_rule import nesterov_sgd
from distributed_training.validator.merge import NESTEROV, OuterState, Rule, norm_of

if TYPE_CHECKING:  # it imports hivemind
    from bench.average import Peers

RULE = Rule(NESTEROV, 0.8, 0.9)
DILOCO_RATE, DILOCO_MOMENTUM = 0.7, 0.9
LATE = 0.1  # of a round
FLOAT32, ONE, HIVEMIND, DILOCO = "float32", "one", "hivemind", "diloco"
FIELDS = ("arm", "seed", "tokens", "loss", "sent", "received", "held")


class Arm(NamedTuple):
    """``way``: a codec of uploads, or one of the words above."""

    name: str
    way: str
    optimizer: str = "AdamW"
    late: bool = False


ARMS = {
    arm.name: arm
    for arm in (
        Arm("one", ONE),
        Arm("one-muon", ONE, "Muon"),
        Arm("float32", FLOAT32),
        Arm("float32-muon", FLOAT32, "Muon"),
        Arm("4-bit", "4-bit"),
        Arm("2-bit-muon", "2-bit", "Muon"),
        Arm("late", "4-bit", late=True),
        Arm("diloco", DILOCO),
        Arm("sparse", "sparse"),
        Arm("hivemind", HIVEMIND),
    )
}


class Inner:
    """The inner optimizer of stacked models, ``(models, ...)`` each: AdamW, or Muon for matrices.

    ``weights`` gets other tensors where Muon steps them.
    """

    def __init__(self, weights: Weights, name: str, schedule: Schedule) -> None:
        self._schedule, self._weights = schedule, weights
        hidden = [n for n in weights if name == "Muon" and n[0].isdigit()]
        rest = [w for n, w in weights.items() if n not in hidden]
        self._all: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.1)
        ]
        if hidden:
            matrices = [MatrixRows.of(weights[n].detach(), weights[n].shape) for n in hidden]
            weights |= dict(zip(hidden, matrices, strict=True))
            self._all.append(Muon(matrices, weight_decay=0.1))

    def step(self, number: int, tokens: Tensor) -> None:
        """Take inner step ``number``, from 0; ``tokens`` are (models, batch, context + 1)."""
        device = tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = losses(self._weights, tokens)
        for weight in self._weights.values():
            weight.grad = None
        loss.sum().backward()
        for optimizer in self._all:
            optimizer.param_groups[0]["lr"] = self._schedule.rate(number)
            optimizer.step()


@dataclass
class Members(Network):
    """Four members of a store network, or what their exchange would be with float32."""

    arm: Arm = ARMS["4-bit"]
    snapshot: Sequence[Tensor] = ()  # by parameter, all members', at the close
    start: Sequence[Tensor] = ()  # of the outer step that was closed last
    peers: Peers | None = None  # over hivemind
    usual: float = 0.0  # norm of an upload
    averaged: int = 0  # outer steps that follow from an average

    def close(self, weights: Sequence[Tensor], folder: Path, step: int) -> None:
        """Take the uploads of the members' ``weights``, (members, ...) each, and merge them."""
        own = [each.float().cpu() for each in weights]
        self.start = self.state.weights
        self.snapshot = [each.clone() for each in weights]
        if self.arm.way != FLOAT32:
            self.exchange(own, folder, step)
            return
        before: Sequence[Tensor | None] = self.state.momentum or [None] * len(own)
        found = [
            nesterov_sgd(s, (s - w).mean(0), m, lr=RULE.learning_rate, mu=RULE.mu)
            for s, w, m in zip(self.start, own, before, strict=True)
        ]
        self.state = OuterState([w for w, _ in found], [m for _, m in found])
        self.sent += sum(4 * each.numel() for each in self.start)
        self.received = self.sent

    def apply(self, weights: Sequence[Tensor]) -> None:
        """Begin the new outer step, in place, with what was trained since the close.

        Of that remains what does not lie along the update, which has the rest already.
        """
        parts = zip(weights, self.state.weights, self.snapshot, self.start, strict=True)
        for mine, new, then, start in parts:
            late, new = mine.sub_(then), new.to(mine.device)
            flat, along = late.flatten(1), (new - start.to(mine.device)).flatten()
            share = (flat @ along) / along.square().sum().clamp_min(1e-30)
            late.sub_((share.clamp_min(0)[:, None] * along).view_as(late)).add_(new)

    def merge_all(self, uploads: Sequence[UpdateFile], folder: Path, outer_step: int) -> None:
        usual, self.usual = self.usual, statistics.median_low(map(norm_of, uploads))
        paths = [upload.path for upload in uploads]
        if self.peers is None or not usual or self.peers.round(paths, usual, ahead=1):
            super().merge_all(uploads, folder, outer_step)
            return
        average = Average(self.peers.folder / "average", uploads[0].layout.schema)
        update = self.merge([average], [1.0], 1.0, folder, outer_step)
        self.averaged += 1
        ring = 2 * sum(2 * each.numel() for each in self.start) * (1 - 1 / self.workers)
        self.sent += uploads[0].layout.body_bytes + ring
        self.received += update.layout.body_bytes + ring


class DiLoCo:
    """Algorithm 1 of the paper: an outer SGD along the mean of what the members moved."""

    def __init__(self, start: Weights, device: torch.device) -> None:
        self.shared = [each.clone().to(device) for each in start.values()]
        self._outer = torch.optim.SGD(
            self.shared, lr=DILOCO_RATE, momentum=DILOCO_MOMENTUM, nesterov=True
        )
        self.sent = self.received = 0.0

    def close(self, weights: Sequence[Tensor]) -> None:
        for shared, own in zip(self.shared, weights, strict=True):
            shared.grad = (shared - own).half().float().mean(0)
        self._outer.step()
        for shared, own in zip(self.shared, weights, strict=True):
            own.copy_(shared.expand_as(own))
        self.sent += 2 * sum(2 * s.numel() for s in self.shared) * (1 - 1 / len(weights[0]))
        self.received = self.sent


def batches(data: Tensor, seed: int, options: argparse.Namespace) -> Iterator[Tensor]:
    """Yield tokens (members, batch, context + 1): for a seed the same for each arm."""
    window, generator = torch.arange(options.context + 1), torch.Generator().manual_seed(seed + 1)
    last, shape = len(data) - options.context, (WORKERS, options.batch, 1)
    while True:
        places = torch.randint(last, shape, generator=generator)
        yield data[places + window].to(options.device)


def train(
    arm: Arm, seed: int, data: Tensor, options: argparse.Namespace, folder: Path
) -> Iterator[tuple[int, float, float, float, float]]:
    """Train one arm; yield tokens, loss, bytes sent and received and seconds held at each close."""
    start = initial(seed, options.width, options.layers, options.context)
    models, total = 1 if arm.way == ONE else WORKERS, options.rounds * options.steps
    weights = stack([start], models, options.device)
    rate = options.muon_rate if arm.optimizer == "Muon" else options.rate
    inner = Inner(weights, arm.optimizer, Schedule(rate, min(WARMUP, total // 2), total))
    diloco = DiLoCo(start, options.device)
    codec = arm.way if arm.way not in (ONE, FLOAT32, DILOCO, HIVEMIND) else "4-bit"
    members = Members(RULE, [*start], OuterState([*start.values()]), codec=codec, arm=arm)
    late = max(1, round(LATE * options.steps)) if arm.late else 0
    down, up = options.link
    with contextlib.ExitStack() as stop:
        if arm.way == HIVEMIND:
            from bench.average import Peers

            schema = [(name, tuple(weight.shape)) for name, weight in start.items()]
            peers = Peers(folder, schema, WORKERS + 1, witness=True)
            members.peers = stop.enter_context(contextlib.closing(peers))
        for number, tokens in zip(
            range(total), batches(data[HELD_OUT_BYTES:], seed, options), strict=False
        ):
            inner.step(number, tokens.reshape(models, -1, options.context + 1))
            step, own = number + 1, [weight.detach() for weight in weights.values()]
            closes = step % options.steps == 0
            if arm.way == DILOCO and closes:
                diloco.close(own)
            elif arm.way not in (ONE, DILOCO):
                if closes:
                    members.close(own, folder, step // options.steps)
                if members.snapshot and step % options.steps == late:
                    members.apply(own)
            if not closes:
                continue
            merged = own
            if arm.way == DILOCO:
                merged = [each.unsqueeze(0) for each in diloco.shared]
            elif arm.way != ONE:
                merged = [each.unsqueeze(0).to(options.device) for each in members.state.weights]
            (loss,) = held_out_losses(
                dict(zip(weights, merged, strict=True)), data[:HELD_OUT_BYTES]
            )
            moved: DiLoCo | Members = diloco if arm.way == DILOCO else members
            held = 0.0 if arm.late else (moved.sent / up + moved.received / down) * 8e-6
            yield step * tokens[..., 1:].numel(), loss, moved.sent, moved.received, held
    if members.peers is not None:
        print(f"outer steps from an average: {members.averaged} of {options.rounds}")


# --- what comes out -------------------------------------------------------------------------------


class Curves:
    """The rows of a CSV: finished arms by seed, (arm, seed) -> rows in the order of their tokens.

    ``setting``: what all arms have in common, in the first line. Raises SystemExit for a CSV of
    another setting.
    """

    def __init__(self, path: Path, setting: str, rounds: int) -> None:
        self.path, self.found = path, dict[tuple[str, int], list[dict[str, str]]]()
        if path.exists():
            first, *lines = path.read_text().splitlines()
            if first != setting:
                sys.exit(
                    f"{path} has the curves of another setting ({first}), so nothing was trained: "
                    "give the same sizes, or another --csv"
                )
            for row in csv.DictReader(lines):
                self.found.setdefault((row["arm"], int(row["seed"])), []).append(row)
        self.found = {key: rows for key, rows in self.found.items() if len(rows) == rounds}
        with open(path, "w", newline="") as file:
            file.write(f"{setting}\n")
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for rows in self.found.values() for row in rows)

    def add(self, arm: str, seed: int, *values: float) -> None:
        texts = [arm, str(seed), str(values[0]), *(f"{value:.6g}" for value in values[1:])]
        with open(self.path, "a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(texts)
        row = dict(zip(FIELDS, texts, strict=True))
        self.found.setdefault((arm, seed), []).append(row)

    def of(self, arm: str, field: str) -> list[list[float]]:
        """Return a field of each seed of an arm, at all closes."""
        found = (rows for (name, _), rows in self.found.items() if name == arm)
        return [[float(row[field]) for row in rows] for rows in found]

    def last(self, arm: str, field: str = "loss") -> dict[int, float]:
        """Return by seed what stands in an arm's last row."""
        found = self.found.items()
        return {seed: float(rows[-1][field]) for (name, seed), rows in found if name == arm}

    @property
    def arms(self) -> list[str]:
        return [name for name in ARMS if any(name == arm for arm, _ in self.found)]


def apart(curves: Curves, arm: str, way: str) -> str:
    """Return how far an arm's last loss is from that of ``way`` with its optimizer and seeds."""
    other = curves.last(f"{way}-muon" if ARMS[arm].optimizer == "Muon" else way)
    mine = curves.last(arm)
    both = sorted(mine.keys() & other.keys())
    if not both:
        return ""
    return f"{sum(mine[s] for s in both) / sum(other[s] for s in both) - 1:+.2%}"


def tell(curves: Curves) -> None:
    rows = []
    for arm in curves.arms:
        loss = curves.last(arm).values()
        sent, received, held = (
            next(iter(curves.last(arm, field).values())) for field in ("sent", "received", "held")
        )
        rows.append((
            arm, len(loss), f"{statistics.mean(loss):.4f}", f"{min(loss):.4f} to {max(loss):.4f}",
            *(apart(curves, arm, way) for way in (ONE, FLOAT32)),
            f"{sent / 1e6:.2f} MB", f"{received / 1e6:.2f} MB", f"{held:.1f}",
        ))  # fmt: skip
    table(
        ("arm", "seeds", "loss", "of the seeds", "against one", "against float32", "sent",
         "received", "seconds held"), rows,
    )  # fmt: skip


def draw(curves: Curves, path: Path) -> None:
    """Write the picture: a line is the mean of the seeds, the band around it their range."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "curves", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for arm in curves.arms:
        seeds = list(zip(*curves.of(arm, "loss"), strict=False))
        tokens = [each / 1e6 for each in curves.of(arm, "tokens")[0][: len(seeds)]]
        style = "--" if ARMS[arm].optimizer == "Muon" else "-"
        (line,) = axes.plot(tokens, [statistics.mean(s) for s in seeds], style, label=arm)
        low, high = ([of(s) for s in seeds] for of in (min, max))
        axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="million tokens, of all members", ylabel="held-out loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def link(text: str) -> tuple[float, float]:
    down, up = map(float, text.split("/"))
    return down, up


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser(__doc__)
    add, usual = arguments.add_argument, [name for name in ARMS if name != HIVEMIND]
    add("--arms", type=some_of([*ARMS]), default=usual, help=f"[{','.join(usual)}]")
    add("--seeds", type=int, default=1, help="to add to the CSV at the most [1]")
    add("--minutes", type=float, default=1e9, help="no arm begins that would end later [any]")
    add("--device", type=torch.device, default="cpu")
    add("--tokens", type=float, help="of each arm [150 thousand; cuda: 200 million]")
    add("--steps", type=int, help="inner steps of a round [15; cuda: 50]")
    for size in ("width", "layers", "context", "batch"):
        add(f"--{size}", type=int, help="[160, 3, 64, 4; cuda: 512, 10, 256, 64]")
    add("--rate", type=float, help="of AdamW [0.003; cuda: 0.001]")
    add("--muon-rate", type=float, default=0.003, help="[0.003]")
    add("--link", type=link, default=(100.0, 20.0), metavar="DOWN/UP", help="Mbit/s [100/20]")
    add("--text", type=Path, help="a file, .xz too, or a folder [Python's own library]")
    add("--csv", type=Path, default=Path("curves.csv"), help="[curves.csv]")
    options = arguments.parse_args(argv)
    small = {"width": 160, "layers": 3, "context": 64, "batch": 4, "steps": 15, "tokens": 150e3}
    large = {"width": 512, "layers": 10, "context": 256, "batch": 64, "steps": 50, "tokens": 2e8}
    cuda = options.device.type == "cuda"
    for name, value in (large | {"rate": 1e-3} if cuda else small | {"rate": 3e-3}).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    torch.set_num_threads(os.cpu_count() or 1 if cuda else 1)
    a_round = options.steps * WORKERS * options.batch * options.context
    options.rounds = max(2, round(options.tokens / a_round))
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options, began, longest = read_options(argv), time.monotonic(), 0.0
    if "sparse" in options.arms:
        import_plugins(["examples.sparse_codec"])
    data = text(options.text)
    start = initial(0, options.width, options.layers, options.context)
    parameters = sum(each.numel() for each in start.values())
    names = ("rounds", "steps", "width", "layers", "context", "batch", "rate", "muon_rate", "link")
    told = " ".join(f"{n}={str(getattr(options, n)).replace(' ', '')}" for n in names)
    setting = f"# parameters={parameters} text={len(data)} {told}"
    print(setting, flush=True)
    curves = Curves(options.csv, setting, options.rounds)
    wanted = ((s, a) for s in count() for a in options.arms if (a, s) not in curves.found)
    first: list[int] = []  # seeds of this run
    for seed, name in wanted:
        if seed not in first:
            first.append(seed)
        arm_began = time.monotonic()
        if len(first) > options.seeds or arm_began + longest > began + 60 * options.minutes:
            break
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            for row in train(ARMS[name], seed, data, options, Path(folder)):
                curves.add(name, seed, *row)
        longest = max(longest, time.monotonic() - arm_began)
        print(
            f"{name}, seed {seed}: {row[1]:.4f} in {time.monotonic() - arm_began:.0f} s", flush=True
        )
        draw(curves, options.csv.with_suffix(".svg"))
    tell(curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
