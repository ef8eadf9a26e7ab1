"""Commands that have no program of their own.

python -m distributed_training doctor ...             check all before a start; see its --help
python -m distributed_training page ...               serve the dashboard of a miner
python -m distributed_training stop-seconds KIND ...  print how long its stop may take
python -m distributed_training run-folder KIND ...    print its run folder

The last three take the flags of that program. KIND is miner or validator.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from distributed_training import NO_HELP, __version__
from distributed_training.config import (
    OPERATORS_FILE,
    ConfigError,
    exit_with,
    load_config,
    run_folder_of,
)
from distributed_training.config.schema import schema


def main(argv: list[str]) -> int:
    match argv:
        case ["doctor", *words]:
            from distributed_training.doctor import main as doctor

            return doctor(words)
        case ["page", *flags]:
            try:
                config = load_config("miner", flags, file=OPERATORS_FILE, check=False)
            except ConfigError as error:
                from distributed_training.telemetry.run_state import is_run_folder

                folder = run_folder_of(flags)
                if not is_run_folder(folder):
                    return exit_with(error)
                # The same error refused the miner's start, and the dashboard shows that.
                return _serve_page(schema("miner").classes["telemetry"](), folder)
            return _serve_page(config.telemetry, config.run_folder)
        case ["stop-seconds" | "run-folder" as what, ("miner" | "validator") as kind, *flags]:
            # app.config.js takes pm2's time limit from stop-seconds, and scripts/update.sh finds
            # the events by run-folder.
            own = OPERATORS_FILE if kind == "miner" else None
            try:
                # Skip the checks that compare settings, because the start reports their problems.
                config = load_config(kind, flags, file=own, check=False)
            except ConfigError as error:
                return exit_with(error)
            longest = config.miner.stop_timeout.total_seconds()
            print(longest if what == "stop-seconds" else config.run_folder.absolute())
            return 0
        case ["-h" | "--help"]:
            print(__doc__ or NO_HELP)
            return 0
        case ["--version"]:
            print(__version__)
            return 0
    print(__doc__ or NO_HELP, file=sys.stderr)
    return 2


def _serve_page(telemetry: Any, folder: Path) -> int:
    """Replace this process with the dashboard of a miner; return 2 if the dashboard is off.

    The dashboard is a separate program, because a server must have no secret except its token.
    """
    from distributed_training.common.processes import die_with_parent, without_secrets

    if telemetry.page_port == "off":
        print("error: there is no dashboard: --neuron.page_port is off", file=sys.stderr)
        return 2
    if "pm_id" in os.environ:  # if pm2's daemon is killed, the next one starts a new dashboard
        die_with_parent()
    environment = without_secrets()
    if telemetry.page_token is not None:
        environment["DT_PAGE_TOKEN"] = telemetry.page_token.get_secret_value()
    words = [sys.executable, "-m", "distributed_training.telemetry.page", "--beside-miner"]
    words += ["--host", telemetry.page_host, "--port", str(telemetry.page_port)]
    os.execve(sys.executable, [*words, str(folder.absolute())], environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
