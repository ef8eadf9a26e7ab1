"""Time a start: ``make run`` to the first inner step, ``kill -9`` to the next one, and the doctor.

    python -m bench.start                        about 2 minutes at rest
    python -m bench.start --ranks 2,1 --kills 3

A whole local subnet starts on this machine. The baseline is what *one* process needs here and now
to import torch, the Llama model and hivemind (median of one look before the subnet and one after
it): a start cannot be much shorter than that. Then rank 0 of the first miner is killed, and its
whole process tree, until ``--kills`` of each are measured.
Memory is the proportional set size (a page that n processes share counts 1/n in each) of the first
miner's tree while it trains.

Run it on a quiet machine: on two cores everything here waits for imports.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from bench.common import parser, proportional_bytes
from distributed_training.localnet.services import SubnetOptions, parse_ranks
from distributed_training.localnet.subnet import LocalNeuron, LocalSubnet
from distributed_training.miner.run_folder import listening_ranks
from distributed_training.telemetry import read_events

LONGEST = timedelta(minutes=5)


def import_seconds() -> float:
    modules = "torch, transformers.models.llama.modeling_llama, hivemind"
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
    return time.monotonic() - began


def next_step_after(subnet: LocalSubnet, miner: LocalNeuron, began: float) -> float:
    """Seconds from ``began`` to the next inner step's end."""
    subnet.wait_until(
        lambda: bool(miner.state.losses) and miner.state.losses[-1].time > began,
        LONGEST,
        "the next inner step",
    )
    return miner.state.losses[-1].time - began


def kill_rank_zero(subnet: LocalSubnet, miner: LocalNeuron) -> float:
    pid = listening_ranks(miner.folder)[0].pid
    began = time.time()
    os.kill(pid, 9)

    def another() -> bool:
        rank = listening_ranks(miner.folder).get(0)
        return rank is not None and rank.pid != pid

    subnet.wait_until(another, LONGEST, "another rank 0")
    return next_step_after(subnet, miner, began)


def kill_miner(subnet: LocalSubnet, miner: LocalNeuron) -> float:
    began = time.time()
    subnet.kill_miner(0)
    subnet.restart_miner(0)
    return next_step_after(subnet, miner, began)


def doctor_seconds(subnet: LocalSubnet, miner: LocalNeuron) -> float:
    """Time the doctor of a miner that trains meanwhile, without its measurement of a step."""
    words = ["doctor", *miner.flags, *subnet.options.miner_flags]
    environment = {**os.environ, **miner.environment}
    began = time.monotonic()
    command = [sys.executable, "-m", "distributed_training", *words]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", default="2,1", help="ranks of each miner")
    arguments.add_argument("--kills", type=int, default=1, help="of rank 0, and of the whole miner")
    options = arguments.parse_args()
    before = import_seconds()
    with tempfile.TemporaryDirectory() as folder:
        subnet_options = SubnetOptions(
            folder=Path(folder) / "subnet",
            ranks=parse_ranks(options.ranks, None),
            period=100_000,  # no round: it would be measured with it
        )
        with LocalSubnet(options=subnet_options) as subnet:
            miner = subnet.miners[0]
            subnet.wait_until(lambda: bool(miner.state.losses), LONGEST, "the first inner step")
            first = next(read_events(miner.folder / "events.jsonl", "step"))["time"]
            subnet.wait_until(lambda: len(miner.state.losses) >= 5, LONGEST, "five inner steps")
            memory = proportional_bytes(miner.pid or 0)
            doctor = doctor_seconds(subnet, miner)
            ranks = [kill_rank_zero(subnet, miner) for _ in range(options.kills)]
            miners = [kill_miner(subnet, miner) for _ in range(options.kills)]
    baseline = statistics.median([before, import_seconds()])  # neither while the subnet runs
    first = (first - subnet.started_at) / baseline
    print(f"{baseline:6.1f} s  imports of one process (torch, Llama, hivemind): the baseline")
    print(f"{first:6.2f} x  that until the first inner step (goal 20 s): {first * baseline:.1f} s")
    print(f"{statistics.median(ranks):6.1f} s  kill -9 of rank 0 to the next inner step (goal 20)")
    print(f"{statistics.median(miners):6.1f} s  kill -9 of the whole miner to its next step")
    print(
        f"{doctor:6.1f} s  doctor of a miner that trains, without the step's measurement (goal 10)"
    )
    print(f"{memory / 1e9:6.2f} GB the first miner's tree while it trains")
    return 0


if __name__ == "__main__":
    sys.exit(main())
