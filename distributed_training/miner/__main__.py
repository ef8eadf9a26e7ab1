"""The miner as a program: train, upload and average until a stop.

    python -m distributed_training.miner --wallet.name W --wallet.hotkey H --nproc_per_node 4 ...
    torchrun --nproc_per_node 4 -m distributed_training.miner ...     the same, without a launcher
    python -m distributed_training.miner init                         write miner.toml and .env

Started plainly it is the launcher: it checks the configuration, starts one rank per GPU, restarts
them when one fails, forwards a stop and cleans up. ``dt-miner`` and ``neurons/miner.py`` are the
same program. Exit status: :class:`~distributed_training.protocol.types.ExitStatus`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from distributed_training.config import OPERATORS_FILE, ConfigError, exit_with, load_config
from distributed_training.miner.rank_group import PROGRAM


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Run the launcher, or one rank where ``RANK`` is set. Return the exit status.

    The configuration is read here and nowhere else: the launcher hands it to its ranks.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["init"]:
        from distributed_training.miner import init_command

        return init_command.main(argv[1:])
    try:
        config = load_config("miner", argv, file=OPERATORS_FILE)
        # Under torchrun every process is a rank, and torchrun restarts all or none.
        if "RANK" not in os.environ:
            from distributed_training.miner.launcher import launch

            return launch(config, program=program)
    except ConfigError as error:
        return exit_with(error, of_service=True)
    # Here: the launcher imports no torch, and refuses a wrong flag at once.
    from distributed_training.common.processes import leave
    from distributed_training.miner.start import run_rank

    leave(run_rank(config))


if __name__ == "__main__":
    sys.exit(main())
