"""The reference validator: owns the global bucket, leads the rounds, scores the uploads.

One thread, one clock of blocks. At each tick, in this order: a round when it is due, else weights,
else a scoring pass. Everything it needs is handed to it (see ``wiring.py``), so that tests run it
with twins in memory.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from distributed_training.chain.base import ChainError, Neuron
from distributed_training.config.validator import ValidatorSettings
from distributed_training.node.signals import Stopped
from distributed_training.protocol import schedule
from distributed_training.protocol.types import AllReduceFault
from distributed_training.training.outer import nesterov_sgd
from distributed_training.validator.evaluator import Judgement
from distributed_training.validator.events import EventSink
from distributed_training.validator.ledger import Ledger
from distributed_training.validator.model import EvaluationModel
from distributed_training.validator.publisher import GlobalPublisher, GlobalState, GlobalStateError
from distributed_training.validator.rounds import Attendance, RoundCaller, RoundOutcome
from distributed_training.validator.scorer import Scorer

log = logging.getLogger(__name__)

PUBLICATION_RETRY = timedelta(seconds=2)
WORSE = "WORSE"  # fault of a round whose average made the model worse than tolerated


class Chain(Protocol):
    """``chain.Chain``, as far as a validator needs it."""

    def block(self) -> int: ...
    def neurons(self) -> Sequence[Neuron]: ...
    def commitment(self, hotkey: str) -> str | None: ...
    def set_weights(self, weights: dict[int, float]) -> None: ...


@dataclass(frozen=True)
class Identity:
    hotkey: str
    peer_id: Callable[[], str]  # of the averager; a new one after each restart of the swarm
    run: int
    maddrs: tuple[str, ...] = ()


class Validator:
    """Call :meth:`start`, then :meth:`run`. ``stop`` ends both soon; the swarm's owner also cancels
    a running round then.

    ``folder`` keeps the ledger. ``epoch_length``: blocks between two settings of weights.
    """

    def __init__(
        self,
        *,
        settings: ValidatorSettings,
        identity: Identity,
        epoch_length: int,
        chain: Chain,
        rounds: RoundCaller,
        publisher: GlobalPublisher,
        scorer: Scorer,
        model: EvaluationModel,
        held_out: Tensor,
        events: EventSink,
        folder: Path,
        stop: threading.Event,
    ) -> None:
        # collaborators
        self._settings = settings
        self._identity = identity
        self._chain = chain
        self._rounds = rounds
        self._publisher = publisher
        self._scorer = scorer
        self._model = model
        self._held_out = held_out
        self._events = events
        self._stop = stop
        self._epoch_length = epoch_length
        # what it knows
        self._ledger_path = folder / "ledger.json"
        try:
            self._ledger = Ledger.load(self._ledger_path)
        except ValueError as error:
            raise GlobalStateError(
                f"{self._ledger_path} is damaged ({error}), so the miners' scores are unknown: "
                "restore it, or remove it to start with empty scores"
            ) from None
        self._state: GlobalState | None = None
        self._loss = math.nan  # held-out loss of the state
        self._scored_at = -1
        self._weights_at = -1

    @property
    def state(self) -> GlobalState:
        if self._state is None:
            raise RuntimeError("start() was not called")
        return self._state

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def blocks_per_allreduce(self) -> int:
        later = self._settings.blocks_per_allreduce_later
        if later and self._ledger.successful_rounds:
            return later
        return self._settings.blocks_per_allreduce

    @property
    def last_allreduce_block(self) -> int:
        """Where the present period began: the last round, good or bad."""
        return max(self.state.last_allreduce_block, self._ledger.last_round_block or 0)

    # --- life -----------------------------------------------------------------------------------

    def start(self, initial: Callable[[], GlobalState]) -> None:
        """Go on from what the global bucket holds; publish ``initial()`` if it is empty.

        Raises GlobalStateError, BucketError when the bucket cannot be read or written.
        """
        block = self._chain.block()
        found = self._publisher.load()
        if found is None:
            self._state = replace(initial(), last_allreduce_block=block)
            self._publish_initial()
        else:
            self._state = found
            self._publisher.announce(found.outer_step)
        state = self.state
        self._loss = self._held_out_loss(state.weights)
        # Miners need time to load and to train: a period never starts before the validator does.
        self._ledger.last_round_block = max(block, self._ledger.last_round_block or 0)
        self._events.write(
            "start",
            uid=self._own_uid(),
            hotkey=self._identity.hotkey,
            peer_id=self._identity.peer_id(),
            maddrs=list(self._identity.maddrs),
            outer_step=state.outer_step,
            resumed=found is not None,
        )
        self._told_loss(state.outer_step, self._loss, self._loss)
        log.info(
            "Global state %d.%d.0, held-out loss %.4f",
            self._identity.run,
            state.outer_step,
            self._loss,
        )

    def run(self) -> None:
        """Tick until stopped."""
        while not self._stop.wait(self._settings.tick.total_seconds()):
            try:
                self.tick()
            except ChainError as error:
                log.warning("The chain does not answer (%s). Trying again.", error)
            except Stopped:
                break
        self._ledger.save(self._ledger_path)
        self._events.write("stop", reason="asked to stop")

    def tick(self) -> None:
        """Do what is due at the present block: a round, or weights, or a scoring pass.

        Raises ChainError, Stopped.
        """
        block = self._chain.block()
        if self._round_due(block):
            self.round()
        elif block - self._weights_at >= self._epoch_length and self._ledger.weights():
            self._set_weights(block)
        elif block - self._scored_at >= self._settings.score_blocks:
            self.score()

    # --- the round --------------------------------------------------------------------------------

    def round(self) -> bool:
        """Lead one round and, if it was good, publish the next outer step; whether it was.

        Raises ChainError, Stopped.
        """
        began = time.monotonic()
        state = self.state
        log.info("Round due at outer step %d", state.outer_step)
        outcome = self._rounds.run(state, self._miners, self._on_sweep)
        # One count a round, however many sweeps it took to gather the miners.
        self._ledger.swept(outcome.attendance.alive, outcome.attendance.asked)
        if outcome.averaged is None and self._stop.is_set():
            raise Stopped
        fault, detail = outcome.fault.name if outcome.fault else "", outcome.detail
        following: GlobalState | None = None
        if outcome.averaged is not None:
            following = self._outer_step(outcome.averaged)
            if following is None:
                fault, detail = AllReduceFault.NOT_FINITE.name, "the new weights are not finite"
        if following is not None:
            before, after = self._loss, self._held_out_loss(following.weights)
            self._told_loss(following.outer_step, before, after)
            if not after <= before * (1 + self._settings.loss_tolerance):  # also for NaN
                fault, detail = WORSE, f"held-out loss {before:.4f} -> {after:.4f}"
                following = None
        self._told_round(outcome, fault, detail)
        if following is not None and self._published(following):
            self._succeeded(following, after, outcome, began)
            return True
        self._failed(fault or "publication", detail)
        return False

    def _outer_step(self, averaged: Sequence[Tensor]) -> GlobalState | None:
        """None if the result is not finite."""
        state = self.state
        weights, momentum = [], []
        for i, (start, gradient) in enumerate(zip(state.weights, averaged, strict=True)):
            old = None if state.momentum is None else state.momentum[i]
            new, buffer = nesterov_sgd(start, gradient, old, lr=state.learning_rate, mu=state.mu)
            if not bool(torch.isfinite(new).all()):
                return None
            weights.append(new)
            momentum.append(buffer)
        return state.after(weights, momentum, block=self._chain.block())

    def _succeeded(
        self, following: GlobalState, loss: float, outcome: RoundOutcome, began: float
    ) -> None:
        ledger = self._ledger
        self._state, self._loss = following, loss
        ledger.round_succeeded(
            alive=outcome.attendance.alive,
            asked=outcome.attendance.asked,
            failed=outcome.failed,
        )
        ledger.failed_rounds = 0
        ledger.successful_rounds += 1
        ledger.last_round_block = following.last_allreduce_block
        ledger.save(self._ledger_path)
        self._events.write(
            "outer_step",
            outer_step=following.outer_step,
            participants=list(outcome.participants),
            seconds=round(time.monotonic() - began, 3),
        )
        log.info(
            "AllReduce Operation Finished Succesfully: outer step %d, held-out loss %.4f",
            following.outer_step,
            loss,
        )

    def _failed(self, fault: str, detail: str) -> None:
        """The epoch is kept and the whole period starts again."""
        self._ledger.failed_rounds += 1
        self._ledger.last_round_block = self._chain.block()
        self._ledger.save(self._ledger_path)
        log.warning(
            "The round failed (%s: %s), so outer step %d stays; the next round is due in %d blocks",
            fault,
            detail,
            self.state.outer_step,
            self.blocks_per_allreduce,
        )

    def _on_sweep(self, attendance: Attendance) -> None:
        alive = set(attendance.alive)
        self._events.write(
            "sweep",
            outer_step=self.state.outer_step,
            block=self._chain.block(),
            alive=sorted(alive),
            not_alive=sorted(set(attendance.asked) - alive),
        )

    # --- scoring ----------------------------------------------------------------------------------

    def score(self) -> list[Judgement]:
        """One pass over the miners' uploads: check all, judge some, update scores.

        Raises ChainError, Stopped. Stops early when a round falls due.
        """
        block, state = self._chain.block(), self.state
        self._scored_at = block
        miners = self._miners()
        attendance = self._rounds.sweep(miners, state.outer_step)
        self._ledger.swept(attendance.alive, attendance.asked)
        self._on_sweep(attendance)
        judgements = self._scorer.score(
            miners,
            state,
            self._ledger,
            block=block,
            bpa=self.blocks_per_allreduce,
            interrupted=lambda: self._round_due(self._chain.block()),
        )
        self._ledger.save(self._ledger_path)
        return judgements

    def _set_weights(self, block: int) -> None:
        self._weights_at = block
        weights = self._ledger.weights()
        try:
            self._chain.set_weights(weights)
        except ChainError as error:
            log.warning(
                "Weights were not set (%s). Trying again in %d blocks.", error, self._epoch_length
            )
            return
        self._events.write("weights", block=block, weights={str(u): w for u, w in weights.items()})

    # --- small parts ------------------------------------------------------------------------------

    def _round_due(self, block: int) -> bool:
        return schedule.round_due(
            block=block,
            last_allreduce_block=self.last_allreduce_block,
            bpa=self.blocks_per_allreduce,
        )

    def _miners(self) -> list[Neuron]:
        """Registered, with an endpoint, not us and not a validator; the ledger takes them in."""
        miners = [
            n
            for n in self._chain.neurons()
            if n.hotkey != self._identity.hotkey
            and n.port is not None
            and not (n.validator_permit and n.stake > self._settings.minimum_stake)
        ]
        self._ledger.sync(miners)
        return miners

    def _own_uid(self) -> int | None:
        return next(
            (n.uid for n in self._chain.neurons() if n.hotkey == self._identity.hotkey), None
        )

    def _held_out_loss(self, weights: list[Tensor]) -> float:
        self._model.load(weights)
        return self._model.loss(self._held_out)

    def _publish_initial(self) -> None:
        if not self._published(self.state):
            raise GlobalStateError(
                "the initial model could not be published, so there is nothing to train: check the "
                "write keys and the bucket of --neuron.global_model_name"
            )

    def _published(self, state: GlobalState) -> bool:
        """Publish, trying again for a while: the miners have made the step already."""
        deadline = time.monotonic() + self._settings.publication_budget.total_seconds()
        while True:
            report = self._publisher.publish(state)
            self._events.write(
                "publication",
                revision=report.revision.tag,
                ok=report.ok,
                seconds=round(report.seconds, 3),
                bytes_sent=report.bytes_sent,
                reason=report.reason,
            )
            if report.ok:
                return True
            log.error("Outer step %d is not published yet: %s", state.outer_step, report.reason)
            pause = PUBLICATION_RETRY.total_seconds()
            if time.monotonic() + pause > deadline or self._stop.wait(pause):
                return False

    def _told_loss(self, outer_step: int, before: float, after: float) -> None:
        self._events.write("held_out", outer_step=outer_step, before=before, after=after)

    def _told_round(self, outcome: RoundOutcome, fault: str, detail: str) -> None:
        result = outcome.result
        self._events.write(
            "round",
            outer_step=self.state.outer_step,
            ok=not fault,
            fault=fault,
            detail=detail,
            peers=list(result.peers) if result else [],
            failed_peers=list(result.failed_peers) if result else [],
            called=list(outcome.called),
            participants=list(outcome.participants),
            top_uid=outcome.top_uid,
            seconds=round(outcome.seconds, 3),
            matchmaking_seconds=result.matchmaking_seconds if result else None,
            transfer_seconds=result.transfer_seconds if result else None,
        )
