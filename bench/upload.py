"""Upload one large file and many small ones to a local object store: ours and boto3.

    python -m bench.upload                                          about 10 minutes
    python -m bench.upload --gigabytes 0.2 --small 50 --rounds 1    a quick look

Rounds are interleaved, each contestant in a process of its own; the figures are medians and their
ratio to ``boto3 tuned`` (``upload_file``, 32 MiB parts, 6 threads) of the same rounds. CPU seconds
and peak resident memory are the contestant's alone, ``base`` being what an interpreter with boto3
takes before it uploads anything.

Then the same for one file with a SIGKILL in the middle: how much the next process sends again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
BUCKET = "bench-upload"
BASELINE = "boto3 tuned"
COMMAND = (sys.executable, "-m", "bench.upload", "--contestant")

Spec = dict[str, str]
Seconds = tuple[float, float]  # of the large file and of the small ones


def _store(spec: Spec) -> Any:
    from pydantic import SecretStr

    from distributed_training.config.settings import StoreSettings
    from distributed_training.store.s3 import S3ObjectStore

    settings = StoreSettings(
        endpoint_url=spec["endpoint"],
        write_access_key_id=SecretStr(spec["key"]),
        write_secret_access_key=SecretStr(spec["secret"]),
        write_interval=timedelta(0),
    )
    return S3ObjectStore.from_settings(settings, bucket=BUCKET, write=True)


def _sender(spec: Spec) -> Any:
    from distributed_training.store.journal import Journal
    from distributed_training.store.transfer import Sender

    journal = Journal(Path(spec["work"]) / "journal.json")
    return Sender(store=_store(spec), journal=journal, deadline=time.monotonic() + 600)


def _ours(spec: Spec, large: Path, small: list[Path]) -> Seconds:
    with _sender(spec) as sender:
        began = time.perf_counter()
        sender.upload_all([(f"{spec['prefix']}/{large.name}", large)])
        middle = time.perf_counter()
        sender.upload_all((f"{spec['prefix']}/{p.name}", p) for p in small)
        return middle - began, time.perf_counter() - middle


def _boto3(spec: Spec, large: Path, small: list[Path], *, tuned: bool) -> Seconds:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    as_needed = {
        f"{way}_checksum_{what}": "when_required"
        for way, what in (("request", "calculation"), ("response", "validation"))
    }
    changes: dict[str, Any] = {"max_pool_connections": 20, **as_needed} if tuned else {}
    client = boto3.client(
        "s3",
        endpoint_url=spec["endpoint"],
        region_name="auto",
        aws_access_key_id=spec["key"],
        aws_secret_access_key=spec["secret"],
        config=Config(s3={"addressing_style": "path"}, **changes),
    )
    size, threads = (32 * MIB, 6) if tuned else (8 * MIB, 10)
    transfer = TransferConfig(
        multipart_threshold=size,
        multipart_chunksize=size,
        max_concurrency=threads,
        preferred_transfer_client="classic",
    )

    def upload(path: Path) -> None:
        client.upload_file(str(path), BUCKET, f"{spec['prefix']}/{path.name}", Config=transfer)

    began = time.perf_counter()
    upload(large)
    middle = time.perf_counter()
    with ThreadPoolExecutor(6 if tuned else 1) as pool:
        list(pool.map(upload, small))
    return middle - began, time.perf_counter() - middle


CONTESTANTS: dict[str, Callable[[Spec, Path, list[Path]], Seconds]] = {
    "ours": _ours,
    BASELINE: lambda *given: _boto3(*given, tuned=True),
    "boto3 default": lambda *given: _boto3(*given, tuned=False),
}


def contestant(name: str) -> None:
    """In a process of its own: read what to do from stdin, print the figures."""
    import boto3  # noqa: F401 - part of the base

    spec = json.loads(sys.stdin.read())
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    small = sorted(Path(spec["small"]).iterdir())
    large_seconds, small_seconds = CONTESTANTS[name](spec, Path(spec["large"]), small)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "large": large_seconds,
        "small": small_seconds,
        "cpu": usage.ru_utime + usage.ru_stime,
        "rss": usage.ru_maxrss / 1024,
        "base": base,
    }
    print(json.dumps(figures))


def _run(name: str, spec: Spec) -> dict[str, float]:
    done = subprocess.run(
        [*COMMAND, name], input=json.dumps(spec), capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _resume(spec: Spec, store: Any) -> str:
    """SIGKILL when half of the parts are there; what the next process sends."""
    from distributed_training.store.transfer import part_size_for

    spec = spec | {"prefix": "killed"}
    large = Path(spec["large"])
    total = -(-large.stat().st_size // part_size_for(large.stat().st_size))
    arrived = 0
    deadline = time.monotonic() + 120
    with subprocess.Popen(
        [*COMMAND, "ours"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(spec))
        process.stdin.close()
        while arrived < total // 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
            for upload in store.list_multiparts("killed/"):
                arrived = len(store.list_parts(upload.key, upload.upload_id))
        process.send_signal(signal.SIGKILL)
    with _sender(spec) as sender:
        sender.upload_all([(f"killed/{large.name}", large)])
    return (
        f"SIGKILL with {arrived} of {total} parts at the store: the next process kept "
        f"{sender.sent.parts_kept}, sent {sender.sent.parts}; stuck uploads left: "
        f"{len(store.list_multiparts())}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--small", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        contestant(options.contestant)
        return

    from distributed_training.localnet.services import ObjectStoreServer

    with tempfile.TemporaryDirectory(prefix="bench-upload-") as name:
        work = Path(name)
        large, small = _files(work, options)
        with ObjectStoreServer(folder=work / "server") as server:
            spec = {
                "endpoint": server.endpoint,
                "key": server.keys["R2_WRITE_ACCESS_KEY_ID"],
                "secret": server.keys["R2_WRITE_SECRET_ACCESS_KEY"],
                "large": str(large),
                "small": str(small),
                "work": str(work),
            }
            store = _store(spec)
            store.create_bucket()
            figures: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
            for number in range(options.rounds):
                names = list(CONTESTANTS)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    prefix = f"{name.replace(' ', '-')}-{number}"
                    figures[name].append(_run(name, spec | {"prefix": prefix}))
                    store.delete([o.key for o in store.list_objects(prefix)])
            _table(figures, large.stat().st_size / MIB, options.small)
            print(_resume(spec, store))


def _files(work: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """Write the large file and the folder of small ones."""
    large, small = work / "large.bin", work / "small"
    with large.open("wb") as file:
        for _ in range(int(options.gigabytes * 1e9 / 1e6)):
            file.write(os.urandom(1_000_000))
    small.mkdir()
    for number in range(options.small):
        (small / f"{number:04d}.bin").write_bytes(os.urandom(20_000))
    return large, small


def _table(figures: dict[str, list[dict[str, float]]], megabytes: float, count: int) -> None:
    def median(name: str, what: str) -> float:
        return statistics.median(f[what] for f in figures[name])

    def ratio(name: str, what: str) -> float:
        pairs = zip(figures[name], figures[BASELINE], strict=True)
        return statistics.median(b[what] / a[what] for a, b in pairs)

    head = f"{'':14} {'MiB/s':>6} {'ratio':>6} {'small/s':>8} {'ratio':>6} {'CPU s':>6}"
    print(f"{head} {'RSS MB':>7} {'base':>5}   rounds: {len(figures[BASELINE])}")
    for name in figures:
        print(
            f"{name:14} {megabytes / median(name, 'large'):6.0f} {ratio(name, 'large'):6.2f} "
            f"{count / median(name, 'small'):8.0f} {ratio(name, 'small'):6.2f} "
            f"{median(name, 'cpu'):6.1f} {median(name, 'rss'):7.0f} {median(name, 'base'):5.0f}"
        )


if __name__ == "__main__":
    main()
