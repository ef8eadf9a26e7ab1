"""Own the global bucket of a store network: its state, its chain of manifests, and their files.

An outer step is published by its manifest. A single validator writes the manifest after all other
files, and until then members read the previous outer step. So a kill at any time leaves either the
old outer step or the new one. The next start corrects ``state.json``, which names the head.

What the master has signed is the truth, and the store is only a cache of it. So this machine writes
its own copy again (:mod:`.own_copy`) if the store loses or damages an object, or returns an old
one. Only a signed state that is newer than ours shows that another process leads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from distributed_training.common.files import sha256_of
from distributed_training.protocol import keys, lines
from distributed_training.protocol.manifest import Manifest, Master, State
from distributed_training.protocol.metadata import config_bytes
from distributed_training.protocol.network_report import printable
from distributed_training.protocol.types import Sign
from distributed_training.store.base import ObjectInfo, ObjectStore, put_once
from distributed_training.store.bucket_reader import MOST_BYTES, remove_states, states
from distributed_training.store.errors import IntegrityError, StoreError, TakenError
from distributed_training.store.transfer import (
    PART,
    deadline_in,
    sweep_uploads,
    upload_all,
)
from distributed_training.training.model import parameter_schema
from distributed_training.training.weights import GlobalState
from distributed_training.validator.global_state import GlobalStateError
from distributed_training.validator.merge import HISTORY, OuterState
from distributed_training.validator.own_copy import RECOVER, SMALL, Kept, OwnCopy, age_of
from distributed_training.validator.replay import ManifestChain, read_set, write_set

log = logging.getLogger(__name__)


class AnotherLeadsError(GlobalStateError):
    """Another process leads this network now. After a restart the two would take turns to lead."""


_PUBLICATION = timedelta(minutes=30)  # time limit for a publication, including retries
_AGAIN = 60.0  # seconds before sending a large file again that the store did not keep
_SETS = (keys.MODEL, keys.OUTER_STATE, keys.CONFIG)
SERIALS = 1 << 20  # added to the serial if closes may have moved without our knowledge


class OuterSteps(OwnCopy):
    """Reads and writes the chain. All methods raise StoreError.

    ``keep_uploads``: the number of outer steps whose merged uploads are kept.
    """

    def __init__(
        self, store: ObjectStore, folder: Path, master: Master, sign: Sign, *, keep_uploads: int
    ) -> None:
        super().__init__(store, folder, master)
        self.sign = sign
        # The newest state that we know, written or found at the start.
        self.state: State | None = None
        self.head: Manifest
        self.values: OuterState  # the head's values
        self.history: list[Manifest] = []  # the last manifests, ascending
        # Whether nobody else has led the network since the last process with this folder.
        self.led_last = False
        self.unsure = False  # whether closes may have moved after the state that was found
        self._keep_uploads = keep_uploads
        self.serial = 0  # the largest serial that the store may show
        self._ahead = 0.0  # seconds by which the store's clock is ahead of ours
        self._etag = ""  # etag of our state in the store
        self._ours: list[bytes] = []  # our last two states, since an answer may have been lost
        self._looks = 0  # number of checks since an outer step was published
        self._older: Manifest  # the manifest after the one that the next check compares
        self._sent_at: dict[str, float] = {}  # key -> when it was sent, by time.monotonic()
        self._fault = ""  # fault of the state in the store, as it was last logged
        self.emptied = False  # whether the store had no state at a check
        self._gone: set[str] = set()  # keys of objects that nobody has
        self._mended: set[str] = set()  # keys of the objects written again at the last repair
        self._kept_at: object = None  # the head's digest, and the outer steps with whole weights
        self._kept_there: list[Kept] = []  # our copies of the objects that _kept_at identifies

    # --- reading ----------------------------------------------------------------------------------

    def load(self) -> bool:
        """Find the state, the head and the history; return whether the bucket has a network.

        Raises GlobalStateError.
        """
        own, theirs = self.own_state(), self.stored_state()
        found = [one for one in (own, theirs) if one is not None]
        newest = max(found, key=lambda one: age_of(one.file), default=None)
        self.led_last = newest is not None and newest is own
        self.serial = max((self.serial, *(one.file.serial for one in found)))
        if newest is not None:
            self.state, self._ours = newest.file, [newest.data]
        try:
            if self.state is None and not self._make_state():
                return False
            assert self.state is not None
            head = self.find_manifest(self.state.outer_step)
            if head is None or head.digest != self.state.head:
                raise ValueError(f"{keys.STATE} names a manifest that does not exist")
            # A process may have been killed after it published an outer step and before the state
            # named it. If it then published a rewind too, the state lacks both.
            while (following := self.find_manifest(head.outer_step + 1)) is not None:
                following.check_after(head)
                head = following
            chain, oldest = [head], min(self.state.weights_at, default=0)
            while chain[0].previous and (len(chain) < HISTORY or chain[0].outer_step > oldest):
                before = self.find_manifest(chain[0].outer_step - 1)
                if before is None:
                    break
                chain[0].check_after(before)
                chain.insert(0, before)
        except ValueError as error:
            raise GlobalStateError(
                f"the chain in the global bucket is damaged ({error}; after a bucket was restored "
                f"from a backup: {RECOVER}), so it is unclear where training stands: restore its "
                "files"
            ) from None
        self.head, self.history, self._older = head, chain[-HISTORY:], chain[0]
        self.serial = max(self.serial, *(manifest.serial for manifest in chain))
        behind = self.state.outer_step < head.outer_step or self.state.expires < self.now()
        self.unsure = behind and not self.led_last
        if self.unsure:
            self.serial += SERIALS
        return True

    def _make_state(self) -> bool:
        """Make a state from the newest manifest; return whether there is a manifest.

        Raises ValueError if the bucket is not empty, but the master has signed nothing in it.
        """
        listed = self._retry(self._store.list_objects, "outer/")
        found = [one for info in listed if (one := keys.parse_outer_key(info.key)) is not None]
        stored = {step for step, name in found if name == keys.MANIFEST}
        steps = sorted(stored | self.steps(), reverse=True)
        head = next((m for step in steps if (m := self.find_manifest(step)) is not None), None)
        if head is None:
            if steps or self._retry(self._store.head, keys.STATE) is not None:
                raise ValueError("nothing in it is signed by this network's master")
            return False
        log.warning(
            "There is no %s that the network's master has signed: it is rebuilt from the manifests "
            "up to outer step %d. If the bucket was restored from a backup: %s",
            keys.STATE,
            head.outer_step,
            RECOVER,
        )
        at: list[int] = []
        for step in steps:
            there = (step, keys.MODEL) in found or (self.place(step) / keys.MODEL).exists()
            if there and step <= head.outer_step and len(at) < 2:
                named = self.find_manifest(step)
                at += [step] if named is not None and keys.MODEL in named.files else []
        # Set its times in the past, so that nobody seems to lead.
        made = next_state(None, head, head.serial, now=0.0, period=0.0, grace=0.0)
        self.state = replace(made, weights_at=tuple(sorted(at)))
        self._ours = [self.state.to_bytes(self.sign)]
        self.serial += SERIALS
        return True

    def now(self) -> float:
        """Return the time by the store's clock, in seconds since 1970."""
        key = keys.outer_key(self.head.outer_step, keys.MANIFEST)
        return self._time_of(self._retry(self._store.head, key))

    def _time_of(self, info: ObjectInfo | None) -> float:
        if info is not None:
            self._ahead = info.modified + (info.age_seconds or 0.0) - time.time()
        return time.time() + self._ahead

    def restore_lost(self) -> float:
        """Write again what the store has lost; return the time by its clock, in Unix seconds.

        Each call compares the state and one more object, in turn and starting with the newest.
        Raises AnotherLeadsError if another validator leads the rounds of this network.
        """
        info = self._retry(self._store.head, keys.STATE)
        kept = self._find_copies()
        turn, self._looks = self._looks % (len(kept) + 1), self._looks + 1
        if turn == len(kept) or info is None or info.etag != self._etag:
            known = self._fault
            if not self._holds_state(info):
                if not known:  # a store that lost the state may also have lost what it names
                    self.restore()
                self._retry(self._store.put, keys.STATE, self._ours[-1])
                # Read it at the next check, because some stores confirm a write that they drop.
                self._etag = ""
                info = self._retry(self._store.head, keys.STATE)
            elif turn == len(kept):
                self._fault = ""
        elif not all(
            self.fits(one, most=most)
            # Compare the head's manifest at each check, since nobody trusts a state without it.
            for one, most in ((kept[turn], SMALL), *((one, 0) for one in kept[:1]))
        ):
            self.restore()
        self._compare_older()
        return self.now() if info is None else self._time_of(info)

    def _compare_older(self) -> None:
        """Copy or rewrite the next older manifest of the chain; after the oldest, the head's."""
        step, named = self._older.outer_step - 1, self._older.previous
        self._older = self.head
        if not named:
            return
        ours, theirs = self.manifest(step), self.stored_manifest(step)
        if theirs is not None and theirs.file.digest == named:
            self._older = theirs.file
            if ours is None:
                self.save(f"{step}.json", theirs.data)
        elif ours is not None and ours.digest == named:
            self._older = ours
            if theirs is None:
                self.restore(older=True)

    def _holds_state(self, info: ObjectInfo | None) -> bool:
        """Return whether the store has our state. Raises AnotherLeadsError for a newer state."""
        found = None
        with suppress(IntegrityError):  # raised for an object that is too large
            found = self._retry(self._store.get, keys.STATE, limit=State.most_bytes)
        if found == self._ours[-1]:  # true even if another replica answered the HEAD
            self._etag = "" if info is None else info.etag
            return True
        theirs = None
        with suppress(ValueError):
            theirs = State.parse(found or b"", self._master)
        assert self.state is not None
        if theirs is not None and found not in self._ours and age_of(theirs) > age_of(self.state):
            raise AnotherLeadsError(
                f"{keys.STATE} was written by another process with the master's hotkey, which "
                f"led at {datetime.fromtimestamp(theirs.written_at, UTC):%Y-%m-%d %H:%M:%S} "
                f"UTC (serial {theirs.serial}), so this one "
                "stops: let only one validator lead this network, and change the master's hotkey "
                "if the other process is not yours"
            )
        fault = "missing" if found is None else "damaged" if theirs is None else "an older one"
        self.emptied |= found is None
        if fault != self._fault:
            log.warning(
                "%s in the store is %s: this validator wrote the last one, and writes it again",
                keys.STATE,
                fault,
            )
        self._fault = fault
        return False

    def is_free(self, period: float) -> bool:
        """Return whether nobody leads the network.

        A leader renews the state at least once every half ``period`` (in seconds).

        Raises AnotherLeadsError if another process has renewed it since the start.
        """
        assert self.state is not None
        found = self.stored_state()
        newer = found is not None and age_of(found.file) > age_of(self.state)
        if newer or self.find_manifest(self.head.outer_step + 1) is not None:
            raise AnotherLeadsError(
                f"another process with the master's hotkey leads this network and has just written "
                f"{keys.STATE if newer else 'an outer step'}, so this one stops and the other "
                "continues: stop the other first, or start this one with --take-over"
            )
        return self.state.written_at + period / 2 <= self.now()

    # --- the store as a cache ---------------------------------------------------------------------

    def _find_copies(self) -> list[Kept]:
        place = self.head.digest, () if self.state is None else self.state.weights_at
        if self._kept_at != place:
            self._kept_at, self._kept_there = place, self.find_copies(self.head, place[1])
        return self._kept_there

    def restore(self, *, deep: bool = False, older: bool = False) -> None:
        """Write again what the store lacks or has with other bytes; log what nobody has.

        ``deep``: also read large objects to compare them. ``older``: compare all manifests, even if
        nothing else is wrong. Raises AnotherLeadsError for a signed manifest that is not ours.
        """
        wrong = self.wrong(self._find_copies(), most=MOST_BYTES if deep else SMALL)
        if wrong or older:
            known = {one.key for one in wrong}
            wrong += [one for one in self.lost_manifests(self.head) if one.key not in known]
        sound = [one for one in wrong if one.path.exists() and sha256_of(one.path) == one.digest]
        gone = {one.key for one in wrong if one not in sound}
        signed = [one for one in sound if one.key.endswith(keys.MANIFEST)]
        now = time.monotonic()
        # A store may show a confirmed write late, so wait before sending a large file again.
        files = [
            (one.key, one.path)
            for one in sound
            if one not in signed and (deep or now - self._sent_at.get(one.key, -_AGAIN) >= _AGAIN)
        ]
        logged, self._mended = self._mended, {one.key for one in sound}
        if self._mended - logged:
            log.warning(
                "The store lacks %s or holds it with other bytes (%s in all): this machine writes "
                "its copy again",
                sound[0].key,
                lines.counted(len(sound), "object"),
            )
        if files:
            for key, path in files:
                if path.stat().st_size > PART:  # by its etag, a damaged file would count as sent
                    self._retry(self._store.delete, key)
            upload_all(self._store, files, until=deadline_in(_PUBLICATION))
            self._sent_at |= {key: now for key, path in files if path.stat().st_size > SMALL}
        for one in reversed(signed):
            step, _ = keys.parse_outer_key(one.key) or (0, "")
            data = one.path.read_bytes()
            if not self._is_published(step, data):
                self._retry(self._store.put, one.key, data)
        for key in sorted(gone - self._gone):
            log.warning(
                "%s in the store is missing or damaged, and this machine has no copy: a member "
                "that needs it waits for later whole weights. If training stands still: %s",
                key,
                RECOVER,
            )
        self._gone = gone

    def list_uploads(self) -> list[ObjectInfo]:
        """List all uploads of the members."""
        return self._retry(self._store.list_objects, "uploads/")

    # --- the local copy ---------------------------------------------------------------------------

    def write_values(self, state: GlobalState, values: OuterState) -> dict[str, str]:
        """Write the values of an outer step; return the digests of the files. Raises OSError."""
        folder = self.place(state.outer_step)
        folder.mkdir(parents=True, exist_ok=True)
        return write_set(folder, state.schema, values, config_bytes(state.model_config))

    def read_state(self, model: Mapping[str, Any]) -> GlobalState:
        """Return the state of the head, and keep its values.

        ``model``: the model's configuration. Raises GlobalStateError, OSError.
        """
        head, folder = self.head, self.place(self.head.outer_step)
        assert self.state is not None
        schema, found = parameter_schema(model), None
        try:
            with suppress(ValueError, OSError):
                found = read_set(folder, schema, head)
            if found is None or found.digests != (head.weights, head.momentum, head.residual):
                log.info("Outer step %d is computed again from the store", head.outer_step)
                chain = ManifestChain(self.reader, schema, self._folder / "replay", self._master)
                found = chain.replay(self.state, head.outer_step)
            self.values = found
        except ValueError as error:
            raise GlobalStateError(
                f"the global bucket does not lead to outer step {head.outer_step} ({error}; if its "
                f"files are lost: {RECOVER}), so it is unclear where training stands: restore its "
                "files"
            ) from None
        return GlobalState(
            model_config=dict(model),
            schema=schema,
            outer_step=head.outer_step,
            weights=[*found.weights],
            total_inner_steps=head.total_inner_steps,
            total_tokens=head.total_tokens,
        )

    def went_on(self, manifest: Manifest, values: OuterState) -> None:
        """Continue from a manifest that was just published."""
        self.head, self.values, self._older = manifest, values, manifest
        self.history = [*self.history[1 - HISTORY :], manifest]
        self._looks = 0

    # --- writing ----------------------------------------------------------------------------------

    def write(self, state: State) -> None:
        """Sign and write a state."""
        data = state.to_bytes(self.sign)
        self._ours = [*self._ours[-1:], data]
        # Keep the state before writing it, because members may see it even if the store's answer is
        # lost. The next check writes it again.
        self.serial, self.state = state.serial, state
        self.save(keys.STATE, data)
        self._etag = ""
        self._etag = self._retry(self._store.put, keys.STATE, data)

    def publish(
        self, manifest: Manifest, data: bytes, uploads: Mapping[int, Path] | None = None
    ) -> int:
        """Write the files of an outer step, its manifest last; return how many bytes were sent.

        Args:
            manifest: The outer step's manifest; its files are in the outer step's folder.
            data: The signed manifest. Each try needs the same bytes, and no two signatures are
                equal.
            uploads: The merged uploads, by uid.

        Raises OSError, and AnotherLeadsError if another validator has published this outer
        step.
        """
        n, place = manifest.outer_step, keys.outer_key(manifest.outer_step, keys.MANIFEST)
        self._is_published(n, data)
        names = [*manifest.files, *([keys.UPDATE] if manifest.update else [])]
        files = [(keys.outer_key(n, name), self.place(n) / name) for name in names]
        files += [(keys.merged_key(n, uid), path) for uid, path in (uploads or {}).items()]
        sent = upload_all(self._store, files, until=deadline_in(_PUBLICATION))
        if self.state is not None:
            self.restore_lost()  # another leader may have written its files over ours
        try:
            self._retry(put_once, self._store, place, data)
        except TakenError:
            if not self._is_published(n, data):
                if self._retry(self._store.head, place) is None:
                    raise
                # The master has not signed the existing object, so replace it.
                self._retry(self._store.put, place, data)
        self.save(f"{n}.json", data)
        return sent

    def _is_published(self, outer_step: int, data: bytes) -> bool:
        """Return whether the store has this manifest. Raises AnotherLeadsError for another one."""
        found = self.stored_manifest(outer_step)
        if found is not None and found.data != data:
            raise AnotherLeadsError(
                f"{keys.outer_key(outer_step, keys.MANIFEST)} was published by another process "
                "with the master's hotkey, so this one stops: let one validator lead this network; "
                "a restart continues from the store"
            )
        return found is not None

    def delete_past(self) -> None:
        """Delete what nobody needs any more. A failure is logged, and the next call tries again."""
        state = self.state
        assert state is not None
        n, at = state.outer_step, state.weights_at
        # In our copy, delete the files that members do not need any more, except the signed ones.
        remove_states(self._folder, before=min(at, default=n))
        for step, folder in states(self._folder):
            needless = _SETS if step not in at else () if step == max(at) else (keys.OUTER_STATE,)
            for name in needless if step < n else ():
                (folder / name).unlink(missing_ok=True)
        # A validator with an empty disk needs the uploads since the newest set, even if the
        # network's file keeps fewer.
        oldest, merged = min(at, default=0), min(n - self._keep_uploads, max(at, default=0))
        try:
            for info in self._store.list_objects("outer/"):
                step, name = keys.parse_outer_key(info.key) or (n, keys.MANIFEST)
                if (
                    (name in _SETS and step not in at and step < n)
                    or (name == keys.UPDATE and step <= oldest)
                    or ((name.startswith("uploads/") or name == keys.AVERAGE) and step <= merged)
                ):
                    self._store.delete(info.key)
            for info in self._store.list_objects("uploads/"):
                _, *close = keys.parse_upload_key(info.key) or (0, n, state.serial)
                if close < [n, state.serial]:
                    self._store.delete(info.key)
        except StoreError as error:
            log.info("Old files were not deleted (%s): the next round tries again", error)
        sweep_uploads(self._store, prefix="outer/")


def next_state(
    before: State | None,
    manifest: Manifest,
    serial: int,
    *,
    now: float,
    period: float,
    grace: float,
    finished: str = "",
    gate: int = 0,
) -> State:
    """Return the state whose head is ``manifest``; if it already is, one with a later close.

    ``serial``: the close's serial, above all that the store may show. ``now``: the time by the
    store's clock.
    """
    at = () if before is None else before.weights_at
    if keys.MODEL in manifest.files and manifest.outer_step not in at:
        at = (*at, manifest.outer_step)[-2:]
    moved = before is not None and before.outer_step == manifest.outer_step
    # The next close is a period after this one, or later if this one was late: members first need
    # time to get the update.
    due = now + period if moved or before is None else before.closes_at + period
    return State(
        run_id=manifest.run_id,
        outer_step=manifest.outer_step,
        serial=serial,
        closes_at=float(max(due, now + period / 2)),
        grace=float(grace),
        head=manifest.digest,
        weights_at=at,
        written_at=now,
        expires=now + 2 * period,
        finished=printable(finished, 200) or None,
        gate=gate,
    )


def renewed(state: State, *, now: float, period: float, finished: str = "") -> State:
    """Return the same state, written ``now``, or later if the store's clock was set back."""
    now = max(now, state.written_at + 0.001)
    return replace(
        state, written_at=now, expires=now + 2 * period, finished=printable(finished, 200) or None
    )
