"""Find the verdict that a validator would reach now on an upload, and its cause.

The score preview is the reference validator's own evaluator over what anybody may read: the chain,
the global bucket, and miners' buckets, whose read keys are public. A folder on this machine can
take a bucket's place. None of its results flows back into training. The block that a validator will
draw from a miner's list can be computed, but training on it preferentially would only falsify the
figure for how good the training is.

It says nothing of a rank: a validator's ratings have a history that nobody else can see. And a
validator draws its random block itself; the preview draws another from the same range, so the
figures agree to the last digit only for the same blocks.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distributed_training.chain.base import Neuron
from distributed_training.common.memory import ModelShape, disk_space
from distributed_training.config import Config, ConfigError
from distributed_training.config.settings import MinerSettings
from distributed_training.health.machine import bytes_under, count_moments
from distributed_training.node.buckets import PeerBuckets
from distributed_training.node.identity import follow_chain, miners_of
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import MAX_METADATA_BYTES, MetadataError, RoundNotes
from distributed_training.protocol.scoring import scored_epoch
from distributed_training.scoring.evaluator import Evaluator, Judgement
from distributed_training.scoring.upload import (
    Cause,
    DataUnavailable,
    InvalidUpload,
    Judged,
    OpenBucket,
    Repository,
    inspect,
    read_upload,
    within,
)
from distributed_training.store.bucket_reader import BucketReader, check_run, pt_content, states
from distributed_training.store.errors import NoRoomError, StoreError
from distributed_training.store.snapshot_folder import size_text
from distributed_training.training.compression import compression_of
from distributed_training.training.model import parameter_schema
from distributed_training.training.outer_rule import OUTER_LEARNING_RATE
from distributed_training.training.outer_step import load_weights, model_bytes

log = logging.getLogger(__name__)


class NotJudgeable(RuntimeError):
    """The global state cannot be had, so nothing can be scored; the text says why."""


@dataclass(frozen=True)
class PublishedState(Judged):
    """Global weights as anybody finds them in the bucket; the newest: ``global_outer_step``."""

    global_outer_step: int
    model_config: Mapping[str, Any]


def read_judged(
    bucket: BucketReader,
    folder: Path,
    config: Config,
    *,
    block: int,
    miners: Path | None = None,
) -> PublishedState:
    """Read the global state that uploads are judged against.

    Raises NotJudgeable.

    ``folder`` keeps the weights, so that they are fetched once an outer step. ``miners``: folder of
    run folders, whose miners' share of the same disk stays free.
    """
    reserved = 0  # bytes that miners may still take, if their disk is the folder's
    try:
        # The root first: a publisher writes it last, so what it names is there.
        root = bucket.metadata()
        if root is None:
            raise NotJudgeable(f"{bucket.name} is empty: nothing was uploaded yet")
        check_run(root, config.store.run)
        settings = config.validator
        bpa = settings.blocks_per_allreduce
        # As the validators of the public network after their first good round.
        if root.outer_step > 0:
            bpa = settings.blocks_per_allreduce_later or bpa
        model_config, extras = bucket.config(root.outer_step)
        outer_step = scored_epoch(
            outer_step=root.outer_step,
            block=block,
            last_allreduce_block=extras.last_allreduce_block or 0,
            bpa=bpa,
        )
        schema = parameter_schema(model_config)
        folder.mkdir(parents=True, exist_ok=True)
        if miners is not None:
            shape = ModelShape.from_config(model_config, sum(math.prod(s) for _, s in schema))
            most = disk_space(
                shape,
                keep_checkpoints=MinerSettings().keep_checkpoints,
                moments=count_moments(config.training, shape),
                content=config.store.content,
            )
            # With checkpoints it is a miner's; a validator's or a subnet's takes no such room.
            for run in {path.parent for path in miners.glob("*/checkpoints")}:
                if run.stat().st_dev == folder.stat().st_dev:
                    reserved += max(0, most - bytes_under(run))
        limit = model_bytes(schema)
        found = bucket.fetch(outer_step, folder, (keys.MODEL,), limit=limit, reserved=reserved)
        # After the fetch, since it may fail: each state is as large as the model.
        for _, state in states(folder):
            if state != found:
                shutil.rmtree(state, ignore_errors=True)
        return PublishedState(
            block=block,
            bpa=bpa,
            global_outer_step=root.outer_step,
            outer_step=outer_step,
            model_config=model_config,
            schema=schema,
            weights=load_weights(found / keys.MODEL, schema),
            learning_rate=_learning_rate(bucket, root.outer_step),
            compression=compression_of(config.training),
        )
    except NoRoomError as error:
        raise NotJudgeable(
            f"{error}; the miner on this disk may take {size_text(reserved)} of it: give --cache "
            "on another disk"
        ) from None
    # OSError: a disk that is full, or a miner that goes while its run folder is measured.
    except (StoreError, ValueError, OSError) as error:
        raise NotJudgeable(f"the global state cannot be read: {error}") from None


def _learning_rate(bucket: BucketReader, outer_step: int) -> float:
    """Read the rate from the global outer optimizer's file.

    Its momentum is left out, which is as large as the model.
    """
    key = keys.epoch_key(outer_step, keys.OUTER_OPTIMIZER)
    try:
        # Buffered: a table of contents is read a few bytes at a time, each of them a request.
        content = pt_content(io.BufferedReader(bucket.open(key), 64 * 1024)).content
        found = float(content["optimizer_state_dict"]["param_groups"][0]["lr"])
        if not math.isfinite(found):
            raise ValueError(f"the rate is {found}")
    except Exception as error:  # noqa: BLE001 - foreign bytes; the rate is hardly ever another
        log.warning(
            "%s/%s cannot be read (%s): scored with outer learning rate %g",
            bucket.name,
            key,
            error,
            OUTER_LEARNING_RATE,
        )
        return OUTER_LEARNING_RATE
    return found


@dataclass(frozen=True)
class Row:
    """One miner.

    ``judgement``: None if it was not judged. ``cause``: why its score is zero or will fall to it,
    None if nothing stands in its way.
    """

    neuron: Neuron
    repository: Repository
    age_limit: timedelta
    judgement: Judgement | None
    cause: Cause | None
    reason: str
    of_round: str = ""  # why the validator's last round was without it


@dataclass(frozen=True)
class Preview:
    """The verdicts on the uploads of an outer step, reached in ``seconds``."""

    block: int
    global_outer_step: int
    outer_step: int
    random_blocks: tuple[int, ...]
    rows: tuple[Row, ...]
    seconds: float


@dataclass(frozen=True)
class Previewer:
    """``timeout`` covers all that is read from one miner's bucket.

    One that takes longer costs its own row a reason and nobody else anything. ``tell`` is called
    with a line before each phase of each miner.
    """

    judged: PublishedState
    open_bucket: OpenBucket
    evaluator: Evaluator
    age_limit: timedelta
    timeout: timedelta = timedelta(seconds=60)
    tell: Callable[[str], None] = lambda line: None

    def run(
        self,
        neurons: Sequence[Neuron],
        *,
        random_blocks: Sequence[int],
        notes: Mapping[int, str] = MappingProxyType({}),
    ) -> Preview:
        """Judge the uploads of ``neurons``; ``notes``: by uid, why the last round was without it.

        Raises ChainError, Stopped.
        """
        began = time.monotonic()
        rows = []
        for number, neuron in enumerate(neurons, start=1):
            who = f"uid {neuron.uid:03d}, miner {number} of {len(neurons)}"
            row = self._judge(neuron, random_blocks, who)
            rows.append(dataclasses.replace(row, of_round=notes.get(neuron.uid, "")))
        return Preview(
            block=self.judged.block,
            global_outer_step=self.judged.global_outer_step,
            outer_step=self.judged.outer_step,
            random_blocks=tuple(random_blocks),
            rows=tuple(rows),
            seconds=time.monotonic() - began,
        )

    def _judge(self, neuron: Neuron, random_blocks: Sequence[int], who: str) -> Row:
        judged, uid, began = self.judged, neuron.uid, time.monotonic()
        self.tell(f"{who}: looking into its bucket")
        look = partial(
            inspect,
            neuron,
            self.open_bucket,
            outer_step=judged.outer_step,
            age_limit=self.age_limit,
        )
        try:
            repository = within(self.timeout, look)
        except TimeoutError:
            reason = f"no answer in {self.timeout.total_seconds():g} s"
            repository = Repository(uid, False, Cause.TOO_SLOW, reason)
        # The bucket's cause first: the upload's matters only once that is fixed.
        cause, reason, judgement = repository.cause, repository.reason, None
        if repository.trained:
            # Of one timeout: a bucket that drips may not have it twice.
            left = self.timeout - timedelta(seconds=time.monotonic() - began)
            try:
                self.tell(f"{who}: reading its upload {repository.tag}")
                upload = read_upload(repository, judged, timeout=left)
                self.tell(f"{who}: judging it on {len(random_blocks)} random and its own blocks")
                judgement = self.evaluator.judge(upload, judged, random_blocks=random_blocks)
            except InvalidUpload as error:
                judgement = Judgement.reset(uid, judged.outer_step, error.cause, str(error))
            except DataUnavailable as error:
                cause, reason = cause or Cause.NO_DATA, reason or str(error)
        if judgement is not None:
            cause, reason = cause or judgement.cause, reason or judgement.reason
            if cause is None and judgement.random is not None:
                if judgement.random.absolute <= 0:
                    cause = Cause.MAKES_IT_WORSE
                elif judgement.assigned_wins is False:
                    cause = Cause.ASSIGNED_NOT_BETTER
        # Without the buckets: those of all miners would keep their connections until the end.
        repository = dataclasses.replace(repository, bucket=None)
        return Row(neuron, repository, self.age_limit, judgement, cause, reason)


@dataclass(frozen=True)
class Sources:
    """The sources of a preview: present block, miners, global bucket, a miner's bucket."""

    block: Callable[[], int]
    miners: Callable[[], Sequence[Neuron]]
    global_bucket: Callable[[], BucketReader]
    open_bucket: OpenBucket


def on_chain(
    config: Config,
    stack: ExitStack,
    *,
    master: str | None,
    timeout: timedelta,
    instead: Mapping[int, BucketReader] | None = None,
) -> Sources:
    """Return the subnet's own sources.

    No wallet is needed: what is read is public. ``master``: hotkey of the owner of the global
    bucket, None for the validator with the largest stake. ``instead``: by uid, what is read in
    place of its bucket. Raises NetworkFailure.
    """
    chain = follow_chain(config.chain, stack, master=master)
    peers = PeerBuckets(config.store, chain, large=timeout)
    # Without the global bucket nobody is scored; one miner's costs one row.
    patient = PeerBuckets(config.store, chain, small=timedelta(seconds=30))
    readers = instead or {}

    def miners() -> Sequence[Neuron]:
        # One that is not served yet can be read all the same.
        known = miners_of(chain.neurons(), max_uids=config.miner.max_uids)
        return [*known, *(n for n in chain.neurons() if n.uid in readers and n not in known)]

    def global_bucket() -> BucketReader:
        validators = [n for n in chain.neurons() if n.validator_permit]
        # A local subnet's master is whoever has all the stake.
        largest = max(validators, key=lambda n: n.stake, default=None)
        return patient.of_master(master or (largest.hotkey if largest else ""))

    return Sources(
        block=chain.block,
        miners=miners,
        global_bucket=global_bucket,
        open_bucket=lambda neuron: readers.get(neuron.uid) or peers.of_miner(neuron),
    )


def read_round_notes(bucket: BucketReader) -> dict[int, str]:
    """Return why the last round was without single miners, by uid; nothing of it is needed."""
    try:
        data = bucket.get(keys.ROUND, limit=MAX_METADATA_BYTES)
        notes = RoundNotes.parse(data) if data is not None else RoundNotes(0)
    except (StoreError, MetadataError) as error:
        log.debug("%s: %s", keys.ROUND, error)
        return {}
    return {
        u: f"in the round of outer step {notes.outer_step} {w}" for u, w in notes.miners.items()
    }


def choose_miners(miners: Sequence[Neuron], uids: Sequence[int] | None) -> Sequence[Neuron]:
    """Return the miners asked for; None: all. Raises ConfigError for a uid that nobody has."""
    if uids is None:
        return miners
    by_uid = {neuron.uid: neuron for neuron in miners}
    for uid in uids:
        if uid not in by_uid:
            raise ConfigError(
                f"uid {uid} is no miner with an endpoint on this subnet, so validators do not "
                "score it: check --uid, --netuid and the network"
            )
    return [by_uid[uid] for uid in dict.fromkeys(uids)]
