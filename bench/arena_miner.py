"""One miner of the arena: training by the product's trainer, and every way to publish it.

What is published changes nothing in training. So one training run serves all contenders that train
alike: each has its own error feedback, schedule and bucket, and looks at the same weights at the
same inner steps. Two ways to publish are compared on the same luck.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from bench.arena_levers import LEVERS
from bench.freshness import LEAD, STEPS_OF_A_BLOCK, World, our_miner, public_miner
from bench.small_model import EFFECTIVE, MICRO, new_trainer
from distributed_training.protocol import keys, schedule
from distributed_training.protocol.metadata import ConfigExtras, Metadata
from distributed_training.protocol.payload import GradientMetadata
from distributed_training.protocol.types import Revision
from distributed_training.scoring.upload import PageReader
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.s3 import ObjectInfo, S3ObjectStore
from distributed_training.training.error_feedback import Code, Codec, ErrorFeedback
from distributed_training.training.local_evaluation import Preview
from tests.tools.gradient_file import build_payload

HELD_SEQUENCES = 16  # as many as four ranks hold back by default
TRAINED = 40  # sequences of a block: 2.4 inner steps, of which validators judge two of five pages
JUDGED = 16
FIRST_BLOCK = 1_000_000

Codes = Mapping[str, Sequence[Code | None]]


@dataclass(frozen=True)
class Contender:
    """One way to mine. ``training``: of ``TRAININGS``. ``schedule``: ``public``, or ours with so
    many upload steps. ``rescale``: of ``LEVERS``."""

    name: str
    says: str
    feedback: str = "best"
    search: bool = True
    schedule: str = "5"
    rescale: str = ""
    curved: bool = True  # its part of `best`
    training: str = "adamw"
    topk: int = 2  # of rows of 96 and 256: the public network's density


@dataclass
class Upload:
    """A publication. ``content`` is made when a validator first looks: what nobody looks at needs
    no line search. Blocks as the chain numbers them."""

    outer_step: int
    inner_step: int
    blocks: tuple[int, ...]
    taken_at: float
    visible_at: float
    codes: Codes
    start: Sequence[Tensor]
    loss: float
    content: bytes | None = None
    said: str = ""


@dataclass
class Publisher:
    """One contender's part of a miner."""

    contender: Contender
    feedback: ErrorFeedback
    preview: Preview
    decide: Callable[..., bool]
    done: Callable[..., None]
    through_rounds: bool
    uploads: list[Upload] = field(default_factory=list)
    under_way: Upload | None = None
    since: list[int] = field(default_factory=list)  # blocks trained since the last publication

    def sent(self, now: float) -> None:
        """Take note of an upload that has ended by ``now``."""
        if self.under_way is not None and self.under_way.visible_at <= now:
            self.done(self.under_way, self.under_way.visible_at)
            self.under_way = None

    def round(self, ends: float, pause: float) -> None:
        """A round pauses our upload and kills the public miner's."""
        if self.under_way is None or self.under_way.visible_at <= ends:
            return
        if self.through_rounds:
            self.under_way.visible_at += pause
        else:
            self.uploads.remove(self.under_way)
            self.under_way = None


class Miner:
    """One training run of uid ``uid`` and the ``contenders`` that publish it."""

    def __init__(
        self,
        uid: int,
        contenders: Sequence[Contender],
        *,
        world: World,
        pages: Callable[[int], PageReader],
        seed: int,
    ) -> None:
        self.uid = uid
        self.training = contenders[0].training
        ranks = 1 if self.training == "rank 0 only" else 4
        self._trained = pages(ranks)
        self._world = world
        self.trainer = new_trainer(seed=seed)
        self._after_step = LEVERS.get(self.training, lambda trainer: lambda: None)(self.trainer)
        self.held = pages(ranks)(uid, 10 * FIRST_BLOCK + seed)[:HELD_SEQUENCES]
        self.publishers = [self._publisher(each) for each in contenders]
        self._block: Tensor | None = None
        self._left = 0.0
        self._at = 0
        self._block_now = 0
        self._asked_at = self._listed_at = 0.0

    def _publisher(self, contender: Contender) -> Publisher:
        sharded, stream = self.trainer.sharded, self.trainer.stream
        feedback = ErrorFeedback(
            mode=contender.feedback,
            decay=0.999,
            codec=Codec(topk=contender.topk),
            shards=sharded.shards,
            stream=stream,
        )
        preview = Preview(
            sharded=sharded, stream=stream, feedback=feedback, search=contender.search
        )
        if contender.schedule == "public":
            timing = public_miner()
        else:
            timing = our_miner(self._world, int(contender.schedule))
        return Publisher(
            contender, feedback, preview, timing.decide, timing.done, timing.through_rounds
        )

    # --- training ---------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Training begins, or goes on after a round."""
        self._left = 0.0
        self._asked_at = now - LEAD

    def inner_step(self, outer: int, inner: int, now: float, next_round: float | None) -> None:
        """``now``: when it ends."""
        if self._left <= 0:
            self._begin_block()
        self._left -= 1
        report = None
        for _ in range(EFFECTIVE // MICRO):
            report = self.trainer.add_micro_batch(self._batch())
        assert report is not None
        self._after_step()
        if self._left <= 0:
            self._asked_at = now - LEAD
        for each in self.publishers:
            each.since.append(self._block_now)
            each.sent(now)
            age = now - self._listed_at
            if each.decide(outer, inner, now, each.under_way is not None, age, next_round):
                self._publish(each, outer, inner, now, report.loss)

    def _begin_block(self) -> None:
        self._left += STEPS_OF_A_BLOCK
        self._listed_at = self._asked_at
        self._block_now = block_at(self._asked_at)
        self._block, self._at = self._trained(self.uid, self._block_now), 0

    def _batch(self) -> Tensor:
        assert self._block is not None
        if self._at + MICRO > len(self._block):
            self._at = 0
        self._at += MICRO
        return self._block[self._at - MICRO : self._at]

    def _publish(self, each: Publisher, outer: int, inner: int, now: float, loss: float) -> None:
        step = self.trainer.outer
        start = step.epoch_start
        assert start is not None
        current = step.current()
        moment = [v.clone() for v in self.trainer.optimizer.exp_avg_sq]
        directions = each.feedback.directions(
            start,
            current,
            step.learning_rate,
            second_moment=moment if each.contender.curved else None,
        )
        codes: Codes = {d.name: d.encode() for d in directions}
        if each.contender.rescale:
            codes = LEVERS[each.contender.rescale](codes, start, current, step.learning_rate)
        blocks = tuple(dict.fromkeys(each.since))
        visible = now + self._world.upload
        each.under_way = Upload(outer, inner, blocks, now, visible, codes, start, loss)
        each.uploads.append(each.under_way)
        each.since = []

    # --- what a validator finds -------------------------------------------------------------------

    def bucket(self, each: Publisher, outer_step: int, now: float) -> BucketReader:
        """As it is at ``now``, when outer step ``outer_step`` is judged."""
        seen = [u for u in each.uploads if u.visible_at <= now]
        root = max(seen, key=lambda u: u.visible_at, default=None)
        there = [u for u in seen if u.outer_step == outer_step]
        newest = max(there, key=lambda u: u.visible_at, default=None)
        if newest is not None and newest.content is None:
            newest.content = self._content(each, newest)
            newest.codes = {}
        name = f"{each.contender.name} of uid {self.uid}"
        return BucketReader(cast(S3ObjectStore, Bucket(name, root, newest, now)))

    def _content(self, each: Publisher, upload: Upload) -> bytes:
        """``gradients.pt``, of the direction and length that the preview chooses."""
        rate = self.trainer.outer.learning_rate
        direction, factor = next(iter(upload.codes)), 1.0
        if each.contender.search:
            choice = each.preview.choose(
                epoch_id=str(upload.outer_step),
                start=upload.start,
                codes=upload.codes,
                learning_rate=rate,
                held=self.held.split(MICRO),
                count=1.0,
            )
            if choice.delta < choice.plain_delta:
                direction, factor = choice.direction, choice.factor
        upload.said = f"{direction} x{factor:.2f}"
        shards, codes = self.trainer.sharded.shards, {}
        for shard, code in zip(shards, upload.codes[direction], strict=True):
            assert code is not None
            shape = each.feedback.codec.shape(shard.shape)
            codes[shard.name] = (code[0].reshape(shape), (code[1] * factor).reshape(shape))
        about = GradientMetadata(
            upload.blocks[-1], upload.inner_step, upload.outer_step, upload.loss
        )
        file = io.BytesIO()
        torch.save(build_payload(codes, about), file)
        return file.getvalue()

    def end_outer_step(self, averaged: Sequence[Tensor]) -> None:
        """A round whose average is ``averaged``."""
        trainer = self.trainer
        trainer.write_pseudo_gradient([torch.zeros(shape) for _, shape in trainer.schema])
        trainer.prepare_outer_step(averaged)
        trainer.commit_outer_step()

    def pseudo_gradient(self) -> list[Tensor]:
        buffers = [torch.zeros(shape) for _, shape in self.trainer.schema]
        self.trainer.write_pseudo_gradient(buffers)
        return buffers


class Bucket:
    """An object store to read, with what was published until ``now``.

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


def block_at(now: float) -> int:
    return FIRST_BLOCK + int(now / schedule.SECONDS_PER_BLOCK)
