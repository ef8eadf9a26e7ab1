"""The miner's next action, as one pure function of state and event.

Everything that happens becomes an *event* in one queue of rank 0: a close, an update, a signal, the
result of each command. :func:`decide` turns the :class:`MinerState` and an event into the next
state and what follows: *commands*, which reach all ranks at a micro-batch boundary, and *tasks*,
which rank 0 starts next to the loop. What follows from one is an event again. No process, clock or
network is touched here: events carry the time at which they happened, of ``time.monotonic()``,
because a wall clock that is set must move no deadline.

=================  ==============================================================================
mode               meaning
=================  ==============================================================================
TRAINING           inner steps
AWAITING_GLOBAL    inner steps; an update could not be applied, and is asked for again later
STOPPING           the last command was STOP
=================  ==============================================================================
"""

from __future__ import annotations

from dataclasses import replace

from distributed_training.protocol.types import Progress

from . import events as ev
from .events import Action, Decision, MinerState, Mode, Rules, Task
from .store_round import decide_round, keep_upload


def decide(state: MinerState, event: ev.Event, rules: Rules) -> Decision:
    """Return the next state, and the commands and tasks that follow from ``event``.

    Pure. An event that has no meaning in a mode changes nothing.
    """
    if state.mode is Mode.STOPPING:
        return state, ()
    if isinstance(event, ev.RolledBack):
        state = keep_upload(state, event)
    match event:
        case ev.StopRequested(reason=reason, exit_status=status):
            after = replace(state, mode=Mode.STOPPING, exit_status=status, stop_reason=reason)
            return after, (Action.STOP,)
        case ev.InnerStepDone(diverged=True):
            if state.update is None:
                return state.clear_unsaved(), (Action.ROLL_BACK,)
            return state, ()  # the checkpoint may be of an earlier outer step than the update
        case ev.InnerStepDone(report=report) if not report.skipped:
            # Time counts as well as steps: a checkpoint has 16 bytes a parameter, and a GPU may
            # take 25 steps in a minute.
            steps, seconds = state.unsaved_steps + 1, state.unsaved_seconds + report.seconds
            due = steps >= rules.checkpoint_steps and seconds >= rules.checkpoint_seconds
            # Not in a round: its copies would be in host memory next to the round's.
            if due and not state.in_round:
                return state.clear_unsaved(), (Action.CHECKPOINT,)
            return replace(state, unsaved_steps=steps, unsaved_seconds=seconds), ()
        case ev.RolledBack(progress=Progress(outer_step=outer)) if outer != state.outer_step:
            return replace(state, outer_step=outer), (Task.SHOW_APPLIED,)
        case ev.RolledBack():  # the checkpoint may be older than the place
            known = state.place is not None and state.place[0] == state.outer_step
            return state, (Action.FOLLOW_SCHEDULE,) if known else ()
        case _:
            return decide_round(state, event)
