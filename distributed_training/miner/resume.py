"""Decide what a start continues from: its last checkpoint, or the network's weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_training.common.files import read_json_object
from distributed_training.node.start import NetworkFailure, OldRunFolder
from distributed_training.protocol import keys
from distributed_training.training.checkpoint import (
    Checkpointer,
    is_complete,
    newest_first,
    outer_step_of,
)
from distributed_training.training.held_weights import HeldWeights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartupInfo:
    """The facts that rank 0 found out and every rank needs; JSON-able."""

    uid: int = 0
    model_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_path: str = ""
    eos_id: int = 0
    global_outer_step: int = 0
    hotkey: str = ""
    rules: str = ""  # the version of the network's file that holds; empty: as the file given
    problem: str = ""  # why there is no start; the other ranks leave quietly then


def first_outer_step(folder: Path, outer_step: int) -> int:
    """Return the outer step that a start continues from: its newest complete checkpoint's.

    A kill leaves one that is not complete, perhaps of a later outer step, for which another
    version of the network's file may hold.

    Args:
        folder: Of the checkpoints.
        outer_step: Of the network's weights, for a start without a checkpoint.
    """
    found = (folder / name for name in newest_first(folder))
    complete = next((path for path in found if is_complete(path)), None)
    reached = None if complete is None else outer_step_of(complete)
    return outer_step if reached is None else reached


def refuse_old_checkpoints(folder: Path) -> None:
    """Raise OldRunFolder where the checkpoints of ``folder`` are of subnet 38's kind of network.

    They hold another outer step's state, and weights that no network of today has.
    """
    newest = max(folder.glob("checkpoint-*/rank-0.json"), default=None)
    state = ((newest and read_json_object(newest)) or {}).get("state")
    if isinstance(state, dict) and "outer_momentum" in state:
        raise OldRunFolder(
            f"{folder} holds checkpoints of the old hivemind kind of network (subnet 38), which "
            "this version cannot continue, so nothing was started: set --neuron.run_folder to a "
            "new folder; the weights come from the network"
        )


def resume_training(
    trainer: HeldWeights,
    checkpointer: Checkpointer,
    info: StartupInfo,
    global_folder: Path | None,
) -> dict[str, Any]:
    """Load the last checkpoint, or the network's weights where there is none. Collective.

    Any checkpoint will do, because updates lead from each outer step to the network's. Training
    continues at the network's place in the learning rate's schedule.

    Args:
        trainer: This rank's weights.
        checkpointer: Finds the last whole checkpoint.
        info: What rank 0 found out.
        global_folder: Rank 0's folder of the network's weights; None on other ranks.

    Returns:
        What was kept in the checkpoint; empty after a fresh start.

    Raises:
        NetworkFailure: Where the weights are not this model's.
    """
    steps = info.model_config.get("total_inner_steps") or 0
    if (restored := checkpointer.restore()) is not None:
        progress, kept = restored
        log.info(
            "Resumed at outer step %d, inner step %d", progress.outer_step, progress.inner_step
        )
        # The checkpoint may be of before the place was known.
        trainer.follow_schedule(info.global_outer_step, steps)
        return kept
    try:
        weights = None if global_folder is None else global_folder / keys.MODEL
        trainer.load_global(weights, info.global_outer_step)
    except ValueError as error:  # on all ranks alike; nothing has changed
        raise NetworkFailure(
            f"the network's weights do not fit this program ({error}), so nothing is trained: look "
            "for a newer version; other weights are fetched as soon as they are published"
        ) from None
    trainer.follow_schedule(info.global_outer_step, steps)
    return {}
