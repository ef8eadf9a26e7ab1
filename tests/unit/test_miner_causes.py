"""Lines that name a cause: the words that each must have, and must not have, for each fault.

An operator who reads "open the port" or "look at the GPU" looks there first.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.miner import events as ev
from distributed_training.miner import signals
from distributed_training.miner.events import MinerState, Mode
from distributed_training.miner.global_state import (
    GlobalEpoch,
    GlobalSilentError,
    GlobalUnavailableError,
)
from distributed_training.miner.missed_rounds import MissedRounds
from distributed_training.node.start import Stopped
from distributed_training.protocol.lines import step_warnings
from distributed_training.telemetry.verdict import Fact, judge
from tests.tools.miner_parts import step_report
from tests.unit.test_miner_income import NOW, WELL

pytestmark = pytest.mark.timeout(30)

Say = Callable[[pytest.LogCaptureFixture, pytest.MonkeyPatch], str]
Row = tuple[str, Say, list[str], list[str]]  # what happened, the line, what is in it and what not

HOUR = 3600.0


def missed(*looks: float, listens_at: float = 0.0, fetched: float | None = None) -> Say:
    """A round is missed; the global bucket was read at ``looks``, and at the last it is ahead.

    ``fetched``: when a fetch ended, during which nothing was read.
    """

    def say(caplog: pytest.LogCaptureFixture, _: pytest.MonkeyPatch) -> str:
        rounds = MissedRounds(
            outer_step=3,
            published_within=timedelta(minutes=55),
            listens_at=listens_at,
            started=1e9,
            interval=timedelta(minutes=5),
        )
        for at in looks:
            state = MinerState(mode=Mode.TRAINING, outer_step=3)
            if at == fetched:
                rounds.on_event(ev.GlobalFetched(Path()), state)
            rounds.on_event(ev.GlobalEpochSeen(4 if at == looks[-1] else 3, at), state)
        return caplog.messages[-1]

    return say


def regularly(until: float) -> list[float]:
    return [300.0 * look for look in range(int(until / 300) + 1)]


def slow_step(memory: float | None, *, expect_gpu: bool = False) -> Say:
    report = step_report(seconds=62.1, gpu_memory_gb=memory)
    return lambda *_: " ".join(step_warnings(report, expect_gpu=expect_gpu))


def sigterm(starter: Any) -> Say:
    def say(_: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: starter)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        stop = signals.RankStop()
        stop._on_signal(signal.SIGTERM, None)
        event = stop.events.get_nowait()
        assert isinstance(event, ev.StopRequested)
        return event.reason

    return say


def launcher(*, alive: bool) -> Any:
    return SimpleNamespace(pid=41, is_alive=lambda: alive)


def not_called(chain_silent: float = 0.0) -> Say:
    found = replace(WELL, called_at=NOW - 3 * HOUR, block=Fact(1440, NOW - chain_silent))
    return lambda *_: judge(found, NOW).words


def bucket_fails(error: Exception) -> Say:
    def say(caplog: pytest.LogCaptureFixture, _: pytest.MonkeyPatch) -> str:
        def outer_step() -> int:
            raise error

        bucket: Any = SimpleNamespace(outer_step=outer_step)
        watch = GlobalEpoch(
            bucket=bucket,
            post=lambda event: None,
            interval=timedelta(hours=1),
            epoch_start=lambda: (0, ()),
        )
        watch._compare()
        return caplog.messages[-1]

    return say


PORT, GPU, STARTING = "--axon.port", "Check GPU usage", "was starting (since"
TABLE: list[Row] = [
    ("a round nobody called here", missed(*regularly(2 * HOUR)), [PORT], [STARTING]),
    ("called before a start was over", missed(300.0), [STARTING, "nothing to do"], [PORT]),
    ("the same, seen long after", missed(*regularly(0.9 * HOUR)), [STARTING], [PORT]),
    (
        "no network for an hour",
        missed(*regularly(2 * HOUR), 3 * HOUR + 60),
        ["did not answer this machine for 3660 s", "its network"],
        [PORT, STARTING],
    ),
    (
        "a fetch of an hour",
        missed(*regularly(2 * HOUR), 3 * HOUR, 3 * HOUR + 300, fetched=3 * HOUR),
        [PORT],
        ["did not answer"],
    ),
    ("a slow step of a GPU", slow_step(40.0), ["SLOW STEP: 62.1s (expected 10-30s)", GPU], []),
    ("of one that is not used", slow_step(None, expect_gpu=True), [GPU, "LOW GPU"], []),
    ("a slow step of a CPU", slow_step(None), ["SLOW STEP: 62.1s", "on the CPU"], [GPU]),
    ("a stop by the launcher", sigterm(launcher(alive=True)), ["asked to stop"], ["gone"]),
    ("by hand, under torchrun", sigterm(None), ["asked to stop"], ["gone"]),
    ("the launcher is killed", sigterm(launcher(alive=False)), ["launcher (pid 41) is gone"],
     ["asked"]),
    ("no call for hours", not_called(), [PORT], ["the network of this machine"]),
    ("no call, and no chain", not_called(chain_silent=2 * HOUR), ["the network of this machine"],
     [PORT]),
    ("a store that is away", bucket_fails(GlobalSilentError("no route")),
     ["The global bucket does not answer (no route)"], []),
    ("one that answers 403", bucket_fails(GlobalUnavailableError("HTTP 403")),
     ["The global bucket cannot be read (HTTP 403)"], ["does not answer"]),
]  # fmt: skip


@pytest.mark.parametrize(("what", "say", "present", "absent"), TABLE, ids=[r[0] for r in TABLE])
def test_a_line_names_no_cause_that_was_not_looked_at(
    what: str,
    say: Say,
    present: list[str],
    absent: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    line = say(caplog, monkeypatch)
    assert all(part in line for part in present), line
    assert not [part for part in absent if part in line], line


def test_a_stop_ends_a_start_that_waits_for_a_store() -> None:
    """Once: a second signal does not cut the start's cleaning short."""
    stop = signals.RankStop()
    try:
        began = time.monotonic()
        main = threading.main_thread().ident
        timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGTERM))
        with pytest.raises(Stopped), stop.interrupting():
            timer.start()
            threading.Event().wait(20)
        assert time.monotonic() - began < 10 and stop.wanted
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped), stop.interrupting():
            raise AssertionError("it was asked to stop before")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
