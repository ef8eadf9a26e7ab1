"""Run the miner as a program: train, upload and average until it is stopped.

    python -m distributed_training.miner --wallet.name W --wallet.hotkey H --nproc_per_node 4 ...
    python -m distributed_training.miner config ... show every setting and where it comes from
    python -m distributed_training.miner check ...  check the settings as a start would, and exit
    torchrun --nnodes 2 ... neurons/miner.py ...    one rank of a miner on several machines

Without a subcommand it is the launcher: it checks the configuration, starts one rank per GPU,
restarts them all when one fails, forwards a stop and cleans up. ``dt-miner`` and
``neurons/miner.py`` are the same program. Exit status:
:class:`~distributed_training.protocol.types.ExitStatus`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distributed_training.common.files import late_mount
from distributed_training.config import (
    OPERATORS_FILE,
    Config,
    ConfigError,
    all_settings,
    exit_with,
    load_config,
    problems,
    run_folder_of,
)
from distributed_training.miner.rank_group import PROGRAM
from distributed_training.protocol.types import FINAL, ExitStatus

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_OF_PLATFORMS = {
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "GLOO_DEVICE_TRANSPORT", *_INTERFACES),
    *("NCCL_COMM_ID", "NCCL_NET", "NCCL_NET_PLUGIN"),
}


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Run the launcher, or one rank if torchrun has set its variables. Return the exit status.

    Only this module reads the configuration, and the launcher passes it on to its ranks.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["config"]:
            config = load_config("miner", argv[1:], file=OPERATORS_FILE, check=False)
            print(all_settings(config), end="")
            for line in [*config.warnings, *problems(config)]:
                print(f"warning: {line}", file=sys.stderr)
            return ExitStatus.STOPPED
        if argv[:1] == ["check"]:
            return check(argv[1:])
        # Under torchrun every process is a rank, and torchrun restarts either all of them or none.
        if not ("RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ):
            config = load_settings(argv)
            from distributed_training.miner.launcher import launch

            return launch(forget_platform(config), program=program)
        config = load_config("miner", argv, file=OPERATORS_FILE)
    except ConfigError as error:
        return exit_with(error, of_service=True)
    # Only a rank needs this. The launcher skips it, so that it refuses a wrong flag at once.
    set_rank_environment()
    from distributed_training.common.processes import leave

    leave(importlib.import_module(program).run_rank(config))


def forget_platform(config: Config) -> Config:
    """Unset variables that a platform or an image sets for its own jobs.

    The ranks of one launcher are all on this machine, so they need none of these variables.
    Return the configuration, with a warning that names the variables found.
    """
    names = sorted(n for n in os.environ if n in _OF_PLATFORMS or n.startswith("TORCHELASTIC_"))
    if not (found := [f"{name}={os.environ.pop(name)}" for name in names]):
        return config
    line = (
        f"{', '.join(found)} in the environment: ignored, since ranks on one machine find each "
        "other without them (to use several machines, see ops/torchrun.sh)"
    )
    return replace(config, warnings=(*config.warnings, line))


def load_settings(argv: Sequence[str]) -> Config:
    """Return the configuration. Raises ConfigError, after recording it in the run folder.

    Without that record, the dashboard and dt-status would show why the miner stopped last time.
    """
    try:
        return load_config("miner", argv, file=OPERATORS_FILE)
    except ConfigError as error:
        from distributed_training.telemetry.facts import SETTINGS
        from distributed_training.telemetry.run_state import LauncherFile

        folder = run_folder_of(argv)
        # Create the folder even on a miner's first start, but not if a mount is missing.
        if (OPERATORS_FILE.exists() or Path(".env").exists()) and late_mount(folder) is None:
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True, parents=not folder.is_absolute())
        LauncherFile(folder).stopped(SETTINGS, str(error))
        raise


def check(argv: Sequence[str]) -> int:
    """Check the settings before torchrun starts. Return the exit status.

    If nothing is wrong, print how many seconds a stop may take, since torchrun must wait that long.
    torchrun exits with status 1 whatever ended its ranks, so pm2 and Slurm would restart it again
    and again. So if the last ranks here exited with a final status (2 or above), return it, but
    only once: whoever starts the miner after that has fixed the cause. Raises ConfigError.
    """
    from distributed_training.health.machine import refuse_model
    from distributed_training.miner.launcher import ranks_of, stop_limit
    from distributed_training.miner.run_folder import forget_ranks, read_exit_status

    config = load_config("miner", argv, file=OPERATORS_FILE)
    refuse_model(config, ranks=ranks_of(config))
    ended = read_exit_status(config.run_folder)
    if ended and ended.status in FINAL:
        forget_ranks(config.run_folder)
        print(f"error: {ended.reason}", file=sys.stderr, flush=True)
        return ended.status
    print(stop_limit(config.run_folder, config.miner.stop_timeout).total_seconds())
    return ExitStatus.STOPPED


def set_rank_environment() -> None:
    """Set the variables that libraries read on import, as the launcher does for its ranks.

    gloo and NCCL get the network interface that leads to node 0. By default they would take the
    interface that this machine's host name resolves to, which may be a public one.
    """
    import psutil

    from distributed_training.miner.rank_group import rank_environment_defaults

    with contextlib.suppress(OSError):  # unlikely, since torchrun has just resolved the same name
        found = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], found[1]) as route:
            route.connect(found[4])  # sends nothing
            own = route.getsockname()[0]
        for name, entries in psutil.net_if_addrs().items():
            if any(entry.address == own for entry in entries):
                for variable in _INTERFACES:
                    os.environ.setdefault(variable, name)
    # torchrun sets it to 1 by default, so encoding an upload would use only one of many cores.
    if os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]
    chosen = {name: os.environ[name] for name in _INTERFACES if name in os.environ}
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ.update(rank_environment_defaults(ranks=ranks) | chosen)


if __name__ == "__main__":
    sys.exit(main())
