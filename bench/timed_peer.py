"""A peer process of :mod:`.average` that also writes how long its transfers take.

    python -m bench.timed_peer DESCRIPTOR

Seconds go, a line for each transfer, into the file that the variable ``DT_BENCH_TIMES`` names.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from distributed_training.exchange import hivemind_peer


class Averager(hivemind_peer.Averager):
    """Ours, timed from the found group to the last value."""

    async def _aggregate_with_group(self, *given: Any, **named: Any) -> Any:
        began = time.monotonic()
        found = await super()._aggregate_with_group(*given, **named)
        with Path(os.environ["DT_BENCH_TIMES"]).open("a") as file:
            file.write(f"{time.monotonic() - began:.3f}\n")
        return found


class Peer(hivemind_peer.Peer):
    averager_class = Averager


if __name__ == "__main__":
    hivemind_peer.main(Peer)
