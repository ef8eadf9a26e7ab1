"""Measure by how much this machine's clock is wrong, and against whose.

Two limits hang on it. DHT peers whose clocks are more than 3 s apart do not meet, since hivemind
refuses the other's entries. Stores refuse requests that are 15 minutes off. So a wrong clock looks
like a closed port or a wrong key, and must be named before those.

The store's ``Date`` comes first, since the store mostly runs on another machine. Without it the
chain's clock counts: a registry's to a second, a public chain's to the time of a block.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import timedelta

import httpx

from distributed_training.chain.base import Chain
from distributed_training.common.http import PAST_CACHES, answered_at
from distributed_training.common.proxies import proxy_for
from distributed_training.config import Config
from distributed_training.network_place import certificates
from distributed_training.store.s3 import endpoint_of

log = logging.getLogger(__name__)

#: Seconds between two peers' clocks from which they do not meet.
LIMIT = 3.0
#: Two peers that are wrong by this in opposite directions are at the limit.
WARN = LIMIT / 2
REMEDY = "timedatectl set-ntp true; then timedatectl shows 'synchronized: yes'"
_TIMEOUT = timedelta(seconds=5)
_OLDEST = timedelta(minutes=2)  # age of the chain's last answer

# OSError: certificates that cannot be read.
_SILENT = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, OverflowError)


class ClockUnknown(RuntimeError):
    """The store gives no time; the text has the reason."""


@dataclass(frozen=True)
class Offset:
    """The seconds by which this machine's clock is ahead of ``against``, give or take ``error``.

    A clock that is given in whole seconds is assumed to be in the middle of a second.
    """

    seconds: float
    error: float
    against: str

    @property
    def sure(self) -> float:
        """The seconds by which it is wrong at least."""
        return max(0.0, abs(self.seconds) - self.error)

    def __str__(self) -> str:
        side = "ahead of" if self.seconds > 0 else "behind"
        return f"{abs(self.seconds):.1f} s {side} {self.against}"


def store_offset(config: Config) -> Offset:
    """Compare this machine's clock with the store's. Raises ClockUnknown."""
    try:
        url = endpoint_of(config.store)
        with httpx.Client(
            proxy=proxy_for(url),
            trust_env=False,
            verify=certificates(),
            timeout=_TIMEOUT.total_seconds(),
            headers=PAST_CACHES,
        ) as client:
            began = time.time()
            reply = client.head(url)
            ended = time.time()
        theirs, cached = answered_at(reply.headers)
    except _SILENT as error:
        raise ClockUnknown(f"the store does not tell its time ({error})") from None
    if cached:
        raise ClockUnknown("a cache before the store answers in its place")
    theirs += 0.5  # whole seconds
    # The store wrote it between the two: half of the way there and back is taken off.
    return Offset((began + ended) / 2 - theirs, (ended - began) / 2, "the store's")


def chain_offset(chain: Chain) -> Offset | None:
    """Compare this machine's clock with a registry's; None if that is not known now."""
    theirs = chain.clock()
    if theirs is None or chain.age() > _OLDEST:
        return None
    error = 0.5  # seconds that an answer of a registry may take
    return Offset(time.time() - theirs - error, error, "the registry's")
