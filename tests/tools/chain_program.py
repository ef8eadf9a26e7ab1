"""The local subnet's chain server as a program of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def chain_program(*flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """At a free port: its URL, which takes requests at once, and its process."""
    command = [sys.executable, "-m", "distributed_training.localnet.chain_server", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        yield found[0], process
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
