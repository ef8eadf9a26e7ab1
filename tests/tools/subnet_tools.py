"""Slow down or stop the miners of a local subnet."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet

PACED = Path(__file__).parents[2] / "testbed" / "paced_miner.py"
#: Prepare one block ahead: a block lasts longer here, and an upload must report a new one.
_PACED_FLAGS = ("--data.prefetch_blocks", "1")


def paced(options: SubnetOptions, samples: int = 8) -> SubnetOptions:
    """Return options of the same subnet, whose miners leave the cores idle most of the time.

    ``samples``: sequences per inner step. 8 is half of the usual number, so that a step takes
    little longer than usual. 2 is one micro-batch, for tests in which nothing has to be learned.
    """
    flags = (*_PACED_FLAGS, *options.miner_flags)
    rules = {"training.effective_batch": samples, **options.rules}
    return replace(options, miner_script=PACED, miner_flags=flags, rules=rules)


def idle(options: SubnetOptions) -> SubnetOptions:
    """Return :func:`paced` options for miners that learn nothing and take a tenth of a core."""
    return paced(options, samples=2)


@contextmanager
def steps_of(seconds: float) -> Iterator[None]:
    """Make each inner step of paced miners that start in the block take at least this long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACED_STEP", str(seconds))
        yield


def stop_miner(
    subnet: LocalSubnet, index: int, grace: timedelta = timedelta(seconds=30)
) -> int | None:
    """Stop a miner as pm2 does. Return its exit status, or None if it still runs then."""
    child = subnet.miners[index]
    child.signal(signal.SIGINT)
    return child.wait(grace)
