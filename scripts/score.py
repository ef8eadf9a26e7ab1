#!/usr/bin/env python
"""Show the verdicts on uploads, like ``dt-score``, from this checkout. See ``--help``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training.scoring.command import run

if __name__ == "__main__":
    sys.exit(run())
