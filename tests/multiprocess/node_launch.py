"""The launcher of one node, with the ranks of :mod:`node_ranks`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

if __name__ == "__main__":
    from distributed_training.miner.launcher import launch

    sys.exit(launch(sys.argv[1:], script=HERE / "node_ranks.py"))
