"""Own the global bucket of a store network: its state, its chain of manifests, their files.

Its manifest publishes an outer step; it is written last and by a single validator. Until then
members read the step before. So a kill at any byte leaves the old outer step or
the new one; ``state.json``, which names the head, is corrected at the next start.

The store is the truth. This machine's copy saves a download at a start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master, State
from distributed_training.protocol.metadata import MAX_CONFIG_BYTES, ConfigExtras, parse_config
from distributed_training.protocol.network_report import printable
from distributed_training.protocol.types import Sign
from distributed_training.store.base import ObjectInfo, ObjectStore, put_once
from distributed_training.store.bucket_reader import BucketReader, remove_states
from distributed_training.store.errors import StoreError, TakenError
from distributed_training.store.journal import Journal
from distributed_training.store.transfer import Retry, Sender, Sent, deadline_in
from distributed_training.training.model import parameter_schema, without_extras
from distributed_training.training.outer_step import GlobalState
from distributed_training.validator.global_state import GlobalStateError
from distributed_training.validator.merge import HISTORY, OuterState, Rule
from distributed_training.validator.replay import Chain, read_set, write_set

log = logging.getLogger(__name__)


class AnotherLeadsError(GlobalStateError):
    """Another process leads this network by now. Started again, each would end the other's turn."""


_SMALL = timedelta(seconds=30)  # one small object with its retries
_PUBLICATION = timedelta(minutes=30)  # one, with its retries
_UPDATES = "updates-sent.json"  # the journal of uploads, in our folder


@dataclass(frozen=True)
class Prepared:
    """An outer step that waits for its publication.

    ``files``: by their names in the manifest's folder, which are their names on the disk too;
    ``uploads``: the merged ones, by uid. ``data``: the manifest as it is signed.
    """

    manifest: Manifest
    data: bytes
    files: Mapping[str, Path]
    uploads: Mapping[int, Path] = field(default_factory=dict)


class OuterSteps:
    """Reads and writes the chain. All methods raise StoreError.

    ``folder``: for the local copy. ``keep_uploads``: outer steps whose merged uploads stay.
    """

    def __init__(
        self, store: ObjectStore, folder: Path, master: Master, sign: Sign, *, keep_uploads: int
    ) -> None:
        self.sign = sign
        self._master = master
        self.reader = BucketReader(store)
        self.state: State | None = None  # as it was written last
        self.head: Manifest
        self.values: OuterState  # after the head
        self.history: list[Manifest] = []  # the last manifests, ascending
        self._store = store
        self._folder = folder
        self._keep_uploads = keep_uploads
        self._retry = Retry(each=_SMALL)
        self.serial = 0  # the largest that the store may show
        self._etag = ""  # of our state in the store
        self._ours: list[bytes] = []  # the last two: an answer may have been lost

    # --- reading ----------------------------------------------------------------------------------

    def load(self) -> bool:
        """Read state, head and history; whether a network has begun in this bucket.

        Raises GlobalStateError.
        """
        data = self._retry(self._store.get, keys.STATE, limit=State.most_bytes)
        try:
            if data is not None:
                self.state = State.parse(data, self._master)
                self.serial, self._ours = self.state.serial, [data]
            named = 0 if self.state is None else self.state.outer_step
            found = self.manifest(named)
            if found is None and self.state is None:
                return False
            if found is None or (self.state is not None and found.digest != self.state.head):
                raise ValueError(f"{keys.STATE} names a manifest that is not there")
            self.head = found
            # Published by a process that was killed before it could say so. Two, if the second
            # goes back.
            while (following := self.manifest(self.head.outer_step + 1)) is not None:
                if self.state is None:
                    raise ValueError(f"it has outer steps and no {keys.STATE}")
                following.check_after(self.head)
                self.head = following
            self.history = [self.head]
            while len(self.history) < HISTORY and self.history[0].previous:
                before = self.manifest(self.history[0].outer_step - 1)
                if before is None:
                    break
                self.history[0].check_after(before)
                self.history.insert(0, before)
        except ValueError as error:
            raise GlobalStateError(
                f"the chain in the global bucket is damaged ({error}), so it is not known where "
                "training stands: restore its files"
            ) from None
        return True

    def manifest(self, outer_step: int) -> Manifest | None:
        """Return the manifest of an outer step, None if there is none. Raises ValueError."""
        key = keys.outer_key(outer_step, keys.MANIFEST)
        data = self._retry(self._store.get, key, limit=Manifest.most_bytes)
        return None if data is None else Manifest.parse(data, self._master)

    def now(self) -> float:
        """Return the time by the store's clock, in seconds since 1970."""
        key = keys.outer_key(self.head.outer_step, keys.MANIFEST)
        info = self._retry(self._store.head, key)
        return time.time() if info is None else info.modified + (info.age_seconds or 0.0)

    def look(self) -> float:
        """Return the time by the store's clock, in seconds since 1970.

        Raises AnotherLeadsError where another validator of this network leads its rounds.
        """
        info = self._retry(self._store.head, keys.STATE)
        if info is None and self.state is not None:
            self.write(self.state)  # whoever deleted it: nobody would find the head
        elif info is not None and info.etag != self._etag:
            found = self._retry(self._store.get, keys.STATE, limit=State.most_bytes)
            if found not in self._ours:
                raise AnotherLeadsError(
                    f"{keys.STATE} was written by another process with the master's hotkey, so "
                    "this one stops: let one validator lead this network, and give the master "
                    "another hotkey if you do not know the other"
                )
            self._etag = info.etag
            if found != self._ours[-1] and self.state is not None:
                self.write(self.state)  # the store lost it, or took the one before twice
        return self.now() if info is None else info.modified + (info.age_seconds or 0.0)

    def list_uploads(self) -> list[ObjectInfo]:
        """List all uploads of members."""
        return self._retry(self._store.list_objects, "uploads/")

    # --- the local copy ---------------------------------------------------------------------------

    def place(self, outer_step: int) -> Path:
        """Return the folder with the files of an outer step."""
        return self._folder / keys.epoch_folder(outer_step)

    def write_values(self, state: GlobalState, values: OuterState) -> dict[str, str]:
        """Write a set of what an outer step leads to; return its files' digests. Raises OSError."""
        folder = self.place(state.outer_step)
        folder.mkdir(parents=True, exist_ok=True)
        tokens = state.total_tokens or None
        extras = ConfigExtras((), 0, None, state.total_inner_steps, tokens)
        return write_set(folder, state.schema, values, extras.merge_into(state.model_config))

    def read_state(self, rates: Rule) -> GlobalState:
        """Return the state of the head, and keep its values. Raises GlobalStateError, OSError."""
        head, folder = self.head, self.place(self.head.outer_step)
        at = self.state.weights_at if self.state is not None else (0,)
        try:
            content = self.reader.get(keys.outer_key(at[-1], keys.CONFIG), limit=MAX_CONFIG_BYTES)
            named = self.manifest(at[-1])
            if named is None or sha256(content or b"").hexdigest() != named.files.get(keys.CONFIG):
                raise ValueError(f"the {keys.CONFIG} of outer step {at[-1]} is not the signed one")
            config = parse_config(content or b"")[0]
            schema = parameter_schema(config)
            found = None
            with suppress(ValueError, OSError):
                found = read_set(folder, schema, head)
            if found is None or found.digests != (head.weights, head.momentum, head.residual):
                log.info("Outer step %d is computed again from the store", head.outer_step)
                chain = Chain(self.reader, schema, self._folder / "replay", self._master)
                state = self.state or next_state(None, head, 1, now=0, period=0, grace=0)
                found = chain.replay(state, head.outer_step)
            self.values = found
        except (ValueError, IndexError) as error:
            raise GlobalStateError(
                f"the global bucket does not lead to outer step {head.outer_step} ({error}), so it "
                "is not known where training stands: restore its files"
            ) from None
        return GlobalState(
            model_config=without_extras(config),
            schema=schema,
            outer_step=head.outer_step,
            weights=[*found.weights],
            momentum=None,  # the values have it
            learning_rate=rates.learning_rate,
            mu=rates.mu,
            last_allreduce_block=0,
            total_inner_steps=head.total_inner_steps,
            total_tokens=head.total_tokens,
        )

    def went_on(self, manifest: Manifest, values: OuterState) -> None:
        """Go by a manifest that is published from now on."""
        self.head, self.values = manifest, values
        self.history = [*self.history[1 - HISTORY :], manifest]
        remove_states(self._folder, before=manifest.outer_step - 1)

    # --- writing ----------------------------------------------------------------------------------

    def write(self, state: State) -> None:
        """Sign and write a state."""
        data = state.to_bytes(self.sign)
        self._ours = [*self._ours[-1:], data]
        # First: if the answer is lost members have this close, and another needs another serial.
        self.serial = state.serial
        self._etag = self._retry(self._store.put, keys.STATE, data)
        self.state = state

    def publish(self, prepared: Prepared) -> int:
        """Write the files of an outer step, its manifest last; return the bytes that were sent.

        May be tried again. Raises OSError, and AnotherLeadsError where another validator has
        published this outer step.
        """
        n = prepared.manifest.outer_step
        place = keys.outer_key(n, keys.MANIFEST)
        self._is_published(place, prepared.data)
        sent = Sent()
        files = [(keys.outer_key(n, name), path) for name, path in prepared.files.items()]
        files += [(keys.merged_key(n, uid), path) for uid, path in prepared.uploads.items()]
        self._folder.mkdir(parents=True, exist_ok=True)
        journal = Journal(self._folder / _UPDATES)
        deadline = deadline_in(_PUBLICATION)
        with Sender(store=self._store, journal=journal, deadline=deadline, sent=sent) as sender:
            sender.abandon_all_but(key for key, _ in files)
            sender.upload_all(files)
        if self.state is not None:
            self.look()  # who leads by now may have written its files over ours
        try:
            self._retry(put_once, self._store, place, prepared.data)
        except TakenError:
            if not self._is_published(place, prepared.data):
                raise
        return sent.bytes

    def _is_published(self, key: str, data: bytes) -> bool:
        """Return whether the store holds a manifest. Raises AnotherLeadsError for another one."""
        found = self._retry(self._store.get, key, limit=Manifest.most_bytes)
        if found not in (None, data):
            raise AnotherLeadsError(
                f"{key} was published by another process with the master's hotkey, so this one "
                "stops: let one validator lead this network; a new start continues from the store"
            )
        return found is not None

    def delete_past(self) -> None:
        """Delete what nobody needs any more. A failure is logged: the next time has it again."""
        state = self.state
        assert state is not None
        n, oldest = state.outer_step, min(state.weights_at, default=0)
        # From the newest set on an empty disk needs them, however few the network's file keeps.
        merged = min(n - self._keep_uploads, max(state.weights_at, default=0))
        try:
            for info in self._store.list_objects("outer/"):
                step, name = keys.parse_outer_key(info.key) or (n, keys.MANIFEST)
                whole = name in (keys.MODEL, keys.CONFIG, keys.OUTER_STATE)
                if (
                    (whole and step not in state.weights_at and step < n)
                    or (name == keys.UPDATE and step <= oldest)
                    or ((name.startswith("uploads/") or name == keys.AVERAGE) and step <= merged)
                ):
                    self._store.delete(info.key)
            for info in self._store.list_objects("uploads/"):
                _, *close = keys.parse_upload_key(info.key) or (0, n, state.serial)
                if close < [n, state.serial]:
                    self._store.delete(info.key)
        except StoreError as error:
            log.info("Files that are past were not deleted (%s): after the next round", error)


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
    """Return the state whose head is ``manifest``, or, if it is that already, a close that moved.

    ``serial``: of its close, above all that the store may show. ``now``: by the store's clock.
    """
    at = () if before is None else before.weights_at
    if keys.MODEL in manifest.files and manifest.outer_step not in at:
        at = (*at, manifest.outer_step)[-2:]
    moved = before is not None and before.outer_step == manifest.outer_step
    # From close to close it is a period. After one that was late, members first need the update.
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
    """Return the same state, written ``now``."""
    return replace(
        state, written_at=now, expires=now + 2 * period, finished=printable(finished, 200) or None
    )
