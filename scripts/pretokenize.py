#!/usr/bin/env python3
"""Tokenize a source once and store it as shards: see ``examples/pretokenize.py`` and ``--help``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.pretokenize import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
