"""Somebody with a network's file and no uid, who wants to be averaged with: ``stranger_peer.py
FOLDER FILE ADDRESS``.

It looks for a group again and again, as a miner does that was called. A line ``GROUP`` and what
came of it when it found one, else a line ``alone``.
"""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from pathlib import Path

from distributed_training.exchange.sn38.swarm import HivemindSwarm
from distributed_training.protocol.types import AllReduceError, AllReduceFault, RoundRequest
from distributed_training.training.model import parameter_schema
from tests.tools.settings import load_config


def main() -> int:
    folder, file, address = sys.argv[1:4]
    flags = ["--network", file, "--preset", "local"]
    flags += ["--dht.listen_ip", "0.0.0.0", "--dht.ip", address]
    config = load_config("miner", flags, environ={}, dotenv=None, check=False)
    assert config.network is not None and config.network.model is not None
    swarm = HivemindSwarm(
        settings=config.swarm,
        schema=parameter_schema(config.network.model),
        run_folder=Path(folder).absolute(),
    )
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    print(f"peer {swarm.peer_id}", flush=True)
    try:
        while True:
            for buffer in swarm.buffers:
                buffer.fill_(1.0)
            request = RoundRequest("5Stranger", timeout=timedelta(seconds=20), min_group_size=2)
            try:
                said = f"GROUP {swarm.average(request)}"
            except AllReduceError as error:
                known = f"{swarm.known_peers() or 0} peers are known"
                alone = error.fault is AllReduceFault.NO_GROUP
                said = f"alone, {known}" if alone else f"GROUP {error.fault.name}, {known}"
            print(said, flush=True)
    finally:
        swarm.close()


if __name__ == "__main__":
    sys.exit(main())
