"""Follow a network whose rounds go through the store, in a thread of a miner's rank 0.

The thread reads ``state.json``. At the close that this file names, the thread posts CloseReached
(:mod:`.base`), and the loop answers with an upload, which another thread sends
(:mod:`.own_uploads`). If the network is ahead, the thread checks the signed manifests up to the
head (:mod:`.chain_copy`), fetches the update that follows our outer step, and posts it. It fetches
the next update once the loop has applied that one. A member that has missed many updates gets whole
weights.

Nothing here ever stops training. An object in the store is used only if all of it is valid. If the
store does not answer, or has something invalid, one line is logged and the store is asked again.

All times are by the store's clock, so a machine whose own clock is wrong still joins rounds, and
logs a line.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from distributed_training.common.backoff import Backoff, Clocks
from distributed_training.common.files import sync_folder
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master, State
from distributed_training.protocol.metadata import MAX_CONFIG_BYTES
from distributed_training.protocol.types import UPDATE_CODEC, Base, ExitStatus, Schema, Update
from distributed_training.protocol.update_file import largest_file
from distributed_training.store.base import ObjectStore, Uplink
from distributed_training.store.bucket_reader import MOST_BYTES, BucketReader, StateUnavailable
from distributed_training.store.errors import (
    IntegrityError,
    NotGrantedError,
    ObjectMissingError,
    OtherBytesError,
    PreconditionError,
    StoppedError,
    StoreError,
)

from .base import (
    Close,
    CloseReached,
    NetworkDiffers,
    Post,
    StopRequested,
    UpdateReady,
    UploadEnded,
)
from .chain_copy import ChainCopy, ForkError, OlderStateError
from .own_uploads import Fate, OwnUploads, forget_files

log = logging.getLogger(__name__)

_INTERVAL = 30.0  # seconds between two reads of the state
_SOON = 5.0  # seconds between two reads after a close, until its update exists
_SOON_FOR = 600.0  # seconds after the grace; for a later update _INTERVAL is enough
_CLOCK_OFF = 2.0  # seconds by which our clock may differ from the store's without a warning
# first and longest pause after a failed fetch
_FIRST_WAIT, _LONGEST_WAIT = timedelta(seconds=5), timedelta(minutes=5)
_LAST_REQUEST = 5.0  # seconds that a request in flight gets to finish at the end
_VOID = "void: the close moved, or its outer step is over"
_OVERTAKEN = "the upload for a close comes first, and holds the same training"
_LONGEST_PROGRESS = 3600.0  # seconds for sending a progress upload
_SHORTEST = 0.2  # seconds between two turns
_LATE = 75.0  # seconds for which a store may show an older state without a warning
#: Faults of an object, after which the next valid object is used instead.
_FAULTS = (
    StateUnavailable,
    ObjectMissingError,
    IntegrityError,
    OtherBytesError,
    PreconditionError,
)
_UPDATES_OF_WEIGHTS = 8  # updates that are as large as whole weights: 0.5 bytes per value, not 4
_SLOW = 15.0  # seconds after which an answer to a read of the state is overdue


class StoreRounds:
    """Follows the network in its own thread: an :class:`~.base.Exchange`.

    Only this object writes to ``folder``: our copy of the chain, the updates and the weights.
    ``longest``: the longest time that a transfer may take. ``at_head``: called in this object's
    thread at each new outer step.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        *,
        master: Master,
        uploads: OwnUploads,
        longest: timedelta = timedelta(minutes=40),
        at_head: Callable[[], object] = lambda: None,
        clocks: Clocks = Clocks(),
    ) -> None:
        self._store = store
        self._folder = folder
        self._post: Post = lambda event: None  # until the start
        self._at_head = at_head
        self._clocks = clocks
        self._reader = BucketReader(store, large=longest)
        self._chain = ChainCopy(self._reader, folder / "chain", master)
        self._uploads = uploads
        self._state: State | None = None  # the newest state that was accepted, or None
        self._held = 0  # the outer step whose epoch-start weights we have
        # The outer step that we were at before older weights were loaded. The fates of uploads for
        # earlier outer steps have already been posted.
        self._counted = 0
        self._largest_update = 0
        self._ahead: float | None = None  # the store's Unix time minus the steady clock
        self.clock_offset: float | None = None  # our Unix time minus the store's, if known
        self._older_since: float | None = None  # when the store began to show an older state
        self._lost_since: float | None = None  # when our upload was first found missing
        self._checks_at = -math.inf  # when to check next whether our upload is in the store
        self._silent_since: float | None = None  # when the store fell silent, by the steady clock
        self._asked: float | None = None  # when the current read of the state began
        self.trouble = ""  # why the store cannot be read now
        self._next_look = -math.inf
        self._posted: Close | None = None
        self._sent: Close | None = None  # the close of the last upload whose sending was begun
        # How often the loop has reported its outer step, and the last report that was answered with
        # an update. An update that was fetched for an earlier report is not posted.
        self._reports, self._answered = 1, 0
        self._wants_weights = False
        self._waits = Backoff(first=_FIRST_WAIT, longest=_LONGEST_WAIT)
        self._not_before = -math.inf  # earliest time of the next fetch
        self._reported: dict[str, str] = {}
        self._to_send: deque[Close] = deque(maxlen=1)
        self._sending: tuple[Close, Uplink, threading.Thread] | None = None
        self._tidies = False  # whether the upload was sent, so that past uploads are deleted
        self._progress = Uplink()  # uplink of the last progress upload
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-rounds", daemon=True)

    # --- for the start, before the thread --------------------------------------------------------

    def fetch_newest(self) -> Update:
        """Fetch and check the newest whole weights that the store has, and return them.

        Raises StoreError with a line for the operator, and OSError from the disk.
        """
        state = self._read_state()
        return self._fetch_soundest(state.weights_at, state, "a start")

    def held_weights(self) -> Path | None:
        """Return the folder of the newest whole weights on the disk, or None. Asks no store."""
        found = [path for path in (self._folder / "weights").glob("*") if path.name.isdigit()]
        return max(found, key=lambda path: int(path.name), default=None)

    def start(self, post: Post, *, outer_step: int, schema: Schema) -> None:
        self._post, self._held = post, outer_step
        self._largest_update = largest_file(schema, UPDATE_CODEC)
        self._thread.start()

    # --- for the loop: each only leaves a note for the thread ------------------------------------

    def send(self, close: Close) -> None:
        """Send the upload for ``close``, or a progress upload.

        A second call for the same close sends the same file again or none. A progress upload is
        given up when the upload for a close begins; send another only after UploadEnded.
        """
        if close.serial:
            self._to_send.append(close)
            self._wake.set()
            return
        self._progress = Uplink()
        args = close, self._progress
        threading.Thread(target=self._send, args=args, name="progress", daemon=True).start()

    def applied(self, outer_step: int, *, wants_weights: bool = False) -> None:
        self._held, self._wants_weights = outer_step, wants_weights
        self._reports += 1
        self._wake.set()

    def forget(self, before: int) -> None:
        """Delete files that only a checkpoint of an outer step before ``before`` would need."""
        self._uploads.forget(before)
        forget_files(self._folder / "updates", before + 1)

    @property
    def next_close(self) -> Close | None:
        """The close that the newest state names; None if there is no state yet."""
        state = self._state
        if state is None:
            return None
        return Close(state.outer_step, state.serial, state.closes_at, state.grace)

    @property
    def gate(self) -> int:
        """Consecutive closes at which fewer than half of the uploads passed on held-out text."""
        return 0 if self._state is None else self._state.gate

    @property
    def silent_since(self) -> float | None:
        """When the store stopped answering, by the steady clock; None if it answers."""
        asked = self._asked
        # It takes a minute until a store that hangs causes an error.
        hangs = asked is not None and self._clocks.steady() - asked > _SLOW
        return self._silent_since or (asked if hangs else None)

    def manifest(self, outer_step: int) -> Manifest | None:
        """Return our copy of that outer step's manifest; None if it was never seen."""
        return self._chain.copy(outer_step)

    def now(self) -> float:
        """Return the Unix time, by the store's clock as far as it is known."""
        return self._clocks.unix() if self._ahead is None else self._clocks.steady() + self._ahead

    def stop(self) -> None:
        """End transfers in progress; wait a few seconds for a request in flight."""
        self._closed.set()
        self._wake.set()
        self._reader.stop()
        self._progress.stop()
        sending = self._sending
        if sending is not None:
            if self._tidies:  # let it finish, since this miner may never start again
                sending[2].join(_LAST_REQUEST)
            sending[1].stop()
        for thread in (self._thread, *([sending[2]] if sending else [])):
            if thread.is_alive():
                thread.join(_LAST_REQUEST)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            try:
                wait = self.turn()
            except StoppedError:
                return
            except Exception:  # without this thread the miner would no longer join any round
                log.exception("Unexpected error while following the store; please report it")
                wait = _INTERVAL
            self._wake.wait(wait)

    def turn(self) -> float:
        """Do the work that is due. Return how many seconds to wait until the next turn."""
        steady = self._clocks.steady
        if steady() >= self._next_look:
            self._follow_state()
        if not self._chain.forked:
            if self._reported.pop("fork", None) is not None:  # a recovery has settled it
                self._post(NetworkDiffers("", forked=True))
            self._send_due()
            self._post_close()
            self._fetch_next()
        if forked := self._chain.forked:
            if "fork" not in self._reported:
                self._report("fork", forked)
                self._post(NetworkDiffers(forked, forked=True))
            if self._sending is not None:
                self._sending[1].stop()
            for close in self._to_send:  # the loop delays checkpoints until an upload has ended
                self._post(UploadEnded(close, forked))
            self._to_send.clear()
            return _INTERVAL
        due = self._next_look
        if self._not_before > steady():
            due = min(due, self._not_before)
        return max(_SHORTEST, due - steady())

    def _follow_state(self) -> None:
        """Read the state, and log each fault of the state or the store once."""
        steady, before = self._clocks.steady, self._state
        self._asked = steady()
        self._next_look = self._asked + _INTERVAL
        try:
            self._state = state = self._read_state()
        except ForkError:
            return  # turn() logs it
        except StateUnavailable as error:
            self._settle_silence()
            older = isinstance(error, OlderStateError)
            self._older_since = (self._older_since or steady()) if older else None
            # A store may show an older state for a while, which is nobody's fault.
            if self._older_since is None or steady() - self._older_since >= _LATE:
                self._report("state", str(error))
        except (StoreError, OSError) as error:
            # Log one line per outage, not per read.
            text = f"The store cannot be read ({error}). Training continues, and it is asked again"
            self._silent_since, self.trouble = self._silent_since or self._asked, str(error)
            if isinstance(error, NotGrantedError):  # the registry is silent, not the store
                self._silent_since, self.trouble = None, ""
            self._report("store", text, kind="away")
        else:
            self._settle_silence()
            self._older_since = None
            self._settle("state", "The network's state is accepted again")
            if before is None or before.outer_step != state.outer_step:
                self._not_before = -math.inf
                self._at_head()
            if state.finished and (before is None or not before.finished):
                why = f"the network is finished: {state.finished}"
                self._post(StopRequested(why, ExitStatus.FINISHED))
        finally:
            self._asked = None
        if (close := self.next_close) is not None:
            left = close.closes_at - self.now()
            if left > 0:
                self._next_look = min(self._next_look, steady() + left)
            elif left > -close.grace - _SOON_FOR:
                self._next_look = steady() + _SOON

    def _settle_silence(self) -> None:
        self._silent_since, self._asked, self.trouble = None, None, ""
        self._settle("store", "The store answers again")

    def _read_state(self) -> State:
        """Return the network's state; compare our clock with the store's. Raises StoreError."""
        began = self._clocks.steady()
        info = self._store.head(keys.STATE)
        ended = self._clocks.steady()
        if info is not None and info.age_seconds is not None:
            theirs = info.modified + info.age_seconds
            # An HTTP date has only whole seconds.
            theirs += 0.5 if theirs.is_integer() else 0.0
            self._ahead = theirs - (began + ended) / 2
            self.clock_offset = off = self._clocks.unix() - self.now()
            # A cache may have kept this answer for seconds, so it says nothing about the clocks.
            if (0.0 if info.cached else abs(off) - 0.5 - (ended - began) / 2) > _CLOCK_OFF:
                side = "ahead of" if off > 0 else "behind"
                self._report(
                    "clock",
                    f"This machine's clock is {abs(off):.1f} s {side} the store's. Closes follow "
                    "the store's clock, but other programs depend on this one, so set it "
                    "(timedatectl set-ntp true)",
                    kind="off",
                )
            else:
                self._settle("clock", "This machine's clock is right again")
        return self._chain.state(info, self.now())

    def _send_due(self) -> None:
        """Begin to send an upload that is due or was cut off by a kill; stop a void one."""
        if (close := self.next_close) is None:
            return
        if self._sending is not None:
            current, uplink, thread = self._sending
            if current != close:
                uplink.stop()
            if thread.is_alive():
                return
            self._sending = None
        wanted = self._to_send.pop() if self._to_send else None
        if wanted is None and self._sent != close and self._uploads.unfinished(close):
            wanted = close
        if wanted is None and self._sent == close and self._is_lost(close):
            self._uploads.send_again(close)
            wanted = close
        if wanted is None:
            return
        self._sent, self._lost_since = wanted, None
        if wanted != close:
            self._post(UploadEnded(wanted, _VOID))
            return
        uplink, self._tidies = Uplink(), False
        self._progress.stop()
        thread = threading.Thread(
            target=self._send, args=(close, uplink), name="upload", daemon=True
        )
        self._sending = close, uplink, thread
        thread.start()

    def _is_lost(self, close: Close) -> bool:
        """Return whether our upload has been missing for longer than a store may lag behind."""
        steady = self._clocks.steady()
        if steady < self._checks_at or self.now() >= close.ends_at:
            return False
        self._checks_at = steady + _INTERVAL
        try:
            lost = self._uploads.is_lost(close)
        except StoreError:  # the upload may still be there
            return False
        self._lost_since = (self._lost_since or steady) if lost else None
        return self._lost_since is not None and steady - self._lost_since >= _LATE

    def _send(self, close: Close, uplink: Uplink) -> None:
        """Send one upload, in its own thread, so that the state can be read meanwhile."""
        try:
            if close.serial:
                ended = self._uploads.send(close, close.ends_at - self.now(), uplink)
            else:
                ended = self._uploads.send_progress(close, _LONGEST_PROGRESS, uplink)
        except StoppedError:
            if self._closed.is_set():
                return
            why = _VOID if close.serial else _OVERTAKEN
            ended = UploadEnded(close, why)
        except Exception as error:  # otherwise the loop would wait forever for an answer
            log.exception("Unexpected error while sending an upload; please report it")
            ended = UploadEnded(close, repr(error))
        if close.serial:
            self._tidies = True
        self._post(ended)
        self._wake.set()
        if not close.serial:
            return
        try:
            self._uploads.tidy(close, uplink)
        except StoppedError:
            pass
        except Exception:  # whatever the store answers, only log it
            log.exception("Unexpected error while tidying up after an upload; please report it")

    def _post_close(self) -> None:
        """Post the close once, while it is open, if we have the weights that it applies to."""
        state, close = self._state, self.next_close
        if state is None or close is None or state.finished or state.outer_step != self._held:
            return
        if not close.closes_at <= self.now() < close.ends_at or self._posted == close:
            return
        self._posted = close
        # If an earlier process began an upload for this close, there is no second one.
        if not self._uploads.begun(close):
            left = close.ends_at - self.now()
            self._post(CloseReached(close, self._clocks.steady() + left))

    def _fetch_next(self) -> None:
        """Fetch the next update or weights on the way from our outer step to the head; post it."""
        state, steady = self._state, self._clocks.steady
        reports = self._reports
        if state is None or self._answered == reports or steady() < self._not_before:
            return
        if state.outer_step == self._held and not (self._wants_weights and state.weights_at):
            return
        try:
            update = self._next(state)
        except ForkError:
            return
        except (StoreError, OSError) as error:
            wait = self._waits.failed().total_seconds()
            self._not_before = steady() + wait
            text = f"Outer step {state.outer_step} is not taken over: {error}. Training continues"
            self._report("fetch", text, kind=str(error))
            return
        self._waits.succeeded()
        self._settle("fetch", "Outer steps are taken over again")
        if self._reports == reports:  # otherwise the next turn fetches what follows the new report
            self._answered = reports
            self._post(UpdateReady(update, steady()))

    def _next(self, state: State) -> Update:
        """Return the update or weights that the loop applies next. Raises StoreError, OSError.

        If later whole weights exist, anything missing or damaged before them is skipped.
        """
        held, wanted = self._held, self._wants_weights and bool(state.weights_at)
        usable = [step for step in state.weights_at if wanted or step > held]
        first, reason, fate = held, "", Fate(Base.KEPT)
        if wanted:
            first, reason = min(held, usable[-1]), "they were asked for"
        elif held > state.outer_step:
            raise StateUnavailable(
                f"we are at outer step {held}, which {keys.STATE} has not reached: if the bucket "
                "was restored from a backup, the founder must run dt-network recover"
            )
        try:
            back = self._chain.link(first, state)
        except StateUnavailable as error:
            if isinstance(error, ForkError) or not usable:
                raise
            # The manifests that cannot be read may include a rewind.
            reason, fate = str(error), Fate(Base.REFUSED, cause=f"its fate is unknown: {error}")
        else:
            if back is not None:  # training on abandoned weights is dropped with them
                cause = f"the network went back to outer step {back}"
                reason, fate = reason or cause, Fate(Base.REFUSED, cause=cause)
        if reason:
            return self._lead_by_weights(usable, state, reason, fate)
        if usable and usable[-1] - held > _UPDATES_OF_WEIGHTS:
            fewer = f"they are fewer bytes than {usable[-1] - held} updates"
            try:
                return self._lead_by_weights(usable, state, fewer, fate)
            except _FAULTS as error:  # the updates lead there too
                if isinstance(error, ForkError):
                    raise
        try:
            return self._fetch_update(held + 1, self._find_fate(held, fate))
        except _FAULTS as error:
            if not usable:
                raise
            return self._lead_by_weights(usable, state, str(error), fate)

    def _lead_by_weights(
        self, steps: Sequence[int], state: State, reason: str, fate: Fate
    ) -> Update:
        """Return the newest valid weights of ``steps``. Raises StoreError, OSError.

        If they skip the outer step that our upload is for, they come with its fate; ``fate``: if it
        is already known.
        """
        weights, held = self._fetch_soundest(steps, state, reason), self._held
        if weights.outer_step <= held:
            self._counted = held
            return weights
        fate = self._find_fate(held, fate)
        return replace(weights, base=fate.base, own_upload=fate.path, cause=fate.cause)

    def _find_fate(self, held: int, known: Fate) -> Fate:
        """Return the fate of our upload for outer step ``held``; KEPT if it was already posted.

        ``known``: the fate, if it is already known.
        """
        if known.base is Base.KEPT and held >= self._counted:
            known, self._counted = self._uploads.find_fate(self._chain.manifest(held + 1)), 0
        return known

    def _fetch_soundest(self, steps: Sequence[int], state: State, reason: str) -> Update:
        """Return the newest whole weights of ``steps`` that are valid. Raises StoreError, OSError.

        Args:
            steps: The outer steps to choose from, out of those that ``state`` names.
            state: The state to whose head their manifests must lead.
            reason: Why weights are fetched, for the log.
        """
        fault: StoreError = StateUnavailable(f"{keys.STATE} names no whole weights")
        for step in sorted(steps, reverse=True):
            try:
                self._chain.link(step, state)
                return self._fetch_weights(step, reason)
            except ForkError:
                raise
            except _FAULTS as error:  # earlier weights and the updates since lead there too
                fault = error
        raise fault

    def _fetch_update(self, outer_step: int, fate: Fate) -> Update:
        manifest = self._chain.manifest(outer_step)
        if not manifest.update:
            raise StateUnavailable(f"outer step {outer_step} has no update, and no weights follow")
        path = self._folder / "updates" / f"{outer_step}.safetensors"
        key = keys.outer_key(outer_step, keys.UPDATE)
        self._reader.fetch_signed(key, path, manifest.update, limit=self._largest_update)
        return _lead_to(manifest, path, fate)

    def _fetch_weights(self, outer_step: int, reason: str) -> Update:
        manifest, place = self._chain.manifest(outer_step), self._folder / "weights"
        folder, aside = place / str(outer_step), place / f".{outer_step}"
        whole = folder if folder.exists() else aside
        for name in (keys.CONFIG, keys.MODEL):
            if (digest := manifest.files.get(name)) is None:
                raise StateUnavailable(f"the manifest of outer step {outer_step} has no {name}")
            key = keys.outer_key(outer_step, name)
            most = MAX_CONFIG_BYTES if name == keys.CONFIG else MOST_BYTES
            self._reader.fetch_signed(key, whole / name, digest, limit=most)
        if whole is aside:
            aside.rename(folder)
            sync_folder(place)
        for other in place.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        return _lead_to(manifest, folder / keys.MODEL, Fate(Base.KEPT), whole=reason)

    def _report(self, what: str, text: str, *, kind: str = "") -> None:
        """Log a line about ``what``, unless the last one was of the same kind."""
        if self._reported.get(what) != (kind or text):
            self._reported[what] = kind or text
            log.warning("%s", text)

    def _settle(self, what: str, line: str) -> None:
        """Log that ``what`` works again, if a line said that it did not."""
        if self._reported.pop(what, None) is not None:
            log.info("%s", line)


def _lead_to(manifest: Manifest, path: Path, fate: Fate, *, whole: str = "") -> Update:
    """Return the update that leads to the weights of ``manifest``, from the file at ``path``."""
    return Update(
        manifest.outer_step,
        path,
        base=fate.base,
        own_upload=fate.path,
        weights=manifest.weights,
        inner_steps=manifest.total_inner_steps,
        cause=fate.cause,
        whole=whole,
    )
