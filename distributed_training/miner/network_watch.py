"""Follow what the network's bucket says of the network and of its file, next to its outer steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from distributed_training.chain.base import ChainError
from distributed_training.common.backoff import Throttle
from distributed_training.config.versions import Versions
from distributed_training.network import Network, Shown, other_version
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import StoppedError, StoreError

from . import events as ev

log = logging.getLogger(__name__)

_SAY_AGAIN = 300.0  # seconds between two lines of a start that waits
_EXPECTED = 600.0  # seconds in which a start may wait for a first state without a warning
_LOOK_AGAIN = 1.0  # seconds between two looks for a global state that is not there yet


class GlobalUnavailableError(RuntimeError):
    """The bucket cannot be read now; the message says why."""


class StopBeforeStart(RuntimeError):
    """A stop was asked for while the start waited."""


class GlobalBucket:
    """The network's bucket, as far as it says something of the network itself.

    All methods raise :class:`GlobalUnavailableError` with a line that says why.
    """

    def __init__(self, reader: BucketReader) -> None:
        self._reader = reader

    def network(self) -> Shown | None:
        """Return what the bucket says of its network; None if it does not."""
        with _unavailable():
            return self._reader.network()

    def learn(self, versions: Versions) -> str:
        """Add the bucket's versions of the network's file. Returns what was refused."""
        with _unavailable():
            return versions.look(self._reader.version)


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except (StoppedError, GlobalUnavailableError, ChainError):
        raise
    except Exception as error:  # a border to foreign bytes: whatever they made a library raise
        known = isinstance(error, (StoreError, OSError))
        why = str(error) if known else f"{type(error).__name__}: {error}"
        raise GlobalUnavailableError(why) from error


# --- at the start -------------------------------------------------------------------------------


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

    def compare(self) -> str:
        """Post what has changed; return why the network is finished, as the bucket says.

        A bucket that is damaged, or away just now, changes nothing. Nor does what the network's
        master has not signed, or an older version than the bucket has named before.
        """
        try:
            shown, rules, refused = self._bucket.network(), self._network, ""
            if shown is None or not shown.counts_for(self._network):
                return ""
            if shown.version < self._version:
                return ""
            self._version = shown.version
            if self.versions is not None:
                if shown.version > self.versions.newest.head.version:
                    refused = self._bucket.learn(self.versions)
                rules = self.versions.newest
        except GlobalUnavailableError:  # no reason to call ours old
            return ""
        problem = other_version(shown, rules)
        if problem and refused:
            problem = f"{problem}; {refused}"
        if problem != self._other_version:
            self._other_version = problem
            self._post(ev.NetworkCompared(problem))
        return "" if problem else shown.finished or ""
