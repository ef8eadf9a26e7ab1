"""The validator as a program: from its configuration to an exit status."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distributed_training.chain.base import ChainError
from distributed_training.common.exits import ExitStatus
from distributed_training.config import Config, ConfigError, describe, exit_with
from distributed_training.node.failures import NetworkFailure
from distributed_training.node.signals import Stopped, StopSignals
from distributed_training.node.start import make_run_folder, start_log
from distributed_training.scoring.evaluator import Evaluator
from distributed_training.scoring.model import EvaluationModel, evaluation_device
from distributed_training.store.errors import StoreError
from distributed_training.telemetry import EventLog
from distributed_training.training.model import parameter_schema
from distributed_training.training.outer import OUTER_LEARNING_RATE, OUTER_MOMENTUM
from distributed_training.validator.global_state import (
    GlobalPublisher,
    GlobalState,
    GlobalStateError,
)
from distributed_training.validator.initial import initial_weights, read_model_config, small_llama
from distributed_training.validator.parts import Parts, connect
from distributed_training.validator.rounds import RoundCaller
from distributed_training.validator.run import Run
from distributed_training.validator.scorer import Scorer
from distributed_training.validator.standings import Standings
from distributed_training.validator.validator import Validator

log = logging.getLogger(__name__)


def run_validator(
    config: Config, *, connect: Callable[[Config, Path, ExitStack], Parts] = connect
) -> int:
    """Exit status: 0 stopped as asked, 1 a fault (pm2 restarts), 2 bad configuration.

    Call it in the main thread: it handles SIGINT, SIGTERM and SIGHUP.
    """
    try:
        print("\n".join(describe(config)), flush=True)
        folder = make_run_folder(config)
        start_log(config, folder, name="validator")
        with StopSignals(interrupts=True) as signals, ExitStack() as stack:
            parts = connect(config, folder, stack)
            validator, found, initial = build(
                config, parts, folder=folder, stop=signals.stop, stack=stack
            )
            validator.start(found, initial)
            signals.interrupts = False
            validator.run()
    except ConfigError as error:
        return exit_with(error)
    except Stopped:
        log.info("Stopped before the start was complete")
    except (NetworkFailure, GlobalStateError, StoreError, ChainError) as error:
        log.error("%s", error)
        return ExitStatus.FAULT
    return ExitStatus.STOPPED


def build(
    config: Config, parts: Parts, *, folder: Path, stop: threading.Event, stack: ExitStack
) -> tuple[Validator, GlobalState | None, Callable[[], GlobalState]]:
    """The validator, the state that the global bucket holds, and what makes the first one if it is
    empty.

    What must be closed is left to ``stack``. Raises ConfigError, GlobalStateError, StoreError.
    """
    settings = config.validator
    events = EventLog.from_settings(config.telemetry, folder)
    run = Run(folder, events.write if events else _record_nothing, stop)
    publisher = GlobalPublisher(
        store=parts.store, folder=folder / "global", keep_epochs=config.store.keep_epochs
    )
    found = publisher.load()
    model_config = found.model_config if found else _new_model(config, parts)
    schema = parameter_schema(model_config)
    swarm = parts.swarm(schema)
    stack.callback(swarm.close)
    model = EvaluationModel(
        model_config=model_config, device=evaluation_device(config.miner.device), stop=stop
    )
    validator = Validator(
        settings=settings,
        member=parts.member,
        rounds=RoundCaller(
            client=parts.client,
            swarm=swarm,
            open_bucket=parts.open_bucket,
            settings=settings,
            swarm_settings=config.swarm,
            caller=parts.member.hotkey,
            run=run,
        ),
        publisher=publisher,
        scorer=Scorer(
            settings=settings,
            open_bucket=parts.open_bucket,
            publisher=publisher,
            evaluator=Evaluator(model=model, pages=parts.pages),
            rng=random.Random(settings.seed or None),
            record=run.record,
        ),
        standings=_standings(folder / "ledger.json"),
        held_out_loss=lambda weights: model.loss_of(weights, parts.held_out),
        run=run,
    )

    def initial() -> GlobalState:
        return GlobalState(
            model_config=model_config,
            schema=schema,
            outer_step=0,
            weights=initial_weights(model_config, seed=settings.initial_seed),
            momentum=None,
            learning_rate=OUTER_LEARNING_RATE,
            mu=OUTER_MOMENTUM,
            last_allreduce_block=0,
        )

    return validator, found, initial


def _standings(path: Path) -> Standings:
    try:
        return Standings.load(path)
    except ValueError as error:
        raise GlobalStateError(
            f"{path} is damaged ({error}), so the miners' scores are unknown: restore it, or "
            "remove it to start with empty scores"
        ) from None


def _new_model(config: Config, parts: Parts) -> dict[str, Any]:
    path = config.validator.model_config
    if path is not None:
        return read_model_config(path, parts.vocabulary)
    return small_llama(
        vocabulary=parts.vocabulary,
        sequence_length=config.training.sequence_length,
        eos_token=parts.eos_id,
    )


def _record_nothing(kind: str, **fields: Any) -> None:
    """``--neuron.dont_save_events``."""
