"""Act on a local subnet that runs."""

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
#: One block ahead: it lasts longer, and what is uploaded must not be of an old one.
_PACED_FLAGS = ("--data.prefetch_blocks", "1")


def paced(options: SubnetOptions, samples: int = 8) -> SubnetOptions:
    """The same subnet, but its miners leave the cores to others for most of the time.

    ``samples``: of an inner step. 8 is half of the usual, so that steps take little longer than
    another miner's. 2 is one micro-batch: where steps need only continue and nobody learns.
    """
    flags = (*_PACED_FLAGS, *options.miner_flags)
    rules = {"training.effective_batch": samples, **options.rules}
    return replace(options, miner_script=PACED, miner_flags=flags, rules=rules)


def idle(options: SubnetOptions) -> SubnetOptions:
    """As :func:`paced`, where nobody learns: a tenth of a core."""
    return paced(options, samples=2)


@contextmanager
def steps_of(seconds: float) -> Iterator[None]:
    """Inner steps of paced miners that start meanwhile take about this long, or longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACED_STEP", str(seconds))
        yield


def stop_miner(
    subnet: LocalSubnet, index: int, grace: timedelta = timedelta(seconds=30)
) -> int | None:
    """Stop a miner as pm2 would; its exit status, None if it did not stop in ``grace``."""
    child = subnet.miners[index]
    child.signal(signal.SIGINT)
    return child.wait(grace)
