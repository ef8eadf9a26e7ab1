"""What tests do to a local subnet that runs."""

from __future__ import annotations

import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from distributed_training.localnet.plan import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet

PACED = Path(__file__).with_name("paced_miner.py")
#: Half of the preset's batch: a paced miner's steps take little longer than another's. One block
#: ahead: it lasts longer, and what is uploaded must not be of an old one.
_PACED_FLAGS = (
    *("--neuron.local_batch_size_train_effective", "8"),
    *("--data.prefetch_blocks", "1", "--data.max_prefetch_blocks", "1"),
)


def paced(options: SubnetOptions) -> SubnetOptions:
    """The same subnet, but its miners leave the cores alone for most of the time."""
    flags = (*_PACED_FLAGS, *options.miner_flags)
    return replace(options, miner_script=PACED, miner_flags=flags)


def stop_miner(
    subnet: LocalSubnet, index: int, grace: timedelta = timedelta(seconds=30)
) -> int | None:
    """Stop a miner as pm2 would; its exit status, None if it did not stop in ``grace``."""
    child = subnet.miners[index].child
    child.signal(signal.SIGINT)
    return child.wait(grace)
