"""One scoring pass over all miners' uploads, and the standings that passes add up to.

A pass runs between two rounds. Standings (ratings, moving averages, missed sweeps) are kept across
restarts.

Some bytes may end the process itself: by a fault in a library, or the memory of the machine. So the
standings name the upload that is judged before it is begun. A process that finds that note at its
start judges the miner's next upload last, in a pass of its own: a reboot costs nobody a score.
After the second end its uploads are reset unread for a round period, then for two, for four.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter

from distributed_training.chain.base import Neuron
from distributed_training.common.files import write_json
from distributed_training.config.settings import ValidatorSettings
from distributed_training.node.start import Stopped
from distributed_training.protocol import lines
from distributed_training.protocol.compression import Compression
from distributed_training.protocol.gradients import TOP_K
from distributed_training.protocol.scoring import (
    MAX_MISSED_SWEEPS,
    RESET,
    ScoreBoard,
    moving_average,
    random_block_range,
    scored_epoch,
    upload_age_limit,
)
from distributed_training.scoring.evaluator import Evaluator, Judgement, judgement_fields
from distributed_training.scoring.upload import (
    Cause,
    DataUnavailable,
    InvalidUpload,
    Judged,
    OpenBucket,
    Repository,
    in_a_line,
    inspect,
    of_this_machine,
    read_upload,
)
from distributed_training.store.errors import StoreError
from distributed_training.training.outer_step import GlobalState
from distributed_training.validator.global_state import GlobalPublisher
from distributed_training.validator.rounds import Attendance, each, unless_stopped
from distributed_training.validator.suspects import Suspects

log = logging.getLogger(__name__)


@dataclass
class Ends:
    """Processes that ended while they judged uploads of one miner. ``block``: of the last."""

    count: int
    block: int
    alone: bool = True  # the next upload is judged in a pass of its own

    def refused_until(self, bpa: int) -> int:
        """Return the block from which an upload is judged again."""
        return self.block + (bpa << min(self.count - 2, _MOST_DOUBLINGS) if self.count > 1 else 0)

    def forgotten_at(self, bpa: int) -> int:
        # By time, not by a good upload: one in between costs whoever crafts the others nothing.
        return self.block + (bpa << min(self.count, _MOST_DOUBLINGS))


_MOST_DOUBLINGS = 10


@dataclass(frozen=True)
class Begun:
    """The upload that is being judged, and at which block that was begun."""

    uid: int
    hotkey: str
    upload: str
    block: int


@dataclass
class _Entry:
    hotkey: str
    published: float = 0.0  # the moving average of totals
    all_reduce: int = 0
    repo_valid: int = 0
    missed_sweeps: int = 0
    elsewhere_since: int | None = None  # block since which it answers from another outer step
    run_id: str = ""  # of another network's file, if it runs with one
    scored_at: int = -1  # block of the last evaluation, or of the last try
    seen: str = ""  # revision of the upload seen last
    ends: Ends | None = None
    uploaded: float | None = None  # when its gradient came, in seconds since the epoch
    fault: str = ""  # of its bucket, at the last look
    reset: str = ""  # why the last upload that was judged was reset

    @property
    def cause(self) -> str:
        """The reason why it has no score, as far as that is known."""
        if self.run_id:
            return "its network's file is another version"
        if self.missed_sweeps > MAX_MISSED_SWEEPS:
            return f"it missed the last {self.missed_sweeps} sweeps"
        waits = "no upload of it was judged yet" if self.scored_at < 0 else ""
        return self.fault or self.reset or waits or "its uploads have gained nothing so far"


@dataclass(frozen=True)
class PastRound:
    """A round that ended at ``ended``, in seconds since the epoch; see RoundReport."""

    outer_step: int
    ended: float
    seconds: float
    participants: list[int]  # uids
    tokens: int
    fault: str
    detail: str


@dataclass(frozen=True)
class Reached:
    """A good round whose outer step is being published. ``asked``, ``good``: uids."""

    outer_step: int
    asked: list[int]
    good: list[int]


@dataclass
class Standings:
    """Scores and attendance by uid. A uid that changes its hotkey starts afresh."""

    # These fields and ``board`` are the file.
    entries: dict[int, _Entry] = field(default_factory=dict)
    failed_rounds: int = 0  # since the last success
    successful_rounds: int = 0
    last_round_block: int | None = None  # when the period was last restarted
    # Saved before the publication: a kill after it must not lose the round.
    reached: Reached | None = None
    begun: Begun | None = None
    suspects: Suspects = field(default_factory=Suspects)
    rounds: list[PastRound] = field(default_factory=list)  # the last ones

    def __post_init__(self) -> None:
        self.board = ScoreBoard(())
        self._absent: set[int] = set()  # of the entries: not registered when that was last seen

    def sync(self, neurons: Iterable[Neuron]) -> None:
        """Take in who is registered now. Who is not keeps its standing for its return."""
        present = {n.uid: n.hotkey for n in neurons}
        # A registry of an older backup, or a chain's node that is behind, hides some for a while.
        self._absent = self.entries.keys() - present.keys()
        for uid, hotkey in present.items():
            entry = self.entries.get(uid)
            if entry is None or entry.hotkey != hotkey:
                self.entries[uid] = _Entry(hotkey)
                self.board.add(uid)
                self.suspects.forget(uid)

    def record_sweep(self, attendance: Attendance, *, block: int, patience: int) -> None:
        """Record which miners answered a sweep.

        Who answers from another outer step has missed none for ``patience`` blocks: after a round
        that failed only here all miners do, until they have gone back.
        """
        for uid in self.entries.keys() & set(attendance.asked):
            entry = self.entries[uid]
            if uid in attendance.answered:
                entry.run_id = attendance.other_runs.get(uid, "")
            if uid in attendance.alive or entry.run_id:
                entry.missed_sweeps, entry.elsewhere_since = 0, None
                continue
            if uid in attendance.elsewhere:
                if entry.elsewhere_since is None:
                    entry.elsewhere_since = block
                if block - entry.elsewhere_since <= patience:
                    continue
            entry.missed_sweeps += 1

    def published(self, outer_step: int) -> None:
        """Count the round that was ``reached``, if it led to ``outer_step``.

        It gives 1 to the miners that were good, in the group or not, and 0 to all others asked.
        """
        reached, self.reached = self.reached, None
        if reached is None or reached.outer_step != outer_step:
            return
        for uid in self.entries.keys() & set(reached.asked):
            self.entries[uid].all_reduce = int(uid in reached.good)
        self.failed_rounds = 0
        self.successful_rounds += 1

    def judged(
        self, judgements: Sequence[Judgement], valid: Mapping[int, bool], *, block: int
    ) -> dict[int, dict[str, float]]:
        """Record one scoring pass; return all scores by uid, as in an event."""
        # Also of miners that are not judged in this pass: their totals are computed again too.
        for uid, is_valid in valid.items():
            self.entries[uid].repo_valid = int(is_valid)
        self.board.update_round(
            random={j.uid: j.random.losses if j.random else RESET for j in judgements},
            assigned={j.uid: j.assigned.losses if j.assigned else RESET for j in judgements},
            # Its blocks are too short to be measured, which is no fault of the upload.
            unknown={j.uid for j in judgements if j.ok and j.assigned is None},
        )
        for judgement in judgements:
            entry = self.entries[judgement.uid]
            entry.scored_at, entry.reset = block, judgement.reason
        present = self.present()
        totals = self.board.total_scores(
            all_reduce={uid: e.all_reduce for uid, e in present.items()},
            repo_valid={uid: e.repo_valid for uid, e in present.items()},
        )
        for uid, entry in present.items():
            entry.published = moving_average(entry.published, totals[uid])
            # The ratings stay: they count again once the miner answers.
            if entry.missed_sweeps > MAX_MISSED_SWEEPS or entry.run_id:
                entry.published = 0.0
        ratings = {uid: self.board.rating(uid) for uid in present}
        return {
            uid: {
                "random": self.board.random_score(uid),
                "mu": ratings[uid][0],
                "sigma": ratings[uid][1],
                "assigned": self.board.assigned_score(uid),
                "train": self.board.train_score(uid),
                "all_reduce": entry.all_reduce,
                "repo_valid": entry.repo_valid,
                "total": totals[uid],
                "published": entry.published,
            }
            for uid, entry in present.items()
        }

    def weights(self) -> dict[int, float]:
        present = self.present()
        return {u: e.published for u, e in present.items() if e.published > 0 and not e.run_id}

    def present(self) -> dict[int, _Entry]:
        """Return the entries of who was registered when that was last seen."""
        return {uid: e for uid, e in self.entries.items() if uid not in self._absent}

    def save(self, path: Path) -> None:
        board = {u: s for u, s in self.board.state().items() if int(u) in self.entries}
        write_json(path, asdict(self) | {"board": board})

    @classmethod
    def load(cls, path: Path) -> Standings:
        """Load standings, empty ones if there is no file. Raises ValueError for a damaged one.

        The end of the process before counts, if it ended while it judged an upload.
        """
        try:
            # No read_state: it would set a damaged file aside, and begin with empty scores.
            data = path.read_bytes()
            found = TypeAdapter(cls).validate_json(data, strict=True)
            found.board.restore(json.loads(data)["board"])
        except FileNotFoundError:
            return cls()
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a validator's standings: {type(error).__name__}") from None
        begun, found.begun = found.begun, None
        entry = found.entries.get(begun.uid) if begun else None
        if begun is not None and entry is not None and entry.hotkey == begun.hotkey:
            count = 1 + (entry.ends.count if entry.ends else 0)
            entry.ends = Ends(count, begun.block)
            entry.scored_at = begun.block  # or it would come before those of its pass again
            log.warning(
                "The validator ended while it judged upload %s of uid %d (%d. time), so that "
                "miner's next one is %s; if it was no reboot, look for the process in dmesg",
                begun.upload,
                begun.uid,
                count,
                "judged last, in a pass of its own"
                if count == 1
                else "reset unread for a while, then judged in a pass of its own",
            )
        return found


_UPLOAD_PATIENCE = timedelta(minutes=5)  # with one upload: a store may drip for ever


@dataclass(kw_only=True)
class Scorer:
    """Check every repository, judge some uploads, update the standings.

    It judges at most ``settings.score_uids`` of them.
    """

    settings: ValidatorSettings
    open_bucket: OpenBucket
    publisher: GlobalPublisher
    evaluator: Evaluator
    standings: Standings
    rng: random.Random
    record: Callable[..., None]
    stop: threading.Event
    compression: Compression = TOP_K
    ledger: Path | None = None  # the file of the standings; None: they are in no file

    def score(
        self,
        miners: Sequence[Neuron],
        state: GlobalState,
        *,
        block: int,
        bpa: int,
        interrupted: Callable[[], bool],
    ) -> list[Judgement]:
        """Make one scoring pass; return the judgements.

        ``interrupted`` is asked between two uploads; the pass then ends with what it has. Raises
        ChainError, Stopped.
        """
        outer_step = scored_epoch(
            outer_step=state.outer_step,
            block=block,
            # Of the last good round: a failed one begins no outer step that could be judged.
            last_allreduce_block=state.last_allreduce_block,
            bpa=bpa,
        )
        limit = upload_age_limit(
            failed_rounds=self.standings.failed_rounds, base=self.settings.upload_age_limit
        )
        look = partial(
            inspect, open_bucket=self.open_bucket, outer_step=outer_step, age_limit=limit
        )
        repositories = each(look, miners, stop=self.stop)
        if self._our_link_is_away(repository.cause for repository in repositories):
            return []
        for repository in repositories:
            entry, tag = self.standings.entries[repository.uid], repository.tag
            entry.fault = "" if repository.valid and repository.trained else repository.reason
            if repository.age is not None:
                entry.uploaded = time.time() - repository.age.total_seconds()
            if repository.metadata is not None and tag != entry.seen:
                entry.seen, age = tag, repository.age
                self.record(
                    "upload_seen",
                    uid=repository.uid,
                    revision=tag,
                    outer_step=outer_step,
                    age_seconds=age.total_seconds() if age else None,
                )
        chosen, weights = self._choose(repositories, block, bpa), None
        if chosen:
            try:
                fetch = partial(self.publisher.weights, outer_step, schema=state.schema)
                weights = unless_stopped(fetch, stop=self.stop)
            except (StoreError, ValueError) as error:
                log.warning("No scoring: global weights of outer step %d: %s", outer_step, error)
        judgements: list[Judgement] = []
        if weights is not None:
            # One for all: improvements on the same text can be compared.
            random_block = self.rng.randrange(*random_block_range(block))
            judged = Judged(
                block=block,
                bpa=bpa,
                outer_step=outer_step,
                schema=state.schema,
                weights=weights,
                learning_rate=state.learning_rate,
                compression=self.compression,
            )
            for tried, repository in enumerate(chosen):
                if tried and interrupted():
                    done = len(judgements)
                    log.info("A round is due: %d of %d uploads judged", done, len(chosen))
                    break
                try:
                    judgement = self._judge(repository, judged, random_block)
                    if self._our_link_is_away([judgement.cause]):
                        return []  # nothing of the pass counts
                except DataUnavailable as error:
                    log.warning("uid %d is not scored now: %s", repository.uid, error)
                    # Or its text would keep the first place from others, whose text can be had.
                    self.standings.entries[repository.uid].scored_at = block
                    continue
                judgements.append(judgement)
                self.record("upload_scored", **judgement_fields(judgement, repository.tag))
                log.info("%s", _line(judgement, repository.tag))
        valid = {r.uid: r.valid for r in repositories}
        scores = self.standings.judged(judgements, valid, block=block)
        self.record(
            "scores",
            outer_step=outer_step,
            block=block,
            scores={str(uid): figures for uid, figures in scores.items()},
        )
        return judgements

    def store_answers(self) -> bool:
        """Return whether the global bucket answers. Raises Stopped.

        If it does not, our link or the store is away: each miner would look as if it were.
        """
        try:
            unless_stopped(self.publisher.outer_step, stop=self.stop)
        except StoreError as error:
            log.warning(
                "No scoring pass, since the global bucket does not answer (%s); no miner loses by "
                "it, and it is tried again in %d blocks",
                error,
                self.settings.score_blocks,
            )
            return False
        return True

    def _our_link_is_away(self, causes: Iterable[Cause | None]) -> bool:
        """Return whether some bucket does not answer, and neither does the global one."""
        silent = not {Cause.UNREACHABLE, Cause.TOO_SLOW}.isdisjoint(causes)
        return silent and not self.store_answers()

    def _choose(self, repositories: Sequence[Repository], block: int, bpa: int) -> list[Repository]:
        """Choose the uploads of a pass: the longest unjudged ones, or one that ended a process.

        A miner that never uploaded an inner step is left out.
        """
        entries = self.standings.entries
        trained = [repository for repository in repositories if repository.trained]
        trained.sort(key=lambda r: entries[r.uid].scored_at)
        risks = set()
        for uid in (repository.uid for repository in trained):
            ends = entries[uid].ends
            if ends is not None and block >= ends.forgotten_at(bpa):
                entries[uid].ends = None
            elif ends is not None and ends.alone and block >= ends.refused_until(bpa):
                risks.add(uid)
        # What was judged is kept at the end of a pass: with others, one more end would lose theirs.
        if trained and trained[0].uid in risks:
            return trained[:1]
        return [each for each in trained if each.uid not in risks][: self.settings.score_uids]

    def _judge(self, repository: Repository, judged: Judged, random_block: int) -> Judgement:
        """Judge one upload, noted on the disk until that is over: see the module's docstring.

        Raises as :meth:`_measure`. An error that ends the process leaves the note, as a kill does.
        """
        standings, uid = self.standings, repository.uid
        entry = standings.entries[uid]
        ends, until = entry.ends, entry.ends.refused_until(judged.bpa) if entry.ends else 0
        if ends is not None and judged.block < until:
            why = (
                f"the validator ended {ends.count} times over its uploads: none until block {until}"
            )
            return Judgement.reset(uid, judged.outer_step, Cause.BAD_GRADIENT, why)
        standings.begun = Begun(uid, entry.hotkey, repository.tag, judged.block)
        if self.ledger is not None:
            with suppress(OSError):  # the end of the pass says so
                standings.save(self.ledger)
        try:
            judgement = self._measure(repository, judged, random_block)
        except (DataUnavailable, Stopped):
            standings.begun = None
            raise
        standings.begun = None
        if ends is not None:
            ends.alone = False
        return judgement

    def _measure(self, repository: Repository, judged: Judged, random_block: int) -> Judgement:
        """Judge one upload, or reset it for whatever its bytes make a library raise.

        Raises DataUnavailable, which says nothing about the upload, Stopped, and
        torch.AcceleratorError, after which this process can judge nothing.
        """
        uid, outer_step = repository.uid, judged.outer_step
        try:
            read = partial(read_upload, repository, judged, timeout=_UPLOAD_PATIENCE)
            upload = unless_stopped(read, stop=self.stop)
            return self.evaluator.judge(upload, judged, random_blocks=(random_block,))
        except InvalidUpload as error:
            return Judgement.reset(uid, outer_step, error.cause, str(error))
        except (DataUnavailable, torch.AcceleratorError):
            raise
        except Exception as error:  # one upload must not end the pass of all
            if of_this_machine(error):
                raise DataUnavailable(in_a_line(error)) from error
            return Judgement.reset(uid, outer_step, Cause.BAD_GRADIENT, in_a_line(error))


def _line(judgement: Judgement, tag: str) -> str:
    start = f"uid {judgement.uid}: {lines.judged_upload(tag, judgement.outer_step)}"
    if judgement.random is None:
        return f"{start} reset: {judgement.reason}"
    before, after = judgement.random.losses
    found = f"{start} random {before:.4f} -> {after:.4f}"
    if judgement.assigned is None:
        return found
    before, after = judgement.assigned.losses
    return f"{found}, assigned {before:.4f} -> {after:.4f}"
