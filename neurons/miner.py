"""Runs the miner: trains, publishes, averages, until it is told to stop.

    python neurons/miner.py --wallet.name W --wallet.hotkey H --nproc_per_node 4 ...
    torchrun --nproc_per_node 4 neurons/miner.py ...      the same, without the launcher's care

Started plainly it is the launcher: it checks the configuration, starts one rank per GPU, starts
them again when one fails, forwards a stop and cleans up. Exit status: 0 stopped as asked, 1 a
fault, 2 bad configuration, 3 deregistered.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(argv: list[str]) -> int:
    if "RANK" in os.environ:
        from distributed_training.common.processes import leave
        from distributed_training.miner.start import run_rank

        leave(run_rank(argv))
    from distributed_training.miner.launcher import launch

    return launch(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
