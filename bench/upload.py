"""Upload one large file and many small ones to a local object store: ours and boto3.

    python -m bench.upload                                          about 10 minutes
    python -m bench.upload --gigabytes 0.2 --small 50 --rounds 1    a quick look

Rounds are interleaved, each contestant in a process of its own; the figures are medians and their
ratio to ``boto3 tuned`` (``upload_file``, 32 MiB parts, 6 threads) of the same rounds. CPU seconds
and peak resident memory are of the contestant's process only, ``base`` being what the imports of
both take before anything is uploaded.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from pydantic import SecretStr

from bench.common import parser, table
from distributed_training.config.settings import StoreSettings
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.store.transfer import upload, upload_all

MIB = 1024 * 1024
BUCKET = "bench-upload"
BASELINE = "boto3 tuned"
COMMAND = (sys.executable, "-m", "bench.upload", "--contestant")

Spec = dict[str, str]
Seconds = tuple[float, float]  # of the large file and of the small ones


def _store(spec: Spec) -> S3ObjectStore:
    settings = StoreSettings(
        endpoint_url=spec["endpoint"],
        write_access_key_id=SecretStr(spec["key"]),
        write_secret_access_key=SecretStr(spec["secret"]),
    )
    return S3ObjectStore.from_settings(settings, bucket=BUCKET, write=True)


def _ours(spec: Spec, large: Path, small: list[Path]) -> Seconds:
    store, until = _store(spec), time.monotonic() + 600
    began = time.perf_counter()
    upload(store, f"{spec['prefix']}/{large.name}", large, until=until)
    middle = time.perf_counter()
    upload_all(store, [(f"{spec['prefix']}/{p.name}", p) for p in small], until=until)
    return middle - began, time.perf_counter() - middle


def _boto3(spec: Spec, large: Path, small: list[Path]) -> Seconds:
    as_needed = {
        f"{way}_checksum_{what}": "when_required"
        for way, what in (("request", "calculation"), ("response", "validation"))
    }
    client = boto3.client(
        "s3",
        endpoint_url=spec["endpoint"],
        region_name="auto",
        aws_access_key_id=spec["key"],
        aws_secret_access_key=spec["secret"],
        config=Config(s3={"addressing_style": "path"}, max_pool_connections=20, **as_needed),
    )
    transfer = TransferConfig(
        multipart_threshold=32 * MIB,
        multipart_chunksize=32 * MIB,
        max_concurrency=6,
        preferred_transfer_client="classic",
    )

    def upload(path: Path) -> None:
        client.upload_file(str(path), BUCKET, f"{spec['prefix']}/{path.name}", Config=transfer)

    began = time.perf_counter()
    upload(large)
    middle = time.perf_counter()
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(upload, small))
    return middle - began, time.perf_counter() - middle


CONTESTANTS: dict[str, Callable[[Spec, Path, list[Path]], Seconds]] = {
    "ours": _ours,
    BASELINE: _boto3,
}


def contestant(name: str) -> None:
    """In a process of its own: read what to do from stdin, print the figures."""
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


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--gigabytes", type=float, default=2.0)
    arguments.add_argument("--small", type=int, default=200)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--contestant", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.contestant:
        contestant(options.contestant)
        return

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
                    for found in store.list_objects(prefix):
                        store.delete(found.key)
            _table(figures, large.stat().st_size / MIB, options.small)


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

    def ratio(name: str, what: str) -> str:
        pairs = zip(figures[name], figures[BASELINE], strict=True)
        return f"{statistics.median(b[what] / a[what] for a, b in pairs):.2f}"

    rows = [
        (
            *(name, f"{megabytes / median(name, 'large'):.0f}", ratio(name, "large")),
            *(f"{count / median(name, 'small'):.0f}", ratio(name, "small")),
            *(f"{median(name, what):.1f}" for what in ("cpu", "rss", "base")),
        )
        for name in figures
    ]
    table(("", "MiB/s", "ratio", "small/s", "ratio", "CPU s", "RSS MB", "base"), rows)


if __name__ == "__main__":
    main()
