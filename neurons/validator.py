"""Runs the reference validator: owns the global bucket, calls the rounds, scores the uploads.

    python neurons/validator.py --wallet.name W --wallet.hotkey H ...

One process (and the swarm's own). Exit status: 0 stopped as asked, 1 a fault, 2 bad configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(argv: list[str]) -> int:
    from distributed_training.chain.wallet import require_hotkey
    from distributed_training.config import ConfigError, exit_with, load_config

    try:
        config = load_config("validator", argv)
        require_hotkey(config.chain)
    except ConfigError as error:  # said before torch is imported, which takes seconds
        return exit_with(error)
    from distributed_training.validator.program import run_validator

    return run_validator(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
