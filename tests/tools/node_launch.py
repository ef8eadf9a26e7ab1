"""The launcher of one node, with the ranks of :mod:`node_ranks`.

NODE_PATIENCE: seconds that it asks again after node 0 refused its flags.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

if __name__ == "__main__":
    from distributed_training.miner import several_nodes
    from distributed_training.miner.__main__ import main

    if "NODE_PATIENCE" in os.environ:
        several_nodes.PATIENCE["flags"] = timedelta(seconds=float(os.environ["NODE_PATIENCE"]))
    sys.exit(main(program="tests.tools.node_ranks"))
