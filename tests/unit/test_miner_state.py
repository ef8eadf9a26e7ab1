"""The miner's state machine as a table: no process, no clock, no network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.miner.state import (
    COLLECTIVE,
    AllReduceCalled,
    AveragingEnded,
    Do,
    Event,
    GlobalEpochSeen,
    GlobalFetched,
    GlobalFetchFailed,
    InnerStepEnded,
    LoadEnded,
    MinerState,
    Mode,
    OuterStepEnded,
    PseudoGradientWritten,
    RolledBack,
    StopRequested,
    Tick,
    Timing,
    WeightsCompared,
    trains,
    transition,
)
from distributed_training.protocol.types import AllReduceFault, AllReduceResult, RoundRequest

TIMING = Timing(reload_seconds=2640)
CALL = RoundRequest(caller="5Validator", received_at=1e9)
RESULT = AllReduceResult(
    peers=("a", "b", "c"),
    failed_peers=(),
    matchmaking_seconds=1.0,
    transfer_seconds=2.0,
    total_seconds=3.0,
)


def state(mode: Mode, **fields: object) -> MinerState:
    base = MinerState(mode=mode, outer_step=12)
    if mode is Mode.AVERAGING:
        base = replace(base, round=CALL, called_at=1000.0)
    if mode is Mode.AWAITING_GLOBAL:
        base = replace(base, global_due=3640.0)
    return replace(base, **fields)  # type: ignore[arg-type]


TABLE: list[tuple[str, MinerState, Event, Mode, tuple[Do, ...]]] = [
    # --- a call from the validator
    (
        "a call while training starts a round",
        state(Mode.TRAINING),
        AllReduceCalled(CALL, 1000.0),
        Mode.AVERAGING,
        (Do.PAUSE_UPLOADS, Do.AVERAGE),
    ),
    (
        "a second round may follow before the global state was seen",
        state(Mode.AWAITING_GLOBAL),
        AllReduceCalled(CALL, 1000.0),
        Mode.AVERAGING,
        (Do.PAUSE_UPLOADS, Do.AVERAGE),
    ),
    ("a call in a round", state(Mode.AVERAGING), AllReduceCalled(CALL, 1000.0), Mode.AVERAGING, ()),
    ("a call in a load", state(Mode.LOADING), AllReduceCalled(CALL, 1000.0), Mode.LOADING, ()),
    ("a call in a fetch", state(Mode.FETCHING), AllReduceCalled(CALL, 1000.0), Mode.FETCHING, ()),
    (
        "inner steps go on while the global state is fetched, without snapshots",
        state(Mode.FETCHING),
        InnerStepEnded(50, snapshot_due=True, checkpoint_due=True),
        Mode.FETCHING,
        (Do.CHECKPOINT,),
    ),
    (
        "fetched but none of this model's: as a fetch that failed",
        state(Mode.LOADING),
        GlobalFetchFailed("another shape", 5000.0),
        Mode.AWAITING_GLOBAL,
        (Do.RESUME_UPLOADS,),
    ),
    (
        "an epoch ahead that could not be fetched is asked for later",
        state(Mode.AWAITING_GLOBAL, fetch_failures=1, failed_target=13),
        GlobalEpochSeen(13, 2000.0),
        Mode.AWAITING_GLOBAL,
        (),
    ),
    (
        "a call when stopping",
        state(Mode.STOPPING),
        AllReduceCalled(CALL, 1000.0),
        Mode.STOPPING,
        (),
    ),
    # --- the round
    (
        "buffers are written: the swarm starts",
        state(Mode.AVERAGING),
        PseudoGradientWritten(1.0),
        Mode.AVERAGING,
        (Do.START_AVERAGING,),
    ),
    (
        "buffers written too late",
        state(Mode.AWAITING_GLOBAL),
        PseudoGradientWritten(1.0),
        Mode.AWAITING_GLOBAL,
        (),
    ),
    (
        "an average is there: all ranks prepare and vote",
        state(Mode.AVERAGING),
        AveragingEnded(RESULT),
        Mode.AVERAGING,
        (Do.OUTER_STEP,),
    ),
    (
        "no average: training goes on",
        state(Mode.AVERAGING),
        AveragingEnded(None, AllReduceFault.NO_GROUP),
        Mode.AWAITING_GLOBAL,
        (Do.RESUME_UPLOADS,),
    ),
    (
        "an average that was given up",
        state(Mode.TRAINING),
        AveragingEnded(RESULT),
        Mode.TRAINING,
        (),
    ),
    (
        "committed: the checkpoint decides after a kill",
        state(Mode.AVERAGING),
        OuterStepEnded(True, 13, 1100.0),
        Mode.AWAITING_GLOBAL,
        (Do.CHECKPOINT, Do.RESUME_UPLOADS),
    ),
    (
        "rolled back",
        state(Mode.AVERAGING),
        OuterStepEnded(False, 12, 1100.0),
        Mode.AWAITING_GLOBAL,
        (Do.RESUME_UPLOADS,),
    ),
    # --- inner steps
    ("an ordinary step", state(Mode.TRAINING), InnerStepEnded(3), Mode.TRAINING, ()),
    (
        "a step with a snapshot due",
        state(Mode.TRAINING),
        InnerStepEnded(50, snapshot_due=True),
        Mode.TRAINING,
        (Do.SNAPSHOT,),
    ),
    (
        "snapshot and checkpoint of the same step",
        state(Mode.AWAITING_GLOBAL),
        InnerStepEnded(50, snapshot_due=True, checkpoint_due=True),
        Mode.AWAITING_GLOBAL,
        (Do.SNAPSHOT, Do.CHECKPOINT),
    ),
    (
        "losses that are not finite win over a snapshot",
        state(Mode.TRAINING),
        InnerStepEnded(50, snapshot_due=True, roll_back=True),
        Mode.TRAINING,
        (Do.ROLL_BACK,),
    ),
    (
        "rolled back within the epoch",
        state(Mode.TRAINING),
        RolledBack(12),
        Mode.TRAINING,
        (),
    ),
    (
        "rolled back to the epoch before: the commit's checkpoint was not written",
        state(Mode.AWAITING_GLOBAL),
        RolledBack(11),
        Mode.AWAITING_GLOBAL,
        (Do.COMPARE_EPOCHS,),
    ),
    # --- the global state
    (
        "the same epoch",
        state(Mode.TRAINING),
        GlobalEpochSeen(12, 5000.0),
        Mode.TRAINING,
        (),
    ),
    (
        "behind the global epoch",
        state(Mode.TRAINING),
        GlobalEpochSeen(13, 5000.0),
        Mode.FETCHING,
        (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL),
    ),
    (
        "ahead of the global epoch: the validator refused the round",
        state(Mode.TRAINING),
        GlobalEpochSeen(11, 5000.0),
        Mode.FETCHING,
        (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL),
    ),
    (
        "the validator is still publishing",
        state(Mode.AWAITING_GLOBAL),
        GlobalEpochSeen(11, 2000.0),
        Mode.AWAITING_GLOBAL,
        (),
    ),
    (
        "missed a round that others finished: no need to wait",
        state(Mode.AWAITING_GLOBAL),
        GlobalEpochSeen(13, 2000.0),
        Mode.FETCHING,
        (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL),
    ),
    (
        "agreed before the time is up: the wait goes on, for the next round may come late",
        state(Mode.AWAITING_GLOBAL),
        GlobalEpochSeen(12, 2000.0),
        Mode.AWAITING_GLOBAL,
        (),
    ),
    (
        "agreed after it",
        state(Mode.AWAITING_GLOBAL),
        GlobalEpochSeen(12, 3641.0),
        Mode.TRAINING,
        (Do.COMPARE_WEIGHTS,),
    ),
    (
        "agreed after a round that lost parts: others' weights may differ",
        state(Mode.AWAITING_GLOBAL, partial=True),
        GlobalEpochSeen(12, 3641.0),
        Mode.FETCHING,
        (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL),
    ),
    (
        "the same, seen while training",
        state(Mode.TRAINING, partial=True),
        GlobalEpochSeen(12, 5000.0),
        Mode.FETCHING,
        (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL),
    ),
    (
        "our weights are the global ones",
        state(Mode.TRAINING),
        WeightsCompared(12, True),
        Mode.TRAINING,
        (),
    ),
    (
        "our weights are not the global ones",
        state(Mode.TRAINING),
        WeightsCompared(12, False),
        Mode.FETCHING,
        (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL),
    ),
    (
        "a comparison of an epoch that is over",
        state(Mode.TRAINING),
        WeightsCompared(11, False),
        Mode.TRAINING,
        (),
    ),
    (
        "a comparison that ends in a round",
        state(Mode.AVERAGING),
        WeightsCompared(12, False),
        Mode.AVERAGING,
        (),
    ),
    (
        "fetched because our weights differed: what was trained is kept",
        state(Mode.FETCHING, rebase=True),
        GlobalFetched(12, Path("epoch-12")),
        Mode.LOADING,
        (Do.REBASE,),
    ),
    (
        "disagreed after it",
        state(Mode.AWAITING_GLOBAL),
        GlobalEpochSeen(11, 3641.0),
        Mode.FETCHING,
        (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL),
    ),
    (
        "an epoch seen in a round does not end it",
        state(Mode.AVERAGING),
        GlobalEpochSeen(13, 2000.0),
        Mode.AVERAGING,
        (),
    ),
    ("not yet", state(Mode.AWAITING_GLOBAL), Tick(3639.0), Mode.AWAITING_GLOBAL, ()),
    (
        "the time is up: compare",
        state(Mode.AWAITING_GLOBAL),
        Tick(3640.0),
        Mode.TRAINING,
        (Do.COMPARE_EPOCHS, Do.COMPARE_WEIGHTS),
    ),
    ("ticks mean nothing else", state(Mode.TRAINING), Tick(9e9), Mode.TRAINING, ()),
    (
        "fetched",
        state(Mode.FETCHING),
        GlobalFetched(13, Path("epoch-13")),
        Mode.LOADING,
        (Do.LOAD,),
    ),
    (
        "fetch failed: stale weights beat no training",
        state(Mode.FETCHING),
        GlobalFetchFailed("404", 5000.0),
        Mode.AWAITING_GLOBAL,
        (Do.RESUME_UPLOADS,),
    ),
    (
        "loaded",
        state(Mode.LOADING),
        LoadEnded(13),
        Mode.TRAINING,
        (Do.CHECKPOINT, Do.RESUME_UPLOADS),
    ),
    # --- the end
    (
        "stop while training",
        state(Mode.TRAINING),
        StopRequested("SIGTERM"),
        Mode.STOPPING,
        (Do.STOP,),
    ),
    (
        "stop in a round frees the swarm first",
        state(Mode.AVERAGING),
        StopRequested("SIGTERM"),
        Mode.STOPPING,
        (Do.CANCEL_AVERAGING, Do.STOP),
    ),
    (
        "one stop is enough",
        state(Mode.STOPPING),
        StopRequested("SIGTERM"),
        Mode.STOPPING,
        (),
    ),
]


@pytest.mark.parametrize(
    ("before", "event", "mode", "orders"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_table(before: MinerState, event: Event, mode: Mode, orders: tuple[Do, ...]) -> None:
    after, given_orders = transition(before, event, TIMING)
    assert after.mode is mode
    assert given_orders == orders


def test_fetches_that_fail_are_tried_more_and_more_seldom() -> None:
    now, waits = state(Mode.TRAINING), []
    at = 5000.0
    for _ in range(9):
        now, orders = transition(now, GlobalEpochSeen(13, at), TIMING)
        assert (now.mode, orders) == (Mode.FETCHING, (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL))
        now, _ = transition(now, GlobalFetchFailed("NaN", at), TIMING)
        waits.append(now.global_due - at)
        at = now.global_due
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    now, _ = transition(now, GlobalEpochSeen(13, at), TIMING)
    now, _ = transition(now, GlobalFetched(13, Path("epoch-13")), TIMING)
    now, _ = transition(now, LoadEnded(13), TIMING)
    assert now.fetch_failures == 0


def test_a_newer_epoch_is_not_held_back_by_one_that_failed() -> None:
    now, _ = transition(state(Mode.TRAINING), GlobalEpochSeen(13, 5000.0), TIMING)
    for _ in range(7):
        now, _ = transition(now, GlobalFetchFailed("NaN", 5000.0), TIMING)
        assert transition(now, GlobalEpochSeen(13, 5001.0), TIMING)[1] == ()
        now, _ = transition(now, GlobalEpochSeen(13, now.global_due), TIMING)
    now, _ = transition(now, GlobalFetchFailed("NaN", 5000.0), TIMING)
    now, orders = transition(now, GlobalEpochSeen(14, 5001.0), TIMING)
    assert (now.fetch_target, orders) == (14, (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL))
    now, _ = transition(now, GlobalFetchFailed("NaN", 5002.0), TIMING)
    assert now.global_due == 5062.0, "another epoch, another count"


def test_a_roll_back_to_an_older_epoch_leads_to_the_global_one() -> None:
    after, _ = transition(state(Mode.TRAINING), RolledBack(11), TIMING)
    assert after.outer_step == 11
    after, orders = transition(after, GlobalEpochSeen(12, 5000.0), TIMING)
    assert (after.fetch_target, orders) == (12, (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL))


def test_a_failed_round_waits_from_the_call_not_from_the_failure() -> None:
    after, _ = transition(
        state(Mode.AVERAGING), AveragingEnded(None, AllReduceFault.TIMEOUT), TIMING
    )
    assert after.global_due == 1000.0 + TIMING.reload_seconds
    assert after.outer_step == 12


def test_a_committed_round_moves_the_epoch() -> None:
    after, _ = transition(state(Mode.AVERAGING), OuterStepEnded(True, 13, 1100.0), TIMING)
    assert (after.outer_step, after.round) == (13, None)


def test_a_failed_fetch_does_not_forget_that_weights_differ() -> None:
    loading, _ = transition(state(Mode.TRAINING), WeightsCompared(12, False), TIMING)
    assert loading.rebase and loading.fetch_target == 12
    waiting, _ = transition(loading, GlobalFetchFailed("404", 5000.0), TIMING)
    assert waiting.partial and not waiting.rebase
    again, orders = transition(waiting, GlobalEpochSeen(12, 5060.0), TIMING)
    assert again.rebase and Do.FETCH_GLOBAL in orders
    loading, _ = transition(again, GlobalFetched(12, Path("epoch-12")), TIMING)
    done, _ = transition(loading, LoadEnded(12), TIMING)
    assert (done.mode, done.partial, done.rebase) == (Mode.TRAINING, False, False)


def test_a_whole_round_clears_what_a_partial_one_left() -> None:
    for partial in (True, False):
        after, _ = transition(
            state(Mode.AVERAGING, partial=not partial),
            OuterStepEnded(True, 13, 1100.0, "", partial),
            TIMING,
        )
        assert after.partial is partial
    after, _ = transition(
        state(Mode.AVERAGING, partial=True), OuterStepEnded(False, 12, 1100.0), TIMING
    )
    assert after.partial, "nothing was committed, so nothing is mended"


def test_stop_keeps_reason_and_status() -> None:
    after, _ = transition(state(Mode.TRAINING), StopRequested("deregistered", 3), TIMING)
    assert (after.stop_reason, after.exit_status) == ("deregistered", 3)


EVENTS = st.sampled_from([row[2] for row in TABLE])


@given(st.lists(EVENTS, max_size=40))
def test_invariants_over_any_sequence_of_events(events: list[Event]) -> None:
    current = MinerState(mode=Mode.TRAINING, outer_step=12)
    uploads_paused = False
    for event in events:
        before = current
        current, orders = transition(before, event, TIMING)
        for order in orders:
            if order is Do.PAUSE_UPLOADS:
                uploads_paused = True
            if order is Do.RESUME_UPLOADS:
                uploads_paused = False
        # A paused publisher is only ever paused while a round or a load is under way.
        if uploads_paused and current.mode is not Mode.STOPPING:
            assert current.mode in (Mode.AVERAGING, Mode.FETCHING, Mode.LOADING)
        # A round is remembered exactly as long as it runs.
        assert (current.round is not None) == (current.mode is Mode.AVERAGING)
        # STOP is ordered once, and nothing after it.
        if before.mode is Mode.STOPPING:
            assert orders == ()
        # Training goes on in every state in which no collective order is under way.
        if trains(current.mode) and trains(before.mode):
            assert set(orders) <= COLLECTIVE | {
                Do.COMPARE_EPOCHS,
                Do.COMPARE_WEIGHTS,
                Do.RESUME_UPLOADS,
            } | ({Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL} if current.mode is Mode.FETCHING else set())
        # What makes a difference to others' weights is not forgotten before it is mended.
        if before.partial and not current.partial:
            assert isinstance(event, (LoadEnded, OuterStepEnded))
