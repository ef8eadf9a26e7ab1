#!/usr/bin/env python3
"""A field of miners under the reference validator's evaluation: what each way to mine earns.

    python -m bench.arena                            three seeds, two at a time
    python -m bench.arena --seeds 1 2 3 4 --json build/arena.json
    python -m bench.arena --contenders rows muon snoo "rank 0 only"
    python -m bench.arena --outer-steps 1 --seeds 1  a quick look

``--miners`` miners train a small model, each on the pages of its own uid: for each the same number
of inner steps in the same time, and uploads of the same length. All take the same outer steps, from
the average of all. What a miner publishes changes nothing in training, so every contender publishes
each miner's training: by the product's error feedback, line search, codec and upload schedule, or
by the public miner's, into a bucket of its own.

A validator looks every ``--look`` blocks, by the product's one evaluator: repository, freshness,
assigned and random text. It begins half a period after the start: before, nobody could have
published anything, which on the public network was so once. Then, for each contender and miner, a
field is scored in which this miner mines the contender's way and all others the public way, and one
in which all others mine our way; Plackett-Luce, the moving average and the totals are the product's
score board.

``share``: of the train score, as a ratio to what the same miner gets when everybody mines the same
way; it cannot be above the number of miners. Time is simulated (a step takes 60 s, an upload 300 s,
400 blocks between rounds), so nothing here races for this machine's cores, and one contender's
inner step is as long as another's: that the public miner reduces at each micro-batch, and so steps
more slowly, is in none of these figures (``bench/inner_step.py`` has it). A subnet of real
processes is no option here: its miners would share two cores, and whose process ran when would
decide who trains more.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

from bench.arena_field import PUBLIC, Look, Looks, draw, results, table
from bench.arena_miner import JUDGED, TRAINED, Contender, Miner, Publisher, block_at
from bench.freshness import World
from bench.small_model import SEQUENCE, small_config
from distributed_training.chain.base import Neuron
from distributed_training.data.corpus import StdlibSource
from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer
from distributed_training.protocol import schedule
from distributed_training.scoring.evaluator import EvaluationModel, Evaluator, Judgement
from distributed_training.scoring.upload import InvalidUpload, PageReader, inspect, read_upload

UID_SPACING = 11  # uid u's rank 1 reads the pages of uid u + 1's rank 0
CONTENDERS = {
    each.name: each
    for each in (
        Contender(PUBLIC, "the public miner's way", "upload", False, "public"),
        Contender("ours", "default"),
        Contender("search", "public way, values times a searched factor", "upload", True, "public"),
        Contender("schedule", "public way, our upload schedule", "upload", False),
        Contender("off", "--neuron.error_feedback off", "off"),
        Contender("upload", "--neuron.error_feedback upload", "upload"),
        Contender("not curved", "ours, entries chosen by their size alone", curved=False),
        Contender("late", "--neuron.upload_steps 20", schedule="20"),
        Contender("rows", "each row's values rescaled before the search", rescale="rows"),
        Contender("rows of off", "as rows, direction off alone", rescale="rows of off"),
        Contender("rank 0 only", "ours, pages of one rank trained", training="rank 0 only"),
        Contender("snoo", "ours, SNOO look-ahead in training", training="snoo"),
        Contender("muon", "ours, Muon in training", training="muon"),
    )
}
DEFAULT = ("public", "ours", "search", "schedule", "off", "upload", "late", "rows")


class RememberingModel(EvaluationModel):
    """Does not run the same text through the same global weights twice: many contenders' uploads
    are judged on one text."""

    def __init__(self) -> None:
        super().__init__(
            model_config=small_config(), device=torch.device("cpu"), micro_batch=JUDGED
        )
        self._seen: dict[tuple[int, bytes], tuple[float, ...]] = {}
        self._loaded: int | None = None

    def load(self, weights: Sequence[Tensor]) -> None:
        super().load(weights)
        self._loaded = id(weights)

    def subtract(self, name: str, delta: Tensor, factor: float) -> None:
        super().subtract(name, delta, factor)
        self._loaded = None

    def losses(self, sequences: Tensor) -> tuple[float, ...]:
        if self._loaded is None:
            return super().losses(sequences)
        key = (self._loaded, sequences.numpy().tobytes())
        if key not in self._seen:
            self._seen[key] = super().losses(sequences)
        return self._seen[key]


class ShortPages:
    """The local corpus with ``rows`` rows a page: public pages hold more text than is trained."""

    def __init__(self, rows: int) -> None:
        self._source, self._rows = StdlibSource(), rows

    def num_rows(self) -> Mapping[str, int]:
        return self._source.num_rows()

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        return self._source.rows(config, row, split=split, limit=min(limit, self._rows))


class Arena:
    """All miners of one seed, and the validator."""

    def __init__(
        self, contenders: Sequence[Contender], *, miners: int, world: World, look: int, seed: int
    ) -> None:
        self.world = world
        self.look_every = look * schedule.SECONDS_PER_BLOCK
        self._dice = random.Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            path, eos = build_tokenizer("bytes", Path(folder))
            self._tokenizer = TextTokenizer(path, eos_id=eos)
        trainings = dict.fromkeys(c.training for c in contenders)
        self.miners = [
            Miner(
                UID_SPACING * (1 + i + miners * seed),
                [c for c in contenders if c.training == training],
                world=world,
                pages=lambda ranks: self._pages(ranks, TRAINED),
                seed=seed,
            )
            for training in trainings
            for i in range(miners)
        ]
        judged = self._pages(4, JUDGED)
        texts: dict[tuple[int, int], Tensor] = {}

        def pages(uid: int, block: int) -> Tensor:
            if (uid, block) not in texts:
                texts[uid, block] = judged(uid, block)
            return texts[uid, block]

        self._evaluator = Evaluator(model=RememberingModel(), pages=pages)
        self._starts: list[Sequence[Tensor]] = []
        # contender -> uid -> one entry a look
        self.looks: dict[str, dict[int, list[Look]]] = {c.name: {} for c in contenders}

    def _pages(self, ranks: int, limit: int) -> PageReader:
        rows = 2 * max(1, 4 // ranks)
        return PageReader(
            source=ShortPages(rows),
            tokenizer=self._tokenizer,
            sequence_length=SEQUENCE,
            ranks=ranks,
            pages=1,
            rows_per_page=100,
            max_length=1024,
            limit=limit,
        )

    def run(self, outer_steps: int) -> None:
        """Train, publish and judge until half a period after the last round."""
        period = self.world.period
        for outer in range(outer_steps):
            self._outer_step(outer, outer * period)
            print(f"outer step {outer} done", file=sys.stderr, flush=True)
        self._judge_between(outer_steps * period, outer_steps * period + period / 2, outer_steps)

    def _outer_step(self, outer: int, called: float) -> None:
        world, ends = self.world, called + self.world.period
        start = self.miners[0].trainer.outer.epoch_start
        assert start is not None
        self._starts.append(start)
        now, inner = called + world.pause, 0
        for miner in self.miners:
            miner.begin(now)
        next_look = now
        while now + world.step <= ends:
            now, inner = now + world.step, inner + 1
            for miner in self.miners:
                miner.inner_step(outer, inner, now, ends)
            if now >= next_look + self.look_every and now > self.world.period / 2:
                self._judge(outer, called, now)
                next_look = now
        for miner in self.miners:
            for each in miner.publishers:
                each.round(ends, world.pause)
        of_all = [m.pseudo_gradient() for m in self.miners if m.training == "adamw"]
        averaged = [torch.stack(list(parts)).mean(0) for parts in zip(*of_all, strict=True)]
        for miner in self.miners:
            miner.end_outer_step(averaged)

    def _judge_between(self, begin: float, end: float, outer: int) -> None:
        now = begin + self.world.pause
        while (now := now + self.look_every) < end:
            self._judge(outer, begin, now)

    def _judge(self, outer: int, called: float, now: float) -> None:
        """One pass over all buckets at ``now``. ``outer``: the global state's outer step."""
        block, bpa = block_at(now), self.world.blocks
        judged = schedule.scored_epoch(
            outer_step=outer, block=block, last_allreduce_block=block_at(called), bpa=bpa
        )
        random_block = self._dice.randrange(*schedule.random_block_range(block))
        for miner in self.miners:
            for each in miner.publishers:
                found = self._look(miner, each, judged, now, random_block)
                self.looks[each.contender.name].setdefault(miner.uid, []).append(found)

    def _look(
        self, miner: Miner, each: Publisher, judged: int, now: float, random_block: int
    ) -> Look:
        bucket = miner.bucket(each, judged, now)
        repository = inspect(
            Neuron(miner.uid, hotkey="", port=1),
            lambda neuron: bucket,  # type: ignore[arg-type, return-value]
            outer_step=judged,
            age_limit=schedule.UPLOAD_AGE_LIMIT,
        )
        rate = miner.trainer.outer.learning_rate
        weights = self._starts[judged]
        schema = miner.trainer.schema
        try:
            upload = read_upload(
                repository,
                schema,
                outer_step=judged,
                block=block_at(now),
                bpa=self.world.blocks,
                timeout=timedelta(minutes=5),
            )
        except InvalidUpload as error:
            return Look(repository.valid, why=str(error))
        judgement: Judgement = self._evaluator.judge(
            upload,
            weights=weights,
            outer_step=judged,
            outer_learning_rate=rate,
            random_blocks=(random_block,),
        )
        if judgement.random is None or judgement.assigned is None:
            return Look(repository.valid, why=judgement.reason)
        said = next(u.said for u in reversed(each.uploads) if u.content is not None)
        return Look(
            repository.valid,
            judgement.random.losses,
            judgement.assigned.losses,
            inner_step=upload.payload.metadata.inner_step,
            said=said,
        )


def one_seed(seed: int, options: argparse.Namespace) -> Looks:
    """In a process of its own, on one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    contenders = [with_topk(CONTENDERS[name], options.topk) for name in options.contenders]
    world = World(options.blocks, options.step, options.upload)
    arena = Arena(contenders, miners=options.miners, world=world, look=options.look, seed=seed)
    arena.run(options.outer_steps)
    dist.destroy_process_group()
    return arena.looks


def with_topk(contender: Contender, topk: int) -> Contender:
    return Contender(**{**asdict(contender), "topk": topk})


def as_json(by_seed: Mapping[int, Looks]) -> dict[str, object]:
    """Every look of every seed; :func:`read_json` takes it."""
    return {
        "command": sys.argv,
        "seeds": {
            seed: {
                name: {uid: [asdict(look) for look in looks] for uid, looks in by_uid.items()}
                for name, by_uid in found.items()
            }
            for seed, found in by_seed.items()
        },
    }


def read_json(path: Path) -> dict[int, Looks]:
    def look(fields: dict[str, Any]) -> Look:
        texts = {name: tuple(fields[name]) for name in ("random", "assigned")}
        return Look(**{**fields, **texts})

    return {
        int(seed): {
            name: {int(uid): list(map(look, looks)) for uid, looks in by_uid.items()}
            for name, by_uid in found.items()
        }
        for seed, found in json.loads(path.read_text())["seeds"].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--contenders", nargs="+", default=list(DEFAULT), choices=list(CONTENDERS))
    parser.add_argument("--miners", type=int, default=4)
    parser.add_argument("--outer-steps", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=400, help="between two rounds")
    parser.add_argument("--step", type=float, default=60.0, help="seconds of an inner step")
    parser.add_argument("--upload", type=float, default=300.0, help="seconds of an upload")
    parser.add_argument("--look", type=int, default=75, help="blocks between a validator's looks")
    parser.add_argument("--topk", type=int, default=2, help="values published of each row")
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time")
    parser.add_argument("--json", type=Path, help="write every look here")
    parser.add_argument("--read", type=Path, help="show what --json wrote, run nothing")
    parser.add_argument("--picture", type=Path, help="draw the improvement of look after look")
    options = parser.parse_args()
    options.contenders = list(dict.fromkeys([PUBLIC, "ours", *options.contenders]))
    options.fields = [PUBLIC, "ours"]
    began = time.monotonic()
    if options.read:
        found = read_json(options.read)
        options.contenders = list(next(iter(found.values())))
    else:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            waiting = {seed: pool.submit(one_seed, seed, options) for seed in options.seeds}
            found = {seed: each.result() for seed, each in waiting.items()}
    for name in options.contenders:
        print(f"{name:12} {CONTENDERS[name].says}")
    for base in options.fields:
        print(f"\nIn a field of '{base}': ratios to it")
        print("\n".join(table({seed: results(looks, base) for seed, looks in found.items()}, base)))
    print(f"\n{time.monotonic() - began:.0f} s, seeds {' '.join(map(str, found))}")
    if options.picture:
        draw(options.picture, found)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(as_json(found), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
