"""Measure how slow or busy this machine is, to choose the times of a local subnet.

With a fixed period, a machine that many programs share would train only a step or two between two
rounds, and its uploads would come too late. Therefore as many processes as the subnet has neurons
multiply matrices for a moment, as training does. If they are slower than on a reference machine,
the period is longer by the same factor.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from distributed_training.common.processes import without_secrets

#: Matrix products per second of each of four processes (two miners with 2 and 1 ranks, and a
#: validator) on two free cores. The times in ``networks/local.toml`` are chosen for such a machine.
_REFERENCE = 1450.0
_SECONDS = 1.5
_SPARED = 1.3  # a slowness up to this factor is ignored as noise
_MOST = 60.0  # largest factor
_LONGEST = 60.0  # seconds after which a process is stopped, and its rate counts as 0
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
    """Return how many times slower ``processes`` parallel processes are than on the reference.

    The reference is four processes on two free cores. The result is at least 1, and it is 1 if
    nothing can be measured.
    """
    with ThreadPoolExecutor(processes) as pool:
        rates = [*pool.map(_measure_rate, range(processes))]
    slowness = _REFERENCE / max(statistics.median(rates), 1.0)
    return min(round(slowness, 1), _MOST) if slowness > _SPARED else 1.0


def _measure_rate(_: int) -> float:
    """Return the matrix products per second of one process."""
    one = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=without_secrets() | one,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            # Start a session, as neurons do: the kernel shares a core between sessions first.
            start_new_session=True,
            timeout=_LONGEST,
            check=False,
        )
        return float(done.stdout)
    except subprocess.TimeoutExpired:
        return 0.0
    except ValueError:
        return _REFERENCE  # the process has failed
