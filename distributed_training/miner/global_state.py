"""Follow the global bucket: its outer step, its files, and our drift from it.

The validator that owns the bucket uploads the global state there after each round: the model's
``config.json`` and ``model.safetensors`` and the ``outer_optimizer.pt``. Its read keys stand in
that validator's commitment on the chain. A start waits for both (:func:`open_global_bucket`,
:func:`first_global_state`); later a thread of rank 0 watches the bucket. It only ever posts events:
a bucket that does not answer, or a state that is refused, never stops training.

A peer that is lost in mid-transfer leaves the survivors of a round with averages that differ in
parts, and outer steps are compared only by number. So after a round, once the validator
has uploaded, this miner reads a few slices of the global ``model.safetensors``. It compares them
with the weights it began the outer step with (rank 0's rows of them).
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from distributed_training.chain.base import Chain, ChainError
from distributed_training.common.backoff import Throttle, doubling
from distributed_training.config import Config
from distributed_training.config.versions import Versions
from distributed_training.network import Network, Shown, other_version
from distributed_training.node.buckets import NoBucket, PeerBuckets
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import ConfigExtras
from distributed_training.protocol.pt_file import safetensors_table
from distributed_training.protocol.types import ExitStatus
from distributed_training.store.bucket_reader import (
    BucketReader,
    check_run,
    refusal,
    remove_states,
    states,
)
from distributed_training.store.errors import DeadlineError, StoppedError, StoreError
from distributed_training.training.outer_step import Rows

from . import events as ev

log = logging.getLogger(__name__)

#: Of float32 weights that went through the same arithmetic in another order.
TOLERANCE = 1e-4
SLICES = 48
SLICE_ROWS_BYTES = 256 * 1024

#: (first byte, bytes) of the object -> its content.
ReadRange = Callable[[int, int], bytes]


class NotComparable(ValueError):
    """The object is not a float32 safetensors file with our parameters; the message says why."""


def drift(rows: Sequence[Rows], read: ReadRange, *, size: int, seed: int) -> float:
    """Return the largest difference found, relative to the largest weight of its slice; or NaN.

    ``size``: bytes of the whole object. Reads the header and some slices of at most 256 KiB, chosen
    at random among all rows by their size. Raises NotComparable, and the errors of ``read``.
    """
    try:
        table = safetensors_table(read, size)
    except ValueError as error:
        raise NotComparable(f"it is not a whole safetensors file: {error}") from None
    chosen = random.Random(seed)
    usable = [item for item in rows if item.values.numel()]
    # By size, or a norm of a thousand values would be read as often as an embedding.
    weights = [item.values.numel() for item in usable]
    largest = 0.0
    for item in chosen.choices(usable, weights, k=SLICES):
        row_bytes = 4 * item.values[0].numel()
        count = max(1, min(len(item.values), SLICE_ROWS_BYTES // row_bytes))
        start = chosen.randrange(len(item.values) - count + 1)
        entry = table.get(item.name)
        if entry is None or entry.dtype != "F32":
            raise NotComparable(f"it holds no float32 {item.name}")
        at = (item.first + start) * row_bytes
        # The header is the bucket's: it is no reason to ask for bytes.
        if at + count * row_bytes > entry.size or entry.shape[1:] != item.values.shape[1:]:
            raise NotComparable(f"{item.name} has another shape")
        data = read(entry.start + at, count * row_bytes)
        theirs = torch.frombuffer(bytearray(data), dtype=torch.float32)
        ours = item.values[start : start + count].reshape(-1)
        scale = max(float(theirs.abs().max()), 1e-12)
        difference = float((ours - theirs).abs().max()) / scale
        # At once: max() would let the next slice's number take its place.
        if math.isnan(difference):
            return difference
        largest = max(largest, difference)
    return largest


_ANSWER = timedelta(minutes=1)  # of the store to a question, with its retries
_SAY_AGAIN = 300.0  # seconds between two lines of a start that waits
_EXPECTED = 600.0  # seconds in which a start may wait for a first state without a warning
_LOOK_AGAIN = 1.0  # seconds between two looks for a global state that is not there yet
_FETCH_AGAIN = timedelta(seconds=1)  # a state that is refused: doubled by each refusal
_FETCH_AGAIN_LONGEST = timedelta(minutes=5)


class GlobalUnavailableError(RuntimeError):
    """The global state cannot be had now; the message says why."""


class GlobalEmptyError(GlobalUnavailableError):
    """The global bucket is empty so far."""


class GlobalSilentError(GlobalUnavailableError):
    """The store does not answer."""


class GlobalRefusedError(GlobalUnavailableError):
    """The global state could not be loaded when it was tried; ``folder`` holds its files."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(problem)
        self.folder = folder


class StopBeforeStart(RuntimeError):
    """A stop was asked for while the start waited."""


class GlobalBucket:
    """``folder`` keeps the states fetched, one ``epoch-N`` each: a restart need not download.

    ``open_bucket``: the bucket by the keys that its owner commits now. It is called before each
    use, so it must not wait; while it fails the last bucket stays. All methods raise
    :class:`GlobalUnavailableError` with a line that says why, and StoppedError after :meth:`stop`,
    which nobody has to hear of.
    """

    def __init__(self, *, open_bucket: Callable[[], BucketReader], folder: Path, run: int) -> None:
        self._open_bucket = open_bucket
        self._bucket: BucketReader | None = None
        self._run = run
        self.run_seen: int | None = None  # of the bucket, when it was last looked at
        self.folder = folder

    def follow(self) -> BucketReader:
        """Return the bucket by the keys of now, or else the last one.

        The owner may have moved to another account; a text that is no commitment is not followed.
        Raises NoBucket, ChainError as long as there was none.
        """
        try:
            # At each use, not on an error: a bucket that its owner left stays readable for ever.
            found = self._open_bucket()
        except (NoBucket, ChainError):
            if self._bucket is None:
                raise
            return self._bucket
        if self._bucket not in (None, found):
            log.info(
                "The master hotkey committed other read keys: the global bucket is read with them"
            )
        self._bucket = found
        return found

    def outer_step(self) -> int:
        """Return the outer step of the root metadata, which its owner writes last."""
        with _unavailable():
            metadata = self.follow().metadata()
            if metadata is None:
                raise GlobalEmptyError("the global bucket is empty so far")
            # Before the check: the metric is there for the run that is refused.
            self.run_seen = metadata.run
            return check_run(metadata, self._run).outer_step

    def fetch(self, outer_step: int) -> Path:
        """Return the folder of that outer step's checked files.

        They are config.json, model.safetensors and outer_optimizer.pt. Raises GlobalRefusedError
        for a state that :func:`refuse` was called for.
        """
        with _unavailable():
            folder = self.follow().fetch(outer_step, self.folder)
        remove_states(self.folder, before=outer_step - 1)
        problem = refusal(folder)
        if problem is not None:
            # Raised with the folder: a start with a checkpoint needs only its config.json.
            raise GlobalRefusedError(folder, problem)
        return folder

    def drift(self, outer_step: int, rows: Sequence[Rows]) -> float:
        """See :func:`drift`; of the bucket's ``model.safetensors`` of that outer step."""
        with _unavailable():
            model = self.follow().open(keys.epoch_key(outer_step, keys.MODEL))
            return drift(rows, model.read_at, size=model.size, seed=outer_step)

    def extras(self, outer_step: int) -> ConfigExtras:
        """Return what the validator says of that outer step in its config.json."""
        with _unavailable():
            return self.follow().config(outer_step)[1]

    def network(self) -> Shown | None:
        """Return what the bucket says of its network; None if it does not."""
        with _unavailable():
            return self.follow().network()

    def learn(self, versions: Versions) -> str:
        """Add the bucket's versions of the network's file. Returns what was refused."""
        with _unavailable():
            return versions.look(self.follow().version)

    def stop(self) -> None:
        """End a fetch under way; its files stay for the next fetch."""
        if self._bucket is not None:
            self._bucket.stop()


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except (StoppedError, GlobalUnavailableError, ChainError):
        raise
    except Exception as error:  # a border to foreign bytes: whatever they made a library raise
        silent = isinstance(error, DeadlineError) or getattr(error, "retryable", False)
        known = isinstance(error, (StoreError, NotComparable, OSError))
        why = str(error) if known else f"{type(error).__name__}: {error}"
        raise (GlobalSilentError if silent else GlobalUnavailableError)(why) from error


# --- at the start -------------------------------------------------------------------------------


def open_global_bucket(
    config: Config, chain: Chain, folder: Path, wanted: Callable[[], bool]
) -> GlobalBucket:
    """Wait for the read credentials in the master's commitment, and open the bucket.

    Raises StopBeforeStart. Another commitment of that hotkey later is followed.
    """
    master, most = config.miner.master_ss58_address, config.store.longest_transfer
    peers = PeerBuckets(config.store, chain, small=_ANSWER, large=most)
    bucket = GlobalBucket(
        open_bucket=lambda: peers.of_master(master),
        folder=folder / "global",
        run=config.store.run,
    )
    waiting = StartWait("if this lasts: is chain.master_hotkey the subnet's?")
    while True:
        try:
            bucket.follow()
            return bucket
        except (NoBucket, ChainError) as error:  # none, of no account, or not read yet
            waiting.report(f"Waiting for the commitment of the master hotkey {master} ({error})")
        pause_start(wanted)


def first_global_state(
    bucket: GlobalBucket, wanted: Callable[[], bool], *, resumes: bool = False
) -> tuple[int, Path, bool]:
    """Wait for a global state; return its outer step, its folder, and its origin.

    The last value is whether the bucket showed it. ``resumes``: there is a checkpoint to train
    from, so a state that was refused will do, and while the store does not answer the newest one on
    the disk.
    """
    waiting = StartWait("if this lasts: check the network of this machine, or update the miner")
    target, failures, not_before = -1, 0, 0.0
    while True:
        try:
            outer_step = bucket.outer_step()
            if outer_step != target:
                target, failures, not_before = outer_step, 0, 0.0
            if time.monotonic() >= not_before:
                try:
                    return outer_step, bucket.fetch(outer_step), True
                finally:  # what is refused was downloaded whole, and every miner does that
                    failures += 1
                    wait = doubling(failures, first=_FETCH_AGAIN, longest=_FETCH_AGAIN_LONGEST)
                    not_before = time.monotonic() + wait.total_seconds()
        except GlobalUnavailableError as error:
            if resumes and isinstance(error, GlobalRefusedError):
                return outer_step, error.folder, True
            silent = isinstance(error, GlobalSilentError)
            # The newest outer step that was fetched whole, and its folder.
            found = max(states(bucket.folder), default=None) if resumes and silent else None
            if found is not None:
                log.warning(
                    "The global bucket does not answer (%s): starting from the disk with outer "
                    "step %d, fetched %.0f minutes ago, or a later checkpoint. The bucket is asked "
                    "again in the background; no round is joined before it answers",
                    error,
                    found[0],
                    (time.time() - found[1].stat().st_mtime) / 60,
                )
                return *found, False
            expected = isinstance(error, GlobalEmptyError)
            waiting.report(f"Waiting for the global state: {error}", expected=expected)
        pause_start(wanted)


class StartWait:
    """Log what a start waits for: when that changes, and every five minutes."""

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._throttle = Throttle(_SAY_AGAIN, clock=time.monotonic)
        self._began = time.monotonic()

    def report(self, what: str, *, expected: bool = False) -> None:
        if not self._throttle(what):
            return
        # An empty bucket is nothing to warn of, unless it stays empty.
        early = expected and time.monotonic() - self._began < _EXPECTED
        level = logging.INFO if early else logging.WARNING
        log.log(level, "%s. Training cannot begin without it; %s", what, self._advice)


def pause_start(wanted: Callable[[], bool]) -> None:
    """Wait before another try of the start. Raises StopBeforeStart when ``wanted`` turns False."""
    deadline = time.monotonic() + _LOOK_AGAIN
    while time.monotonic() < deadline:
        if not wanted():
            raise StopBeforeStart
        time.sleep(0.05)


_ATTEMPTS = 3  # at a fetch, before it is given up with an event
_SHORT = (
    30.0  # seconds: a fetch that failed later has used its time, and what waits for it continues
)
_FIRST_WAIT, _LONGEST_WAIT = timedelta(seconds=5), timedelta(minutes=1)  # between two of them
_LAST_REQUEST = 5.0  # seconds that one in flight gets at the end


class NetworkWatch:
    """Compare what the global bucket says of its network with the file by which we train.

    ``versions``: of that file, to which this adds what the bucket has; None: there are none.
    """

    def __init__(
        self,
        bucket: GlobalBucket,
        network: Network,
        versions: Versions | None,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._bucket = bucket
        self._network = network
        self.versions = versions
        self._post = post
        self._other_version = ""
        self._version = 0  # the newest that the bucket has named

    def look(self) -> str:
        """Post what has changed; return why the network is finished, as the bucket says.

        A bucket that is damaged, or away just now, changes nothing. Nor does what the network's
        master has not signed, or an older version than the bucket has named before.
        """
        try:
            shown, rules, refused = self._bucket.network(), self._network, ""
            if self._network.head.format > 1:
                if shown is None or not shown.counts_for(self._network):
                    return ""
                if shown.version < self._version:
                    return ""
                self._version = shown.version
            if self.versions is not None and shown is not None:
                if shown.version > self.versions.newest.head.version:
                    refused = self._bucket.learn(self.versions)
                rules = self.versions.newest
        except GlobalUnavailableError:  # no reason to call ours old
            return ""
        problem = "" if shown is None else other_version(shown, rules)
        if problem and refused:
            problem = f"{problem}; {refused}"
        if problem != self._other_version:
            self._other_version = problem
            outdated = shown is not None and shown.version > rules.head.version
            self._post(ev.NetworkCompared(problem, outdated=outdated))
        return "" if shown is None or problem else shown.finished or ""


class GlobalEpoch:
    """Compares and fetches in a thread of its own.

    ``interval``: between two looks at the bucket's root metadata. ``epoch_start``: our outer step
    and what its global weights are compared with; called in this thread. ``network``: the file by
    which we train, compared with what the bucket says of its own; None: it says nothing.
    ``versions``: of that file, to which this thread adds what the bucket has.
    """

    def __init__(
        self,
        *,
        bucket: GlobalBucket,
        post: Callable[[ev.Event], None],
        interval: timedelta,
        epoch_start: Callable[[], tuple[int, Sequence[Rows]]],
        network: Network | None = None,
        versions: Versions | None = None,
    ) -> None:
        self._network = network
        self._network_watch = (
            None if network is None else NetworkWatch(bucket, network, versions, post)
        )
        self._bucket = bucket
        self._post = post
        self._interval = interval.total_seconds()
        self._epoch_start = epoch_start
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._target: int | None = None  # to fetch
        self._compare_weights: int | None = None  # the outer step to compare
        self.unavailable_since: float | None = None  # time.monotonic()
        self._seen: int | None = None
        self._place: ev.PlaceSeen | None = None
        self._drift_unknown = False  # told already
        self._thread = threading.Thread(target=self._run, name="global-epoch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def compare_soon(self) -> None:
        """Compare outer steps soon; GlobalEpochSeen follows if the bucket can be read."""
        self._wake.set()

    def fetch(self, outer_step: int) -> None:
        """Fetch that global state in the background.

        GlobalFetched or GlobalFetchFailed answers.
        """
        self._target = outer_step
        self._wake.set()

    def compare_weights(self, outer_step: int) -> None:
        """Compare weights soon; WeightsCompared follows if the bucket can be read."""
        self._compare_weights = outer_step
        self._wake.set()

    def close(self) -> None:
        """End a download; wait a few seconds for a request in flight."""
        # First: the thread that wakes up, or loses its download, must find it.
        self._closed.set()
        self._wake.set()
        self._bucket.stop()
        if self._thread.is_alive():
            self._thread.join(_LAST_REQUEST)

    def _run(self) -> None:
        while not self._closed.is_set():
            # A validator tells nobody that it has published: its root metadata is looked at.
            self._wake.wait(self._interval)
            # Cleared before the target is read: one that is set later leads to another turn.
            self._wake.clear()
            if self._closed.is_set():
                return
            target, self._target = self._target, None
            try:
                if target is None:
                    self._compare()
                else:
                    self._compare_weights = None  # with an epoch's start that is about to change
                    self._fetch_state(target)
            except StoppedError:
                return  # a clean end: nothing of it is worth a line
            except Exception as error:  # this thread gone, a load would be waited for for ever
                log.exception("Unexpected error while reading the global bucket; please report it")
                if target is not None:
                    self._post(ev.GlobalFetchFailed(repr(error), time.monotonic()))

    def _compare(self) -> None:
        """Compare outer steps and the networks' files; then weights, where that was asked for."""
        try:
            self._seen = self._bucket.outer_step()
        except GlobalUnavailableError as error:
            # One line for an outage, not one for each look.
            if self.unavailable_since is None:
                self.unavailable_since = time.monotonic()
                silent = isinstance(error, GlobalSilentError)
                what = "does not answer" if silent else "cannot be read"
                log.warning("The global bucket %s (%s). Training continues.", what, error)
        else:
            if self.unavailable_since is not None:
                away = time.monotonic() - self.unavailable_since
                log.info("The global bucket answers again after %.0f s", away)
                self.unavailable_since = None
            self._post(ev.GlobalEpochSeen(self._seen, time.monotonic()))
            with contextlib.suppress(GlobalUnavailableError):  # at the next look
                if self._place is None or self._place.outer_step != self._seen:
                    extras, steps = self._bucket.extras(self._seen), 0
                    if self._network is not None and self._network.head.format > 1:
                        steps = extras.total_inner_steps or 0
                    self._place = ev.PlaceSeen(self._seen, steps, extras.last_allreduce_block)
                self._post(self._place)
            if self._network_watch is not None and (finished := self._network_watch.look()):
                why = f"the network is finished: {finished}"
                self._post(ev.StopRequested(why, ExitStatus.FINISHED))
        outer_step, self._compare_weights = self._compare_weights, None
        # Another outer step there is a load, and no weights of ours are in the bucket.
        if outer_step is None or self._seen not in (None, outer_step):
            return
        ours, rows = self._epoch_start()
        # The loop continues next to this thread: other weights would look like drift.
        if not rows or ours != outer_step:
            return
        try:
            found = self._bucket.drift(outer_step, rows)
        except GlobalUnavailableError as error:
            # Not once another comparison is asked for.
            if self._compare_weights is None:
                self._compare_weights = outer_step  # at the next look
            if not self._drift_unknown:
                log.warning("The global weights could not be compared with ours yet: %s", error)
            self._drift_unknown = True
            return
        self._drift_unknown = False
        if self._epoch_start()[0] != outer_step:  # a round was faster
            return
        if found > TOLERANCE or math.isnan(found):
            log.warning(
                "Our weights of outer step %d are not the global ones (difference %.1e): the "
                "global state becomes the epoch-start weights, what was trained since is kept",
                outer_step,
                found,
            )
        self._post(ev.WeightsCompared(outer_step, found <= TOLERANCE))

    def _fetch_state(self, outer_step: int) -> None:
        began = time.monotonic()
        for failures in range(1, _ATTEMPTS + 1):
            try:
                self._post(ev.GlobalFetched(self._bucket.fetch(outer_step)))
                return
            except GlobalUnavailableError as error:
                detail = str(error)
            wait = doubling(failures, first=_FIRST_WAIT, longest=_LONGEST_WAIT)
            if time.monotonic() - began > _SHORT:
                break
            if failures < _ATTEMPTS and self._closed.wait(wait.total_seconds()):
                return
        self._post(ev.GlobalFetchFailed(detail, time.monotonic()))
