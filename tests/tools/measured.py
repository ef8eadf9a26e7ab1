"""Measure what is a child's or a folder's: tests before have left things in this process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_measured(
    command: Sequence[str], **how: Any
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command; return how it ended, and the seconds of the processor that it took.

    RUSAGE_CHILDREN would count any child of this process that is reaped meanwhile.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=output, stderr=errors, **how)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        for file in (output, errors):
            file.seek(0)
        done = subprocess.CompletedProcess(command, child.returncode, output.read(), errors.read())
    return done, usage.ru_utime + usage.ru_stime


def open_below(folder: Path) -> list[str]:
    """Return the files below ``folder`` that this process holds open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(descriptor))
    return [place for place in found if Path(place).is_relative_to(folder)]
