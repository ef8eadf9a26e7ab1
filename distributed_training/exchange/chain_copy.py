"""Keep a member's own copy of a store network's chain, and refuse another history.

No object in the store counts unless the master has signed it. The chain only ever grows, so a state
with a smaller serial is an old state, and a manifest that follows a different manifest than ours is
part of another history. So the newest state and all manifests seen so far are kept on the disk,
also across restarts. Two valid manifests of one outer step prove that the master's key signed two
histories. Only the owner of that key can say which history is valid, so nothing is applied before a
recovery, which restarts the chain above both.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from distributed_training.common.files import write_bytes
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master, State
from distributed_training.store.base import ObjectInfo, is_md5, same_etag
from distributed_training.store.bucket_reader import BucketReader, StateUnavailable
from distributed_training.store.errors import IntegrityError, StoreError

_AT_ONCE = 8  # manifests that are fetched in parallel
_Kind = TypeVar("_Kind", State, Manifest)

log = logging.getLogger(__name__)


class ForkError(StateUnavailable):
    """The master signed two manifests of one outer step; the message names both."""


class OlderStateError(StateUnavailable):
    """The store shows an older state than one seen before: it lags behind, or has lost objects."""


class ChainCopy:
    """Keeps the chain as far as this member has seen it, in ``folder``. Methods raise StoreError.

    ``forked``: a line about two valid manifests of one outer step, until a recovery settles it;
    otherwise empty.
    """

    def __init__(self, reader: BucketReader, folder: Path, master: Master) -> None:
        self._reader = reader
        self._folder = folder
        self._master = master
        self.forked = self._describe_fork()
        self._etag = ""  # etag of the newest state's object
        # The newest state ever seen, even by an earlier process.
        self._newest = self._read("state", State, "an older state would not be noticed")

    def _describe_fork(self) -> str:
        """Return the line about two valid manifests that were seen; empty if there are none."""
        for path in sorted(self._folder.glob("*.other.json")):
            name = path.name.partition(".")[0]
            return (
                f"The network's master has signed two manifests of outer step {name}: "
                f"{self._path(name)} and {path}. The bucket was restored from a backup, or the "
                "master's key was stolen. Nothing is applied or sent until the founder runs "
                "dt-network recover to say which is valid; then this member continues on its own"
            )
        return ""

    def state(self, info: ObjectInfo | None, now: float) -> State:
        """Return the network's state from the object that ``info`` describes.

        ``now``: Unix seconds, by the store's clock. Raises StateUnavailable, and ForkError.
        """
        state = self._newest
        # GET may find what HEAD does not, since different replicas may answer.
        if state is None or info is None or not same_etag(info.etag, self._etag):
            data = self._get(keys.STATE, State)
            if data is None and state is None:
                raise StateUnavailable(
                    f"the store holds no {keys.STATE} yet: the network has not begun"
                )
            if data is None:
                raise StateUnavailable(
                    f"{keys.STATE} is missing in the store: the network's validator writes it again"
                )
            try:
                state = State.parse(data, self._master)
                if self._newest is not None:
                    self._check_history(state, self._newest)
                if self.forked and state != self._newest:
                    self._settle_fork(state)
            except ValueError as error:
                raise StateUnavailable(f"{error}: nothing is taken from it") from None
            if state != self._newest:
                write_bytes(self._path("state"), data)
            self._newest = state
            md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
            # A cache may return older bytes than HEAD described. Then the next call asks again.
            old = info is None or (is_md5(info.etag) and not same_etag(info.etag, md5))
            self._etag = "" if info is None or old else info.etag
        if self.forked:
            raise ForkError(self.forked)
        # A finished network publishes no newer state.
        if state.expires < now and not state.finished:
            raise StateUnavailable(
                f"{keys.STATE} of outer step {state.outer_step} has expired at "
                f"{datetime.fromtimestamp(state.expires, UTC):%Y-%m-%d %H:%M:%S} UTC: nobody leads "
                "the network now; training continues, and nothing is uploaded until there is a "
                "newer one"
            )
        return state

    def link(self, first: int, state: State) -> int | None:
        """Fetch the manifests from ``first`` to the state's; check that each follows the previous.

        If the founder has recovered the network since ``first``, the chain begins at that recovery.
        Returns the outer step that the network went back to on the way, or None if it did not go
        back. Raises StateUnavailable, and ForkError.
        """
        back, before = None, self.copy(state.outer_step)
        try:
            before = head = before or self._fetch(state.outer_step)[0]
            _check_head(state, head)
            before = self.manifest(max(first, head.recovered))
            if before.outer_step > first:
                back = before.rewound_to
            for after, data in self._fetch_missing(before.outer_step + 1, state.outer_step + 1):
                after.check_after(before)
                if data:
                    write_bytes(self._path(after.outer_step), data)
                before = after
                back = back if after.rewound_to is None else after.rewound_to
            _check_head(state, before)
        except ValueError as error:
            if before is not None:
                self._find_another(before.outer_step)
            raise StateUnavailable(f"{error}: nothing is taken from it") from None
        return back

    def manifest(self, outer_step: int) -> Manifest:
        """Return our copy of a manifest, or else the store's. Raises StateUnavailable."""
        if (ours := self.copy(outer_step)) is not None:
            return ours
        try:
            manifest, data = self._fetch(outer_step)
            if manifest.outer_step != outer_step:
                raise ValueError(f"it is of outer step {manifest.outer_step}")
        except ValueError as error:
            what = keys.outer_key(outer_step, keys.MANIFEST)
            raise StateUnavailable(f"{what} is refused: {error}") from None
        write_bytes(self._path(outer_step), data)
        return manifest

    def copy(self, outer_step: int) -> Manifest | None:
        """Return our copy of a manifest, without asking the store; None if it was never seen."""
        return self._read(outer_step, Manifest, "it is fetched again")

    def _check_history(self, state: State, before: State) -> None:
        try:
            state.check_after(before)
            if (ours := self.copy(state.outer_step)) is not None:
                _check_head(state, ours)
        except ValueError as error:
            self._find_another(state.outer_step)
            if state.serial >= before.serial and state.outer_step >= before.outer_step:
                raise
            raise OlderStateError(
                f"{error}. Nothing is taken from it; if this lasts, the bucket was restored from a "
                "backup, and the founder must run dt-network recover"
            ) from None

    def _settle_fork(self, state: State) -> None:
        """Forget the two histories if the state follows a later recovery; else raise ForkError."""
        head, _ = self._fetch(state.outer_step)
        _check_head(state, head)
        forks = list(self._folder.glob("*.other.json"))
        if any(int(path.name.partition(".")[0]) >= head.recovered for path in forks):
            raise ForkError(self.forked)
        for path in forks:
            path.unlink()
        self.forked = ""

    def _find_another(self, outer_step: int) -> None:
        """Raise ForkError if the store has a valid manifest that differs from the one we have."""
        try:
            theirs, data = self._fetch(outer_step)
        except (StoreError, ValueError):
            return
        ours = self.copy(outer_step)
        if ours is None or theirs.outer_step != outer_step or theirs.digest == ours.digest:
            return
        write_bytes(self._path(f"{outer_step}.other"), data)
        self.forked = self._describe_fork()
        raise ForkError(self.forked)

    def _fetch_missing(self, first: int, end: int) -> Iterator[tuple[Manifest, bytes]]:
        """Yield the manifests, in order, with the bytes of each that we have no copy of."""

        def fetch(outer_step: int) -> tuple[Manifest, bytes]:
            ours = self.copy(outer_step)
            return self._fetch(outer_step) if ours is None else (ours, b"")

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="manifests") as pool:
            for start in range(first, end, _AT_ONCE):
                yield from pool.map(fetch, range(start, min(start + _AT_ONCE, end)))

    def _fetch(self, outer_step: int) -> tuple[Manifest, bytes]:
        """Return the store's manifest, and its bytes. Raises StoreError, ValueError."""
        key = keys.outer_key(outer_step, keys.MANIFEST)
        data = self._get(key, Manifest)
        if data is None:
            raise StateUnavailable(f"{key} is missing")
        return Manifest.parse(data, self._master), data

    def _get(self, key: str, kind: type[State | Manifest]) -> bytes | None:
        try:
            return self._reader.get(key, limit=kind.most_bytes)
        except IntegrityError as error:  # a fault of the object, not of the store
            raise StateUnavailable(f"{error}: nothing is taken from it") from None

    def _path(self, name: object) -> Path:
        return self._folder / f"{name}.json"

    def _read(self, name: object, kind: type[_Kind], lost: str) -> _Kind | None:
        path = self._path(name)
        try:
            return kind.parse(path.read_bytes(), self._master)
        except FileNotFoundError:
            return None
        except ValueError as error:
            log.warning("%s is damaged (%s): %s", path, error, lost)
            return None


def _check_head(state: State, manifest: Manifest) -> None:
    """Raise ValueError unless ``manifest``, of the state's outer step, is the state's head."""
    if manifest.digest != state.head:
        raise ValueError(
            f"{keys.STATE} has another history: its head is {state.head}, and the manifest of "
            f"outer step {state.outer_step} is {manifest.digest}"
        )
