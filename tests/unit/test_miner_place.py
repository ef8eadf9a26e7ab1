"""The place in the learning rate's schedule: the network's, whenever a miner joined."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from distributed_training.miner import events as ev
from distributed_training.miner.build import StartupInfo, resume_training
from distributed_training.miner.events import Action, Command, MinerState, Mode, Rules
from distributed_training.miner.rounds import decide
from distributed_training.protocol.types import Base, Progress, Update
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
    """A network's newest outer step, and the inner steps that it has taken before."""

    def __init__(self) -> None:
        self.outer_step = self.place = 0

    def publish(self, outer_step: int, place: int) -> None:
        self.outer_step, self.place = outer_step, place


class Member:
    """Trainer and state machine of a miner that joins now; a round is a word."""

    def __init__(self, network: Network, *, schedule: str) -> None:
        self.trainer = trainer(
            schedule=schedule, learning_rate=PEAK, warmup_steps=WARM, total_steps=TOTAL,
            **SCHEDULES[schedule],
        )  # fmt: skip
        info = StartupInfo(
            global_outer_step=network.outer_step,
            inner_steps=network.place,
        )
        resume_training(self.trainer, Mock(restore=lambda: None), info, None)
        self.state = MinerState(Mode.TRAINING, network.outer_step)

    def apply(self, network: Network) -> None:
        """Take the network's outer step, by an update or by whole weights."""
        update = Update(
            network.outer_step, Path("u"), Base.KEPT, None, "ab", network.place, whole="many"
        )
        self.handle(ev.UpdateReady(update, 0.0))
        self.trainer.begin_epoch(network.outer_step)
        self.handle(ev.OuterStepEnded(True, network.outer_step))

    def handle(self, event: ev.Event) -> None:
        self.state, actions = decide(self.state, event, Rules(10))
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


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_miners_that_joined_at_different_times_have_one_rate(schedule: str) -> None:
    draw, network = random.Random(schedule), Network()
    members, place = [Member(network, schedule=schedule)], 0
    for outer_step in range(1, 12):
        for member in members:
            member.train(draw.randint(5, 60))
        place += draw.randint(5, 40)
        network.publish(outer_step, place)
        for member in members:
            member.apply(network)
        if outer_step in (1, 6):
            members.append(Member(network, schedule=schedule))
        rates = [member.train(30) for member in members]
        assert all(other == rates[0] for other in rates)
        expected = [formula(schedule, place + step + 1) for step in range(30)]
        assert rates[0] == pytest.approx(expected, rel=1e-12, abs=0)


def test_the_place_is_gone_to_again_after_a_roll_back() -> None:
    network = Network()
    network.publish(4, 200)
    member = Member(network, schedule="constant")
    assert member.trainer.total_inner_steps == 200
    network.publish(7, 300)
    member.apply(network)
    member.train(9)
    assert member.trainer.total_inner_steps == 309
    member.trainer.inner_step, member.trainer.total_inner_steps = 2, 77  # of an older checkpoint
    member.handle(ev.RolledBack(Progress(7, 2, 77)))
    assert member.trainer.total_inner_steps == 302


def test_a_network_that_does_not_say_its_place_moves_nobody() -> None:
    network = Network()
    member = Member(network, schedule="cosine")
    member.train(WARM - 1)
    network.publish(1, 0)
    member.apply(network)
    member.train(5)
    assert member.trainer.total_inner_steps == WARM - 1 + 5
