"""Run neurons/miner.py with the ranks of :mod:`node_ranks`, with or without torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    from distributed_training.miner.__main__ import main

    sys.exit(main(program="tests.tools.node_ranks"))
