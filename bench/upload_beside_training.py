#!/usr/bin/env python3
"""What an upload costs the training beside it: step times with the uploader at work and paused.

    python bench/upload_beside_training.py [--seconds 40] [--megabytes 400] [--ranks 2]

A step is a fixed piece of torch work on one thread; ``--ranks`` such threads work, each in a
process of its own, and the first is timed. The uploader (its own process, as in the miner)
publishes one snapshot after the other to a local server and is paused every other second; the ratio
is that of the median step times. The server's CPU time is part of the cost here, though on the
network it is another machine's: ``--server-nice`` says how far it steps back, ``--server-idle``
takes it out as far as one machine can (SCHED_IDLE: it runs when nothing else wants to). ``--apart``
gives training the first core and uploader and server the last, as with cores to spare.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")


def work() -> Callable[[], float]:
    """One step; returns its seconds."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.randn(512, 512), torch.randn(512, 512)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(12):
            torch.mm(a, b)
        return time.perf_counter() - began

    return step


def rank(seconds: float) -> None:
    """Another rank: works until killed, at most ``seconds``."""
    step = work()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--server-nice", type=int, default=15)
    parser.add_argument("--server-idle", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--apart", action="store_true")
    arguments = parser.parse_args()

    import multiprocessing

    import psutil

    from distributed_training.localnet.object_store import ObjectStoreServer
    from distributed_training.protocol.types import Revision
    from distributed_training.store.uploader import Uploader
    from tests.tools.support_store import PEER_ID, new_bucket, settings_for, write_snapshot

    step = work()
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=rank, args=(arguments.seconds + 60,), daemon=True)
        for _ in range(arguments.ranks - 1)
    ]
    with tempfile.TemporaryDirectory(prefix="bench-beside-") as name:
        folder = Path(name)
        with ObjectStoreServer(folder=folder / "server") as server:
            for child in psutil.Process().children(recursive=True):
                child.nice(arguments.server_nice)
                if arguments.server_idle:
                    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
            settings = settings_for(server, file_deadline=timedelta(minutes=5), part_size=0)
            store = new_bucket(server, settings)
            rows = arguments.megabytes * 1_000_000 // 8192
            revision = Revision(5, 1, 50)
            write_snapshot(folder / "1.50", revision, world_size=1, rows=rows)
            publisher = Uploader(settings=settings, bucket=store.bucket, folder=folder / "up")
            if arguments.apart:
                cores = psutil.Process().cpu_affinity()
                for child in psutil.Process().children(recursive=True):
                    child.cpu_affinity(cores[-1:])
                psutil.Process().cpu_affinity(cores[:1])
            for other in others:
                other.start()
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
                for other in others:
                    other.kill()
                publisher.close()
            on, off = (statistics.median(times[k]) for k in (True, False))
            print(
                f"step while uploading {1e3 * on:.2f} ms, while paused {1e3 * off:.2f} ms: ratio "
                f"{on / off:.3f} ({len(times[True])} and {len(times[False])} steps; "
                f"{sent / 1e6:.0f} MB published meanwhile)"
            )


if __name__ == "__main__":
    main()
