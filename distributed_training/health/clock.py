"""Measure by how much this machine's clock is wrong, by the store's.

Two limits hang on it. DHT peers whose clocks are more than 3 s apart do not meet, since hivemind
refuses the other's entries. Stores refuse requests that are 15 minutes off. So a wrong clock looks
like a closed port or a wrong key, and must be named before those.

The store mostly runs on another machine, and its answers have its ``Date``. A registry names a
wrong clock itself where it refuses a call for it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import timedelta

import httpx

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

# OSError: certificates that cannot be read.
_SILENT = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, OverflowError)


class ClockUnknown(RuntimeError):
    """The store gives no time; the text has the reason."""


@dataclass(frozen=True)
class Offset:
    """The seconds by which this machine's clock is ahead of the store's, give or take ``error``.

    The store gives whole seconds: it is assumed to be in the middle of one.
    """

    seconds: float
    error: float

    @property
    def sure(self) -> float:
        """The seconds by which it is wrong at least."""
        return max(0.0, abs(self.seconds) - self.error)

    def __str__(self) -> str:
        side = "ahead of" if self.seconds > 0 else "behind"
        return f"{abs(self.seconds):.1f} s {side} the store's"


def store_offset(config: Config) -> Offset:
    """Compare this machine's clock with the store's. Raises ClockUnknown."""
    try:
        url = endpoint_of(config.store)
        with httpx.Client(
            proxy=proxy_for(url),
            trust_env=False,
            verify=certificates() if url.startswith("https") else False,
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
    return Offset((began + ended) / 2 - theirs, (ended - began) / 2)
