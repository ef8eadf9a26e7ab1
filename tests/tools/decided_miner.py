"""A miner whose rounds are decided by the product's own ``decide``, with weights of a test's kind.

Only what an order or a task does to the weights is here; which of them follow from a call, an
outcome and a look at the global bucket is :func:`~distributed_training.miner.state_machine.decide`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.miner import events as ev
from distributed_training.miner.events import Action, MinerState, Mode, Rules, Task
from distributed_training.miner.state_machine import decide
from distributed_training.protocol.types import AllReduceError, AllReduceResult, RoundRequest

RULES = Rules(reload_seconds=2640.0, checkpoint_steps=10)
CALL = RoundRequest("5Validator")


@dataclass(frozen=True)
class Published:
    """The global state: its outer step, and weights (with what belongs to them)."""

    outer_step: int
    weights: Any


class DecidedMiner(ABC):
    """``weights`` are the start of the outer step. ``loads``: global states taken over."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights
        self.state = MinerState(mode=Mode.TRAINING, outer_step=0)
        self.outcome: AllReduceResult | AllReduceError | None = None
        self.loads: list[Action] = []
        self.now = 0.0
        self._published = Published(0, copy.copy(weights))

    @abstractmethod
    def average(self) -> AllReduceResult:
        """Raises AllReduceError."""

    @abstractmethod
    def outer_step(self) -> Any:
        """Return the weights after the step. Raises RuntimeError: a rank votes against it."""

    @abstractmethod
    def same(self, weights: Any) -> bool:
        """Compare the weights with published ones, as far as a sample shows it."""

    def call(self) -> None:
        """The validator calls a round; returns when it is over here."""
        self.outcome = None
        self.on_event(ev.AllReduceCalled(CALL, self.now))

    def follow(self, published: Published) -> None:
        """Look at the global bucket soon after the round, and again when the time is up."""
        self._published = published
        self.on_event(ev.GlobalEpochSeen(published.outer_step, self.now))
        self.now += RULES.reload_seconds + 1
        self.on_event(ev.Tick(self.now))

    def on_event(self, event: ev.Event) -> None:
        self.state, actions = decide(self.state, event, RULES)
        for action in actions:
            answer = self._carry_out(action)
            if answer is not None:
                self.on_event(answer)

    def _carry_out(self, action: Action | Task) -> ev.Event | None:
        published = self._published
        match action:
            case Action.WRITE_PSEUDO_GRADIENT:
                return ev.PseudoGradientWritten(1.0)
            case Task.AVERAGE:
                try:
                    self.outcome = result = self.average()
                except AllReduceError as error:
                    self.outcome = error
                    return ev.RoundFailed(error.fault, error.detail)
                return ev.Averaged(result)
            case Action.OUTER_STEP:
                try:
                    self.weights = self.outer_step()
                except RuntimeError as error:
                    return ev.OuterStepEnded(False, self.state.outer_step, str(error))
                return ev.OuterStepEnded(True, self.state.outer_step + 1)
            case Task.COMPARE_EPOCHS:
                return ev.GlobalEpochSeen(published.outer_step, self.now)
            case Task.COMPARE_WEIGHTS:
                return ev.WeightsCompared(published.outer_step, self.same(published.weights))
            case Task.FETCH_GLOBAL:
                assert self.state.fetch_target == published.outer_step
                return ev.GlobalFetched(Path("global"))
            case Action.LOAD | Action.REBASE:
                self.loads.append(action)
                self.weights = copy.copy(published.weights)
                return ev.Loaded(published.outer_step)
            case _:
                assert action is Action.CHECKPOINT, action
                return None
