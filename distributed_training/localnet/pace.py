"""Measure how slow or busy this machine is, to choose a local subnet's times.

With a fixed period, a machine that many programs share would train a step or two between two
rounds, and its uploads would come too late. So as many processes as the subnet has neurons compute
for a moment what training computes, and a period lasts as many times longer as that takes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from distributed_training.common.processes import without_secrets

#: Products a second of each of four processes (two miners of 2 and 1 ranks, a validator) on two
#: free cores: for these the times of ``networks/local.toml`` are made.
_REFERENCE = 1450.0
_SECONDS = 1.5
_SPARED = 1.3  # times as slow: less is noise
_MOST = 60.0  # times
_LONGEST = 60.0  # seconds for all processes: beyond this a machine counts as slowest
_PROGRAM = f"""
import time, numpy
a = numpy.ones((256, 256), dtype="float32")
a @ a
began, done = time.monotonic(), 0
while time.monotonic() - began < {_SECONDS}:
    a @ a
    done += 1
print(done / (time.monotonic() - began))
"""


def measure_slowness(processes: int) -> float:
    """Return how many times slower ``processes`` at once are here than four on two free cores.

    At least 1; 1 too where it cannot be measured.
    """
    one = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env=without_secrets() | one,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Start a session, as neurons do: the kernel shares a core between sessions first.
            start_new_session=True,
        )
        for _ in range(processes)
    ]
    rates, deadline = [], time.monotonic() + _LONGEST
    try:
        for process in started:
            try:
                said, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
                rates.append(float(said))
            except subprocess.TimeoutExpired:
                rates.append(0.0)
            except ValueError:
                continue  # it has failed
    finally:
        for process in started:
            process.kill()
            process.wait()
    slowness = _REFERENCE / max(statistics.median(rates), 1.0) if rates else 1.0
    return min(round(slowness, 1), _MOST) if slowness > _SPARED else 1.0
