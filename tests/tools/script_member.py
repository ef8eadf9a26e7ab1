"""Run an example as a miner of a local subnet, in its folder, where ``miner.toml`` is.

The first miner runs ``examples/join.py``, the other one ``examples/join_trainer.py``, on the files
``$OWN_TEXT``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {"miner-1": "join.py", "miner-2": "join_trainer.py"}

if __name__ == "__main__":
    network = sys.argv[sys.argv.index("--network") + 1]
    words = [str(EXAMPLES / SCRIPTS[Path.cwd().name]), network]
    os.execv(sys.executable, [sys.executable, *words, *os.environ["OWN_TEXT"].split(os.pathsep)])
