"""The miner's next action, as one pure function of state and event.

Everything that happens becomes an *event* in one queue of rank 0: a call from the validator, the
end of an average, a new global state, a signal, the result of each command. :func:`decide` turns
the :class:`MinerState` and an event into the next state and what follows: *commands*, which reach
all ranks at a micro-batch boundary, and *tasks*, which rank 0 starts next to the loop. What follows
from one is an event again. No process, clock or network is touched here: events carry the time they
happened at, of ``time.monotonic()``, since a wall clock that is set must move no deadline.

=================  ==============================================================================
mode               meaning
=================  ==============================================================================
TRAINING           inner steps; the global outer step is compared with ours from time to time
AVERAGING          inner steps pause, unless ``Rules.train_in_rounds``; the swarm averages, then all
                   ranks vote on the outer step. A snapshot's gradient is checked now
AWAITING_GLOBAL    a round ended, successful or not: inner steps continue, and a global outer step
                   behind ours is not loaded until the validator has had its time to publish
                   (``reload`` timeout), or says that it did not
FETCHING           the global state is being fetched; inner steps continue, and their result is kept
                   should the fetch fail. No round: our pseudo-gradient is another outer step's
LOADING            the global state is being loaded; inner steps pause
STOPPING           the last command was STOP
=================  ==============================================================================
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from distributed_training.common.backoff import doubling
from distributed_training.protocol.types import Progress

from . import events as ev
from .events import Action, Decision, GlobalView, MinerState, Mode, Rules, Task
from .round import decide_round
from .store_round import decide_store_round, keep_upload

#: By the network's exchange: what follows from the events of its rounds; None: nothing of a round.
_ROUNDS = {"hivemind": decide_round, "store": decide_store_round}

#: What becomes of a view once nothing more is expected of the bucket at our last outer step.
_NO_LONGER_AWAITED = {
    GlobalView.UNPUBLISHED: GlobalView.SAME,
    GlobalView.UNPUBLISHED_PARTIAL: GlobalView.DIFFERENT,
}

_FETCH_AGAIN = timedelta(minutes=1)  # after a fetch that failed, doubled by each further one
_FETCH_AGAIN_LONGEST = timedelta(hours=1)


def trains(mode: Mode) -> bool:
    """Return whether inner steps run in this mode.

    Uploads continue then too: validators judge those of an outer step for half a round period after
    it, and a rebase stays in the outer step.
    """
    return mode in (Mode.TRAINING, Mode.AWAITING_GLOBAL, Mode.FETCHING)


def trains_now(state: MinerState) -> bool:
    """Return whether the next boundary may train: also in a round where steps continue then."""
    return trains(state.mode) or state.trains_on


def may_check(state: MinerState) -> bool:
    """Return whether a snapshot's gradient may be checked now.

    A round that has its average is not held up: the check follows the outer step.
    """
    return trains(state.mode) or (state.mode is Mode.AVERAGING and state.averaged is None)


def rebases(state: MinerState) -> bool:
    """Return whether the state being fetched or loaded is of our outer step: training is kept."""
    return state.fetch_target == state.outer_step


def goes_back(state: MinerState) -> bool:
    """Return whether the state being loaded is of no later outer step than this miner's."""
    return state.fetch_target is not None and state.fetch_target <= state.outer_step


def decide(state: MinerState, event: ev.Event, rules: Rules) -> Decision:
    """Return the next state, and the commands and tasks that follow from ``event``.

    Pure.

    An event that has no meaning in a mode (an average that ends after it was given up, say) changes
    nothing.
    """
    if state.mode is Mode.STOPPING:
        return state, ()
    averaging = state.mode is Mode.AVERAGING  # the round's average may still be to come
    if isinstance(event, ev.RolledBack):
        state = keep_upload(state, event)
    match event:
        case ev.StopRequested(reason=reason, exit_status=status):
            after = replace(
                state, mode=Mode.STOPPING, round=None, exit_status=status, stop_reason=reason
            )
            if averaging:
                return after, (Task.CANCEL_AVERAGE, Action.STOP)
            return after, (Action.STOP,)
        case ev.InnerStepDone(diverged=True) if averaging and state.trains_on:
            # No roll-back while the average is to come: its checkpoint may be of the outer step
            # before, and the average is of this one. Skipped steps changed no weights.
            return replace(state, trains_on=False), ()
        # With an update at hand after it: the checkpoint may be of an earlier outer step.
        case ev.InnerStepDone(diverged=True) if trains(state.mode) and state.update is None:
            return state.clear_unsaved(), (Action.ROLL_BACK,)
        case ev.InnerStepDone(report=report) if trains_now(state) and not report.skipped:
            # Time counts as well as steps: a checkpoint has 16 bytes a parameter, and a GPU may
            # take 25 steps in a minute.
            steps, seconds = state.unsaved_steps + 1, state.unsaved_seconds + report.seconds
            due = steps >= rules.checkpoint_steps and seconds >= rules.checkpoint_seconds
            # Not in a round: its copies would be in host memory next to the round's.
            if due and not state.in_round:
                return state.clear_unsaved(), (Action.CHECKPOINT,)
            return replace(state, unsaved_steps=steps, unsaved_seconds=seconds), ()
        case ev.SnapshotWanted() if trains(state.mode):
            # A checkpoint of the same boundary shares the snapshot's copies in host memory.
            if 0 < rules.checkpoint_seconds <= 2 * state.unsaved_seconds:
                return state.clear_unsaved(), (Action.SNAPSHOT, Action.CHECKPOINT)
            return state, (Action.SNAPSHOT,)
        case ev.ModelAsked():
            return replace(state, model_asked=True), ()
        case ev.PublicationEnded(report=upload) if upload.ok and upload.model:
            return replace(state, model_asked=False), ()
        case ev.SnapshotComplete() if may_check(state):
            return state, (Action.CHECK_GRADIENT,)
        case ev.RolledBack(progress=Progress(outer_step=outer)) if outer != state.outer_step:
            view = _NO_LONGER_AWAITED.get(state.view, state.view)
            after = replace(state, outer_step=outer, view=view)
            return after, (Task.COMPARE_EPOCHS,)
        case ev.PlaceSeen(outer_step=outer, inner_steps=steps):
            if not steps or state.place == (outer, steps):
                return state, ()
            after = replace(state, place=(outer, steps))
            return after, _follow_schedule(after)
        case ev.RolledBack():  # the checkpoint may be older than the place
            return state, _follow_schedule(state)
        case _:
            decided = _ROUNDS[rules.exchange](state, event, rules)
            return _follow_global_state(state, event) if decided is None else decided


def _follow_global_state(state: MinerState, event: ev.Event) -> Decision:
    """Compare with the global bucket, fetch what is there, load it."""
    match event:
        case ev.Tick(at=at) if state.mode is Mode.AWAITING_GLOBAL and at >= state.global_due:
            after = replace(state, mode=Mode.TRAINING)
            return after, (Task.COMPARE_EPOCHS, Task.COMPARE_WEIGHTS)
        case ev.ValidatorHeard(outer_step=said, at=at) if (
            state.mode is Mode.AWAITING_GLOBAL
            and said < state.outer_step
            and said != state.failed_target
        ):
            # It calls nobody while it averages or publishes: our outer step is not on its way.
            return replace(state, global_due=min(at, state.global_due)), ()
        case ev.GlobalEpochSeen(outer_step=seen, at=at):
            if state.view is GlobalView.UNREAD:
                state = replace(state, view=GlobalView.UNPUBLISHED)
            view = _NO_LONGER_AWAITED.get(state.view, state.view)
            if state.mode is Mode.AWAITING_GLOBAL:
                # The root metadata is written last: our outer step in it is published whole. The
                # next round may be called before the time to publish is up, and must begin from the
                # same weights.
                published = view is not state.view and seen != state.failed_target
                if seen == state.outer_step and (published or at >= state.global_due):
                    if view is GlobalView.DIFFERENT:
                        return _begin_fetch(state, seen)
                    after = replace(state, mode=Mode.TRAINING, view=view)
                    return after, (Task.COMPARE_WEIGHTS,)
                # Before its time is up the validator may still be publishing the one we already
                # have. An outer step ahead of ours is never on its way: it is there.
                # One that could not be fetched is not asked for again before its time.
                waits = seen <= state.outer_step or seen == state.failed_target
                if at < state.global_due and waits:
                    return state, ()
            elif state.mode is not Mode.TRAINING:
                return state, ()
            if seen != state.outer_step or view is GlobalView.DIFFERENT:
                return _begin_fetch(state, seen)
            return state, ()
        case ev.WeightsCompared(outer_step=outer, same=False) if (
            state.mode is Mode.TRAINING and outer == state.outer_step
        ):
            return _begin_fetch(state, outer)
        case ev.GlobalFetched(folder=folder) if state.mode is Mode.FETCHING:
            after = replace(state, mode=Mode.LOADING, fetched=folder)
            return after, (Action.REBASE if rebases(state) else Action.LOAD,)
        case ev.GlobalFetchFailed(at=at) if state.mode in (Mode.FETCHING, Mode.LOADING):
            return _fetch_failed(state, at), ()
        case ev.LoadFailed(problem=problem, at=at) if state.mode is Mode.LOADING:
            after = replace(_fetch_failed(state, at), problem=problem)
            # Only by the losses of this miner, which are others after its next start or load.
            passing = event.awful and goes_back(state)
            return after, () if passing else (Task.REFUSE_GLOBAL,)
        case ev.Loaded(outer_step=outer) if state.mode is Mode.LOADING:
            after = MinerState(
                mode=Mode.TRAINING,
                outer_step=outer,
                place=state.place,
                model_asked=state.model_asked,
            )
            return after, (*_follow_schedule(after), Action.CHECKPOINT)
        case _:
            return state, ()


def _follow_schedule(state: MinerState) -> tuple[Action, ...]:
    """Return what brings all ranks to the network's place, if it is known of our outer step."""
    known = state.place is not None and state.place[0] == state.outer_step
    return (Action.FOLLOW_SCHEDULE,) if known else ()


def _begin_fetch(state: MinerState, target: int) -> Decision:
    view = _NO_LONGER_AWAITED.get(state.view, state.view)
    # Unread it stays: from weights nobody knows at which outer step the bucket is.
    if target == state.outer_step and view is not GlobalView.UNREAD:
        view = GlobalView.DIFFERENT
    after = replace(state, mode=Mode.FETCHING, fetch_target=target, view=view)
    return after, (Task.FETCH_GLOBAL,)


def _fetch_failed(state: MinerState, at: float) -> MinerState:
    """Continue with stale weights, which beats not training; a later comparison tries again."""
    again = state.fetch_target == state.failed_target
    failures = 1 + (state.fetch_failures if again else 0)
    wait = doubling(failures, first=_FETCH_AGAIN, longest=_FETCH_AGAIN_LONGEST)
    return replace(
        state,
        mode=Mode.AWAITING_GLOBAL,
        fetch_target=None,
        fetch_failures=failures,
        failed_target=state.fetch_target,
        global_due=at + wait.total_seconds(),
    )
