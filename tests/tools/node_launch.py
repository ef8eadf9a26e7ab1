"""The launcher of one node, with the ranks of :mod:`node_ranks`.

NODE_CLOCK: seconds that its clock is fast.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

if __name__ == "__main__":
    from tests.tools import jumping_clock

    jumping_clock.offset = float(os.environ.get("NODE_CLOCK", "0"))
    from distributed_training.miner.__main__ import main

    sys.exit(main(program="tests.tools.node_ranks"))
