"""Fetch, judge and merge the uploads of a close, without waiting forever for any of them.

Each upload is fetched when it arrives and judged once; an upload that is clipped for the merge is
judged again in its clipped form. An upload that the store does not deliver, or that does not fit on
this disk, delays nobody once the grace is over: it is not judged, and its member loses nothing.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from distributed_training.chain.base import ChainError, Neuron
from distributed_training.common.backoff import Backoff
from distributed_training.common.files import sha256_of
from distributed_training.config import Config
from distributed_training.data.held_out import mean_loss
from distributed_training.node.identity import Member
from distributed_training.node.start import StopNow
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Merged, Refused, State
from distributed_training.protocol.network_report import printable
from distributed_training.protocol.types import UPDATE_CODEC
from distributed_training.protocol.update_file import Header, UpdateLayout, largest_file
from distributed_training.scoring.evaluator import (
    DataUnavailable,
    Evaluation,
    Judged,
    OpenBucket,
    in_a_line,
    judgement_fields,
    of_this_machine,
)
from distributed_training.store.base import ObjectInfo
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import (
    IntegrityError,
    NoRoomError,
    ObjectMissingError,
    StoreError,
)
from distributed_training.store.transfer import deadline_in
from distributed_training.training.weights import GlobalState
from distributed_training.validator.errands import Errands
from distributed_training.validator.judging import (
    CAUSES,
    Accepted,
    KnownSamples,
    RefusedUploadError,
    UploadJudge,
)
from distributed_training.validator.merge import (
    OuterState,
    Rule,
    Values,
    count_steps,
    helpful,
    longest_norm,
    merge_factors,
    merge_named,
)
from distributed_training.validator.outer_steps import OuterSteps
from distributed_training.validator.reporter import RoundReporter

log = logging.getLogger(__name__)

LOOK = 2.0  # seconds between two checks of the store
_SILENT = 60.0  # the fewest seconds without an answer after which a store counts as silent
_MOST_NAMED = 3  # most uploads of a close that warnings name, since all may lack the same source
_ALL_AWAITED = 8  # every eighth close waits for all members
_TURN = 30.0  # seconds of judging between two checks of the store, which also renew the state
_MOST_TEXTS = 8  # most random texts of a close; judging takes equally long for each of them
_CLIPPED_AGAIN = 3  # how many times, at most, clipped uploads are judged again
_LONGEST_REASON = 300  # most characters of a refusal's reason in the manifest
_MOST_STEPS_OF_A_SECOND = 1.0  # inner steps per second: more than any network takes


@dataclass
class Waiting:
    """An upload that has not been judged yet, and the reason. Times are by the store's clock."""

    why: str
    fetched: bool = False  # whether it is on this disk
    since: float | None = None  # when its file or text was first found to be unavailable
    again: float = 0.0  # time of the next try
    waits: Backoff = field(
        default_factory=partial(Backoff, first=timedelta(seconds=4), longest=timedelta(minutes=1))
    )


@dataclass
class Intake:
    """Everything that arrived for the close of ``state``. It is fetched again after a restart."""

    state: State
    judged: Judged
    began: float  # when the close began, by time.monotonic()
    until: float  # end of fetching and judging, by the store's clock
    awaited: frozenset[str]  # hotkeys that the round waits for, within the grace
    # uid -> when its upload arrived, by the store's clock
    came: dict[int, float] = field(default_factory=dict)
    accepted: dict[int, Accepted] = field(default_factory=dict)
    refused: dict[int, Refused] = field(default_factory=dict)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    fetching: Errands = field(default_factory=Errands)
    looking: Errands = field(default_factory=Errands)  # checks of own buckets during the grace
    looking_last: Errands = field(default_factory=Errands)  # checks of own buckets after it
    cramped: bool = False  # whether the disk lacks room for several uploads at once

    @property
    def ends(self) -> float:
        """The end of the grace, by the store's clock."""
        return self.state.closes_at + self.state.grace


@dataclass(frozen=True)
class MergedSome:
    """The result of merging some uploads; ``update`` is the digest of the update's file."""

    merged: tuple[Merged, ...]
    update: str
    header: Header
    values: OuterState
    losses: dict[str, float]


@dataclass(kw_only=True)
class CloseJudge:
    """Fetches, judges and merges the uploads of a close.

    ``folder`` keeps what must not be lost; ``record(kind, **fields)`` writes an event (see
    :mod:`.store_rounds`); ``stop`` is set when the program should end. ``losses_of`` returns the
    loss of a model with the given weights on each held-out domain, in nats per token.
    ``of_member`` opens a member's own bucket; None if members have none. ``state`` is the newest
    outer step's.
    """

    config: Config
    state: GlobalState
    member: Member
    steps: OuterSteps
    judge: UploadJudge
    folder: Path
    record: Callable[..., None]
    stop: threading.Event
    reporter: RoundReporter
    losses_of: Callable[[Sequence[Tensor]], dict[str, float]]
    of_member: OpenBucket | None = None

    def __post_init__(self) -> None:
        self._outer_rule = Rule.of(self.config)
        self._samples = KnownSamples(self.folder / "samples", self.judge.secret)
        self.judge = replace(self.judge, secret=self._samples.secret)
        self.standings = self.reporter.standings
        self._grace = self.config.rounds.grace.total_seconds()
        self._uploads = self.folder / "uploads"  # uploads of the current close
        self._patience = max(_SILENT, self._grace)  # seconds that fetching one upload may take
        self._seed = self.config.validator.seed or secrets.randbits(62)
        self._texts = 1  # number of random texts that a close is judged on
        self._look = LOOK  # seconds that a check of the store waits for answers

    def mean(self, losses: Mapping[str, float]) -> float:
        """Return the loss that models are judged by: the weighted mean over the domains."""
        return mean_loss(losses, self.config.domains)

    # --- fetching ---------------------------------------------------------------------------------

    def _fetch_new(
        self, close: Intake, by_uid: Mapping[int, Neuron], miners: Sequence[Neuron], now: float
    ) -> None:
        """Fetch the uploads that arrived since the last check. Raises StoreError."""
        known = close.accepted.keys() | close.refused.keys()
        fetched = {uid for uid, one in close.waiting.items() if one.fetched}
        most, new = largest_file(self.state.schema, self.judge.codec), dict[int, ObjectInfo]()
        for info in self._find_uploads(close, [m for m in miners if m.uid not in known], now):
            uid, *place = keys.parse_upload_key(info.key) or (-1, -1, -1)
            if place != [close.state.outer_step, close.state.serial] or uid not in by_uid:
                continue
            close.came[uid] = self.standings.entries[uid].uploaded = info.modified
            if uid in known | fetched or self._refuse_late(close, uid, info):
                continue
            if info.size > most:
                reason = f"it has {info.size} bytes, but no upload has more than {most}"
                self._refuse(close, uid, "damaged", reason)
            else:
                new[uid] = info
        wanted = self._most_trusted(close, now, new)
        for uid in wanted:
            close.waiting.setdefault(uid, Waiting("the store did not deliver it in time"))
        # Fetch several at a time, since each may be slow and must not delay the others.
        came = close.fetching.run(
            lambda u: self._fetch(close, new[u], by_uid[u], most),
            wanted,
            within=self._look,
            patience=self._patience,
            **({"at_once": 1} if close.cramped else {}),
            stop=self.stop,
        )
        for uid, found in came.items():
            if isinstance(found, ObjectInfo):
                # Since the check, its owner may have replaced it with a copy of an upload that
                # arrived in the meantime.
                close.came[uid] = found.modified
                if uid in by_uid and not self._refuse_late(close, uid, found):
                    why = "its turn to be judged did not come within half a period"
                    close.waiting[uid] = Waiting(why, fetched=True)
            elif isinstance(found, IntegrityError | ObjectMissingError) and uid in by_uid:
                self._refuse(close, uid, "damaged", str(found))
            elif isinstance(found, Exception):
                close.cramped |= isinstance(found, NoRoomError)
                ours = isinstance(found, StoreError | ChainError | OSError)
                self._lack(close, uid, str(found) if ours else in_a_line(found), now)
            else:
                raise found
        for uid in close.fetching.silent(self._patience):
            if uid in close.waiting and close.waiting[uid].since is None:
                self._lack(close, uid, f"it did not arrive within {self._patience:.0f} s", now)

    def _refuse_late(self, close: Intake, uid: int, info: ObjectInfo) -> bool:
        """Refuse an upload if it arrived after the grace, and return whether it did."""
        late = info.modified - close.ends
        if late > 0:
            self._refuse(close, uid, "late", f"it came {late:.0f} s after the end of the grace")
        return late > 0

    def _choose_awaited(self, serial: int, miners: Sequence[Neuron]) -> frozenset[str]:
        """Return the hotkeys of the members whose uploads a close waits for.

        A close waits for a member that missed the last n closes only if n + 1 is a power of two;
        every ``_ALL_AWAITED``-th close waits for all members. So members that have left delay few
        rounds, no matter how many they are.
        """
        members = self.standings.present()
        missed = {m.hotkey: members[m.uid].missed for m in miners if m.uid in members}
        everybody = serial % _ALL_AWAITED == 0
        return frozenset(hotkey for hotkey, n in missed.items() if everybody or not n & (n + 1))

    def _missing(self, close: Intake, miners: Sequence[Neuron], now: float) -> bool:
        """Return whether the round still has to wait for an upload."""
        judged = close.accepted.keys() | close.refused.keys()
        few = len(close.accepted) < self.config.rounds.least
        if now < close.ends:
            awaited = {miner.uid for miner in miners if miner.hotkey in close.awaited}
            return few or bool(close.waiting) or not awaited <= judged
        unheard = [one for one in close.waiting.values() if one.since is None]
        if now >= close.until:
            if unheard:
                log.warning(
                    "Half a period was not enough to fetch and judge %d of %d uploads, so they go "
                    "into the next round: give the validator a faster device or link, or admit "
                    "fewer members",
                    len(unheard),
                    len(close.came),
                )
            return False
        # Wait for missing text only if most uploads lack theirs: a member chooses its own pages,
        # and pages that nobody can read must harm only that member.
        texts = [one for one in close.waiting.values() if one.fetched and one.since is not None]
        return (
            bool(unheard)
            or close.looking_last.unheard
            or (few and bool(close.waiting))
            or len(texts) > len(close.accepted)
        )

    def _most_trusted(self, close: Intake, now: float, uids: Collection[int]) -> list[int]:
        """Return the uids that are due, the least trusted last, since time may run out for them."""
        due = [u for u in uids if u not in close.waiting or close.waiting[u].again <= now]
        return sorted(due, key=lambda uid: (-self.standings.entries[uid].published, uid))

    def _lack(self, close: Intake, uid: int, why: str, now: float) -> None:
        """Note that an upload cannot be judged yet, and log it the first time."""
        one = close.waiting.get(uid)
        if one is None:  # it was refused in the meantime
            return
        one.since = now if one.since is None else one.since
        one.again = now + one.waits.failed().total_seconds()
        since = time.strftime("%H:%M:%S UTC", time.gmtime(one.since))
        one.why = f"since {since}: {why}"
        lacking = sum(each.since is not None for each in close.waiting.values())
        if one.waits.failures == 1 and lacking <= _MOST_NAMED:
            log.warning(
                "The upload of uid %d could not be judged at %s (%s): it is tried again, and after "
                "the grace the round ends without it",
                uid,
                since,
                why,
            )

    def _find_uploads(
        self, close: Intake, miners: Sequence[Neuron], now: float
    ) -> list[ObjectInfo]:
        """List the uploads in the store, or only those of ``miners``. Raises StoreError."""
        if self.of_member is None:
            try:
                return self.steps.list_uploads()
            except StoreError:
                if now < close.ends:
                    raise
        by_uid = {miner.uid: miner for miner in miners}

        def find(uid: int) -> ObjectInfo | None:
            key = keys.upload_key(uid, close.state.outer_step, close.state.serial)
            # An error affects only that owner, and the next check looks for the upload again.
            with suppress(Exception):
                return self._reader(by_uid[uid]).head(key)
            return None

        looking = close.looking if now < close.ends else close.looking_last
        found = looking.run(find, [*by_uid], within=self._look, patience=_SILENT, stop=self.stop)
        return [info for info in found.values() if isinstance(info, ObjectInfo)]

    def _reader(self, miner: Neuron) -> BucketReader:
        """Return the bucket that a member uploads to. Raises StoreError, ChainError."""
        return self.steps.reader if self.of_member is None else self.of_member(miner)

    def _upload_path(self, close: Intake, uid: int) -> Path:
        # Give each close its own folder, because a fetch for an earlier close may still write.
        folder = f"{close.state.outer_step}.{close.state.serial}"
        return self._uploads / folder / f"{uid}.safetensors"

    def _fetch(self, close: Intake, info: ObjectInfo, miner: Neuron, most: int) -> ObjectInfo:
        """Fetch an upload, return its object info. Raises StoreError, ChainError, OSError."""
        path = self._upload_path(close, miner.uid)
        path.parent.mkdir(parents=True, exist_ok=True)
        deadline = deadline_in(timedelta(seconds=self._patience))
        try:
            return self._reader(miner).download(info.key, path, limit=most, deadline=deadline)
        except NoRoomError:
            for part in path.parent.glob(f".{path.name}.*"):  # make room for other uploads
                part.unlink(missing_ok=True)
            raise

    def _refuse(
        self, close: Intake, uid: int, cause: str, reason: str, *, digest: str = ""
    ) -> None:
        hotkey, shown = self.standings.entries[uid].hotkey, printable(reason, _LONGEST_REASON)
        close.refused[uid] = Refused(uid, hotkey, digest, cause, shown)
        close.waiting.pop(uid, None)
        with suppress(OSError):  # make room for other uploads
            self._upload_path(close, uid).unlink()
        reset = Evaluation(uid, close.state.outer_step, cause=CAUSES[cause], reason=reason)
        self.record("upload_scored", **judgement_fields(reset, ""))
        log.info("uid %d: refused (%s): %s", uid, cause, reason)

    def _miners(self) -> list[Neuron]:
        """List the members that may upload: those with an allowed uid, except ourselves."""
        most, own = self.config.rounds.max_uids, self.member.hotkey
        miners = [n for n in self.member.chain.neurons() if n.uid < most and n.hotkey != own]
        self.standings.sync(miners)
        return miners

    # --- judging ----------------------------------------------------------------------------------

    def _judge_new(self, close: Intake, miners: Sequence[Neuron], now: float) -> None:
        """Fetch and judge the uploads that arrived since the last call."""
        began = time.monotonic()
        by_uid = {miner.uid: miner for miner in miners}
        self._fetch_new(close, by_uid, miners, now)
        turn = time.monotonic() + _TURN
        there = [uid for uid, one in close.waiting.items() if one.fetched and uid in by_uid]
        for uid in self._most_trusted(close, now, there):
            if now + time.monotonic() - began >= close.until:
                break
            self._judge_one(close, uid, now)
            self.reporter.keep_up()
            if time.monotonic() > turn:
                break

    def _draw(self, serial: int) -> random.Random:
        """Return the random generator of a close, the same after a restart if a seed is set."""
        return random.Random(self._seed * serial)

    def _judge_one(self, close: Intake, uid: int, now: float) -> None:
        path = self._upload_path(close, uid)
        revision = f"{close.state.outer_step}.{close.state.serial}"
        if close.waiting[uid].since is None:
            self.record(
                "upload_seen",
                uid=uid,
                revision=revision,
                outer_step=close.state.outer_step,
                age_seconds=0.0,
            )
        try:
            found = self.judge.judge(
                uid,
                self.standings.entries[uid].hotkey,
                path,
                close.judged,
                serial=close.state.serial,
                start=self.steps.head.weights,
                modified=close.came[uid],
                longest=longest_norm([], self.steps.history),
            )
        except RefusedUploadError as error:
            self._refuse(close, uid, error.cause, str(error), digest=sha256_of(path))
            return
        except (StopNow, OSError, torch.AcceleratorError):
            raise
        except Exception as error:  # noqa: BLE001 - foreign bytes may harm only their owner
            if not isinstance(error, DataUnavailable) and not of_this_machine(error):
                self._refuse(close, uid, "damaged", in_a_line(error), digest=sha256_of(path))
                return
            self._lack(close, uid, str(error), now)
            return
        close.waiting.pop(uid, None)
        close.accepted[uid] = found
        self.record("upload_scored", **judgement_fields(found.judgement, revision))
        log.info("uid %d: accepted, random text %+.4f nats", uid, -found.improvement)

    def _factors(self, close: Intake) -> dict[int, float]:
        """Return the factor by which the merge would multiply each accepted upload, by uid."""
        found = [close.accepted[uid].measured for uid in sorted(close.accepted)]
        factors = merge_factors(found, self.steps.history)
        return dict(zip(sorted(close.accepted), factors, strict=True))

    def _judge_clipped(self, close: Intake) -> None:
        """Judge again each upload that will be merged with another factor than it was judged with.

        The usual norm is known only after all uploads were judged, and it may change whenever one
        of them turns out not to help. So this is repeated, but only a few times.
        """
        for _ in range(_CLIPPED_AGAIN):
            factors = self._factors(close)
            other = [
                (close.accepted[uid], factor)
                for uid, factor in factors.items()
                if factor and not math.isclose(factor, close.accepted[uid].factor, rel_tol=0.01)
            ]
            if not other:
                break
            for one, factor in other:
                try:
                    as_merged = replace(one, factor=factor)
                    close.accepted[one.uid] = self.judge.measure(as_merged, close.judged)
                except RefusedUploadError as error:
                    self._blame(close, one.uid, error.cause, f"clipped to {factor:.3g}: {error}")
                except DataUnavailable as error:
                    log.info("uid %d: not judged again in clipped form: %s", one.uid, error)

    def _blame(self, close: Intake, uid: int, cause: str, reason: str) -> None:
        digest = close.accepted.pop(uid).file.digest
        self._refuse(close, uid, cause, reason, digest=digest)

    def _choose_text(self, close: Intake) -> None:
        """Judge the next close on twice the text if fewer than half of the uploads help."""
        found = [one.measured for one in close.accepted.values()]
        if 2 * sum(helpful(found)) < len(found):
            self._texts = min(2 * self._texts, _MOST_TEXTS)
        elif 2 * sum(one.gain > 2 * one.chance for one in found) >= len(found):
            self._texts = max(self._texts // 2, 1)  # half as much text is enough

    # --- the update ---------------------------------------------------------------------------

    def _merge_all(self, close: Intake) -> MergedSome:
        """Merge all accepted uploads, and return the result."""
        return self._merge(close, [*close.accepted])

    def _merge(
        self, close: Intake, uids: Sequence[int], average: Values | None = None
    ) -> MergedSome:
        """Merge the uploads of ``uids`` into the update's file, which each call replaces.

        ``average``: the values that the members have averaged, instead of the uploads' mean.
        """
        chosen = [close.accepted[uid] for uid in sorted(uids)]
        factors = merge_factors([one.measured for one in chosen], self.steps.history)
        merged = tuple(
            Merged(
                uid=one.uid,
                hotkey=one.hotkey,
                digest=one.file.digest,
                norm=one.norm,
                factor=factor,
                improvement=one.improvement,
                inner_steps=one.file.header.inner_steps,
                tokens=one.file.header.tokens,
                chance=one.measured.chance,
                share=one.share,
            )
            for one, factor in zip(chosen, factors, strict=True)
        )
        most = int(_MOST_STEPS_OF_A_SECOND * self.config.rounds.period.total_seconds())
        claims = [(one.measured, one.file.header.inner_steps) for one in chosen]
        steps = count_steps(claims, self.steps.history, close.state.closes_at, most)
        count = sum(map(bool, factors))
        header = Header(
            kind="update",
            run_id=self.judge.run_id,
            outer_step=close.state.outer_step,
            serial=0,
            hotkey=self.member.hotkey,
            start=self.steps.head.weights,
            codec=UPDATE_CODEC,
            inner_steps=steps,
            tokens=steps * self._contributors(count) * self.config.tokens_of_step,
        )
        path = self.steps.place(close.state.outer_step + 1) / keys.UPDATE
        path.parent.mkdir(parents=True, exist_ok=True)
        update, values = merge_named(
            merged,
            [one.file for one, factor in zip(chosen, factors, strict=True) if factor],
            self.steps.values,
            self._outer_rule,
            average=average,
            path=path,
            layout=UpdateLayout.of(self.state.schema, header),
            sign=self.steps.sign,
        )
        return MergedSome(merged, update, header, values, self.losses_of(values.weights))

    def _contributors(self, judged: int) -> int:
        """Return the number of contributing members; ``judged``: the number of merged uploads."""
        return judged

    def _participants(self, close: Intake) -> frozenset[int]:
        """Return the uids of the members that contributed to the outer step."""
        return frozenset(close.accepted)
