"""Miners under the reference validator's evaluation: what our way and the public one earn.

    python -m bench.arena                            three seeds, two at a time, up to 18 minutes
    python -m bench.arena --outer-steps 1 --seeds 1 --miners 2 --blocks 150     a quick look

``--miners`` miners train a small model, each on the pages of its own uid: for each the same number
of inner steps in the same time, and uploads of the same length. All take the same outer steps, from
the average of all. What a miner uploads changes nothing in training, so both ways publish
each miner's training: by the product's error feedback, line search, codec and upload schedule, or
by the public miner's, into a bucket of its own. So two ways are compared on the same luck.

A validator looks ten times a round, by the product's one evaluator: repository, freshness,
assigned and random text. It begins half a period after the start: before, nobody could have
uploaded anything, which on the public network was so once. Each miner in turn mines one way and all
others the other way. Plackett-Luce, the moving average and the totals are the product's
score board.

``share``: of the train score, as a ratio to what the same miner gets when everybody mines the same
way; it cannot be above the number of miners. Time is simulated: a step takes 60 s, an upload 300 s
after its files are written and checked. Rounds are called 750 blocks after each other and up to two
minutes late (``bench.freshness``). Rounds of 300 s outlast a check, so that each upload of ours
was searched. So nothing here races for this machine's cores, and one
way's inner step is as long as the other's. The public miner reduces at each micro-batch and so
steps more slowly; ``bench.inner_step`` measures that, and none of these figures holds it. A
subnet of real processes is no option here: its miners would share two cores, and whose process ran
when would decide who trains more.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bench.arena_field import OURS, PUBLIC, Look, Looks, results, table
from bench.common import alone, parser
from bench.freshness import LEAD, STEPS_OF_A_BLOCK, File, World, our_miner, public_miner, sent
from distributed_training.chain.base import Neuron
from distributed_training.common.llama import llama_config
from distributed_training.config.settings import TrainingSettings
from distributed_training.data.page_source import StdlibSource
from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer
from distributed_training.protocol import keys
from distributed_training.protocol.compression import Code
from distributed_training.protocol.gradients import GradientMetadata, GradientPayload, TopK
from distributed_training.protocol.metadata import ConfigExtras, Metadata
from distributed_training.protocol.scoring import (
    SECONDS_PER_BLOCK,
    UPLOAD_AGE_LIMIT,
    random_block_range,
    scored_epoch,
)
from distributed_training.protocol.types import Revision
from distributed_training.scoring.evaluator import EvaluationModel, Evaluator
from distributed_training.scoring.upload import (
    DataUnavailable,
    InvalidUpload,
    Judged,
    PageReader,
    inspect,
    read_upload,
)
from distributed_training.store.base import ObjectInfo
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.training.error_feedback import ErrorFeedback
from distributed_training.training.local_evaluation import GradientCheck, Text
from distributed_training.training.snapshot import Epoch
from distributed_training.training.trainer import Trainer

UID_SPACING = 11  # uid u's rank 1 reads the pages of uid u + 1's rank 0
HELD_SEQUENCES = 16  # as many as four ranks hold back by default
TRAINED = 40  # sequences of a block: 2.4 inner steps, of which validators judge two of five pages
JUDGED = 16
FIRST_BLOCK = 1_000_000

STEP = 60.0  # seconds of an inner step
SEQUENCE, MICRO, EFFECTIVE = 128, 8, 16

Pages = Callable[[int, int], Tensor]  # (uid, block) -> sequences


def small_config() -> dict[str, Any]:
    """Return the model: about 0.27 M parameters, rows of 96 and 256 entries."""
    return llama_config(
        hidden=96,
        layers=2,
        heads=4,
        kv_heads=4,
        intermediate=256,
        vocab=264,
        max_positions=SEQUENCE,
    )


def new_trainer(*, seed: int) -> Trainer:
    """Return a trainer in a process group of its own, with weights of ``seed``, in outer step 0."""
    settings = TrainingSettings(
        local_batch_size_train=MICRO,
        local_batch_size_train_effective=EFFECTIVE,
        sequence_length=SEQUENCE,
        learning_rate=1e-3,
        warmup_steps=20,
        total_steps=10_000,
        seed=seed,
    )
    made = Trainer(
        settings=settings,
        model_config=small_config(),
        device=torch.device("cpu"),
        say=lambda line: None,
    )
    made.load_weights(None)
    made.begin_epoch(0)
    return made


# --- one miner ----------------------------------------------------------------------------------


@dataclass
class Upload(File):
    """``content`` is made when a validator first looks: what nobody looks at needs no line search.
    ``blocks``: as the chain numbers them."""

    blocks: tuple[int, ...]
    codes: Mapping[str, Sequence[Code | None]]
    start: Sequence[Tensor]
    loss: float
    content: bytes | None = None
    said: str = ""


class Publisher:
    """One way's part of a miner: its error feedback, upload schedule and bucket."""

    def __init__(
        self, way: str, trainer: Trainer, held: Tensor, *, world: World, topk: int
    ) -> None:
        sharded, stream = trainer.sharded, trainer.stream
        self.way, self._ours = way, way == OURS
        self._trainer, self._held, self._world = trainer, held, world
        self._feedback = ErrorFeedback(
            mode="best" if self._ours else "upload",
            decay=0.999,
            compression=TopK(topk=topk),
            shards=sharded.shards,
            stream=stream,
        )
        self._check = GradientCheck(
            sharded=sharded,
            stream=stream,
            feedback=self._feedback,
            search=self._ours,
            sequence_length=trainer.settings.sequence_length,
        )
        self.timing = our_miner(world) if self._ours else public_miner()
        self._since: list[int] = []  # blocks trained since the last upload

    @property
    def uploads(self) -> list[Upload]:
        return cast(list[Upload], self.timing.files)

    def inner_step(
        self,
        block: int,
        listed_at: float,
        now: float,
        next_round: float,
        *,
        loss: float,
        outer: int,
    ) -> None:
        """Upload if it is time. ``listed_at``: when ``block`` was the chain's newest."""
        self._since.append(block)
        self.timing.sent(now)
        inner, busy = self._trainer.inner_step, self.timing.under_way is not None
        if not self.timing.decide(outer, inner, now, busy, now - listed_at, next_round):
            return
        step = self._trainer.outer
        assert step.epoch_start is not None
        moment = [v.clone() for v in self._trainer.optimizer.state["exp_avg_sq"]]
        directions = self._feedback.directions(
            step.epoch_start,
            step.current(),
            step.learning_rate,
            second_moment=moment if self._ours else None,
        )
        upload = Upload(
            outer,
            inner,
            listed_at,
            now + self._before_sending() + self._world.upload,
            blocks=tuple(dict.fromkeys(self._since)),
            codes={each.name: each.encode() for each in directions},
            start=step.epoch_start,
            loss=loss,
        )
        self.timing.under_way = upload
        self.timing.files.append(upload)
        self._since = []

    def _before_sending(self) -> float:
        """Return the seconds in which a snapshot is written and, if it is ours, checked."""
        return self._world.write + (self._world.check if self._ours else 0.0)

    def round(self, called: float) -> None:
        """Pause our upload under way, or kill the public miner's."""
        upload = self.timing.under_way
        if upload is None or upload.visible_at <= called:
            return
        if self._ours:
            taken = upload.visible_at - self._before_sending() - self._world.upload
            upload.visible_at = sent(self._world, taken, called, self._world.upload)
        else:
            self.timing.files.remove(upload)
            self.timing.under_way = None

    def bucket(self, outer_step: int, now: float) -> BucketReader:
        """Return the bucket as it is at ``now``, when outer step ``outer_step`` is judged."""
        seen = [u for u in self.uploads if u.visible_at <= now]
        there = [u for u in seen if u.outer_step == outer_step]
        root, newest = (
            max(some, key=lambda u: u.visible_at, default=None) for some in (seen, there)
        )
        if newest is not None and newest.content is None:
            newest.content = self._content(newest)
            newest.codes = {}
        return BucketReader(cast(S3ObjectStore, Bucket(self.way, root, newest, now)))

    def _content(self, upload: Upload) -> bytes:
        """Return ``gradients.pt``, of the direction and scale that the preview chooses."""
        direction, factor = next(iter(upload.codes)), 1.0
        if self._ours:
            rate = self._trainer.outer.learning_rate
            choice = self._check.choose(
                Epoch(str(upload.outer_step), upload.start, rate),
                upload.codes,
                Text(self._held.split(MICRO), counts=True),
            )
            if choice.delta < choice.plain_delta:
                direction, factor = choice.direction, choice.factor
        upload.said = f"{direction} x{factor:.2f}"
        about = GradientMetadata(
            upload.blocks[-1], upload.inner_step, upload.outer_step, upload.loss
        )
        payload: dict[str, Any] = {"metadata": asdict(about)}
        shards = self._trainer.sharded.shards
        for shard, code in zip(shards, upload.codes[direction], strict=True):
            assert code is not None
            (shape, _), _ = self._feedback.compression.shapes(shard.shape)
            payload[shard.name + "idxs"] = code[0].reshape(shape).clone()
            payload[shard.name + "vals"] = (code[1] * factor).reshape(shape)
        file = io.BytesIO()
        torch.save(payload, file)
        return file.getvalue()


class Bucket:
    """An object store to read, with what was uploaded until ``now``.

    ``root``: whose ``metadata.json`` lies at the root; ``upload``: what ``epoch-X`` holds.
    """

    def __init__(self, name: str, root: Upload | None, upload: Upload | None, now: float) -> None:
        self.bucket = name
        self._root, self._upload, self._now = root, upload, now

    def head(self, key: str) -> ObjectInfo | None:
        if self._upload is None or not key.endswith(keys.GRADIENTS):
            return None
        assert self._upload.content is not None
        age = self._now - self._upload.visible_at
        return ObjectInfo(key, len(self._upload.content), "", 0.0, age)

    def get(self, key: str, *, limit: int) -> bytes | None:
        if key == keys.ROOT_METADATA and self._root is not None:
            place = Revision(5, self._root.outer_step, self._root.inner_step)
            return Metadata.of(place, "").to_json()
        if key.endswith(keys.CONFIG) and self._upload is not None:
            return ConfigExtras(self._upload.blocks, self._upload.inner_step).merge_into({})
        return None

    def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
        assert self._upload is not None and self._upload.content is not None
        return self._upload.content[start : start + length]


class Miner:
    """One training run of uid ``uid``, published both ways."""

    def __init__(self, uid: int, *, world: World, pages: PageReader, topk: int, seed: int) -> None:
        self.uid = uid
        self.trainer = new_trainer(seed=seed)
        self._pages = pages
        held = pages(uid, 10 * FIRST_BLOCK + seed)[:HELD_SEQUENCES]
        self.publishers = [
            Publisher(way, self.trainer, held, world=world, topk=topk) for way in (PUBLIC, OURS)
        ]
        self._batches: Iterator[Tensor] = iter(())
        self._left = 0.0  # inner steps of the block
        self._block = 0
        self._asked_at = self._listed_at = 0.0

    def begin(self, now: float) -> None:
        """Begin training, or continue after a round."""
        self._left = 0.0
        self._asked_at = now - LEAD

    def inner_step(self, outer: int, now: float, next_round: float) -> None:
        """``now``: when it ends."""
        if self._left <= 0:
            self._begin_block()
        self._left -= 1
        for _ in range(EFFECTIVE // MICRO):
            report = self.trainer.add_micro_batch(next(self._batches))
        assert report is not None
        if self._left <= 0:
            self._asked_at = now - LEAD
        for each in self.publishers:
            each.inner_step(
                self._block, self._listed_at, now, next_round, loss=report.loss, outer=outer
            )

    def _begin_block(self) -> None:
        self._left += STEPS_OF_A_BLOCK
        self._listed_at, self._block = self._asked_at, block_at(self._asked_at)
        while not has_text(self._pages, self.uid, self._block):
            self._block -= 1  # as a miner does: another block
        batches = self._pages(self.uid, self._block).split(MICRO)
        self._batches = itertools.cycle([each for each in batches if len(each) == MICRO])

    def end_outer_step(self, averaged: Sequence[Tensor]) -> None:
        """Take the outer step of a round whose average is ``averaged``."""
        self.pseudo_gradient()
        self.trainer.prepare_outer_step(averaged)
        self.trainer.commit_outer_step()

    def pseudo_gradient(self) -> list[Tensor]:
        buffers = [torch.zeros(shape) for _, shape in self.trainer.schema]
        self.trainer.write_pseudo_gradient(buffers)
        return buffers


def has_text(pages: Pages, uid: int, block: int) -> bool:
    """Return False if a rank has no text, to which all are cut."""
    try:
        pages(uid, block)
    except DataUnavailable:
        return False
    return True


def block_at(now: float) -> int:
    return FIRST_BLOCK + int(now / SECONDS_PER_BLOCK)


# --- all of them, and the validator -------------------------------------------------------------


class ShortPages(StdlibSource):
    """Two rows a page: public pages hold more text than is trained."""

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        return super().rows(config, row, split=split, limit=min(limit, 2))


class Arena:
    """All miners of one seed, and the validator. ``options``: as :func:`main` has them."""

    def __init__(self, options: argparse.Namespace, *, seed: int) -> None:
        period = options.blocks * SECONDS_PER_BLOCK
        self.world = World(options.blocks, STEP, upload=period / 30)
        self.look_every = period / 10
        self._dice = random.Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            path, eos = build_tokenizer("bytes", Path(folder))
            self._tokenizer = TextTokenizer(path, eos_id=eos)
        self.miners = [
            Miner(
                UID_SPACING * (1 + i + options.miners * seed),
                world=self.world,
                pages=self._pages(TRAINED),
                topk=options.topk,
                seed=seed,
            )
            for i in range(options.miners)
        ]
        self._judged_pages = functools.cache(self._pages(JUDGED))
        self._evaluator = Evaluator(
            model=EvaluationModel(
                model_config=small_config(), device=torch.device("cpu"), micro_batch=JUDGED
            ),
            pages=self._judged_pages,
        )
        self._starts: list[Sequence[Tensor]] = []
        # way -> uid -> one entry a look
        self.looks: dict[str, dict[int, list[Look]]] = {PUBLIC: {}, OURS: {}}

    def _pages(self, limit: int) -> PageReader:
        return PageReader(
            source=ShortPages(),
            tokenizer=self._tokenizer,
            sequence_length=SEQUENCE,
            ranks=4,
            pages=1,
            rows_per_page=100,
            max_length=1024,
            limit=limit,
        )

    def run(self, outer_steps: int) -> None:
        """Train, upload and judge until half a period after the last round."""
        called, late = 0.0, random.Random(self._dice.random())
        for outer in range(outer_steps):
            ends = called + self.world.period + late.uniform(0.0, self.world.late)
            self._outer_step(outer, called, ends)
            print(f"outer step {outer} done", file=sys.stderr, flush=True)
            called = ends
        now = called + self.world.pause
        while (now := now + self.look_every) < called + self.world.half:
            self._judge(outer_steps, called, now)

    def _outer_step(self, outer: int, called: float, ends: float) -> None:
        """Train from one call to the next, at ``ends``, and take the outer step."""
        world = self.world
        start = self.miners[0].trainer.outer.epoch_start
        assert start is not None
        self._starts.append(start)
        now = next_look = called + world.pause
        for miner in self.miners:
            miner.begin(now)
        while now + world.step <= ends:
            now += world.step
            for miner in self.miners:
                miner.inner_step(outer, now, called + world.period)
            if now >= next_look + self.look_every and now > self.world.period / 2:
                self._judge(outer, called, now)
                next_look = now
        for publisher in (each for miner in self.miners for each in miner.publishers):
            publisher.round(ends)
        of_all = [miner.pseudo_gradient() for miner in self.miners]
        averaged = [torch.stack(list(parts)).mean(0) for parts in zip(*of_all, strict=True)]
        for miner in self.miners:
            miner.end_outer_step(averaged)

    def _judge(self, outer: int, called: float, now: float) -> None:
        """Pass over all buckets at ``now``. ``outer``: the global state's outer step."""
        block, bpa = block_at(now), self.world.blocks
        judged = scored_epoch(
            outer_step=outer, block=block, last_allreduce_block=block_at(called), bpa=bpa
        )
        uids = [miner.uid for miner in self.miners]
        draw = functools.partial(self._dice.randrange, *random_block_range(block))
        random_block = draw()
        while not all(has_text(self._judged_pages, uid, random_block) for uid in uids):
            random_block = draw()
        for miner in self.miners:
            for each in miner.publishers:
                found = self._look(miner, each, judged, now, random_block)
                self.looks[each.way].setdefault(miner.uid, []).append(found)

    def _look(
        self, miner: Miner, each: Publisher, judged: int, now: float, random_block: int
    ) -> Look:
        state = Judged(
            block=block_at(now),
            bpa=self.world.blocks,
            outer_step=judged,
            schema=miner.trainer.schema,
            weights=self._starts[judged],
            learning_rate=miner.trainer.outer.learning_rate,
        )
        bucket = each.bucket(judged, now)
        repository = inspect(
            Neuron(miner.uid, hotkey="", port=1),
            lambda neuron: bucket,  # type: ignore[arg-type, return-value]
            outer_step=judged,
            age_limit=UPLOAD_AGE_LIMIT,
        )
        try:
            upload = read_upload(repository, state, timeout=timedelta(minutes=5))
        except InvalidUpload as error:
            return Look(repository.valid, why=str(error))
        judgement = self._evaluator.judge(upload, state, random_blocks=(random_block,))
        if judgement.random is None or judgement.assigned is None:
            return Look(repository.valid, why=judgement.reason)
        assert isinstance(upload.payload, GradientPayload)
        return Look(
            repository.valid,
            judgement.random.losses,
            judgement.assigned.losses,
            inner_step=upload.payload.metadata.inner_step,
            said=next(u.said for u in reversed(each.uploads) if u.content is not None),
        )


def one_seed(seed: int, options: argparse.Namespace) -> Looks:
    """In a process of its own, on one thread."""
    with alone():
        arena = Arena(options, seed=seed)
        arena.run(options.outer_steps)
    return arena.looks


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--miners", type=int, default=4)
    arguments.add_argument("--outer-steps", type=int, default=3)
    arguments.add_argument("--blocks", type=int, default=750, help="between two rounds")
    arguments.add_argument("--topk", type=int, default=2, help="values uploaded of each row")
    options = arguments.parse_args()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        waiting = {seed: pool.submit(one_seed, seed, options) for seed in options.seeds}
        found = {seed: each.result() for seed, each in waiting.items()}
    for base in (PUBLIC, OURS):
        print(f"\nIn a field of '{base}': ratios to it")
        table({seed: results(looks, base) for seed, looks in found.items()}, base)
    return 0


if __name__ == "__main__":
    sys.exit(main())
