"""The miner's state machine as a table: no process, no clock, no network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.miner import events as ev
from distributed_training.miner.events import Action, GlobalView, MinerState, Mode, Rules, Task
from distributed_training.miner.state_machine import decide, rebases, trains, trains_now
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    Progress,
    PublicationReport,
    Revision,
    RoundRequest,
)
from tests.tools.decided_miner import DecidedMiner, Published
from tests.tools.miner_parts import step_report

RULES = Rules(reload_seconds=2640, checkpoint_steps=10)
CALL = RoundRequest(caller="5Validator")
RESULT = AllReduceResult(("a", "b", "c"), (), 1.0, 2.0, 3.0)


def state(mode: Mode, **fields: object) -> MinerState:
    base = MinerState(mode=mode, outer_step=12)
    if mode is Mode.AVERAGING:
        base = replace(base, round=CALL, called_at=1000.0)
    if mode is Mode.AWAITING_GLOBAL:
        base = replace(base, global_due=3640.0)
    return replace(base, **fields)  # type: ignore[arg-type]


def step(inner_step: int, **fields: Any) -> ev.InnerStepDone:
    return ev.InnerStepDone(step_report(inner_step, outer_step=12, **fields))


def skipped(inner_step: int) -> ev.InnerStepDone:
    return step(inner_step, skipped=True)


OVERLAP = replace(RULES, train_in_rounds=True)


def test_inner_steps_go_on_in_a_round_until_its_average_is_there() -> None:
    now, tasks = decide(state(Mode.AVERAGING), ev.PseudoGradientWritten(1.0), OVERLAP)
    assert trains_now(now) and not trains(now.mode) and tasks == (Task.AVERAGE,)
    for inner_step in range(30):
        now, actions = decide(now, step(inner_step), OVERLAP)
        assert actions == (), "no checkpoint during a round, which needs the memory"
    after, actions = decide(now, diverged(31), OVERLAP)
    assert not trains_now(after) and actions == (), "its checkpoint may be of the outer step before"
    assert decide(now, ev.SnapshotWanted(), OVERLAP)[1] == ()
    for ending in (ev.Averaged(RESULT), ev.RoundFailed(AllReduceFault.NO_GROUP)):
        after, _ = decide(now, ending, OVERLAP)
        assert trains_now(after) == trains(after.mode)
    now, actions = decide(replace(now, mode=Mode.AWAITING_GLOBAL), step(31), OVERLAP)
    assert actions == (Action.CHECKPOINT,), "the steps of a round that failed count"


def test_a_model_is_uploaded_once_when_it_was_asked_for() -> None:
    scored = replace(RULES, content="scored")
    before = state(Mode.TRAINING)
    assert scored.parts(before) == "scored" and RULES.parts(before) == "all"
    asked, tasks = decide(before, ev.ModelAsked(), scored)
    assert (scored.parts(asked), RULES.parts(asked), tasks) == ("model", "all", ())
    revision = Revision(5, 12, 50)
    for ok, model in ((False, True), (True, False)):  # it failed; it was on its way before
        ended = ev.PublicationEnded(PublicationReport(revision, ok, 1.0, 1, model=model))
        assert decide(asked, ended, scored)[0].model_asked
    loading = replace(asked, mode=Mode.LOADING, fetch_target=13, fetched=Path("x"))
    assert decide(loading, ev.Loaded(13), scored)[0].model_asked
    ended = ev.PublicationEnded(PublicationReport(revision, True, 1.0, 1, model=True))
    assert scored.parts(decide(asked, ended, scored)[0]) == "scored"


def diverged(inner_step: int) -> ev.InnerStepDone:
    return replace(skipped(inner_step), diverged=True)


WANTED = ev.SnapshotWanted()
NINE: Any = {"unsaved_steps": 9}
CHECKPOINT, ROLL_BACK = (Action.CHECKPOINT,), (Action.ROLL_BACK,)

TRAINING, AVERAGING, AWAITING_GLOBAL = Mode.TRAINING, Mode.AVERAGING, Mode.AWAITING_GLOBAL
FETCHING, LOADING, STOPPING = Mode.FETCHING, Mode.LOADING, Mode.STOPPING
PARTIAL = GlobalView.UNPUBLISHED_PARTIAL
CALLED, seen = ev.AllReduceCalled(CALL, 1000.0), ev.GlobalEpochSeen
Row = tuple[str, MinerState, ev.Event, Mode, tuple[Action | Task, ...]]


def row(text: str, before: Any, event: ev.Event, after: Mode, *actions: Action | Task) -> Row:
    """``before``: a state, or the mode of an ordinary one."""
    return text, state(before) if isinstance(before, Mode) else before, event, after, actions


# fmt: off
TABLE = [
    # --- a call from the validator
    row("a call while training starts a round",
        TRAINING, CALLED, AVERAGING, Action.WRITE_PSEUDO_GRADIENT),
    row("a second round may follow before the global state was seen",
        AWAITING_GLOBAL, CALLED, AVERAGING, Action.WRITE_PSEUDO_GRADIENT),
    row("a call in a round", AVERAGING, CALLED, AVERAGING),
    row("a call in a load", LOADING, CALLED, LOADING),
    row("a call in a fetch", FETCHING, CALLED, FETCHING),
    row("inner steps continue while the global state is fetched, without snapshots",
        state(FETCHING, **NINE), step(50), FETCHING, Action.CHECKPOINT),
    row("a snapshot while the next epoch is fetched: this one is judged for a while",
        FETCHING, WANTED, FETCHING, Action.SNAPSHOT),
    row("but the one that was taken is previewed",
        FETCHING, ev.SnapshotComplete(), FETCHING, Action.CHECK_GRADIENT),
    row("fetched, but it does not fit this model: as a fetch that failed",
        LOADING, ev.LoadFailed("another shape", 5000.0), AWAITING_GLOBAL, Task.REFUSE_GLOBAL),
    row("fetched, but a rank has no memory for it: tried again, since it may be sound",
        LOADING, ev.GlobalFetchFailed("no memory", 5000.0), AWAITING_GLOBAL),
    row("an epoch ahead that could not be fetched is asked for later",
        state(AWAITING_GLOBAL, fetch_failures=1, failed_target=13),
        seen(13, 2000.0), AWAITING_GLOBAL),
    row("a call when stopping", STOPPING, CALLED, STOPPING),
    # --- the round
    row("buffers are written: the swarm starts",
        AVERAGING, ev.PseudoGradientWritten(1.0), AVERAGING, Task.AVERAGE),
    row("buffers written too late",
        AWAITING_GLOBAL, ev.PseudoGradientWritten(1.0), AWAITING_GLOBAL),
    row("an average is there: all ranks prepare and vote",
        AVERAGING, ev.Averaged(RESULT), AVERAGING, Action.OUTER_STEP),
    row("no average: training continues",
        AVERAGING, ev.RoundFailed(AllReduceFault.NO_GROUP), AWAITING_GLOBAL),
    row("a round that failed after it was given up",
        TRAINING, ev.RoundFailed(AllReduceFault.TIMEOUT), TRAINING),
    row("an average that was given up", TRAINING, ev.Averaged(RESULT), TRAINING),
    row("committed: the checkpoint decides after a kill",
        AVERAGING, ev.OuterStepEnded(True, 13), AWAITING_GLOBAL, Action.CHECKPOINT),
    row("rolled back", AVERAGING, ev.OuterStepEnded(False, 12), AWAITING_GLOBAL),
    # --- inner steps
    row("an ordinary step", TRAINING, step(3), TRAINING),
    row("a step with a checkpoint", state(TRAINING, **NINE), step(20), TRAINING, *CHECKPOINT),
    row("not of a skipped step", state(TRAINING, **NINE), skipped(20), TRAINING),
    row("losses are not finite", TRAINING, diverged(20), TRAINING, *ROLL_BACK),
    row("a step that ended when a call had come", AVERAGING, step(20), AVERAGING),
    row("a snapshot", TRAINING, WANTED, TRAINING, Action.SNAPSHOT),
    row("after a round", AWAITING_GLOBAL, WANTED, AWAITING_GLOBAL, Action.SNAPSHOT),
    row("a round overtook it", AVERAGING, WANTED, AVERAGING),
    row("its files are there", TRAINING, ev.SnapshotComplete(), TRAINING, Action.CHECK_GRADIENT),
    row("in a round, while the devices stand still",
        AVERAGING, ev.SnapshotComplete(), AVERAGING, Action.CHECK_GRADIENT),
    row("in a round that has its average: after it",
        state(AVERAGING, averaged=RESULT), ev.SnapshotComplete(), AVERAGING),
    row("nothing to roll back to", TRAINING, ev.RolledBack(None), TRAINING),
    row("rolled back within the epoch", TRAINING, ev.RolledBack(Progress(12)), TRAINING),
    row("rolled back to the epoch before: the commit's checkpoint was not written",
        AWAITING_GLOBAL, ev.RolledBack(Progress(11)), AWAITING_GLOBAL, Task.COMPARE_EPOCHS),
    # --- the global state
    row("the same epoch", TRAINING, seen(12, 5000.0), TRAINING),
    row("behind the global epoch", TRAINING, seen(13, 5000.0), FETCHING, Task.FETCH_GLOBAL),
    row("ahead of the global epoch: the validator refused the round",
        TRAINING, seen(11, 5000.0), FETCHING, Task.FETCH_GLOBAL),
    row("the validator is still publishing", AWAITING_GLOBAL, seen(11, 2000.0), AWAITING_GLOBAL),
    row("the validator says that it did not publish: at the next tick the time is up",
        decide(state(AWAITING_GLOBAL), ev.ValidatorHeard(11, 2000.0), RULES)[0],
        ev.Tick(2000.0), TRAINING, Task.COMPARE_EPOCHS, Task.COMPARE_WEIGHTS),
    row("and if it is where we are, the wait continues",
        decide(state(AWAITING_GLOBAL), ev.ValidatorHeard(12, 2000.0), RULES)[0],
        ev.Tick(2000.0), AWAITING_GLOBAL),
    row("what could not be loaded is tried again at its time, however often it says so",
        decide(state(AWAITING_GLOBAL, failed_target=11), ev.ValidatorHeard(11, 2000.0), RULES)[0],
        ev.Tick(2000.0), AWAITING_GLOBAL),
    row("in a round it means nothing: the call was made before", AVERAGING,
        ev.ValidatorHeard(11, 2000.0), AVERAGING),
    row("missed a round that others finished: no need to wait",
        AWAITING_GLOBAL, seen(13, 2000.0), FETCHING, Task.FETCH_GLOBAL),
    row("agreed before the time is up: the wait continues, for the next round may come late",
        AWAITING_GLOBAL, seen(12, 2000.0), AWAITING_GLOBAL),
    row("agreed after it", AWAITING_GLOBAL, seen(12, 3641.0), TRAINING, Task.COMPARE_WEIGHTS),
    row("agreed after a round that lost parts: others' weights may differ",
        state(AWAITING_GLOBAL, view=PARTIAL), seen(12, 3641.0), FETCHING, Task.FETCH_GLOBAL),
    row("the same, seen while training",
        state(TRAINING, view=PARTIAL), seen(12, 5000.0), FETCHING, Task.FETCH_GLOBAL),
    row("our weights are the global ones", TRAINING, ev.WeightsCompared(12, True), TRAINING),
    row("our weights are not the global ones",
        TRAINING, ev.WeightsCompared(12, False), FETCHING, Task.FETCH_GLOBAL),
    row("a comparison of an epoch that is over", TRAINING, ev.WeightsCompared(11, False), TRAINING),
    row("a comparison that ends in a round", AVERAGING, ev.WeightsCompared(12, False), AVERAGING),
    row("fetched because our weights differed: what was trained is kept",
        state(FETCHING, fetch_target=12), ev.GlobalFetched(Path("a")), LOADING, Action.REBASE),
    row("disagreed after it", AWAITING_GLOBAL, seen(11, 3641.0), FETCHING, Task.FETCH_GLOBAL),
    row("an epoch seen in a round does not end it", AVERAGING, seen(13, 2000.0), AVERAGING),
    row("not yet", AWAITING_GLOBAL, ev.Tick(3639.0), AWAITING_GLOBAL),
    row("the time is up: compare",
        AWAITING_GLOBAL, ev.Tick(3640.0), TRAINING, Task.COMPARE_EPOCHS, Task.COMPARE_WEIGHTS),
    row("ticks mean nothing else", TRAINING, ev.Tick(9e9), TRAINING),
    row("fetched", FETCHING, ev.GlobalFetched(Path("epoch-13")), LOADING, Action.LOAD),
    row("fetch failed: stale weights beat no training",
        FETCHING, ev.GlobalFetchFailed("404", 5000.0), AWAITING_GLOBAL),
    row("loaded", LOADING, ev.Loaded(13), TRAINING, Action.CHECKPOINT),
    # --- the end
    row("stop while training", TRAINING, ev.StopRequested("SIGTERM"), STOPPING, Action.STOP),
    row("stop in a round frees the swarm first",
        AVERAGING, ev.StopRequested("SIGTERM"), STOPPING, Task.CANCEL_AVERAGE, Action.STOP),
    row("one stop is enough", STOPPING, ev.StopRequested("SIGTERM"), STOPPING),
]
# fmt: on


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, 1200), (3.0, 200), (24.0, 25), (60.0, 25)])
def test_checkpoints_are_steps_and_time_apart(seconds: float, expected: int) -> None:
    """They are at least 25 steps and 10 minutes apart for every length of an inner step."""
    rules = Rules(reload_seconds=2640, checkpoint_steps=25, checkpoint_seconds=600)
    now, at = state(Mode.TRAINING, unsaved_steps=20, unsaved_seconds=599.0), list[int]()
    now, actions = decide(now, diverged(1), rules)  # a roll-back: nothing is left to save
    assert actions == ROLL_BACK
    for number in range(1, 2 * expected + 1):
        now, actions = decide(now, step(number, seconds=seconds), rules)
        at += [number] if actions == CHECKPOINT else []
    assert at == [expected, 2 * expected]
    now = replace(now, unsaved_steps=24, unsaved_seconds=599.0)
    now, _ = decide(
        replace(now, mode=Mode.AVERAGING, round=CALL), ev.OuterStepEnded(True, 13), rules
    )
    assert (now.unsaved_steps, now.unsaved_seconds) == (0, 0.0)  # a commit has its checkpoint


@pytest.mark.parametrize(("trained", "actions"), [(299.0, 1), (300.0, 2)])
def test_a_snapshot_takes_a_checkpoint_that_is_half_due_with_it(
    trained: float, actions: int
) -> None:
    """Both then share their copies in host memory."""
    rules = Rules(reload_seconds=2640, checkpoint_steps=25, checkpoint_seconds=600)
    before = state(Mode.TRAINING, unsaved_seconds=trained)
    after, found = decide(before, WANTED, rules)
    assert found == (Action.SNAPSHOT, Action.CHECKPOINT)[:actions]
    assert after.unsaved_seconds == (0.0 if actions == 2 else trained)
    assert decide(before, WANTED, RULES)[1] == (Action.SNAPSHOT,)


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
    if Task.FETCH_GLOBAL in actions:  # what was trained is kept if the outer step is ours
        assert rebases(after) == (after.view is GlobalView.DIFFERENT)


def test_fetches_that_fail_are_tried_more_and_more_seldom() -> None:
    now, waits = state(Mode.TRAINING), []
    at = 5000.0
    for _ in range(9):
        now, actions = decide(now, ev.GlobalEpochSeen(13, at), RULES)
        assert (now.mode, actions) == (Mode.FETCHING, (Task.FETCH_GLOBAL,))
        now, _ = decide(now, ev.GlobalFetchFailed("NaN", at), RULES)
        waits.append(now.global_due - at)
        at = now.global_due
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    now, _ = decide(now, ev.GlobalEpochSeen(13, at), RULES)
    now, _ = decide(now, ev.GlobalFetched(Path("epoch-13")), RULES)
    now, _ = decide(now, ev.Loaded(13), RULES)
    assert now.fetch_failures == 0


def test_a_newer_epoch_is_not_held_back_by_one_that_failed() -> None:
    now, _ = decide(state(Mode.TRAINING), ev.GlobalEpochSeen(13, 5000.0), RULES)
    for _ in range(7):
        now, _ = decide(now, ev.GlobalFetchFailed("NaN", 5000.0), RULES)
        assert decide(now, ev.GlobalEpochSeen(13, 5001.0), RULES)[1] == ()
        now, _ = decide(now, ev.GlobalEpochSeen(13, now.global_due), RULES)
    now, _ = decide(now, ev.GlobalFetchFailed("NaN", 5000.0), RULES)
    now, actions = decide(now, ev.GlobalEpochSeen(14, 5001.0), RULES)
    assert (now.fetch_target, actions) == (14, (Task.FETCH_GLOBAL,))
    now, _ = decide(now, ev.GlobalFetchFailed("NaN", 5002.0), RULES)
    assert now.global_due == 5062.0, "another epoch, another count"


def test_a_failed_fetch_does_not_forget_that_weights_differ() -> None:
    loading, _ = decide(state(Mode.TRAINING), ev.WeightsCompared(12, False), RULES)
    assert rebases(loading) and loading.fetch_target == 12
    waiting, _ = decide(loading, ev.GlobalFetchFailed("404", 5000.0), RULES)
    assert waiting.view is GlobalView.DIFFERENT and not rebases(waiting)
    again, actions = decide(waiting, ev.GlobalEpochSeen(12, 5060.0), RULES)
    assert rebases(again) and Task.FETCH_GLOBAL in actions
    loading, _ = decide(again, ev.GlobalFetched(Path("epoch-12")), RULES)
    done, _ = decide(loading, ev.Loaded(12), RULES)
    assert (done.mode, done.view, rebases(done)) == (Mode.TRAINING, GlobalView.SAME, False)


@pytest.mark.parametrize(
    ("seen", "mode", "follows"),
    [
        (12, Mode.TRAINING, (Task.COMPARE_WEIGHTS,)),
        (13, Mode.FETCHING, (Task.FETCH_GLOBAL,)),
        (11, Mode.AWAITING_GLOBAL, ()),  # the validator has not published our outer step yet
    ],
)
def test_a_start_from_the_disk_joins_no_round_before_the_bucket_was_seen(
    seen: int, mode: Mode, follows: tuple[Task, ...]
) -> None:
    """Its state may be of an outer step that is long over: it trains, and nothing else."""
    call = ev.AllReduceCalled(CALL, 1000.0)
    disk = state(Mode.AWAITING_GLOBAL, view=GlobalView.UNREAD)
    assert decide(disk, call, RULES) == (disk, ())
    late, _ = decide(disk, ev.Tick(4000.0), RULES)
    assert late.mode is Mode.TRAINING and decide(late, call, RULES) == (late, ())
    # A slice of weights could be read, and the root metadata not.
    differs, _ = decide(late, ev.WeightsCompared(12, False), RULES)
    failed, _ = decide(differs, ev.GlobalFetchFailed("away", 4000.0), RULES)
    assert failed.mode is Mode.AWAITING_GLOBAL and decide(failed, call, RULES) == (failed, ())
    after, actions = decide(disk, ev.GlobalEpochSeen(seen, 100.0), RULES)
    assert (after.mode, actions) == (mode, follows) and after.view is not GlobalView.UNREAD
    called, _ = decide(after, call, RULES)
    assert (called.mode is Mode.AVERAGING) == (mode is not Mode.FETCHING)


DIFFERS = (PARTIAL, GlobalView.DIFFERENT)
EVENTS = st.sampled_from([row[2] for row in TABLE])


@given(st.lists(EVENTS, max_size=40))
def test_invariants_over_any_sequence_of_events(events: list[ev.Event]) -> None:
    current = MinerState(mode=Mode.TRAINING, outer_step=12)
    for event in events:
        before = current
        current, actions = decide(before, event, RULES)
        # A round is remembered exactly as long as it runs, and so is its average.
        assert (current.round is not None) == (current.mode is Mode.AVERAGING)
        assert current.averaged is None or current.mode in (Mode.AVERAGING, Mode.STOPPING)
        # STOP is ordered once, and nothing after it.
        if before.mode is Mode.STOPPING:
            assert actions == ()
        # A fetch is asked for exactly when the mode says that one is under way.
        began = before.mode is not Mode.FETCHING and current.mode is Mode.FETCHING
        assert began == (Task.FETCH_GLOBAL in actions)
        # Training continues in every mode in which no order of a round or a load is under way.
        if trains(current.mode) and trains(before.mode):
            assert not {Action.WRITE_PSEUDO_GRADIENT, Action.OUTER_STEP, Action.LOAD} & set(actions)
        # A snapshot is of weights that train, never of ones that are being replaced.
        if Action.SNAPSHOT in actions:
            assert trains(current.mode)
        # What makes a difference to others' weights is not forgotten before it is mended.
        if before.view in DIFFERS and current.view not in DIFFERS:
            assert isinstance(event, (ev.Loaded, ev.OuterStepEnded))


class Counted(DecidedMiner):
    """Weights are one number. ``fault``: the fate of this miner's next round."""

    fault = "none"

    def average(self) -> AllReduceResult:
        if self.fault == "failed":
            raise AllReduceError(AllReduceFault.PEER_FAILED)
        return replace(RESULT, failed_peers=("c",) if self.fault == "partial" else ())

    def outer_step(self) -> float:
        if self.fault == "vote":
            raise RuntimeError("a rank is out of memory")
        wrong = self.fault in ("partial", "another group")
        return float(self.weights) + (1.5 if wrong else 1.0)

    def same(self, weights: float) -> bool:
        return bool(self.weights == weights) or self.fault == "partial"  # the sample misses it


#: What becomes of a round here -> what is taken over of the global state that follows.
TAKEN = {
    "none": [],
    "partial": [Action.REBASE],  # known here
    "another group": [Action.REBASE],  # seen only in the weights
    "failed": [Action.LOAD],
    "vote": [Action.LOAD],
    "not called": [Action.LOAD],
}


@given(st.lists(st.tuples(st.sampled_from(sorted(TAKEN)), st.booleans()), max_size=30))
def test_each_global_state_is_followed_in_all_orders_of_rounds(
    rounds: list[tuple[str, bool]],
) -> None:
    """After each round the weights are those of the validator, and nothing is loaded needlessly.
    Where the validator's own round failed, a step that was taken here is taken back."""
    miner, outer_step, weights = Counted(0.0), 0, 0.0
    for fault, validator in rounds:
        before = miner.weights
        miner.fault, miner.loads = fault, []
        if fault != "not called":
            miner.call()
        stepped = fault in ("none", "partial", "another group")
        assert miner.state.outer_step == outer_step + stepped
        assert stepped or miner.weights == before, "as if there had been no round"
        if validator:
            outer_step, weights = outer_step + 1, weights + 1.0
        miner.follow(Published(outer_step, weights))
        assert (miner.state.mode, miner.state.outer_step) == (Mode.TRAINING, outer_step)
        assert miner.weights == weights
        if validator:
            assert miner.loads == TAKEN[fault]
        else:
            assert miner.loads == ([Action.LOAD] if stepped else [])
