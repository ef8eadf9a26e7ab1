#!/usr/bin/env python3
"""What ``--neuron.error_feedback`` and ``--neuron.step_length`` do to what a publication is worth.

    python -m bench.error_feedback                                 three seeds, two at a time
    python -m bench.error_feedback --model local --seeds 1         the local subnet's model
    python -m bench.error_feedback --epochs 1 --show 20            a quick look
    python -m bench.error_feedback --joiner                        a newcomer's first outer step

A model trains alone; every few inner steps its gradient is published. Training does not depend on
what is published, so all variants encode the same weights in the same run. The public miner's way
(``upload``, decay 0.999, as it is) is the baseline. A factor is chosen on one part of the held-out
text; the improvement, (loss before - loss after) / loss before as validators count it, is judged on
another. ``full`` is what the miner's own weights would bring, as they are and moved on along their
way by a searched factor. A decay of 0 remembers nothing, which is ``off``. The number of
``curved`` is the power of AdamW's second moment. The small model's rows have 96 and 256 entries, so
2 values of each are the public network's density.

``--joiner``: a network that has taken 2000 inner steps trains outer step 0 with 145 steps. Then
newcomers train outer step 1 on data of their own, all from the same weights and on the same data:
one that took over the inner optimizer and its schedule from the files that a miner published, and
publishes the public way or ours; and two that found none and begin with the warm-up of 1000 steps
or at the peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.small_model import EFFECTIVE, MICRO, SEQUENCE, new_trainer
from distributed_training.data.corpus import StdlibSource
from distributed_training.data.pipeline import held_out_batches
from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer
from distributed_training.protocol.types import Progress
from distributed_training.training.error_feedback import Code, Codec, ErrorFeedback
from distributed_training.training.inner_state import take_over
from distributed_training.training.local_evaluation import (
    APPLIED_FRACTION,
    Choice,
    Preview,
    TrialStep,
    best_factor,
)

PUBLIC, DEFAULT, FULL = "upload 0.999", "best 0.999", "full"
VARIANTS = ("upload 0.999", "upload 0.95", "upload 0.9", "off 0", "curved 0.25", "curved 0.5")
BEST_OF = ("upload 0.999", "off 0", "curved 0.5")  # what `best` tries
WITHOUT = "best, not curved"
GOALS = {0: 1.3}  # of the default, as a ratio to the public way, by outer step
LATER_GOAL = 1.8

Codes = Mapping[str, Sequence[Code | None]]
Place = tuple[int, int]  # outer step, inner step


@dataclass(frozen=True)
class Found:
    """Improvement in percent: as it is, and with the factor that the search found."""

    plain: float
    searched: float
    factor: float = 1.0
    delta: float = 0.0  # of the loss the factor was searched on
    direction: str = ""


@dataclass
class Variant:
    """One way to publish, over the whole run."""

    name: str
    feedback: ErrorFeedback
    preview: Preview
    found: dict[Place, Found] = field(default_factory=dict)


class Bench:
    """A trainer, and the variants that publish what it trained."""

    def __init__(
        self,
        model: str,
        seed: int,
        searched: int,
        variants: Sequence[str],
        topk: int,
        warmup_steps: int = 20,
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.train_text, held = text(Path(folder))
        self.searched, self.judged = held[:searched], held[-64:]
        self.codec = Codec(topk=topk)
        self.trainer = new_trainer(seed=seed, model=model, warmup_steps=warmup_steps)
        self.variants = [self._variant(name) for name in variants]
        self.full: dict[Place, Found] = {}
        self.generator = torch.Generator().manual_seed(seed)
        self._before: tuple[str, float] = ("", 0.0)

    def _variant(self, name: str) -> Variant:
        mode, number = name.split()
        curved = mode == "curved"
        sharded, stream = self.trainer.sharded, self.trainer.stream
        feedback = ErrorFeedback(
            mode="best" if curved else mode,
            decay=0.0 if curved else float(number),
            codec=self.codec,
            shards=sharded.shards,
            stream=stream,
        )
        preview = Preview(sharded=sharded, stream=stream, feedback=feedback, search=True)
        return Variant(name, feedback, preview)

    def inner_step(self) -> None:
        for _ in range(EFFECTIVE // MICRO):
            picked = torch.randint(len(self.train_text), (MICRO,), generator=self.generator)
            self.trainer.add_micro_batch(self.train_text[picked])

    def publish(self, place: Place, *, judge: bool) -> None:
        outer = self.trainer.outer
        start, current = outer.epoch_start, outer.current()
        assert start is not None
        if judge:
            before = self._loss_before(start)
            self.full[place] = self._whole(start, current, before)
        for variant in self.variants:
            mode, number = variant.name.split()
            # The direction takes the root of what it is given.
            power = 2 * float(number)
            moment = [v.pow(power) for v in self.trainer.optimizer.exp_avg_sq]
            directions = variant.feedback.directions(
                start, current, outer.learning_rate, second_moment=moment
            )
            codes = {each.name: each.encode() for each in directions if each.name == mode}
            if judge:
                variant.found[place] = self._found(variant, codes, start, before)
        self._set(current)

    def _whole(self, start: Sequence[Tensor], current: Sequence[Tensor], before: float) -> Found:
        """Of the weights themselves, as they are and as far along their way as helps most."""

        def weights(factor: float) -> list[Tensor]:
            return [torch.lerp(a, b, factor) for a, b in zip(start, current, strict=True)]

        best = best_factor(lambda factor: self._loss_of(weights(factor), self.searched))
        plain, searched = (
            100 * (1 - self._loss_of(weights(factor)) / before) for factor in (1.0, best.factor)
        )
        return Found(plain, searched, best.factor, best.loss, "full")

    def _found(
        self, variant: Variant, codes: Codes, start: Sequence[Tensor], before: float
    ) -> Found:
        outer = self.trainer.outer
        choice: Choice = variant.preview.choose(
            epoch_id=outer.epoch_id,
            start=start,
            codes=codes,
            learning_rate=outer.learning_rate,
            held=self.searched.split(MICRO),
            count=1.0,
        )
        self._set(start)
        (name,) = codes
        trial = TrialStep(
            self.trainer.sharded, self.trainer.stream, variant.feedback, start, codes[name]
        )
        improved = []
        for factor in (1.0, choice.factor):
            trial.apply(factor * outer.learning_rate * APPLIED_FRACTION)
            improved.append(100 * (1 - self._loss() / before))
        return Found(improved[0], improved[1], choice.factor, choice.delta, name)

    def outer_step(self) -> None:
        trainer = self.trainer
        buffers = [torch.zeros(shape) for _, shape in trainer.schema]
        trainer.write_pseudo_gradient(buffers)
        trainer.prepare_outer_step(buffers)
        trainer.commit_outer_step()

    def results(self) -> dict[str, dict[Place, Found]]:
        """By variant; ``best`` is, as in the miner, whichever lowered the searched loss more."""
        found = {variant.name: variant.found for variant in self.variants}

        def best(names: Sequence[str]) -> dict[Place, Found]:
            tried = {place: [found[name][place] for name in names] for place in self.full}
            return {
                place: replace(min(each, key=lambda f: f.delta), plain=each[0].plain)
                for place, each in tried.items()
            }

        return {DEFAULT: best(BEST_OF), WITHOUT: best(BEST_OF[:2]), **found, FULL: self.full}

    def _loss_before(self, start: Sequence[Tensor]) -> float:
        epoch = self.trainer.outer.epoch_id
        if self._before[0] != epoch:
            self._before = (epoch, self._loss_of(start))
        return self._before[1]

    def _loss_of(self, weights: Sequence[Tensor], held: Tensor | None = None) -> float:
        self._set(weights)
        return self._loss(held)

    @torch.no_grad()
    def _loss(self, held: Tensor | None = None) -> float:
        text = self.judged if held is None else held
        self.trainer.drop_step()
        losses = (self.trainer.sharded.loss_of(b) for b in text.split(MICRO))
        return float(sum(losses)) / (len(text) * (SEQUENCE - 1))

    @torch.no_grad()
    def _set(self, weights: Sequence[Tensor]) -> None:
        for shard, rows in zip(self.trainer.sharded.shards, weights, strict=True):
            shard.local.copy_(rows)
        self.trainer.drop_step()


def text(folder: Path) -> tuple[Tensor, Tensor]:
    """Training and held-out sequences."""
    path, eos_id = build_tokenizer("bytes", folder)
    source = StdlibSource()
    rows = [
        row
        for config, count in sorted(source.num_rows().items())
        for row in source.rows(config, 0, split="train", limit=min(count, 300))
    ]
    tokens = TextTokenizer(path, eos_id=eos_id).encode_rows(rows, max_length=10_000)
    count = len(tokens) // SEQUENCE
    train = torch.from_numpy(tokens[: count * SEQUENCE].reshape(-1, SEQUENCE).astype(np.int64))
    held = held_out_batches(
        tokenizer_path=path, eos_id=eos_id, sequences=160, sequence_length=SEQUENCE
    )
    shuffled = torch.randperm(len(held), generator=torch.Generator().manual_seed(0))
    return train, held[shuffled]


def one_seed(seed: int, options: argparse.Namespace) -> dict[str, dict[Place, Found]]:
    """In a process of its own, on one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bench = Bench(options.model, seed, options.searched, options.variants, options.topk)
    for epoch in range(options.epochs):
        for step in range(1, max(options.show) + 1):
            bench.inner_step()
            if step % options.every == 0:
                bench.publish((epoch, step), judge=step in options.show)
        bench.outer_step()
        print(f"seed {seed}: outer step {epoch} done", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    return bench.results()


# --- a newcomer -----------------------------------------------------------------------------------

WARM_UP, NETWORK, PERIOD = 1000, 2000, 145  # inner steps; 145 of 60 s lie between two rounds
JOINED, FROM_NOTHING, AT_THE_PEAK = "takes over", "warms up", "begins at the peak"
JOINER_GOAL = 1.7


def one_newcomer(seed: int, options: argparse.Namespace) -> dict[str, dict[Place, Found]]:
    """In a process of its own, on one thread. By way: what was published at each step shown."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    network = Bench(options.model, seed, options.searched, (), options.topk, WARM_UP)
    network.trainer.total_inner_steps = NETWORK
    for _ in range(PERIOD):
        network.inner_step()
    ways: dict[str, dict[Place, Found]] = {}
    with tempfile.TemporaryDirectory() as folder:
        progress = Progress(0, PERIOD, network.trainer.total_inner_steps, [1])
        handle = network.trainer.snapshot(Path(folder), progress=progress, block=1, last_loss=1.0)
        handle.wait(timedelta(minutes=5))
        network.outer_step()
        start = [rows.clone() for rows in network.trainer.outer.epoch_start or []]
        for way in (JOINED, FROM_NOTHING, AT_THE_PEAK):
            bench = Bench(options.model, seed, options.searched, BEST_OF, options.topk, WARM_UP)
            bench.generator.manual_seed(1000 + seed)  # data of its own
            bench._set(start)
            bench.trainer.begin_epoch(1)
            if way == JOINED:
                take_over(bench.trainer, Path(folder))
            elif way == AT_THE_PEAK:
                bench.trainer.total_inner_steps = WARM_UP - 1
            for step in range(1, max(options.show) + 1):
                bench.inner_step()
                if step % options.every == 0:
                    bench.publish((1, step), judge=step in options.show)
            found = bench.results()
            ways |= {f"{way}: {name}": found[name] for name in (PUBLIC, DEFAULT, FULL)}
            print(f"seed {seed}: a newcomer that {way} is done", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    return ways


def show_newcomers(seeds: Sequence[Mapping[str, Mapping[Place, Found]]]) -> None:
    """Published improvement in percent, mean over seeds, and its ratio to the public newcomer's."""
    print("\nnewcomer: published (own weights) in %; ratio to the public one, worst seed, goal")
    base = f"{JOINED}: {PUBLIC}"
    for place in seeds[0][base]:
        theirs = [seed[base][place].plain for seed in seeds]
        full = mean(seed[f"{JOINED}: {FULL}"][place].plain for seed in seeds)
        print(f"inner step {place[1]}: public way, takes over {mean(theirs):.2f} ({full:.2f})")
        for way in (JOINED, FROM_NOTHING, AT_THE_PEAK):
            ours = [seed[f"{way}: {DEFAULT}"][place].searched for seed in seeds]
            full = mean(seed[f"{way}: {FULL}"][place].plain for seed in seeds)
            ratio = mean(ours) / mean(theirs)
            worst = min(a / b for a, b in zip(ours, theirs, strict=True))
            met = ("met" if ratio >= JOINER_GOAL else "MISSED") if way == JOINED else ""
            print(
                f"   ours, {way:18} {mean(ours):6.2f} ({full:5.2f}) {ratio:6.2f}x {worst:6.2f}x "
                f"{met}"
            )


def show(seeds: Sequence[Mapping[str, Mapping[Place, Found]]]) -> None:
    """Means over seeds; ratios to the public way as it is, which is what the public miner gets."""
    names = list(seeds[0])
    print("\nheld-out improvement in %, mean over seeds: as it is -> with the searched factor")
    print("(ratios to the public way)")
    for place in seeds[0][FULL]:
        public = mean(seed[PUBLIC][place].plain for seed in seeds)
        print(f"outer step {place[0]}, inner step {place[1]}: public way {public:.2f}")
        for name in names:
            found = [seed[name][place] for seed in seeds]
            plain, best = mean(f.plain for f in found), mean(f.searched for f in found)
            print(
                f"   {name:16} {plain:6.2f} -> {best:6.2f}   "
                f"({_ratio(plain, public)} -> {_ratio(best, public)})   "
                + " ".join(f"{f.direction} x{f.factor:.2f}" for f in found if f.direction)
            )
    print(f"\ndefault ({DEFAULT}, searched) against the public way:")
    print("   outer.inner  ratio  worst seed      full weights   goal")
    for place in seeds[0][FULL]:
        ours = [seed[DEFAULT][place].searched for seed in seeds]
        theirs = [seed[PUBLIC][place].plain for seed in seeds]
        full = [seed[FULL][place] for seed in seeds]
        goal, base = GOALS.get(place[0], LATER_GOAL), mean(theirs)
        whole = " -> ".join(
            _ratio(mean(improved), base)
            for improved in ([f.plain for f in full], [f.searched for f in full])
        )
        ratio = mean(ours) / mean(theirs) if mean(theirs) > 0 else float("inf")
        worst = min((o / p for o, p in zip(ours, theirs, strict=True) if p > 0), default=ratio)
        print(
            f"   {place[0]}.{place[1]:<10} {ratio:6.2f} {worst:11.2f} "
            f"{whole:>17} {goal:6.1f} {'met' if ratio >= goal else 'MISSED'}"
        )


def _ratio(ours: float, public: float) -> str:
    return f"{ours / public:.2f}x" if public > 0 else "n/a"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--model", choices=["small", "local"], default="small")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=5, help="inner steps between publications")
    parser.add_argument("--show", type=int, nargs="+", help="inner steps, by default 20 40 60")
    parser.add_argument("--searched", type=int, default=32, help="sequences to search a factor on")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--topk", type=int, default=2, help="values published of each row")
    parser.add_argument("--joiner", action="store_true", help="a newcomer's first outer step")
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    options.variants = list(dict.fromkeys([*BEST_OF, *options.variants]))
    options.show = options.show or ([20, 60, PERIOD] if options.joiner else [20, 40, 60])
    run = one_newcomer if options.joiner else one_seed
    began = time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(run, seed, options) for seed in options.seeds]
        seeds = [each.result() for each in waiting]
    (show_newcomers if options.joiner else show)(seeds)
    print(f"\n{time.monotonic() - began:.0f} s, seeds {' '.join(map(str, options.seeds))}")
    if options.json:
        options.json.write_text(
            json.dumps(
                [
                    {
                        name: {f"{o}.{i}": vars(f) for (o, i), f in places.items()}
                        for name, places in each.items()
                    }
                    for each in seeds
                ],
                indent=1,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
