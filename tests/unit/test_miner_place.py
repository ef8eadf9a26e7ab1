"""The place in the learning rate's schedule: the network's, whenever a miner joined."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from distributed_training.miner import events as ev
from distributed_training.miner.events import Action, Command, MinerState, Mode, Rules
from distributed_training.miner.global_state import GlobalBucket, GlobalEpoch
from distributed_training.miner.resume import StartupInfo, resume_training
from distributed_training.miner.state_machine import decide
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import ConfigExtras, Metadata
from distributed_training.protocol.types import Progress, Revision
from distributed_training.store.bucket_reader import BucketReader
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.training_world import trainer

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("process_group")]

PEAK, WARM, TOTAL, BEGINS, LASTS = 2e-3, 25, 400, 150, 120
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {},
    "constant": {"decay_from": BEGINS, "decay_steps": LASTS},
}


def formula(schedule: str, step: int) -> float:
    if step <= WARM:
        return PEAK * step / WARM
    if schedule == "constant":
        return PEAK * (1 - math.sqrt(min(1.0, max(0.0, (step - BEGINS) / LASTS))))
    progress = min(1.0, (step - WARM) / (TOTAL - WARM))
    return PEAK * max(0.1, 0.5 * (1 + math.cos(math.pi * progress)))


class Network:
    """A global bucket, which the test publishes into."""

    def __init__(self) -> None:
        self.store = MemoryObjectStore("global")
        self.outer_step = self.place = 0

    def publish(self, outer_step: int, place: int) -> None:
        self.outer_step, self.place = outer_step, place
        config = ConfigExtras((), 0, None, place).merge_into({})
        self.store.put(keys.epoch_key(outer_step, keys.CONFIG), config)
        metadata = Metadata.of(Revision(5, outer_step, 0), "").to_json()
        self.store.put(keys.ROOT_METADATA, metadata)


class Member:
    """Trainer, state machine and watch of a miner that joins now; a round is a word."""

    def __init__(self, network: Network, folder: Path, *, format_: int, schedule: str) -> None:
        self.trainer = trainer(
            schedule=schedule, learning_rate=PEAK, warmup_steps=WARM, total_steps=TOTAL,
            **SCHEDULES[schedule],
        )  # fmt: skip
        self.events: list[ev.Event] = []
        reader = BucketReader(network.store)
        self.watch = GlobalEpoch(
            bucket=GlobalBucket(open_bucket=lambda: reader, folder=folder, run=5),
            post=self.events.append,
            interval=Mock(),
            epoch_start=lambda: (0, ()),
            network=SimpleNamespace(head=SimpleNamespace(format=format_)),  # type: ignore[arg-type]
        )
        info = StartupInfo(
            global_outer_step=network.outer_step,
            model_config={"total_inner_steps": network.place},
            follows=format_ > 1,
        )
        resume_training(self.trainer, Mock(restore=lambda: None), info, None)
        self.state = MinerState(Mode.TRAINING, network.outer_step)

    def look(self) -> None:
        """Look at the bucket, and carry out its consequence for the schedule."""
        self.watch._compare()
        while self.events:
            self.handle(self.events.pop(0))

    def handle(self, event: ev.Event) -> None:
        self.state, actions = decide(self.state, event, Rules(60, 10))
        if Action.FOLLOW_SCHEDULE in actions:
            assert self.state.place is not None
            outer_step, steps = self.state.place
            command = Command(Action.FOLLOW_SCHEDULE, outer_step=outer_step, inner_steps=steps)
            assert Command.from_integers(command.to_integers()) == command
            self.trainer.follow_schedule(outer_step, steps)

    def train(self, steps: int) -> list[float]:
        """Take inner steps; return the rate of each."""
        rates = []
        for _ in range(steps):
            rates.append(self.trainer.schedule.rate(self.trainer.total_inner_steps))
            self.trainer.inner_step += 1
            self.trainer.total_inner_steps += 1
        return rates

    def take_outer_step(self) -> None:
        """Continue with the next outer step, before the bucket shows it."""
        self.trainer.begin_epoch(self.trainer.outer_step + 1)
        self.state = MinerState(Mode.TRAINING, self.trainer.outer_step, place=self.state.place)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("format_", [1, 2])
def test_miners_that_joined_at_different_times_have_one_rate(
    schedule: str, format_: int, tmp_path: Path
) -> None:
    """They do in format 2; in format 1 each miner keeps counting its own steps."""
    draw, network = random.Random(schedule), Network()
    network.publish(0, 0)
    members = [Member(network, tmp_path, format_=format_, schedule=schedule)]
    differ = place = 0
    for outer_step in range(1, 12):
        for member in members:
            member.train(draw.randint(5, 60))
            member.take_outer_step()
        place += draw.randint(5, 40)
        network.publish(outer_step, place)
        for member in members:
            member.train(3)  # until it looks
            member.look()
        if outer_step in (1, 6):
            members.append(Member(network, tmp_path, format_=format_, schedule=schedule))
            members[-1].train(3)
        rates = [member.train(30) for member in members]
        differ += any(other != rates[0] for other in rates)
        if format_ > 1:
            expected = [formula(schedule, place + step + 1) for step in range(3, 33)]
            assert rates[0] == pytest.approx(expected, rel=1e-12, abs=0)
    assert (differ > 0) is (format_ == 1)


def test_the_place_is_gone_to_again_after_a_load_and_a_roll_back(tmp_path: Path) -> None:
    network = Network()
    network.publish(4, 200)
    member = Member(network, tmp_path, format_=2, schedule="constant")
    member.train(9)
    member.look()
    assert member.trainer.total_inner_steps == 209
    member.trainer.inner_step, member.trainer.total_inner_steps = 2, 77  # of an older checkpoint
    member.handle(ev.RolledBack(Progress(4, 2, 77, [])))
    assert member.trainer.total_inner_steps == 202
    network.publish(7, 300)
    member.state = MinerState(Mode.TRAINING, 4, place=member.state.place)
    member.look()
    assert member.state.fetch_target == 7 and member.trainer.total_inner_steps == 202
    member.trainer.begin_epoch(7)
    member.state = MinerState(Mode.LOADING, 4, place=member.state.place, fetch_target=7)
    member.handle(ev.Loaded(7))
    assert member.trainer.total_inner_steps == 300


def test_a_state_that_does_not_say_moves_nobody(tmp_path: Path) -> None:
    network = Network()
    network.publish(4, 0)
    member = Member(network, tmp_path, format_=2, schedule="cosine")
    member.train(5)
    member.look()
    assert member.trainer.total_inner_steps == WARM - 1 + 5
