"""The validator as a program: publish the global state, lead rounds and score uploads.

    python -m distributed_training.validator --wallet.name W --wallet.hotkey H ...

It runs as a single process until it is stopped. ``dt-validator`` and ``neurons/validator.py`` are
this program. Exit status: 0 stopped as asked, 1 a fault (a restart may help), 2 the settings are
refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the validator until it ends, and return its exit status."""
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
        # Replace this process, so that its supervisor sees neither an exit nor a failure.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return status


if __name__ == "__main__":
    sys.exit(main())
