"""A validator that is killed, or refuses a step, in the first rounds of a young network.

Miners train for real and decide by the product's own ``decide``; the validator's part is played
here. The network wins more than a nat by each of its first outer steps, so what it goes back to is
far worse than what it has.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from distributed_training.miner import events as ev
from distributed_training.miner.events import Action, MinerState, Mode, Task
from distributed_training.miner.loop import state_files
from distributed_training.miner.resume import StartupInfo, resume_training
from distributed_training.protocol import keys
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    Progress,
)
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.local_evaluation import WeightsWorseThanGuess
from distributed_training.training.outer_rule import nesterov_sgd
from distributed_training.training.outer_step import OuterOptimizerState, save_outer_optimizer
from tests.tools.decided_miner import RULES, DecidedMiner, Published
from tests.tools.training_world import save_checkpoint, sequences, train, trainer, whole_weights

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("process_group")]

STEPS = 6
TEXT = sequences(999, count=16)  # to measure on
FLAGS: dict[str, Any] = {"learning_rate": 2e-2, "local_batch_size_train": 8, "warmup_steps": 0}
RESULT = AllReduceResult(("a", "b", "c"), (), 0.1, 0.9, 1.0)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Return the weights of a peer that added up in another order: their last bits differ."""
    return values * (1 + 1e-7 * torch.randn_like(values))


class Miner(DecidedMiner):
    """One with a real trainer. ``folder``: of its run; ``refused``: why a state was not loaded."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(None)
        self.folder, self.number = folder, number
        self.trainer = trainer(**FLAGS)
        self.refused: list[str] = []
        self.noted: list[str] = []  # by which a fetch would be refused from here on
        self.averaged: list[torch.Tensor] | None = None  # None: this miner loses its round
        self.steps = 0

    def train(self, steps: int) -> None:
        train(
            self.trainer, 1000 * self.number + self.steps, 1000 * self.number + self.steps + steps
        )
        self.steps += steps

    def pseudo_gradient(self) -> list[torch.Tensor]:
        buffers = [torch.zeros(shape) for _, shape in self.trainer.schema]
        self.trainer.write_pseudo_gradient(buffers)
        return buffers

    def average(self) -> AllReduceResult:
        if self.averaged is None:
            raise AllReduceError(AllReduceFault.PEER_FAILED)
        return RESULT

    def outer_step(self) -> Any:
        assert self.averaged is not None
        self.trainer.prepare_outer_step([rounded(t) for t in self.averaged])
        self.trainer.commit_outer_step()

    def same(self, weights: Any) -> bool:
        ours = self.trainer.outer.epoch_start or []
        return all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, weights, strict=True))

    def _carry_out(self, action: Action | Task) -> ev.Event | None:
        published = self._published
        match action:
            case Action.LOAD | Action.REBASE:
                files, text = state_files(published.weights.folder), TEXT
                try:
                    if action is Action.LOAD:
                        self.trainer.load_global(*files, published.outer_step, text)
                    else:
                        self.trainer.rebase(*files, text)
                except WeightsWorseThanGuess as error:
                    self.refused.append(str(error))
                    return ev.LoadFailed(str(error), self.now, awful=True)
                self.loads.append(action)
                return ev.Loaded(published.outer_step)
            case Task.COMPARE_WEIGHTS:
                same = self.same(published.weights.weights)
                return ev.WeightsCompared(published.outer_step, same)
            case Task.REFUSE_GLOBAL:
                self.noted.append(self.state.problem)
                return None
            case Action.CHECKPOINT:
                progress = Progress(self.trainer.outer_step, self.trainer.inner_step, 0, [])
                save_checkpoint(self.keeper, progress)
                return None
            case _:
                return super()._carry_out(action)

    @property
    def keeper(self) -> Checkpointer:
        return Checkpointer(trainer=self.trainer, folder=self.folder / "checkpoints")

    def hear(self, published: Published) -> None:
        """The validator's next IsAlive comes long before the time to publish is up."""
        self._published = published
        self.on_event(ev.GlobalEpochSeen(published.outer_step, self.now))
        self.on_event(ev.ValidatorHeard(published.outer_step, self.now))
        self.now += 1
        self.on_event(ev.Tick(self.now))

    def restart(self, published: Published) -> None:
        """A new process with the folder of this one."""
        self.trainer = trainer(**FLAGS)
        info = StartupInfo(global_outer_step=published.outer_step)
        folder = published.weights.folder
        resume_training(self.trainer, self.keeper, info, folder, sample=lambda: TEXT)
        ours = self.trainer.outer_step
        behind = ours != published.outer_step
        self.state = MinerState(
            mode=Mode.AWAITING_GLOBAL if behind else Mode.TRAINING,
            outer_step=ours,
            global_due=self.now + RULES.reload_seconds,
        )


@dataclass
class State:
    folder: Path
    weights: list[torch.Tensor]
    momentum: list[torch.Tensor] | None


@dataclass
class Network:
    """``published``: the outer step from which the validator continues after any loss."""

    folder: Path
    miners: list[Miner] = field(default_factory=list)
    published: Published = field(init=False)

    def __post_init__(self) -> None:
        for number in range(2):
            miner = Miner(self.folder / f"miner-{number}", number)
            # A start has a checkpoint of what it loaded.
            miner._carry_out(Action.CHECKPOINT)
            self.miners.append(miner)
        self.publish(0, whole_weights(self.miners[0].trainer) or [], None)

    def publish(
        self, outer_step: int, weights: list[torch.Tensor], momentum: list[torch.Tensor] | None
    ) -> None:
        folder = self.folder / f"epoch-{outer_step}"
        folder.mkdir(parents=True, exist_ok=True)
        schema = self.miners[0].trainer.schema
        named = {name: values for (name, _), values in zip(schema, weights, strict=True)}
        save_file(named, folder / keys.MODEL)
        outer = OuterOptimizerState(momentum, 0.8, 0.9, outer_step)
        save_outer_optimizer(folder / keys.OUTER_OPTIMIZER, outer, parameters=len(schema))
        self.published = Published(outer_step, State(folder, weights, momentum))

    def round(self, *, reached: int = 2, published: bool = True) -> None:
        """``reached``: miners that have the average before the validator is gone."""
        gradients = [miner.pseudo_gradient() for miner in self.miners]
        average = [sum(parts) / len(gradients) for parts in zip(*gradients, strict=True)]
        for number, miner in enumerate(self.miners):
            miner.averaged = average if number < reached else None
            miner.call()
        state = self.published.weights
        if published:
            momenta = state.momentum or [None] * len(average)
            both = [
                nesterov_sgd(*each, lr=0.8, mu=0.9)
                for each in zip(state.weights, average, momenta, strict=True)
            ]
            self.publish(self.published.outer_step + 1, [w for w, _ in both], [m for _, m in both])

    def follow(self, *, heard: bool = False) -> None:
        for miner in self.miners:
            (miner.hear if heard else miner.follow)(self.published)

    def outer_steps(self) -> set[int]:
        return {self.published.outer_step, *(m.trainer.outer_step for m in self.miners)}


#: One round: how many miners reach its outer step, whether it is published, inner steps of the
#: miners before it, which of them are killed and start again after it, and whether they hear of
#: the validator's outer step.
ROUND = st.tuples(
    st.sampled_from([0, 1, 2]),
    st.booleans(),
    st.sampled_from([(STEPS, STEPS), (0, STEPS)]),
    st.sets(st.sampled_from([0, 1])),
    st.booleans(),
)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(ROUND, min_size=3, max_size=3))
@example(rounds=[(2, False, (6, 6), set(), True)] * 3)
@example(
    rounds=[
        (2, True, (6, 6), set(), False),
        (2, False, (0, 6), {0, 1}, True),
        (1, False, (0, 0), {0}, False),
    ]
)
def test_a_network_continues_after_its_validator_is_killed_in_the_first_rounds(
    rounds: list[tuple[int, bool, tuple[int, int], set[int], bool]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kill may come at any moment: no miner, one or all have the average, published or not."""
    caplog.set_level(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        network = Network(Path(folder))
        for reached, published, steps, restarted, heard in rounds:
            for miner, count in zip(network.miners, steps, strict=True):
                miner.train(count)
            network.round(reached=reached, published=published and reached == 2)
            for number in sorted(restarted):
                network.miners[number].restart(network.published)
            network.follow(heard=heard)
            assert len(network.outer_steps()) == 1
        before = network.published.outer_step
        network.round()
        network.follow()
        assert network.outer_steps() == {before + 1}
        for miner in network.miners:
            assert not miner.refused and miner.same(network.published.weights.weights)
    assert "taken over" not in caplog.text


def test_other_weights_of_the_outer_step_before_are_judged_by_its_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are tried again: weights refused by our losses may be accepted after a restart."""
    network = Network(tmp_path)
    for miner in network.miners:
        miner.train(STEPS)
    began = network.published.weights.weights
    network.round(published=False)
    network.publish(0, [20 * t if t.dim() > 1 else t for t in began], None)
    network.follow()
    for miner in network.miners:
        assert (miner.trainer.outer_step, miner.noted) == (1, [])
        assert "limit 5.20" in miner.refused.pop()
    network.publish(0, [t + 0.01 * torch.randn_like(t) for t in began], None)
    network.follow()
    assert network.outer_steps() == {0} and not network.miners[0].refused
    assert "taken over" not in caplog.text


def test_another_average_of_the_same_outer_step_becomes_its_start(tmp_path: Path) -> None:
    """The validator started again and called a second round at once, with hardly a step in it."""
    network = Network(tmp_path)
    network.miners[0].train(STEPS)
    network.round(published=False)
    other = [t + 0.001 * torch.randn_like(t) for t in network.published.weights.weights]
    network.publish(1, other, [torch.zeros_like(t) for t in other])
    network.follow()
    for miner in network.miners:
        assert miner.loads == [Action.REBASE] and miner.same(other) and not miner.refused


def test_a_start_that_is_two_outer_steps_ahead_goes_back_and_notes_no_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = Network(tmp_path)
    miner = network.miners[0]
    for _ in range(2):
        miner.train(STEPS)
        network.round(published=False)
    began = network.published.weights.weights
    network.publish(0, [20 * t if t.dim() > 1 else t for t in began], None)
    miner.restart(network.published)
    assert miner.trainer.outer_step == 2 and "at outer step 0 with other weights" in caplog.text
    network.publish(0, began, None)
    miner.restart(network.published)
    assert miner.trainer.outer_step == 0
