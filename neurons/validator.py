"""Run this checkout's validator, like ``python -m distributed_training.validator``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training.validator.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
