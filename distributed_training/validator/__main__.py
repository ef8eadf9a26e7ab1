"""The validator as a program: publish the global state, call rounds, score uploads until a stop.

    python -m distributed_training.validator --wallet.name W --wallet.hotkey H ...

One process, and the swarm's own. ``dt-validator`` and ``neurons/validator.py`` are this program.
Exit status: 0 stopped as asked, 1 a fault (a start may help), 2 the settings are refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the validator to its end. Return the exit status."""
    from distributed_training.config import ConfigError, exit_with, load_config

    try:
        config = load_config("validator", sys.argv[1:] if argv is None else argv)
        from distributed_training.health.machine import refuse_model, refuse_unknown_kinds

        refuse_unknown_kinds(config)
        refuse_model(config, ranks=1)
    except ConfigError as error:  # report it before importing torch, which takes seconds
        return exit_with(error, of_service=True)
    from distributed_training.protocol.types import ExitStatus
    from distributed_training.validator.program import run_validator

    status = run_validator(config)
    if status == ExitStatus.AGAIN and argv is None:
        # Replace this process, so that its supervisor sees no end and no failure.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return status


if __name__ == "__main__":
    sys.exit(main())
