"""A peer for tests that need it in a process of its own: ``swarm_peer.py FOLDER IP SIZE PEERS``.

Each line on standard input is a round with the value to fill in; each line out is what came of it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from distributed_training.protocol.types import AllReduceError, RoundRequest
from tests.tools.swarm_world import SETTINGS, open_swarm


def main() -> None:
    folder, ip, size, peers = sys.argv[1:5]
    settings = replace(SETTINGS, dht_listen_ip=ip, run_id="partition")
    swarm = open_swarm(Path(folder), [(int(size) // 4,)] * 4, json.loads(peers), settings)
    print(json.dumps({"maddrs": swarm.visible_maddrs, "peer_id": swarm.peer_id}), flush=True)
    weight = 0.0  # of a model of one parameter
    for line in sys.stdin:
        order = json.loads(line)
        for buffer in swarm.buffers:
            buffer.fill_(order["value"])
        started = time.monotonic()
        answer: dict[str, object] = {}
        try:
            result = swarm.average(
                RoundRequest(
                    caller="5V",
                    timeout=timedelta(seconds=order["timeout"]),
                    min_group_size=order.get("group", 2),
                    min_matchmaking_time=timedelta(seconds=2),
                    request_timeout=timedelta(seconds=1),
                    allreduce_timeout=timedelta(seconds=order["timeout"] - 4),
                    next_chunk_timeout=timedelta(seconds=order.get("chunk", 2)),
                )
            )
            weight += float(swarm.buffers[0][0])
            answer = {"peers": len(result.peers), "partial": result.partial}
        except AllReduceError as error:
            answer = {"fault": error.fault.name}
        answer |= {"seconds": time.monotonic() - started, "weight": weight}
        print(json.dumps(answer), flush=True)
    swarm.close()


if __name__ == "__main__":
    main()
