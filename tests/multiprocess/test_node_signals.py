"""Test how real processes handle requests to stop."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]

WAITS = """
import sys, time
from distributed_training.node.start import StopSignals
with StopSignals() as signals:
    print("ready", flush=True)
    time.sleep(0.01)
    while not signals.stop.wait(0.05):
        pass
    print(signals.name, flush=True)
"""


def start(code: str, *prefix: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup started the tests
    )


@pytest.mark.parametrize(("prefix", "stops"), [((), "SIGHUP"), (("nohup",), "SIGTERM")])
def test_a_closed_terminal_stops_a_node_unless_nohup_started_it(
    prefix: tuple[str, ...], stops: str
) -> None:
    with start(WAITS, *prefix) as node:
        assert node.stdout is not None
        while (line := node.stdout.readline()) != "ready\n":  # nohup prints what it ignores
            assert line, "it ended"
        node.send_signal(signal.SIGHUP)  # signals of one process are handled in this order
        node.send_signal(signal.SIGTERM)
        output, _ = node.communicate(timeout=30)
    assert (node.returncode, output) == (0, f"{stops}\n")


# A signal may be handled between any two bytecodes, even while the wait holds the event's lock.
INTERRUPTS_THE_WAIT = """
import os, signal
from distributed_training.node.start import StopSignals
with StopSignals() as signals:
    with signals.stop._cond:
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.asked_at is not None
    print(signals.stop.wait(20), flush=True)
"""


def test_a_signal_that_interrupts_the_wait_for_it_does_not_hang_the_node() -> None:
    with start(INTERRUPTS_THE_WAIT) as node:
        try:
            output, _ = node.communicate(timeout=30)
        finally:
            node.kill()
    assert (node.returncode, output) == (0, "True\n")
