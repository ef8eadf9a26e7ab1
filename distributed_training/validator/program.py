"""The validator as a program: from its configuration to an exit status.

``outside.py`` brings in chain, object store, data and swarm; here they are put together.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributed_training.chain.base import ChainError
from distributed_training.common.exits import ExitStatus
from distributed_training.config import Config, ConfigError, describe, exit_with
from distributed_training.node.failures import NetworkFailure
from distributed_training.node.signals import Stopped, StopSignals
from distributed_training.node.start import make_run_folder, start_log
from distributed_training.protocol import names
from distributed_training.protocol.commitment import CommitmentError, parse_commitment
from distributed_training.protocol.payload import Schema
from distributed_training.swarm import HivemindSwarm
from distributed_training.telemetry import EventLog
from distributed_training.training.model import parameter_schema
from distributed_training.training.outer import OUTER_LEARNING_RATE, OUTER_MOMENTUM
from distributed_training.validator import rounds
from distributed_training.validator.buckets import Bucket, BucketError, OpenBucket, ReadBucket
from distributed_training.validator.evaluator import Evaluator
from distributed_training.validator.events import EventSink
from distributed_training.validator.initial import (
    initial_weights,
    read_model_config,
    small_llama,
)
from distributed_training.validator.model import EvaluationModel
from distributed_training.validator.pages import PageReader, PageSource, Tokenizer
from distributed_training.validator.publisher import GlobalPublisher, GlobalState, GlobalStateError
from distributed_training.validator.scorer import Scorer
from distributed_training.validator.validator import Chain, Identity, Validator

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outside:
    """Everything beyond this room. ``swarm`` is called once the model's schema is known;
    ``unavailable`` is what ``source`` raises when rows cannot be had now."""

    hotkey: str
    chain: Chain
    client: rounds.Client
    bucket: Bucket
    open_bucket: OpenBucket
    tokenizer: Tokenizer
    vocabulary: int  # of the tokenizer; words a new model needs
    eos_id: int
    source: PageSource
    unavailable: tuple[type[Exception], ...]
    held_out: Tensor
    swarm: Callable[[Schema], HivemindSwarm]


def run_validator(config: Config, *, connect: Callable[..., Outside] | None = None) -> int:
    """Exit status: 0 stopped as asked, 1 a fault (pm2 restarts), 2 bad configuration.

    Call it in the main thread: it handles SIGINT, SIGTERM and SIGHUP. ``connect`` as
    :func:`~.outside.connect`, which is the default.
    """
    try:
        print("\n".join(describe(config)), flush=True)
        folder = make_run_folder(config)
        start_log(config, folder, name="validator")
        if connect is None:
            from distributed_training.validator import outside  # the heavy rooms, when needed

            connect = outside.connect
        with StopSignals(interrupts=True) as signals, ExitStack() as stack:
            parts = connect(config, folder, stack)
            validator, initial = build(config, parts, folder=folder, stop=signals.stop, stack=stack)
            validator.start(initial)
            signals.interrupts = False
            validator.run()
    except ConfigError as error:
        return exit_with(error)
    except Stopped:
        log.info("Stopped before the start was complete")
    except (NetworkFailure, GlobalStateError, BucketError, ChainError) as error:
        log.error("%s", error)
        return ExitStatus.FAULT
    return ExitStatus.STOPPED


def build(
    config: Config,
    outside: Outside,
    *,
    folder: Path,
    stop: threading.Event,
    stack: ExitStack,
) -> tuple[Validator, Callable[[], GlobalState]]:
    """The validator, and what makes the first state if the global bucket is empty.

    What must be closed is left to ``stack``. Raises ConfigError, GlobalStateError, BucketError.
    """
    settings = config.validator
    publisher = GlobalPublisher(
        bucket=outside.bucket,
        folder=folder / "global",
        run=names.RUN,
        peer_id=lambda: swarm.peer_id,
        keep_epochs=config.store.keep_epochs,
    )
    model_config = publisher.model_config()
    if model_config is None:
        model_config = _new_model(config, outside)
    schema = parameter_schema(model_config)
    swarm = outside.swarm(schema)
    stack.callback(swarm.close)
    events: EventSink = EventLog.from_settings(config.telemetry, folder) or _NoEvents()
    model = EvaluationModel(
        model_config=model_config,
        device=_device(config.miner.device),
        micro_batch=2,
        stop=stop,
    )
    rng = random.Random(settings.seed or None)
    evaluator = Evaluator(
        model=model,
        pages=PageReader(
            source=outside.source,
            tokenizer=outside.tokenizer,
            sequence_length=config.training.sequence_length,
            ranks=settings.evaluation_ranks,
            pages=settings.evaluation_pages,
            limit=settings.evaluation_sequences,
            unavailable=outside.unavailable,
        ),
        rng=rng,
    )

    def bucket_of(neuron: Any) -> ReadBucket:
        return bucket_by_commitment(outside, neuron.uid, neuron.hotkey)

    validator = Validator(
        settings=settings,
        identity=Identity(
            outside.hotkey,
            lambda: swarm.peer_id,
            names.RUN,
            tuple(getattr(swarm, "visible_maddrs", ())),
        ),
        epoch_length=config.miner.epoch_length,
        chain=outside.chain,
        rounds=rounds.RoundCaller(
            client=outside.client,
            swarm=swarm,
            bucket_of=bucket_of,
            rules=rounds.RoundRules(
                alive_wanted=settings.alive_wanted,
                alive_least=settings.alive_least,
                alive_timeout=settings.alive_timeout,
                sweep_interval=settings.sweep_interval,
                sweep_patience=settings.sweep_patience,
                minimum_peers=settings.minimum_peers,
                top_candidates=settings.top_candidates,
                round_timeout=config.swarm.round_timeout,
                min_group_size=config.swarm.min_group_size,
            ),
            caller=outside.hotkey,
            run=names.RUN,
            scratch=folder / "scratch",
            stop=stop,
        ),
        publisher=publisher,
        scorer=Scorer(
            commitment=outside.chain.commitment,
            open_bucket=outside.open_bucket,
            publisher=publisher,
            evaluator=evaluator,
            events=events,
            age_limit=settings.upload_age_limit,
            uids_per_pass=settings.score_uids,
        ),
        model=model,
        held_out=outside.held_out,
        events=events,
        folder=folder,
        stop=stop,
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

    return validator, initial


def bucket_by_commitment(outside: Outside, uid: int, hotkey: str) -> ReadBucket:
    """A miner's bucket. Raises BucketError, also for a commitment that is none."""
    try:
        return outside.open_bucket(uid, parse_commitment(outside.chain.commitment(hotkey) or ""))
    except (CommitmentError, ChainError) as error:
        raise BucketError(f"uid {uid}: {error}") from None


def _new_model(config: Config, outside: Outside) -> dict[str, Any]:
    path = config.validator.model_config
    if path is not None:
        return read_model_config(path, outside.vocabulary)
    return small_llama(
        vocabulary=outside.vocabulary,
        sequence_length=config.training.sequence_length,
        eos_token=outside.eos_id,
    )


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "no GPU is visible, so the validator cannot evaluate on one: give --neuron.device cpu"
        )
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(auto if wanted == "auto" else wanted)


class _NoEvents:
    def write(self, kind: str, **fields: Any) -> None:
        """``--neuron.dont_save_events``."""
