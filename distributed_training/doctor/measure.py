"""The step time, by training random tokens for some seconds on all ranks."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from distributed_training.common.ports import free_ports
from distributed_training.common.processes import without_secrets
from distributed_training.diagnostics.checks import ProbeError
from distributed_training.miner.rank_group import rank_environment_defaults, rank_variables

# Loading torch and the model on every rank, before the measured time begins.
_START = timedelta(minutes=3)
_RANK = "distributed_training.doctor.measure_step"


def measure(
    flags: Sequence[str], *, ranks: int, model: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """``micro_batch_seconds`` and ``micro_batches``. ProbeError: with the last line it said."""
    environment = without_secrets() | rank_environment_defaults(ranks=ranks)
    environment["DT_MEASURE"] = json.dumps({"model": model, "seconds": seconds})
    limit = _START.total_seconds() + 3 * seconds
    port = free_ports(1)[0]
    with tempfile.TemporaryFile("w+") as output, contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            process = subprocess.Popen(
                [sys.executable, "-m", _RANK, *flags],
                env=environment | rank_variables(rank, world_size=ranks, port=port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + limit
        # A rank that failed leaves the others waiting for it.
        while None in [p.poll() for p in processes] and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                raise ProbeError(f"no inner step in {limit:.0f} s")
            time.sleep(0.1)
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith('{"micro_batch_seconds"'):
            found: dict[str, Any] = json.loads(line)
            return found
    errors = [line for line in lines if "Error" in line or line.startswith("error:")] or lines
    raise ProbeError(f"training failed: {errors[-1].strip() if errors else 'no output'}")
