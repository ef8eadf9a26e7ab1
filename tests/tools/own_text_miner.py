"""``paced_miner`` on text of its own: the folder ``$OWN_TEXT/NAME`` of the miner called NAME."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from distributed_training.miner.__main__ import main

    name = sys.argv[sys.argv.index("--neuron.name") + 1]
    sys.argv += ["--data.own_text", f"{os.environ['OWN_TEXT']}/{name}"]
    sys.exit(main(program="tests.tools.paced_miner"))
