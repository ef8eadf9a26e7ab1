"""``python -m distributed_training.localnet.guardian ID``: see ``processes.Guardian``."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta

from distributed_training.localnet.processes import marked, sweep


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subnet_id = sys.argv[1]
    sys.stdin.buffer.read()  # until the orchestrator is gone
    for process in marked(subnet_id):
        process.terminate()
    sweep(subnet_id, settle=timedelta(seconds=10))


if __name__ == "__main__":
    main()
