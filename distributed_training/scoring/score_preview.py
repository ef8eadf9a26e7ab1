"""Preview the scores that a validator would compute now, for some miners or all.

The score preview is the reference validator's own evaluator over what anybody may read: the chain,
the global bucket, and miners' buckets, whose read keys are public. A folder on this machine can
take a bucket's place. None of its results flows back into training. The block that a validator will
draw from a miner's list can be computed, but training on it preferentially would only falsify the
figure for how good the training is.

A validator differs in two things. Its ratings have a history that nobody else can see. The preview
starts from fresh ones and judges the present uploads again and again, each time with the
uncertainty that the texts leave; it reports the rank and share they lead to. And a validator draws
its random block itself; the preview draws another from the same range, so the figures agree to the
last digit only for the same blocks.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import random
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from distributed_training.chain.base import Neuron
from distributed_training.common.memory import ModelShape, disk_space
from distributed_training.config import Config, ConfigError
from distributed_training.config.settings import MinerSettings
from distributed_training.health.machine import bytes_under
from distributed_training.node.buckets import PeerBuckets
from distributed_training.node.identity import follow_chain, miners_of
from distributed_training.node.start import fetch_tokenizer
from distributed_training.protocol import keys
from distributed_training.protocol.gradients import Schema
from distributed_training.protocol.metadata import MAX_METADATA_BYTES, MetadataError, RoundNotes
from distributed_training.protocol.scoring import (
    RESET,
    ScoreBoard,
    random_block_range,
    scored_epoch,
)
from distributed_training.scoring.evaluator import (
    Comparison,
    EvaluationModel,
    Evaluator,
    Judgement,
    evaluation_device,
)
from distributed_training.scoring.upload import (
    Cause,
    DataUnavailable,
    InvalidUpload,
    Judged,
    OpenBucket,
    PageReader,
    Repository,
    Upload,
    folder_reader,
    inspect,
    read_upload,
    within,
)
from distributed_training.store.bucket_reader import (
    BucketReader,
    StateUnavailable,
    check_run,
    pt_content,
    states,
)
from distributed_training.store.s3 import NoRoomError, StoreError
from distributed_training.store.snapshot_folder import size_text
from distributed_training.training.model import parameter_schema
from distributed_training.training.outer_step import OUTER_LEARNING_RATE, load_weights, model_bytes

log = logging.getLogger(__name__)


class NotJudgeable(RuntimeError):
    """The global state cannot be had, so nothing can be scored; the text says why."""


@dataclass(frozen=True)
class PublishedState(Judged):
    """The same as anybody finds it in the global bucket, whose newest is ``global_outer_step``."""

    global_outer_step: int
    model_config: Mapping[str, Any]


def read_judged(
    bucket: BucketReader,
    folder: Path,
    config: Config,
    *,
    block: int,
    outer_step: int | None = None,
    miners: Path | None = None,
) -> PublishedState:
    """Read the global state that uploads are judged against.

    Raises NotJudgeable.

    ``outer_step``: to judge, where ``block`` should not decide. ``folder`` keeps the weights, so
    that they are fetched once an outer step. ``miners``: folder of run folders, whose miners' share
    of the same disk stays free.
    """
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
        if outer_step is None:
            outer_step = scored_epoch(
                outer_step=root.outer_step,
                block=block,
                last_allreduce_block=extras.last_allreduce_block or 0,
                bpa=bpa,
            )
        schema = parameter_schema(model_config)
        folder.mkdir(parents=True, exist_ok=True)
        reserved = _kept_for_miners(miners, folder, model_config) if miners else 0
        return PublishedState(
            block=block,
            bpa=bpa,
            global_outer_step=root.outer_step,
            outer_step=outer_step,
            model_config=model_config,
            schema=schema,
            weights=_weights(bucket, folder, outer_step, schema, reserved),
            learning_rate=_learning_rate(bucket, root.outer_step),
        )
    # OSError: a disk that is full, or a miner that goes while its run folder is measured.
    except (StoreError, ValueError, OSError) as error:
        raise NotJudgeable(f"the global state cannot be read: {error}") from None


def _weights(
    bucket: BucketReader, folder: Path, outer_step: int, schema: Schema, reserved: int
) -> list[Tensor]:
    """Fetch the weights of an outer step; ``folder`` keeps one. ``reserved``: bytes left free."""
    try:
        found = bucket.fetch(
            outer_step, folder, (keys.MODEL,), limit=model_bytes(schema), reserved=reserved
        )
    except NoRoomError as error:
        raise NotJudgeable(
            f"{error}; the miner on this disk may take {size_text(reserved)} of it: give --cache "
            "on another disk"
        ) from None
    # After the fetch, since it may fail: each state is as large as the model.
    for _, state in states(folder):
        if state != found:
            shutil.rmtree(state, ignore_errors=True)
    return load_weights(found / keys.MODEL, schema)


def _kept_for_miners(miners: Path, folder: Path, model_config: Mapping[str, Any]) -> int:
    """Return the bytes that miners may still take, if their disk is ``folder``'s.

    Their run folders are in ``miners``.
    """
    checkpoints = MinerSettings().keep_checkpoints
    most = disk_space(ModelShape.from_config(model_config), keep_checkpoints=checkpoints).total
    # With checkpoints it is a miner's; a validator's or a subnet's takes no such room.
    runs = {path.parent for path in miners.glob("*/checkpoints")}
    # Of miners on another disk no room is taken.
    same = [run for run in runs if run.stat().st_dev == folder.stat().st_dev]
    return sum(max(0, most - bytes_under(run)) for run in same)


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


PASSES = 40  # a rating has settled by then: about two days of passes on the public network


@dataclass(frozen=True)
class Standing:
    """``rating``: mu - 3 sigma.

    ``assigned``: in 0..1. ``share``: of the train score of everybody who was judged, which decides
    3/4 of the total score.
    """

    uid: int
    rank: int  # from 1, by rating
    rating: float
    assigned: float
    train: float
    share: float


def rank(
    judgements: Sequence[Judgement], *, passes: int = PASSES, seed: int = 0
) -> Mapping[int, Standing]:
    """Return the standings by uid, best first, after ``passes`` judgements such as these.

    Ratings begin fresh. Each pass draws every upload's improvement again from the uncertainty of
    its texts. ``passes=1`` takes the figures as they are: one pass of a new validator.
    """
    # The same draws at each look, so that only other uploads change a rank.
    generator = random.Random(seed)
    board = ScoreBoard(j.uid for j in judgements)
    for _ in range(passes):
        vary = generator if passes > 1 else None
        board.update_round(
            # Two draws: a validator's random and assigned text are different samples.
            random={j.uid: _draw(j.random, vary) for j in judgements},
            assigned={j.uid: _draw(j.assigned, vary) for j in judgements},
        )
    train = {uid: board.train_score(uid) for uid in board.uids}
    total = sum(train.values())
    ordered = sorted(board.uids, key=lambda uid: -board.random_score(uid))
    return {
        uid: Standing(
            uid=uid,
            rank=place,
            rating=board.random_score(uid),
            assigned=board.assigned_score(uid),
            train=train[uid],
            share=train[uid] / total if total else 0.0,
        )
        for place, uid in enumerate(ordered, 1)
    }


def _draw(found: Comparison | None, generator: random.Random | None) -> tuple[float, float]:
    if found is None:
        return RESET
    before, after = found.losses
    if generator is None or not math.isfinite(found.error):
        return before, after
    # The error is that of the difference: one of the two carries all of it.
    return before, after + generator.gauss(0.0, found.error)


READERS = 8  # buckets looked into at once


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
    standing: Standing | None = None
    of_round: str = ""  # why the validator's last round was without it


@dataclass(frozen=True)
class Preview:
    """``compared``: how many uploads the ranks and shares are among."""

    block: int
    global_outer_step: int
    outer_step: int
    random_blocks: tuple[int, ...]
    compared: int
    rows: tuple[Row, ...]
    seconds: float


@dataclass(frozen=True)
class Previewer:
    """``timeout`` covers all that is read from one miner's bucket.

    One that takes longer costs its own row a reason and nobody else anything.
    """

    judged: PublishedState
    open_bucket: OpenBucket
    evaluator: Evaluator
    age_limit: timedelta
    timeout: timedelta = timedelta(seconds=60)

    def run(
        self,
        neurons: Sequence[Neuron],
        *,
        random_blocks: Sequence[int],
        passes: int = PASSES,
    ) -> Preview:
        """Judge the uploads of ``neurons``; ``passes``: for ranks and shares, see :func:`rank`.

        Raises ChainError, Stopped.
        """
        began = time.monotonic()
        rows = [self._row(*read, random_blocks) for read in self._read_ahead(neurons)]
        judgements = [row.judgement for row in rows if row.judgement is not None]
        # Alone there is no rank, and no share of a train score to lose.
        standings = rank(judgements, passes=passes) if len(judgements) > 1 else {}
        return Preview(
            block=self.judged.block,
            global_outer_step=self.judged.global_outer_step,
            outer_step=self.judged.outer_step,
            random_blocks=tuple(random_blocks),
            compared=len(judgements),
            rows=tuple(_with_standing(row, standings.get(row.neuron.uid)) for row in rows),
            seconds=time.monotonic() - began,
        )

    def _read_ahead(
        self, neurons: Sequence[Neuron]
    ) -> Iterator[tuple[Neuron, Repository, Upload | Judgement | None]]:
        """Yield in order; while one is judged the next are read, ``READERS`` of them at most."""
        rest = iter(neurons)
        with ThreadPoolExecutor(READERS, thread_name_prefix="preview") as pool:
            ahead = deque((n, pool.submit(self._read, n)) for n in islice(rest, READERS))
            while ahead:
                neuron, future = ahead.popleft()
                repository, upload = future.result()
                # One for one: each that was read holds a whole gradients.pt in memory.
                ahead.extend((n, pool.submit(self._read, n)) for n in islice(rest, 1))
                yield neuron, repository, upload

    def _read(self, neuron: Neuron) -> tuple[Repository, Upload | Judgement | None]:
        """Read an upload; return a judgement if it is reset unread, None if it is not chosen."""
        judged, uid = self.judged, neuron.uid
        look = partial(
            inspect,
            neuron,
            self.open_bucket,
            outer_step=judged.outer_step,
            age_limit=self.age_limit,
        )
        began = time.monotonic()
        try:
            repository = within(self.timeout, look)
        except TimeoutError:
            cause, reason = Cause.TOO_SLOW, f"no answer in {self.timeout.total_seconds():g} s"
            return Repository(uid, False, cause, reason), None
        if not repository.trained:
            return repository, None
        # Of one timeout: a bucket that drips may not have it twice.
        left = self.timeout - timedelta(seconds=time.monotonic() - began)
        try:
            return repository, read_upload(repository, judged, timeout=left)
        except InvalidUpload as error:
            reset = Judgement.reset(uid, judged.outer_step, error.cause, str(error))
            return repository, reset
        except DataUnavailable as error:
            cause, reason = repository.cause or Cause.NO_DATA, repository.reason or str(error)
            return dataclasses.replace(repository, cause=cause, reason=reason), None

    def _row(
        self,
        neuron: Neuron,
        repository: Repository,
        upload: Upload | Judgement | None,
        random_blocks: Sequence[int],
    ) -> Row:
        # The bucket's cause first: the upload's matters only once that is fixed.
        cause, reason = repository.cause, repository.reason
        judgement = None if isinstance(upload, Upload) else upload
        if isinstance(upload, Upload):
            try:
                judgement = self.evaluator.judge(upload, self.judged, random_blocks=random_blocks)
            except DataUnavailable as error:
                cause, reason = cause or Cause.NO_DATA, reason or str(error)
        if judgement is not None and judgement.cause is not None:
            cause, reason = cause or judgement.cause, reason or judgement.reason
        # Without the buckets: those of all miners would keep their connections until the end.
        repository = dataclasses.replace(repository, bucket=None)
        return Row(neuron, repository, self.age_limit, judgement, cause, reason)


def _with_standing(row: Row, standing: Standing | None) -> Row:
    cause = row.cause
    if cause is None and row.judgement is not None and row.judgement.random is not None:
        if row.judgement.random.absolute <= 0:
            cause = Cause.MAKES_IT_WORSE
        elif not row.judgement.assigned_wins:
            cause = Cause.ASSIGNED_NOT_BETTER
        elif standing is not None and standing.train == 0:
            cause = Cause.RANKED_LOW
    return dataclasses.replace(row, standing=standing, cause=cause)


def draw_random_blocks(block: int, count: int, generator: random.Random) -> tuple[int, ...]:
    """Draw blocks from the range of which validators draw theirs at ``block``."""
    return tuple(generator.randrange(*random_block_range(block)) for _ in range(count))


@dataclass(frozen=True)
class Wanted:
    """``uids``: whose score, None: everybody's.

    ``others``: so many miners to rank them among, the best paid first. ``random_blocks``: as
    validators drew them; empty: ``draws`` of our own. ``timeout``: for all that is read from one
    miner.
    """

    uids: Sequence[int] | None = None
    others: int = 8
    random_blocks: Sequence[int] = ()
    draws: int = 1
    passes: int = PASSES
    timeout: timedelta = timedelta(seconds=60)


@dataclass(frozen=True)
class Sources:
    """The sources of a preview: present block, miners, global bucket, a miner's bucket."""

    block: Callable[[], int]
    miners: Callable[[], Sequence[Neuron]]
    global_bucket: Callable[[], BucketReader]
    open_bucket: OpenBucket
    outer_step: int | None = None  # to judge; None: as the block says


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
    stake, most = config.validator.minimum_stake, config.miner.max_uids
    readers = instead or {}

    def miners() -> Sequence[Neuron]:
        # One that is not served yet can be read all the same.
        known = miners_of(chain.neurons(), minimum_stake=stake, max_uids=most)
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


def in_folders(upload: Path, global_state: Path, uid: int, *, run: int) -> Sources:
    """Return an upload in a folder against a global state in a folder, without any network.

    "Now" is when its newest block was trained. Raises ConfigError.
    """
    reader, state = folder_reader(upload, run=run), folder_reader(global_state)
    try:
        root = reader.metadata()
        if root is None:
            raise StateUnavailable(f"{upload} holds no upload")
        blocks = reader.config(root.outer_step)[1].block_list
    except StoreError as error:
        raise ConfigError(
            f"--folder {upload} cannot be scored ({error}), so nothing was: give the folder of one "
            "upload"
        ) from None
    return Sources(
        block=lambda: max(blocks, default=0),
        miners=lambda: [Neuron(uid, hotkey="", port=1)],
        global_bucket=lambda: state,
        open_bucket=lambda neuron: reader,
        outer_step=root.outer_step,
    )


class Session:
    """``config``: of kind validator, since a preview judges as one does.

    ``folder`` keeps tokenizer and global weights. ``miners``: folder of the run folders of this
    machine's miners, whose room on the same disk is left to them. Raises ConfigError.
    """

    def __init__(
        self, config: Config, sources: Sources, *, folder: Path, miners: Path | None = None
    ) -> None:
        self._config = config
        self._sources = sources
        self._folder = folder
        self._miners = miners
        self._pages = PageReader.from_settings(config, *fetch_tokenizer(config, folder))
        self._device = evaluation_device(config.miner.device)
        self._model: EvaluationModel | None = None
        # Unseeded, as a validator's: text that is known before could be trained on.
        self._random = random.Random()

    def look(self, wanted: Wanted) -> Preview:
        """Make one preview.

        Raises NotJudgeable, ConfigError (a uid nobody has), ChainError, Stopped.
        """
        sources = self._sources
        # Once: the chain moves on while buckets are read, and all are judged alike.
        block = sources.block()
        judged = self._judged(block)
        previewer = Previewer(
            judged=judged,
            open_bucket=sources.open_bucket,
            evaluator=Evaluator(model=self._model_of(judged), pages=self._pages),
            age_limit=self._config.validator.upload_age_limit,
            timeout=wanted.timeout,
        )
        blocks = wanted.random_blocks or draw_random_blocks(block, wanted.draws, self._random)
        found = previewer.run(
            choose(sources.miners(), wanted), random_blocks=blocks, passes=wanted.passes
        )
        notes = read_round_notes(self._sources.global_bucket())
        rows = (
            dataclasses.replace(row, of_round=notes.get(row.neuron.uid, "")) for row in found.rows
        )
        return dataclasses.replace(found, rows=tuple(rows))

    def _judged(self, block: int) -> PublishedState:
        try:
            bucket = self._sources.global_bucket()
        except StoreError as error:
            raise NotJudgeable(
                f"the global bucket cannot be found ({error}): check --neuron.master_ss58_address"
            ) from None
        return read_judged(
            bucket,
            self._folder / "global",
            self._config,
            block=block,
            outer_step=self._sources.outer_step,
            miners=self._miners,
        )

    def _model_of(self, judged: PublishedState) -> EvaluationModel:
        """Return the model, made once; a network does not change its model."""
        if self._model is None or list(self._model.schema) != list(judged.schema):
            self._model = EvaluationModel(model_config=judged.model_config, device=self._device)
        return self._model


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


def choose(miners: Sequence[Neuron], wanted: Wanted) -> Sequence[Neuron]:
    """Choose the miners asked for, then those to compare them with. Raises ConfigError."""
    if wanted.uids is None:
        return miners
    by_uid = {neuron.uid: neuron for neuron in miners}
    for uid in wanted.uids:
        if uid not in by_uid:
            raise ConfigError(
                f"uid {uid} is no miner with an endpoint on this subnet, so validators do not "
                "score it: check --uid, --netuid and the network"
            )
    # A uid that is given twice would rank against itself.
    asked = [by_uid[uid] for uid in dict.fromkeys(wanted.uids)]
    rest = [neuron for neuron in miners if neuron.uid not in set(wanted.uids)]
    rest.sort(key=lambda neuron: (-neuron.incentive, neuron.uid))
    return [*asked, *rest[: wanted.others]]
