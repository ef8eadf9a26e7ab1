"""The miner's state machine as a table: no process, no clock, no network.

The rows about rounds are in ``test_miner_store_round.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed_training.miner import events as ev
from distributed_training.miner.events import Action, MinerState, Mode, Rules, Task
from distributed_training.miner.state_machine import decide
from distributed_training.protocol.types import Base, Progress, Update
from tests.tools.miner_parts import step_report

RULES = Rules(checkpoint_steps=10)
TRAINING, AWAITING_GLOBAL, STOPPING = Mode.TRAINING, Mode.AWAITING_GLOBAL, Mode.STOPPING
CHECKPOINT, ROLL_BACK = (Action.CHECKPOINT,), (Action.ROLL_BACK,)


def state(mode: Mode, **fields: Any) -> MinerState:
    return replace(MinerState(mode=mode, outer_step=12), **fields)


def step(inner_step: int, **fields: Any) -> ev.InnerStepDone:
    return ev.InnerStepDone(step_report(inner_step, outer_step=12, **fields))


def skipped(inner_step: int) -> ev.InnerStepDone:
    return step(inner_step, skipped=True)


def diverged(inner_step: int) -> ev.InnerStepDone:
    return replace(skipped(inner_step), diverged=True)


NINE = state(TRAINING, unsaved_steps=9)
PLACED = state(TRAINING, place=(12, 900))
UPDATING = state(TRAINING, update=Update(13, Path("u"), Base.KEPT, None, "ab"))

Row = tuple[str, MinerState, ev.Event, Mode, tuple[Action | Task, ...]]
# fmt: off
TABLE: list[Row] = [
    ("an ordinary step", state(TRAINING), step(3), TRAINING, ()),
    ("a step with a checkpoint", NINE, step(20), TRAINING, CHECKPOINT),
    ("a checkpoint is not of a skipped step", NINE, skipped(20), TRAINING, ()),
    ("steps count while an update is awaited", replace(NINE, mode=AWAITING_GLOBAL),
     step(20), AWAITING_GLOBAL, CHECKPOINT),
    ("losses are not finite", state(TRAINING), diverged(20), TRAINING, ROLL_BACK),
    ("losses are not finite while an update waits", UPDATING, diverged(20), TRAINING, ()),
    ("no checkpoint in a round", replace(UPDATING, unsaved_steps=9), step(20), TRAINING, ()),
    ("there is nothing to roll back to", state(TRAINING), ev.RolledBack(None), TRAINING, ()),
    ("a roll-back within the outer step", state(TRAINING), ev.RolledBack(Progress(12)),
     TRAINING, ()),
    ("a roll-back within it follows the schedule", PLACED, ev.RolledBack(Progress(12)),
     TRAINING, (Action.FOLLOW_SCHEDULE,)),
    ("a roll-back, and the place is of another outer step", state(TRAINING, place=(11, 800)),
     ev.RolledBack(Progress(12)), TRAINING, ()),
    ("a roll-back to the outer step before, whose update is asked for", PLACED,
     ev.RolledBack(Progress(11)), TRAINING, (Task.SHOW_APPLIED,)),
    ("ticks mean nothing while it trains", state(TRAINING), ev.Tick(9e9), TRAINING, ()),
    ("a stop while training", state(TRAINING), ev.StopRequested("SIGTERM"),
     STOPPING, (Action.STOP,)),
    ("one stop is enough", state(STOPPING), ev.StopRequested("SIGTERM"), STOPPING, ()),
    ("a step after the stop", state(STOPPING), step(20), STOPPING, ()),
]
# fmt: on


@pytest.mark.parametrize(
    ("before", "event", "mode", "actions"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_table(
    before: MinerState, event: ev.Event, mode: Mode, actions: tuple[Action | Task, ...]
) -> None:
    after, decided = decide(before, event, RULES)
    assert after.mode is mode
    assert decided == actions


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, 1200), (3.0, 200), (24.0, 25), (60.0, 25)])
def test_checkpoints_are_steps_and_time_apart(seconds: float, expected: int) -> None:
    """They are at least 25 steps and 10 minutes apart for every length of an inner step."""
    rules = Rules(checkpoint_steps=25, checkpoint_seconds=600)
    now, at = state(TRAINING, unsaved_steps=20, unsaved_seconds=599.0), list[int]()
    now, actions = decide(now, diverged(1), rules)  # a roll-back: nothing is left to save
    assert actions == ROLL_BACK
    for number in range(1, 2 * expected + 1):
        now, actions = decide(now, step(number, seconds=seconds), rules)
        at += [number] if actions == CHECKPOINT else []
    assert at == [expected, 2 * expected]
