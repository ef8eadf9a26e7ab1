"""Build the parts of a miner that several tests need."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributed_training.common.backoff import Clocks
from distributed_training.config import Config
from distributed_training.miner.reporter import Reporter
from distributed_training.protocol.types import StepReport
from distributed_training.telemetry.facts import Facts
from distributed_training.telemetry.own_facts import OwnFacts
from tests.tools.network import ALICE, network_file
from tests.tools.settings import load_config


def config_of(*argv: str, rules: Mapping[str, Any] = {}, signer: Any = ALICE) -> Config:
    """Return the configuration that follows from only these flags, without checking it.

    ``rules``: rules of the network's file; without any there is no network.
    """
    with tempfile.TemporaryDirectory() as folder:
        if rules:
            file = network_file(Path(folder), rules, signer=signer)
            argv = ("--network", file, *argv)
        return load_config("miner", argv, environ={}, dotenv=None, check=False)


def impatient(config: Config, *, start_timeout: float) -> Config:
    """Return ``config``, changed so that a start waits only that many seconds for the chain."""
    wait = timedelta(seconds=start_timeout)
    return replace(config, chain=replace(config.chain, start_timeout=wait))


def step_report(inner_step: int = 7, *, outer_step: int = 3, **changes: Any) -> StepReport:
    """Return the report of a step that took 2 s."""
    figures = {"loss": 2.5, "learning_rate": 1e-3, "tokens": 256, "samples": 8, "seconds": 2.0}
    figures |= {"data_wait_seconds": 0.5, "micro_batches": 2}
    return StepReport(outer_step, inner_step, **figures | changes)  # type: ignore[arg-type]


def watched(
    folder: Path,
    rules: Facts,
    measured: Callable[[], Mapping[str, Any]],
    clocks: Clocks,
    write: Callable[..., None] = lambda *_, **__: None,
) -> tuple[OwnFacts, Reporter]:
    """Return a miner's facts, and the reporter that records its events through them."""
    facts = OwnFacts(rules=rules, measured=measured, write=write, folder=folder, clocks=clocks)
    reporter = Reporter(
        record=facts.record,
        expect_gpu=False,
        bucket="",
        clock=clocks.steady,
        joined=lambda: facts.joined,
    )
    return facts, reporter
