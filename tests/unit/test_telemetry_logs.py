from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(30)

# Run this in a separate process, since setup_logging changes the root logger and exception hooks.
PRELUDE = """
import dataclasses, logging, sys, threading
from pathlib import Path
from pydantic import SecretStr
from distributed_training.config.settings import TelemetrySettings
from distributed_training.telemetry import setup_logging
log = logging.getLogger("distributed_training.x")
"""


def run(code: str) -> tuple[str, str, int]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=25,
        cwd=Path(__file__).parents[2],
    )
    return done.stdout, done.stderr, done.returncode


def test_a_record_is_one_line_and_masks_secrets() -> None:
    out, err, _ = run(
        """
keys = ["s3cr3t", "s3cr3t-key", "begin\\nsecond line"]
sys.stdout.reconfigure(encoding="ascii", errors="strict")
setup_logging(TelemetrySettings(), rank=0, secrets=[*map(SecretStr, keys), None])
log.info("first\\n\\nsecond %s %s", "s3cr3t-key", keys[2])
log.info("\\x1b[2J from a peer, \\u2713 and \\udcff\\n")
log.debug("not shown")
try:
    raise KeyError("s3cr3t-key")
except KeyError:
    log.exception("it failed")
logging.getLogger("hivemind.averaging").info("chatter")
logging.getLogger("hivemind.averaging").warning("heard")
"""
    )
    lines = out.splitlines()
    assert len(lines) == 4 and not err
    head = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d \| INFO \| "
    assert re.fullmatch(head + r"first / second \*{8} \*{8}", lines[0])
    assert lines[1].endswith(r" | INFO | \ufffd[2J from a peer, \u2713 and \udcff")
    assert "it failed (KeyError: '********'; at <string>:" in lines[2]
    assert lines[3].endswith(" | WARNING | hivemind.averaging: heard")
    assert "s3cr3t" not in out


def test_other_ranks_log_only_warnings() -> None:
    out, _, _ = run(
        """
setup_logging(TelemetrySettings(), rank=3)
log.info("quiet"); log.warning("loud")
"""
    )
    texts = [line.split(" | ", 1)[1] for line in out.splitlines()]
    assert texts == ["WARNING | rank 3 | loud"]


def test_uncaught_errors_are_one_line() -> None:
    out, err, status = run(
        """
setup_logging(TelemetrySettings(), rank=0)
def f(): raise OSError("thread")
t = threading.Thread(target=f, name="poller"); t.start(); t.join()
raise ValueError("main")
"""
    )
    assert status == 1 and "Traceback" not in out + err
    thread, main = out.splitlines()
    assert "CRITICAL | Uncaught error in thread poller (OSError: thread; at <string>" in thread
    assert "Uncaught error (ValueError: main" in main
