#!/usr/bin/env python
"""Run a whole subnet on this machine, like `make run`. See `python scripts/localnet.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training.localnet.command import main

if __name__ == "__main__":
    sys.exit(main())
