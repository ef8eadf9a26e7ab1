"""What tests do to a local subnet that runs."""

from __future__ import annotations

import signal
from datetime import timedelta

from distributed_training.localnet.subnet import LocalSubnet


def stop_miner(
    subnet: LocalSubnet, index: int, grace: timedelta = timedelta(seconds=30)
) -> int | None:
    """Stop a miner as pm2 would; its exit status, None if it did not stop in ``grace``."""
    child = subnet.miners[index].child
    child.signal(signal.SIGINT)
    return child.wait(grace)
