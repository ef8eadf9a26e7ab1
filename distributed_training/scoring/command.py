"""Print what the network's validator has signed about uploads: verdict, cause and score by uid.

    dt-score [--uid N... | --all] [--watch [SECONDS]] [--json] [flags]...

    dt-score                                   the miner of this wallet, with miner.toml
    dt-score --network FILE --uid 227 31       two members, from any machine
    dt-score --all --json                      all members, for programs
    dt-score --subnet runs/localnet --all      a running local subnet

    --uid N...         uids of the uploads (default: uid of the hotkey that the wallet flags name)
    --all              the uploads of all members
    --watch [SECONDS]  repeat (every 300 seconds)
    --json             one JSON object per repetition
    --subnet FOLDER    the run folder of a local subnet

The verdicts are read from the newest outer step's manifest. Nothing is judged again.
It reads every flag of dt-validator, .env and the environment, and changes nothing.
Exit status: 0 done, 1 the registry or the bucket could not be read, 2 a flag is wrong.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from distributed_training import NO_HELP
from distributed_training.common.files import read_json_object
from distributed_training.config import OPERATORS_FILE, ConfigError, exit_with, load_config
from distributed_training.config.installed import require
from distributed_training.config.loader import Parser, argument, ranged
from distributed_training.config.model import extras_of_network
from distributed_training.config.types import File


def run() -> int:
    """Run the command. Ctrl-C is the usual way to end ``--watch``."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    return main(sys.argv[1:])


def main(argv: Sequence[str]) -> int:
    # This parser leaves unknown flags to the validator's loader, which reads or refuses them.
    options, flags = build_parser().parse_known_args(argv)
    if options.help:
        print(__doc__ or NO_HELP)
        return 0
    try:
        config = load_config(
            "validator",
            [*subnet_flags(options.subnet), *flags],
            file=OPERATORS_FILE,
            check=False,
        )
        require(**extras_of_network(config))
        # Import it only after the flags were read, because the import takes seconds.
        from distributed_training.scoring import verdicts

        return verdicts.show(config, options)
    except ConfigError as error:
        return exit_with(error)


def build_parser() -> Parser:
    parser = Parser(add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--uid", type=ranged(0, 65535), nargs="+")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--watch", type=ranged(1.0, 86400.0), nargs="?", const=300.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--subnet", type=argument(File))
    return parser


def subnet_flags(folder: Path | None) -> list[str]:
    """Return the flags with the addresses of a running local subnet. Raises ConfigError."""
    if folder is None:
        return []
    state = read_json_object(folder / "localnet.json") or {}
    # The file stays if the subnet is killed, and its ports may belong to another program by now.
    runs = isinstance(state.get("pid"), int) and psutil.pid_exists(state["pid"])
    if not (runs and state.get("chain") and state.get("store")):
        raise ConfigError(
            f"--subnet {folder} is not the run folder of a running local subnet, so nothing was "
            "shown: start a subnet with `make run`, or correct the path"
        )
    return [
        *("--network", str(folder / "network.toml")),
        *("--neuron.run_folder", str(folder)),
        # Only a member may read the store of such a network.
        *("--wallet.path", str(folder / "wallets"), "--wallet.name", "master"),
    ]
