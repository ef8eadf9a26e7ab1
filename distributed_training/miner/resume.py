"""Decide what a start continues from: its last checkpoint, or the global state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distributed_training.common.files import read_json_object
from distributed_training.data.pipeline import DataPipeline
from distributed_training.node.start import NetworkFailure
from distributed_training.protocol import lines
from distributed_training.protocol.types import RankFailedError
from distributed_training.store.bucket_reader import refuse
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.held_weights import HeldWeights
from distributed_training.training.local_evaluation import WeightsWorseThanGuess

from .loop import not_loaded, state_files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartupInfo:
    """The facts that rank 0 found out and every rank needs; JSON-able."""

    uid: int = 0
    model_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_path: str = ""
    eos_id: int = 0
    global_outer_step: int = 0
    global_seen: bool = True  # in the bucket; else it is the newest on rank 0's disk
    global_uid: int | None = None  # of that bucket's owner
    first_block: int = 0  # of the chain: what a fresh start trains on first
    hotkey: str = ""
    follows: bool = False  # its place in the learning rate's schedule is the network's
    rules: str = ""  # the version of the network's file that holds; empty: as the file given
    problem: str = ""  # why there is no start; the other ranks leave quietly then


_SAMPLE_PATIENCE = 30.0  # seconds, half of --neuron.stop_timeout: a stop is not looked at here


def first_sample(
    data: DataPipeline, block: int, count: int, alive: Callable[[], None]
) -> torch.Tensor | None:
    """Return text to measure the global state with, before the loop; None if it does not come."""
    sample = data.sample(count)
    if sample is not None or not block:
        return sample
    data.request(block)  # the block that a fresh start trains on first
    deadline = time.monotonic() + _SAMPLE_PATIENCE
    # A source that is away holds up no start: its workers ask on, during the swarm's start.
    while data.ready(block) is None and time.monotonic() < deadline:
        alive()
        time.sleep(0.05)
    return data.sample(count)


def goes_on(reached: int, outer_step: int, *, seen: bool, store: bool = False) -> bool:
    """Return whether a start continues from a checkpoint at ``reached``: see resume_training.

    ``outer_step``: of the global state; ``seen``: in the bucket, else on the disk. ``store``: of a
    store network, where updates lead from any outer step to the network's.
    """
    return store or reached in (outer_step, outer_step + 1) or (reached > outer_step and not seen)


def first_outer_step(folder: Path, outer_step: int, *, seen: bool, store: bool = False) -> int:
    """Return the outer step that a start continues from, as the newest checkpoint's files say.

    ``folder``: of the checkpoints; for the rest see :func:`goes_on`.
    """
    newest = max(folder.glob("checkpoint-*/rank-0.json"), key=_written_at, default=None)
    content = None if newest is None else read_json_object(newest)
    progress = (content or {}).get("progress")
    reached = progress.get("outer_step") if isinstance(progress, dict) else None
    if isinstance(reached, int) and goes_on(reached, outer_step, seen=seen, store=store):
        return reached
    return outer_step


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed just now
        return 0.0


def resume_training(
    trainer: HeldWeights,
    checkpointer: Checkpointer,
    info: StartupInfo,
    global_folder: Path | None,
    *,
    sample: Callable[[], torch.Tensor | None] = lambda: None,
    store: bool = False,
) -> dict[str, Any]:
    """Load the checkpoint where it belongs to the global state, else the global state.

    Returns what was kept in the checkpoint. Without any, training begins at the network's place in
    the learning rate's schedule. ``sample``: text of this rank, to measure the global state with.

    A checkpoint one outer step ahead is kept: this miner was ended between its outer step and the
    validator's upload; comparing outer steps later decides. So is any later one where the global
    state is the newest on the disk, since the bucket did not answer. ``store``: of a store network,
    where any is kept, and there is no outer momentum. Raises NetworkFailure.
    """
    restored, outer_step = checkpointer.restore(), info.global_outer_step
    steps = info.model_config.get("total_inner_steps") or 0
    if restored is not None:
        progress, kept = restored
        reached = progress.outer_step
        if goes_on(reached, outer_step, seen=info.global_seen, store=store):
            log.info("Resumed at outer step %d, inner step %d", reached, progress.inner_step)
            if info.follows:  # the checkpoint may be of before the place was known
                trainer.follow_schedule(outer_step, steps)
            return kept
        log.info(lines.epochs_differ(reached, outer_step))
    try:
        weights, outer_optimizer = state_files(global_folder)
        text = None if store else sample()
        trainer.load_global(weights, None if store else outer_optimizer, outer_step, text)
    except ValueError as error:  # on all ranks alike; nothing has changed
        awful, back = None, restored is not None and restored[0].outer_step > outer_step
        if isinstance(error, WeightsWorseThanGuess):
            awful = lines.worse_weights(info.global_uid, error)
            if restored is not None and back:
                awful = lines.worse_weights_back(outer_step, restored[0].outer_step, error)
        # Not what is awful only by the losses of this miner, which tries it again as it runs.
        if global_folder is not None and not (awful and back):
            refuse(global_folder, str(error))  # the next start waits for another one
        if restored is None:
            raise NetworkFailure(
                awful
                or f"the global state does not fit this program ({error}), so nothing is trained: "
                "look for a newer version; another state is fetched as soon as it is published"
            ) from None
        if awful is None:
            awful = f"The global state cannot be loaded ({error}). Training continues without it."
        log.warning("%s", awful)
        return restored[1]
    except RankFailedError as error:  # on all ranks alike, before anything has changed
        if restored is None:
            raise
        log.warning("%s", lines.not_fetched(not_loaded(error)))
        return restored[1]
    if restored is None:
        trainer.begin_schedule(steps, follows=info.follows)
    elif info.follows:
        trainer.follow_schedule(outer_step, steps)
    return {}
