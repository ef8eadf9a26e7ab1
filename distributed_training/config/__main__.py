"""Two questions about the configuration, asked by ``make`` and by ``app.config.js``.

python -m distributed_training.config --markdown [FILE]        write the table of all flags
python -m distributed_training.config --stop-seconds KIND ...  how long a stop may take
"""

from __future__ import annotations

import sys
from pathlib import Path

from .help import PUBLIC_DOCUMENT, markdown
from .loader import exit_with, load_config
from .model import OPERATORS_FILE, Kind
from .types import ConfigError


def main(argv: list[str]) -> int:
    if argv[:1] == ["--stop-seconds"] and argv[1:2] in (["miner"], ["validator"]):
        return _stop_seconds("miner" if argv[1] == "miner" else "validator", argv[2:])
    if argv[:1] != ["--markdown"] or len(argv) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    Path(argv[1] if len(argv) > 1 else PUBLIC_DOCUMENT).write_text(markdown(), encoding="utf-8")
    return 0


def _stop_seconds(kind: Kind, flags: list[str]) -> int:
    file = OPERATORS_FILE if kind == "miner" else None
    try:
        # Without the checks across settings: pm2 needs the time alone, and the start tells what is
        # wrong.
        config = load_config(kind, flags, file=file, check=False)
    except ConfigError as error:
        return exit_with(error)
    print(config.miner.stop_timeout.total_seconds())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
