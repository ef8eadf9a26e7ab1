"""Keep the inner optimizer that a newcomer takes over in the global bucket.

A public miner that joins loads the four ``epoch-N/inner_optimizer.rankRRRR-of-4.pt`` of the global
bucket right after the model: moments, and the place in the learning rate's schedule (protocol page,
section 3). Without them it cannot join. A validator does not train, so it hands on a miner's. That
miner is untrusted: sizes are bounded before a byte is fetched, nothing in its files runs, moments
that AdamW cannot have made are refused. The uploaded files are written by the validator. The
schedule's place is the network's, never a beginner's.

All of it is done beside the rounds and the scoring passes, in a thread. The files of the next outer
step are there before the round that leads to it, so its upload takes no longer. They are written
once for each outer step: nobody reads a mixture of two.
"""

from __future__ import annotations

import io
import logging
import math
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from distributed_training.common.files import read_state, write_state
from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol import keys
from distributed_training.protocol.gradients import Schema
from distributed_training.store.bucket_reader import BucketReader, StateUnavailable, pt_content
from distributed_training.store.journal import Journal
from distributed_training.store.s3 import S3ObjectStore, StoppedError, StoreError, Uplink
from distributed_training.store.transfer import Sender, deadline_in
from distributed_training.training.collectives import row_range
from distributed_training.training.inner_optimizer import CosineSchedule, published_group
from distributed_training.training.inner_state import MOMENTS, InnerState, finished_steps
from distributed_training.training.snapshot import RowsOfMesh, shard_content, write_shard

log = logging.getLogger(__name__)

_ASKED = 16  # miners, best first, whose place in the schedule is looked at
_FETCHED = 3  # of them, whose files may be fetched before this try is given up
_RANKS = (keys.PUBLIC_RANKS, 1, 2, 3, 5, 6, 7, 8, 16, 32, 64)  # that a donor may have
_ANSWER = timedelta(seconds=30)  # of a donor's bucket, for one file's description
_STEPS_OF_A_BLOCK = 12  # inner steps: one a second is more than any network takes
# |m| <= c sqrt(v) holds for any gradients (Cauchy-Schwarz): c = 1.2 for betas of 0.9 and 0.95, 7.3
# for 0.9 and 0.999.
_MOST_RATIO, _ROUNDING = 8.0, 1e-12
_MOST_SQUARES = 4.0  # of the squared clipping norm, in all of v together


@dataclass(frozen=True)
class Donor:
    """A miner whose files may be handed on. Donors come best first."""

    uid: int
    bucket: BucketReader


@dataclass(frozen=True)
class _Made:
    """The complete set of files in the folder. ``place``: in the schedule."""

    outer_step: int
    uid: int
    place: int


@dataclass(frozen=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]


class InnerPublisher:
    """``folder`` keeps what is under way, so that a validator that was killed goes on with it.

    ``budget`` covers the upload; 0: nothing is published.
    """

    def __init__(
        self,
        *,
        store: S3ObjectStore,
        folder: Path,
        schema: Schema,
        training: TrainingSettings,
        budget: timedelta,
        record: Callable[..., None],
    ) -> None:
        self._store = store
        self._global = BucketReader(store)
        self._folder = folder
        self._schema = schema
        self._training = training
        self._schedule = CosineSchedule(
            training.learning_rate, training.warmup_steps, training.total_steps
        )
        self._budget = budget
        self._record = record
        self._uplink = Uplink()
        self._reading: BucketReader | None = None
        self._published: set[int] = set()
        self._thread: threading.Thread | None = None

    def look(
        self, outer_step: int, donors: Sequence[Donor], *, judged: int, period: int, late: bool
    ) -> None:
        """Begin what is missing, unless something is under way.

        ``judged``: the outer step whose uploads ``donors`` have. ``period``: blocks in which an
        outer step's inner steps were made. ``late`` in it, the next outer step's files are made.
        """
        # One at a time: two threads would write the same folder.
        if not self._budget or not donors or (self._thread and self._thread.is_alive()):
            return
        # Until half of the period the uploads of the step before are judged: too old for the next.
        following = [outer_step + 1] if late and judged == outer_step else []
        wanted = [outer_step, *following]
        self._thread = threading.Thread(
            target=self._run, args=(wanted, donors, judged, period), name="inner-optimizer"
        )
        self._thread.daemon = True
        self._thread.start()

    def join(self) -> None:
        """Wait until the work under way has ended."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End what is under way; the next process goes on with it."""
        self._uplink.stop()
        if self._reading is not None:
            self._reading.stop()
        self.join()

    def _run(self, wanted: list[int], donors: Sequence[Donor], judged: int, period: int) -> None:
        try:
            for outer_step in wanted:
                if not self._there(outer_step):
                    self._publish(outer_step, donors, judged, period)
        except StoppedError:
            return
        # A disk that is full is a RuntimeError of torch's; a StoreError is one too.
        except (RuntimeError, OSError, ValueError) as error:
            log.warning(
                "The inner optimizer that newcomers take over is not published yet (%s): tried "
                "again after the next scoring pass",
                error,
            )

    def _there(self, outer_step: int) -> bool:
        if outer_step not in self._published and all(
            self._global.head(keys.epoch_key(outer_step, name))
            for name in _names(keys.PUBLIC_RANKS)
        ):
            self._published.add(outer_step)
        return outer_step in self._published

    def _publish(self, outer_step: int, donors: Sequence[Donor], judged: int, period: int) -> None:
        began = time.monotonic()
        made = read_state(self._note, _Made, lost="it is made once more")
        # A set made before a kill is sent as it was: some of it may be in the bucket already.
        if made is None or made.outer_step != outer_step:
            made = self._make(outer_step, donors, judged, period)
        if made is None:
            return
        files = [
            (keys.epoch_key(outer_step, name), self._folder / name)
            for name in _names(keys.PUBLIC_RANKS)
        ]
        with Sender(
            store=self._store,
            journal=Journal(self._folder / "uploads.json"),
            deadline=deadline_in(self._budget),
            uplink=self._uplink,
        ) as sender:
            sender.abandon_all_but(key for key, _ in files)
            sender.upload_all(files)
        # Twice the size of the model, and of no use once it is sent.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._published.add(outer_step)
        self._record(
            "inner_optimizer",
            outer_step=outer_step,
            uid=made.uid,
            finished_steps=made.place,
            seconds=round(time.monotonic() - began, 3),
        )
        log.info(
            "Published the inner optimizer of outer step %d: moments of uid %d, inner step %d of "
            "the schedule",
            outer_step,
            made.uid,
            made.place,
        )

    @property
    def _note(self) -> Path:
        return self._folder / "made.json"

    # --- the donor --------------------------------------------------------------------------------

    def _make(
        self, outer_step: int, donors: Sequence[Donor], judged: int, period: int
    ) -> _Made | None:
        """Make the files of an outer step; None if no donor's can be handed on."""
        before = self._place_of(self._global, outer_step - 1) if outer_step else 0
        # A network's first files: before outer step 0 nobody had made a step.
        if before is None and judged == 0:
            before = 0
        most = math.inf if before is None else before + _STEPS_OF_A_BLOCK * period
        places = {}
        for donor in donors[:_ASKED]:
            self._uplink.check_stopped()  # a stop would wait for the answers of all of them
            place = self._place_of(donor.bucket, judged)
            if place is not None and place > most:
                log.warning(
                    "uid %d's inner optimizer is not handed on to newcomers: inner step %d of the "
                    "schedule is beyond what the network can have made (%d)",
                    donor.uid,
                    place,
                    most,
                )
            elif place is not None:
                places[donor.uid] = place
        if not places:
            return None
        # The median: one miner, a liar or a beginner, does not move it.
        place = max(before or 0, statistics.median_low(places.values()))
        ordered = sorted(
            (donor for donor in donors if donor.uid in places),
            key=lambda donor: 2 * places[donor.uid] < place,  # beginners last
        )
        for donor in ordered[:_FETCHED]:
            try:
                self._write(outer_step, self._fetch(donor, judged), place)
            except StoppedError:
                raise  # what was fetched stays
            except (StoreError, ValueError) as error:
                log.warning(
                    "uid %d's inner optimizer is not handed on to newcomers: %s", donor.uid, error
                )
                continue
            shutil.rmtree(self._folder / "donor", ignore_errors=True)
            made = _Made(outer_step, donor.uid, place)
            write_state(self._note, made)
            return made
        return None

    def _place_of(self, bucket: BucketReader, outer_step: int) -> int | None:
        """Return the place in the schedule in the first file of an outer step; None without one."""
        try:
            ranks = self._ranks(bucket, outer_step)
            if ranks is None:
                return None
            key = keys.epoch_key(outer_step, keys.inner_optimizer(0, ranks))
            return finished_steps(
                pt_content(io.BufferedReader(bucket.open(key, within=_ANSWER), 1 << 16))
            )
        except StoppedError:
            raise
        except (StoreError, ValueError) as error:
            log.info("No inner optimizer in bucket %s: %s", bucket.name, error)
            return None

    def _ranks(self, bucket: BucketReader, outer_step: int) -> int | None:
        """Return the number of ranks whose files there are.

        Asked by name: an untrusted bucket's list may have no end.
        """
        for ranks in _RANKS:
            if bucket.head(keys.epoch_key(outer_step, keys.inner_optimizer(0, ranks))):
                return ranks
        return None

    def _fetch(self, donor: Donor, outer_step: int) -> InnerState:
        """Fetch a donor's files. Raises StoreError, ValueError."""
        ranks = self._ranks(donor.bucket, outer_step)
        if ranks is None:
            raise StateUnavailable(f"bucket {donor.bucket.name} has none of {outer_step}")
        self._reading = donor.bucket
        found = donor.bucket.fetch(
            outer_step,
            self._folder / "donor",
            _names(ranks),
            limit=_most_bytes(self._schema, ranks),
        )
        return InnerState(found, self._schema)

    # --- the files --------------------------------------------------------------------------------

    def _write(self, outer_step: int, state: InnerState, place: int) -> None:
        """Write the donor's moments as the files of four ranks.

        Raises ValueError for moments that AdamW cannot have made.
        """
        # First: a note of the set before would vouch for this one while it is half written.
        self._note.unlink(missing_ok=True)
        self._check(state)
        training = self._training
        group = published_group(
            [name for name, _ in self._schema],
            self._schedule.rate(place),
            self._schedule.peak,
            betas=(training.adam_beta1, training.adam_beta2),
            weight_decay=training.weight_decay,
        )
        for rank in range(keys.PUBLIC_RANKS):
            first, second = (
                [_rows(state.moment(kind, i), rank) for i in range(len(self._schema))]
                for kind in MOMENTS
            )
            content = shard_content(
                shards=[_Parameter(name, shape) for name, shape in self._schema],
                mesh=RowsOfMesh(keys.PUBLIC_RANKS, rank),
                exp_avg=first,
                exp_avg_sq=second,
                steps=state.facts.steps,
                param_group=group,
                scheduler_state=self._schedule.published_state(place),
                outer_step=outer_step,
            )
            write_shard(self._folder / keys.inner_optimizer(rank, keys.PUBLIC_RANKS), content)
            self._uplink.check_stopped()

    def _check(self, state: InnerState) -> None:
        # NaN and Inf are none here: files that hold them were refused when they were fetched.
        squares, clip = 0.0, self._training.gradient_clip
        for index, (name, _) in enumerate(self._schema):
            first, second = (state.moment(kind, index) for kind in MOMENTS)
            if bool((first.abs() > _MOST_RATIO * second.sqrt() + _ROUNDING).any()):
                raise ValueError(f"the moments of {name} are none of AdamW: |m| is above 8 sqrt(v)")
            squares += float(second.sum(dtype=torch.float64))
        if clip and not squares <= _MOST_SQUARES * clip * clip:
            raise ValueError(
                f"its second moments sum up to {squares:.3g}, which gradients clipped to {clip:g} "
                "cannot have made"
            )


def _names(ranks: int) -> list[str]:
    return [keys.inner_optimizer(rank, ranks) for rank in range(ranks)]


def _most_bytes(schema: Schema, ranks: int) -> int:
    """Return the largest size of one donor's file.

    It holds both float32 moments of the first rank's rows, and their description.
    """
    elements = sum(row_range(shape[0], ranks, 0)[1] * math.prod(shape[1:]) for _, shape in schema)
    return 8 * elements + 4096 * len(schema) + (1 << 20)


def _rows(whole: Tensor, rank: int) -> Tensor:
    start, stop = row_range(len(whole), keys.PUBLIC_RANKS, rank)
    # torch.save writes the whole storage of a view: each file would hold all rows.
    return whole[start:stop].clone()
