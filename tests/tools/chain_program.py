"""Run a registry with open admission as a separate program, created by ``master`` or VALIDATOR."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distributed_training.registry.store import Charter, Registry
from tests.tools.chain_world import VALIDATOR


def serve_command(folder: Path, *flags: str) -> list[str]:
    program = [sys.executable, "-m", "distributed_training.network_command", "serve"]
    return [*program, "--folder", str(folder), *flags]


@contextmanager
def chain_program(
    *flags: str, folder: Path | None = None, master: str = VALIDATOR.ss58
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a registry at a free port; yield its URL, once it answers, and its process."""
    with tempfile.TemporaryDirectory() as made:
        folder = folder or Path(made)
        Registry.at(folder, Charter("test", master, 256, "open")).close()
        more = ("--port", "0", "--requests-per-address", "10000")
        command = serve_command(folder, *more, *flags)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield url_of(process), process
        finally:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


def url_of(process: subprocess.Popen[str]) -> str:
    """Return the URL of a registry's program, once it serves."""
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        if " at http://" in line:
            url = line.split(" at ")[1].strip()
        if line.startswith("READY"):
            return url
    raise AssertionError("the registry did not start")
