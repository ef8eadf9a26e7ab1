"""Run an example as a miner of a local subnet: its flags become ``miner.toml`` of its folder.

The first miner runs ``examples/join.py``, the other one ``examples/join_trainer.py``, on the files
``$OWN_TEXT``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {"miner-000": "join.py", "miner-011": "join_trainer.py"}

if __name__ == "__main__":
    words = iter(sys.argv[1:])
    flags = {flag.removeprefix("--"): value for flag, value in zip(words, words, strict=True)}
    Path("miner.toml").write_text(
        "".join(f'"{name}" = {json.dumps(value)}\n' for name, value in flags.items())
    )
    script = EXAMPLES / SCRIPTS[flags["neuron.name"]]
    text = os.environ["OWN_TEXT"].split(os.pathsep)
    os.execv(sys.executable, [sys.executable, str(script), flags["network"], *text])
