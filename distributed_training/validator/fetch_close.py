"""Fetch the uploads of a close, each as it comes, and wait for nobody without an end.

An upload that the store does not deliver, or that does not fit on this disk, delays nobody once the
grace is over: it is not judged, which costs its member nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

from distributed_training.chain.base import ChainError, Neuron
from distributed_training.common.backoff import Backoff
from distributed_training.node.identity import Member, miners_of
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Refused, State
from distributed_training.protocol.update_file import largest_file
from distributed_training.scoring.evaluator import Evaluation, judgement_fields
from distributed_training.scoring.upload import OpenBucket, in_a_line
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
from distributed_training.validator.judging import CAUSES, Accepted, UploadJudge, refusal
from distributed_training.validator.outer_steps import OuterSteps
from distributed_training.validator.reporter import RoundReporter
from distributed_training.validator.validator import Run, ValidatorRules

log = logging.getLogger(__name__)

LOOK = 2.0  # seconds between two looks at the store
_SILENT = 60.0  # seconds without an answer after which a store counts as silent, at least
_MOST_NAMED = 3  # uploads of a close that a warning names: a source that is away concerns all
_ALL_AWAITED = 8  # at each eighth close all members are expected


@dataclass
class Lack:
    """A text or file that an upload lacks: ``since`` and ``again`` by the store's clock."""

    since: float
    again: float = 0.0  # the next try
    waits: Backoff = field(
        default_factory=partial(Backoff, first=timedelta(seconds=4), longest=timedelta(minutes=1))
    )


@dataclass
class Intake:
    """All that has come of a close, which ``state`` names. A restart finds it in the store."""

    state: State
    random_blocks: Sequence[int]  # blocks of the text on which all uploads of the close are judged
    began: float  # when the close began, by time.monotonic()
    until: float  # end of fetching and judging, by the store's clock
    awaited: frozenset[str]  # hotkeys for which the round waits, within the grace
    # Uid -> when its upload came, by the store's clock.
    came: dict[int, float] = field(default_factory=dict)
    accepted: dict[int, Accepted] = field(default_factory=dict)
    refused: dict[int, Refused] = field(default_factory=dict)
    waiting: dict[int, str] = field(default_factory=dict)  # uid -> why its upload is not judged yet
    lacks: dict[int, Lack] = field(default_factory=dict)  # uid -> what is missing, if it failed
    fetched: set[int] = field(default_factory=set)  # uids whose uploads are on the disk
    fetching: Errands = field(default_factory=Errands)
    looking: Errands = field(default_factory=Errands)  # at members' own buckets, as the next one
    looking_last: Errands = field(default_factory=Errands)  # after the grace
    cramped: bool = False  # the disk has no room for several at once

    @property
    def ends(self) -> float:
        """The end of the grace, by the store's clock."""
        return self.state.closes_at + self.state.grace


class CloseFetcher:
    """Fetches the uploads of a close. ``of_member``: opens a member's bucket, if it has its own."""

    def __init__(
        self,
        *,
        rules: ValidatorRules,
        member: Member,
        steps: OuterSteps,
        judge: UploadJudge,
        run: Run,
        reporter: RoundReporter,
        of_member: OpenBucket | None = None,
    ) -> None:
        # collaborators
        self._rules = rules
        self._member = member
        self._chain = member.chain
        self._reporter = reporter
        self._record = run.record
        self._stop = run.stop
        self._steps = steps
        self._of_member = of_member
        self._judge = judge
        # what the validator knows of each member
        self.standings = reporter.standings
        self.state: GlobalState  # since the start
        self._grace = rules.config.validator.grace.total_seconds()
        self._uploads = run.folder / "uploads"  # uploads of the present close
        self._patience = max(_SILENT, self._grace)  # seconds that one upload has to come

    def _fetch_new(
        self, close: Intake, by_uid: Mapping[int, Neuron], miners: Sequence[Neuron], now: float
    ) -> None:
        """Fetch the uploads that came since the last look. Raises StoreError."""
        known = close.accepted.keys() | close.refused.keys()
        new: dict[int, ObjectInfo] = {}
        for info in self._find_uploads(close, [m for m in miners if m.uid not in known], now):
            uid, *place = keys.parse_upload_key(info.key) or (-1, -1, -1)
            if place == [close.state.outer_step, close.state.serial] and uid in by_uid:
                close.came[uid] = info.modified
                if uid not in known | close.fetched:
                    new[uid] = info
        most = largest_file(self.state.schema, self._judge.codec)

        def refuse_late(uid: int, info: ObjectInfo) -> bool:
            if info.modified > close.ends:
                reason = f"it came {info.modified - close.ends:.0f} s after close and grace"
                self._refuse(close, uid, by_uid[uid].hotkey, "", "late", reason)
            return info.modified > close.ends

        for uid, info in new.items():
            if not refuse_late(uid, info) and info.size > most:
                reason = f"it has {info.size} bytes, and no upload has more than {most}"
                self._refuse(close, uid, by_uid[uid].hotkey, "", "damaged", reason)
        wanted = self._most_trusted(close, now, [uid for uid in new if uid not in close.refused])
        for uid in wanted:
            close.waiting.setdefault(uid, "it did not come from the store in time")
        # Fetch several at a time, since each may be slow and must not delay the others.
        fetched = close.fetching.run(
            lambda u: self._fetch(close, new[u], by_uid[u], most),
            wanted,
            within=LOOK,
            patience=self._patience,
            **({"at_once": 1} if close.cramped else {}),
            stop=self._stop,
        )
        for uid, found in fetched.items():
            if isinstance(found, ObjectInfo):
                # The owner may have replaced it since the look, by a copy of an upload that came
                # later.
                close.came[uid] = found.modified
                if uid in by_uid and not refuse_late(uid, found):
                    close.fetched.add(uid)
                    close.lacks.pop(uid, None)
                    close.waiting[uid] = "its turn to be judged did not come in half a period"
            elif isinstance(found, IntegrityError | ObjectMissingError) and uid in by_uid:
                self._refuse(close, uid, by_uid[uid].hotkey, "", "damaged", str(found))
            elif isinstance(found, Exception):
                close.cramped |= isinstance(found, NoRoomError)
                ours = isinstance(found, StoreError | ChainError | OSError)
                self._lack(close, uid, str(found) if ours else in_a_line(found), now)
            else:
                raise found
        for uid in close.fetching.silent(self._patience):
            if uid not in close.lacks:
                self._lack(close, uid, f"it did not come in {self._patience:.0f} s", now)

    def _choose_awaited(self, serial: int, miners: Sequence[Neuron]) -> frozenset[str]:
        """Return the hotkeys of the members whose uploads a close waits for.

        Whoever missed n closes is waited for where n + 1 is a power of two, all at each
        ``_ALL_AWAITED``-th close: so those who stay away, however many, delay few rounds.
        """
        missed = {m.hotkey: self.standings.entries[m.uid].missed for m in miners}
        everybody = serial % _ALL_AWAITED == 0
        return frozenset(hotkey for hotkey, n in missed.items() if everybody or not n & (n + 1))

    def _missing(self, close: Intake, miners: Sequence[Neuron], now: float) -> bool:
        """Return whether there is somebody to wait for."""
        judged = close.accepted.keys() | close.refused.keys()
        few = len(close.accepted) < self._rules.settings.least
        if now < close.ends:
            awaited = {miner.uid for miner in miners if miner.hotkey in close.awaited}
            return few or bool(close.waiting) or not awaited <= judged
        unheard = close.waiting.keys() - close.lacks.keys()
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
        # Wait for missing text only if most uploads need some: a member chooses its pages, and
        # pages that nobody has must cost only that member.
        texts = close.lacks.keys() & close.fetched
        return (
            bool(unheard)
            or close.looking_last.unheard
            or (few and bool(close.waiting))
            or len(texts) > len(close.accepted)
        )

    def _most_trusted(self, close: Intake, now: float, uids: Collection[int]) -> list[int]:
        """Return those whose turn it is, the least trusted last: there may be no time for it."""
        due = [uid for uid in uids if uid not in close.lacks or close.lacks[uid].again <= now]
        return sorted(due, key=lambda uid: (-self.standings.entries[uid].published, uid))

    def _lack(self, close: Intake, uid: int, why: str, now: float) -> None:
        """Note that an upload cannot be judged yet; the first time with a line."""
        lack = close.lacks.setdefault(uid, Lack(now))
        lack.again = now + lack.waits.failed().total_seconds()
        since = time.strftime("%H:%M:%S UTC", time.gmtime(lack.since))
        close.waiting[uid] = f"since {since}: {why}"
        if lack.waits.failures == 1 and len(close.lacks) <= _MOST_NAMED:
            log.warning(
                "The upload of uid %d cannot be judged since %s (%s): it is tried again, and after "
                "the grace the round ends without it",
                uid,
                since,
                why,
            )

    def _find_uploads(
        self, close: Intake, miners: Sequence[Neuron], now: float
    ) -> list[ObjectInfo]:
        """List the uploads in the store, those of ``miners`` among them. Raises StoreError."""
        if self._of_member is None:
            try:
                return self._steps.list_uploads()
            except StoreError:
                if now < close.ends:
                    raise
        by_uid = {miner.uid: miner for miner in miners}

        def find(uid: int) -> ObjectInfo | None:
            key = keys.upload_key(uid, close.state.outer_step, close.state.serial)
            # Any error is the owner's loss; the upload is looked for again.
            with suppress(Exception):
                return self._reader(by_uid[uid]).head(key)
            return None

        looking = close.looking if now < close.ends else close.looking_last
        found = looking.run(find, [*by_uid], within=LOOK, patience=_SILENT, stop=self._stop)
        return [info for info in found.values() if isinstance(info, ObjectInfo)]

    def _reader(self, miner: Neuron) -> BucketReader:
        """Return where a member uploads. Raises StoreError, ChainError."""
        return self._steps.reader if self._of_member is None else self._of_member(miner)

    def _upload_path(self, close: Intake, uid: int) -> Path:
        # A fetch of an earlier close may still write, though nobody waits for it.
        folder = f"{close.state.outer_step}.{close.state.serial}"
        return self._uploads / folder / f"{uid}.safetensors"

    def _fetch(self, close: Intake, info: ObjectInfo, miner: Neuron, most: int) -> ObjectInfo:
        """Fetch an upload; return what came. Raises StoreError, ChainError, OSError."""
        path = self._upload_path(close, miner.uid)
        path.parent.mkdir(parents=True, exist_ok=True)
        deadline = deadline_in(timedelta(seconds=self._patience))
        try:
            return self._reader(miner).download(info.key, path, limit=most, deadline=deadline)
        except NoRoomError:
            for part in path.parent.glob(f".{path.name}.*"):  # others may have room without it
                part.unlink(missing_ok=True)
            raise

    def _leave(self, close: Intake, uid: int) -> None:
        """Take note that nothing has to be done for an upload any more."""
        close.waiting.pop(uid, None)
        close.lacks.pop(uid, None)
        close.fetched.discard(uid)

    def _refuse(
        self, close: Intake, uid: int, hotkey: str, digest: str, cause: str, reason: str
    ) -> None:
        close.refused[uid] = refusal(uid, hotkey, digest, cause, reason)
        self._leave(close, uid)
        with suppress(OSError):  # others may need its room
            self._upload_path(close, uid).unlink()
        reset = Evaluation.reset(uid, close.state.outer_step, CAUSES[cause], reason)
        self._record("upload_scored", **judgement_fields(reset, ""))
        log.info("uid %d: refused (%s): %s", uid, cause, reason)

    def _miners(self) -> list[Neuron]:
        """List the members that may upload: registered, not us and not a validator."""
        found = miners_of(self._chain.neurons(), max_uids=self._rules.settings.max_uids)
        miners = [n for n in found if n.hotkey != self._member.hotkey]
        self.standings.sync(miners)
        return miners
