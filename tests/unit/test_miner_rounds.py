"""Test what follows from each event of a miner, without a process, a clock or a network."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.exchange.base import Close
from distributed_training.miner import events as ev
from distributed_training.miner.events import (
    Action,
    Applied,
    MinerState,
    Mode,
    Rules,
    Send,
    Stage,
    Upload,
)
from distributed_training.miner.rounds import decide
from distributed_training.protocol.types import Base, Progress, Update
from tests.tools.miner_parts import step_report

pytestmark = pytest.mark.timeout(60)

RULES = Rules(checkpoint_steps=10, upload_from=5)
CLOSE, MOVED = Close(12, 3, 1000.0, 60.0), Close(12, 4, 2000.0, 60.0)
REACHED, AGAIN = ev.CloseReached(CLOSE, 1060.0), ev.CloseReached(MOVED, 2060.0)
TRAINING = MinerState(mode=Mode.TRAINING, outer_step=12, inner_step=5)


@dataclass
class Handle:
    ended: bool = False
    error: BaseException | None = None

    def done(self) -> bool:
        return self.ended


def update(outer_step: int = 13, base: Base = Base.MERGED) -> Update:
    return Update(outer_step, Path("u"), base, None, "ab", 500)


def whole(outer_step: int = 20) -> Update:
    return Update(outer_step, Path("w"), Base.KEPT, None, "cd", 900, whole="fewer bytes")


def ready(outer_step: int = 13) -> ev.UpdateReady:
    return ev.UpdateReady(update(outer_step), 5000.0)


def step(inner_step: int = 5, **fields: Any) -> ev.InnerStepDone:
    return ev.InnerStepDone(step_report(inner_step, outer_step=12, **fields))


UPLOAD, ENDED = Upload(REACHED), ev.UploadEnded(Close(12, 3))
SENT = replace(TRAINING, upload=replace(UPLOAD, stage=Stage.SENDING))
OVER = replace(TRAINING, upload=replace(UPLOAD, stage=Stage.ENDED))
APPLIES = replace(TRAINING, update=update())
NINE = {"unsaved_steps": 9}
SAVES, PLACED = replace(TRAINING, **NINE), replace(TRAINING, place=(12, 900))
EARLY = replace(TRAINING, inner_step=4, reached=REACHED)
STOPPING = replace(TRAINING, mode=Mode.STOPPING)
DIVERGED = replace(step(skipped=True), diverged=True)
WAITS = replace(TRAINING, mode=Mode.UPDATE_FAILED, again_at=5060.0, update_failures=1)

# fmt: off
TABLE: list[tuple[str, MinerState, ev.Event, tuple[Any, ...]]] = [
    ("an ordinary step", TRAINING, step(3), ()),
    ("a checkpoint is not of a skipped step", SAVES, step(skipped=True), ()),
    ("steps count while an update is awaited", replace(SAVES, mode=Mode.UPDATE_FAILED),
     step(20), (Action.CHECKPOINT,)),
    ("losses are not finite", TRAINING, DIVERGED, (Action.ROLL_BACK,)),
    ("losses are not finite while an update waits", APPLIES, DIVERGED, ()),
    ("there is nothing to roll back to", TRAINING, ev.RolledBack(None), ()),
    ("a roll-back within the outer step", TRAINING, ev.RolledBack(Progress(12)), ()),
    ("a roll-back within it follows the schedule", PLACED,
     ev.RolledBack(Progress(12)), (Action.FOLLOW_SCHEDULE,)),
    ("a roll-back, and the place is of another outer step", replace(TRAINING, place=(11, 800)),
     ev.RolledBack(Progress(12)), ()),
    ("a roll-back to the outer step before, whose update is asked for", PLACED,
     ev.RolledBack(Progress(11)), (Applied(11),)),
    ("ticks mean nothing while it trains", TRAINING, ev.Tick(9e9), ()),
    ("a stop while training", TRAINING, ev.StopRequested("SIGTERM"), (Action.STOP,)),
    ("one stop is enough", STOPPING, ev.StopRequested("SIGTERM"), ()),
    ("a step after the stop", STOPPING, step(20), ()),
    ("the close: upload, then a checkpoint that knows of it",
        TRAINING, REACHED, (Action.WRITE_UPLOAD, Action.CHECKPOINT)),
    ("at the first step that counts", EARLY, step(5), (Action.WRITE_UPLOAD, Action.CHECKPOINT)),
    ("or at a tick, where a roll-back has overtaken the upload", replace(TRAINING, reached=REACHED),
        ev.Tick(1.0), (Action.WRITE_UPLOAD, Action.CHECKPOINT)),
    ("not before", EARLY, step(4), ()),
    ("of an outer step that is not ours", TRAINING, ev.CloseReached(Close(11, 3, 0, 0)), ()),
    ("a second time for one close", replace(TRAINING, upload=UPLOAD), REACHED, ()),
    ("a second time for one that was sent", OVER, REACHED, ()),
    ("the close moved: once more", OVER, AGAIN, (Action.WRITE_UPLOAD, Action.CHECKPOINT)),
    ("an update is at hand: too late", APPLIES, REACHED, ()),
    ("upload and checkpoint are there",
        replace(TRAINING, upload=UPLOAD), ev.UploadWritten(CLOSE), (Send(CLOSE),)),
    ("those of a close that has moved",
        replace(TRAINING, upload=Upload(AGAIN)), ev.UploadWritten(CLOSE), ()),
    ("twice", SENT, ev.UploadWritten(CLOSE), ()),
    ("after the update", TRAINING, ev.UploadWritten(CLOSE), ()),
    ("no checkpoint while the upload is written and sent", replace(SENT, **NINE), step(), ()),
    ("but after it", replace(OVER, **NINE), step(), (Action.CHECKPOINT,)),
    ("sent", SENT, ENDED, ()),
    ("the update", TRAINING, ready(), (Action.OUTER_STEP,)),
    ("while the upload is on its way", SENT, ready(), (Action.OUTER_STEP,)),
    ("of a later outer step", TRAINING, ready(14), ()),
    ("that is applied already", TRAINING, ready(12), ()),
    ("twice", APPLIES, ready(), ()),
    ("whole weights, also older ones", TRAINING,
        ev.UpdateReady(whole(3), 1.0), (Action.OUTER_STEP,)),
    ("committed: no checkpoint is needed, and the next one is awaited", APPLIES,
        ev.OuterStepEnded(True, 13), (Action.FOLLOW_SCHEDULE, Applied(13))),
    ("not committed", APPLIES, ev.OuterStepEnded(False, 12, "memory"), ()),
    ("asked for again, not at once", WAITS, ev.Tick(5059.0), ()),
    ("but after a minute", WAITS, ev.Tick(5060.0), (Applied(12),)),
    ("the second time whole weights",
        replace(WAITS, update_failures=2), ev.Tick(5060.0), (Applied(12, wants_weights=True),)),
    ("rolled back to an earlier outer step: its updates are asked for again",
        SENT, ev.RolledBack(Progress(11)), (Applied(11),)),
    ("stop", SENT, ev.StopRequested("SIGTERM"), (Action.STOP,)),
]
# fmt: on


@pytest.mark.parametrize(
    ("before", "event", "actions"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_table(before: MinerState, event: ev.Event, actions: tuple[Any, ...]) -> None:
    assert decide(before, event, RULES)[1] == actions


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, 1200), (3.0, 200), (24.0, 25), (60.0, 25)])
def test_checkpoints_are_steps_and_time_apart(seconds: float, expected: int) -> None:
    """However long an inner step takes, checkpoints are at least 25 steps and 10 minutes apart."""
    rules = Rules(checkpoint_steps=25, checkpoint_seconds=600)
    now, at = replace(TRAINING, unsaved_steps=20, unsaved_seconds=599.0), list[int]()
    now, actions = decide(now, DIVERGED, rules)  # after this roll-back nothing is left to save
    assert actions == (Action.ROLL_BACK,)
    for number in range(1, 2 * expected + 1):
        now, actions = decide(now, step(number, seconds=seconds), rules)
        at += [number] if actions == (Action.CHECKPOINT,) else []
    assert at == [expected, 2 * expected]


def test_a_roll_back_forgets_an_upload_that_was_not_sent_and_no_other() -> None:
    back = ev.RolledBack(Progress(12))
    forgotten, _ = decide(replace(TRAINING, upload=UPLOAD), back, RULES)
    assert (forgotten.upload, forgotten.reached) == (None, REACHED), "there may be another"
    assert decide(SENT, back, RULES)[0].upload == SENT.upload
    elsewhere, _ = decide(replace(SENT, update=update()), ev.RolledBack(Progress(11)), RULES)
    assert (elsewhere.upload, elsewhere.update, elsewhere.outer_step) == (None, None, 11)


# --- everything at any moment ---------------------------------------------------------------------


@dataclass
class World:
    """Simulate a miner's rank 0, its ranks and its disk, one boundary at a time.

    ``checkpoint``: what the newest complete checkpoint holds, as its outer step and the serial of
    the upload whose rows it has.
    """

    state: MinerState = TRAINING
    pending: list[Action] = field(default_factory=list)
    sent: list[tuple[int, int]] = field(default_factory=list)
    handle: Handle | None = None
    checkpoint: tuple[int, int | None] = (12, None)
    # Whether each checkpoint was saved; None while it is being written.
    saved: list[bool | None] = field(default_factory=list)
    written: int | None = None  # the serial of the upload whose rows the ranks hold
    held: int = 12  # the trainer's outer step
    inner_steps: int = 0
    writes: list[tuple[int, int]] = field(default_factory=list)

    def handle_event(self, event: ev.Event) -> None:
        self.state, follows = decide(self.state, event, RULES)
        for action in follows:
            if isinstance(action, Send):
                close = action.close
                assert self.checkpoint == (close.outer_step, close.serial), "a kill would not know"
                assert self.handle is not None and self.handle.ended
                self.sent.append((close.outer_step, close.serial))
            elif isinstance(action, Action):
                if action is Action.STOP:
                    self.pending.clear()
                self.pending.append(action)
            elif isinstance(action, ev.Event):
                self.handle_event(action)

    def poll(self) -> None:
        """Find out whether files are there, as the controller does at each boundary."""
        if self.state.upload and (ended := self.state.upload.end_of_writing()):
            self.handle_event(ended)

    def boundary(self) -> None:
        """Carry out the next command, or take an inner step if there is none."""
        state = self.state
        match self.pending.pop(0) if self.pending else None:
            case None if state.mode is not Mode.STOPPING:
                self.inner_steps += 1
                self.handle_event(step())
            case Action.WRITE_UPLOAD if state.to_write is not None:
                close = state.to_write.close
                self.handle, self.written = Handle(), close.serial
                self.writes.append((close.outer_step, close.serial))
                assert close.outer_step == self.held
                taken: Any = self.handle
                self.handle_event(ev.UploadBegun(close, taken, Progress(self.held)))
            case Action.CHECKPOINT:
                number, knows = len(self.saved), (self.held, self.written)
                self.saved.append(None)

                def saved() -> bool | None:
                    if self.saved[number]:
                        self.checkpoint = knows
                    return self.saved[number]

                self.handle_event(ev.CheckpointBegun(self.held, saved))
            case Action.OUTER_STEP if state.update is not None:
                assert state.update.whole or state.update.outer_step == self.held + 1
                self.held, self.written = state.update.outer_step, None
                self.handle_event(ev.OuterStepEnded(True, self.held, inner_step=5))
            case Action.ROLL_BACK:
                self.held, self.written = self.checkpoint
                self.handle_event(ev.RolledBack(Progress(self.held, 5)))


ROUND = ("close", "moved", "stale", "update", "weights", "sent")
MOMENTS = st.sampled_from((*ROUND, "step", "written", "failed", "saved", "lost", "back", "tick"))


@given(st.lists(MOMENTS, max_size=60))
def test_uploads_are_sent_once_and_known_and_steps_continue_in_any_order_of_events(
    moments: list[str],
) -> None:
    world, serial, at = World(), 1, 0.0
    for moment in moments:
        at += 1.0
        outer = world.state.outer_step
        match moment:
            case "close":
                world.handle_event(ev.CloseReached(Close(outer, serial, at, 60.0)))
            case "moved":
                serial += 1
                world.handle_event(ev.CloseReached(Close(outer, serial, at, 60.0)))
            case "stale":
                world.handle_event(ev.CloseReached(Close(outer - 1, serial, at, 60.0)))
                world.handle_event(ready(outer))
            case "update":
                serial += 1
                world.handle_event(ready(outer + 1))
            case "weights":
                serial += 1
                world.handle_event(ev.UpdateReady(whole(outer + 5), at))
            case "written" | "failed" if world.handle is not None:
                world.handle.ended = True
                world.handle.error = OSError("disk") if moment == "failed" else None
            case "saved" | "lost" if world.saved and world.saved[-1] is None:
                world.saved[-1] = moment == "saved"
            case "sent" if world.sent:
                world.handle_event(ev.UploadEnded(Close(*world.sent[-1])))
            case "back":
                world.handle_event(DIVERGED)
            case "tick":
                world.handle_event(ev.Tick(at))
            case _:
                world.boundary()
        world.poll()
        # Unless a command is pending, training continues.
        assert world.pending or world.state.mode is not Mode.STOPPING
        assert world.state.outer_step == world.held or Action.ROLL_BACK in world.pending
        assert len(set(world.sent)) == len(world.sent), "one close got two files"
    world.pending.clear()
    before = world.inner_steps
    world.boundary()
    assert world.inner_steps == before + 1
    world.handle_event(ev.StopRequested("SIGTERM"))
    assert world.pending == [Action.STOP]
    world.handle_event(ready(world.state.outer_step + 1))
    assert world.pending == [Action.STOP]


def test_a_checkpoint_from_before_an_upload_is_not_the_one_that_knows_it() -> None:
    begun, _ = decide(TRAINING, REACHED, RULES)
    early, _ = decide(begun, ev.CheckpointBegun(12, lambda: True), RULES)
    assert early == begun


@pytest.mark.parametrize("lost", ["file", "checkpoint"])
def test_an_upload_whose_file_or_checkpoint_failed_is_not_sent(lost: str) -> None:
    world = World()
    world.handle_event(REACHED)
    for _ in range(2):
        world.boundary()
    assert world.handle is not None and world.state.upload is not None
    world.handle.ended, world.saved[-1] = True, lost != "checkpoint"
    world.handle.error = OSError("no space left") if lost == "file" else None
    event = world.state.upload.end_of_writing()
    assert isinstance(event, ev.UploadEnded) and event.cause.startswith("it was not sent (")
    world.poll()
    assert not world.sent and world.state.upload.stage is Stage.ENDED


def test_a_close_that_is_missed_for_few_steps_is_told_once() -> None:
    waiting, follows = decide(replace(TRAINING, inner_step=4), REACHED, RULES)
    assert follows == () and waiting.reached == REACHED
    assert decide(waiting, ev.Tick(1059.0), RULES) == (waiting, ())
    after, (missed,) = decide(waiting, ev.Tick(1060.0), RULES)
    assert isinstance(missed, ev.UploadSkipped) and missed.kind == "steps"
    assert missed.problem.startswith("blocked: 4 inner steps when the close was over, and 5 are")
    assert after.reached is None and decide(after, missed, RULES) == (after, ())


def test_progress_is_written_each_so_many_steps_after_the_gate() -> None:
    rules, state = replace(RULES, checkpoint_steps=99, progress_steps=3), replace(TRAINING)
    none = Close(12, 0)

    def train(first: int, last: int) -> list[int]:
        """Return the inner steps after which a progress upload is ordered."""
        nonlocal state
        wanted = []
        for number in range(first, last + 1):
            state, follows = decide(state, step(number), rules)
            assert follows in ((), (Action.WRITE_UPLOAD,))
            wanted += [number] * len(follows)
        return wanted

    assert train(1, 5) == [5]
    # The next progress upload waits until this one has been written and sent.
    handle: Any = Handle()
    state, _ = decide(state, ev.UploadBegun(none, handle, Progress(12)), rules)
    assert train(6, 9) == [] and state.progress is not None
    assert state.progress.end_of_writing() is None
    handle.ended = True
    written = state.progress.end_of_writing()
    assert written == ev.UploadWritten(none)
    state, follows = decide(state, written, rules)
    assert follows == (Send(none),) and state.progress is not None
    assert state.progress.end_of_writing() is None and train(10, 11) == []
    state, _ = decide(state, ev.UploadEnded(none), rules)
    assert train(12, 12) == [12]
    # A round has priority, because its upload contains all that a progress upload would.
    state, follows = decide(state, REACHED, rules)
    assert follows[0] is Action.WRITE_UPLOAD and state.progress is None
    assert train(13, 20) == []
    # The link is reserved for the round until its grace ends, even if the upload was sent before.
    assert state.upload is not None
    state = replace(state, upload=replace(state.upload, stage=Stage.ENDED))
    state, _ = decide(state, ev.Tick(REACHED.until - 1), rules)
    assert train(21, 30) == []
    state, _ = decide(state, ev.Tick(REACHED.until), rules)
    assert train(31, 31) == [31]
