"""Run this checkout's miner, like ``python -m distributed_training.miner``. See ``--help``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training.miner.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
