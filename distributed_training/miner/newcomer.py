"""Take over the inner optimizer and its schedule at a first start.

All other miners train at the network's learning rate, with moments of thousands of steps. A miner
without a checkpoint takes both from the global bucket, as the public one does, or after a lost disk
from its own uploads. It also hands them on: validators take the schedule of the miner with the most
inner steps as the network's own.
"""

from __future__ import annotations

import logging
import math
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training.config import Config, ConfigError
from distributed_training.node import buckets
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.s3 import StoreError

from .global_state import GlobalBucket, GlobalUnavailableError

if TYPE_CHECKING:
    from distributed_training.training.trainer import Trainer

log = logging.getLogger(__name__)

FOLDER = "inner-optimizer"  # in the run folder, until it was taken over


def fetch_inner_optimizer(
    config: Config, global_bucket: GlobalBucket, outer_step: int, *, bucket: str, folder: Path
) -> Path | None:
    """Return the folder with the inner optimizer's shards, or None.

    They come from the global bucket, else from our own ``bucket``. Right after a round the global
    bucket may not have this outer step's yet: the one before will do, some hundred inner steps
    behind in the schedule. Raises StoppedError.
    """
    destination, found = folder / FOLDER, None
    try:
        for each in range(outer_step, max(-1, outer_step - 2), -1):
            if found is None:
                found = global_bucket.fetch_inner_optimizer(each, destination)
    # No reason to end a start: without moments the learning rate warms up, and that is all.
    except GlobalUnavailableError as error:
        log.warning("The network's inner optimizer cannot be fetched: %s", error)
        found = None
    found = found or _own(config, bucket, destination)
    if found is None:
        # What came before it failed: from the first checkpoint on no start looks here again.
        shutil.rmtree(destination, ignore_errors=True)
    return found


def _own(config: Config, bucket: str, destination: Path) -> Path | None:
    try:
        with closing(buckets.open_own(config.store, bucket)) as store:
            reader = BucketReader(
                store,
                large=config.store.longest_transfer,
                concurrency=config.store.concurrency,
            )
            root = reader.metadata()
            if root is None:
                return None
            return reader.fetch_inner_optimizer(root.outer_step, destination)
    except (StoreError, ConfigError, OSError) as error:
        log.warning("This miner's own inner optimizer cannot be fetched: %s", error)
        return None


def begin(trainer: Trainer, folder: Path | None) -> None:
    """Take over what rank 0 fetched into ``folder``, and log what this start begins with.

    All ranks, at a start without a checkpoint.
    """
    from distributed_training.training.inner_state import take_over

    facts, why, schedule = None, "", trainer.schedule
    info, warning = (log.info, log.warning) if trainer.rank == 0 else (log.debug, log.debug)
    try:
        facts = take_over(trainer, folder)
    except ValueError as error:  # on all ranks alike; nothing has changed
        why = f" ({error})"
    if folder is not None:
        # Taken over or not: from here on checkpoints hold the moments.
        shutil.rmtree(folder.parent, ignore_errors=True)
    if facts is not None:
        rate = schedule.rate(facts.finished_steps)
        info(
            "Took over the inner optimizer of %d inner steps: the learning rate is %.3g",
            facts.finished_steps,
            rate,
        )
        if facts.peak is not None and not math.isclose(facts.peak, schedule.peak, rel_tol=1e-3):
            warning(
                "The network's highest learning rate is %.3g, this miner's %.3g: "
                "--neuron.learning_rate %.3g trains at the network's",
                facts.peak,
                schedule.peak,
                facts.peak,
            )
    elif trainer.settings.begin_at_peak:
        trainer.total_inner_steps = max(0, schedule.warmup_steps - 1)
        info("No inner optimizer to take over%s: begins at the highest learning rate", why)
    elif schedule.warmup_steps:
        (warning if trainer.outer_step or why else info)(  # at outer step 0 nobody has one yet
            "No inner optimizer to take over%s: the learning rate rises for %d inner steps; "
            "--neuron.begin_at_peak begins at the highest",
            why,
            schedule.warmup_steps,
        )
