#!/usr/bin/env python3
"""What an upload costs the training beside it: step times with the uploader at work and paused.

    python bench/upload_beside_training.py [--seconds 40] [--megabytes 400]

A step is a fixed piece of torch work on one thread. The uploader (its own process, as in the miner)
publishes one snapshot after the other to a local server and is paused every other second; the ratio
is that of the median step times. The server's CPU time is part of the cost here, though on the
network it is another machine's; ``--server-nice`` says how far it steps back. ``--apart`` gives
training the first core and uploader and server the last, as on a machine with cores to spare.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--server-nice", type=int, default=15)
    parser.add_argument("--apart", action="store_true")
    arguments = parser.parse_args()

    import psutil
    import torch

    from distributed_training.localnet.object_store import ObjectStoreServer
    from distributed_training.protocol.types import Revision
    from distributed_training.store.publisher import Publisher
    from tests.support_store import PEER_ID, new_bucket, settings_for, write_snapshot

    torch.set_num_threads(1)
    a, b = torch.randn(512, 512), torch.randn(512, 512)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(12):
            torch.mm(a, b)
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory(prefix="bench-beside-") as name:
        folder = Path(name)
        with ObjectStoreServer(folder=folder / "server") as server:
            for child in psutil.Process().children(recursive=True):
                child.nice(arguments.server_nice)
            settings = settings_for(server, file_deadline=timedelta(minutes=5), part_size=0)
            store = new_bucket(server, settings)
            rows = arguments.megabytes * 1_000_000 // 8192
            revision = Revision(5, 1, 50)
            write_snapshot(folder / "1.50", revision, world_size=1, rows=rows)
            publisher = Publisher(settings=settings, bucket=store.bucket, folder=folder / "up")
            if arguments.apart:
                cores = psutil.Process().cpu_affinity()
                for child in psutil.Process().children(recursive=True):
                    child.cpu_affinity(cores[-1:])
                psutil.Process().cpu_affinity(cores[:1])
            times: dict[bool, list[float]] = {True: [], False: []}
            sent = 0
            try:
                end = time.monotonic() + arguments.seconds
                uploading = True
                publisher.submit(folder / "1.50", revision, 1, peer_id=PEER_ID)
                while time.monotonic() < end:
                    (publisher.resume if uploading else publisher.pause)()
                    until = time.monotonic() + 1.0
                    settle = time.monotonic() + 0.1
                    while time.monotonic() < until:
                        took = step()
                        if time.monotonic() > settle:
                            times[uploading].append(took)
                        for report in publisher.reports():
                            if not report.ok:
                                raise SystemExit(report.reason)
                            sent += report.bytes_sent
                            publisher.submit(folder / "1.50", revision, 1, peer_id=PEER_ID)
                    uploading = not uploading
            finally:
                publisher.close()
            on, off = (statistics.median(times[k]) for k in (True, False))
            print(
                f"step while uploading {1e3 * on:.2f} ms, while paused {1e3 * off:.2f} ms: ratio "
                f"{on / off:.3f} ({len(times[True])} and {len(times[False])} steps; "
                f"{sent / 1e6:.0f} MB published meanwhile)"
            )


if __name__ == "__main__":
    main()
