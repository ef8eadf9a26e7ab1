#!/usr/bin/env python3
"""Upload one large file and many small ones to a local object store: ours and other ways.

    python bench/upload.py [--gigabytes 2] [--small 200] [--rounds 3]

Rounds are interleaved, each contestant in a process of its own; the figures are medians and their
ratio to ``boto3 tuned`` (``upload_file``, 32 MiB parts, 6 threads) of the same rounds. CPU seconds
and peak resident memory are the contestant's alone, ``base`` being what an interpreter with boto3
takes before it uploads anything. s5cmd and rclone take part where installed.

Then the same for one file with a SIGKILL in the middle: how much the next process sends again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MIB = 1024 * 1024
BUCKET = "bench-upload"
BASELINE = "boto3 tuned"


def _store(spec: dict[str, str]) -> Any:
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


def _ours(spec: dict[str, str], large: Path, small: list[Path]) -> tuple[float, float]:
    from distributed_training.store.journal import Journal
    from distributed_training.store.transfer import Sender

    with Sender(
        store=_store(spec),
        journal=Journal(Path(spec["work"]) / "journal.json"),
        deadline=time.monotonic() + 600,
    ) as sender:
        began = time.perf_counter()
        sender.upload_all([(f"{spec['prefix']}/{large.name}", large)])
        middle = time.perf_counter()
        sender.upload_all((f"{spec['prefix']}/{p.name}", p) for p in small)
        return middle - began, time.perf_counter() - middle


def _boto3(tuned: bool) -> Callable[[dict[str, str], Path, list[Path]], tuple[float, float]]:
    def run(spec: dict[str, str], large: Path, small: list[Path]) -> tuple[float, float]:
        from concurrent.futures import ThreadPoolExecutor

        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        config = Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=20,
            s3={"addressing_style": "path"},
        )
        client = boto3.client(
            "s3",
            endpoint_url=spec["endpoint"],
            region_name="auto",
            aws_access_key_id=spec["key"],
            aws_secret_access_key=spec["secret"],
            config=config if tuned else Config(s3={"addressing_style": "path"}),
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

    return run


def _tool(command: list[str]) -> Callable[[dict[str, str], Path, list[Path]], tuple[float, float]]:
    def run(spec: dict[str, str], large: Path, small: list[Path]) -> tuple[float, float]:
        environment = os.environ | {
            "AWS_ACCESS_KEY_ID": spec["key"],
            "AWS_SECRET_ACCESS_KEY": spec["secret"],
            "AWS_REGION": "auto",
            "RCLONE_S3_ENDPOINT": spec["endpoint"],
            "RCLONE_S3_PROVIDER": "Other",
            "RCLONE_S3_ENV_AUTH": "true",
        }
        times = []
        for source in (large, small[0].parent):
            words = [
                w.format(source=source, endpoint=spec["endpoint"], to=f"{BUCKET}/{spec['prefix']}/")
                for w in command
            ]
            began = time.perf_counter()
            subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - began)
        return times[0], times[1]

    return run


CONTESTANTS: dict[str, Callable[[dict[str, str], Path, list[Path]], tuple[float, float]]] = {
    "ours": _ours,
    BASELINE: _boto3(True),
    "boto3 default": _boto3(False),
}
if shutil.which("s5cmd"):
    CONTESTANTS["s5cmd"] = _tool(
        ["s5cmd", "--endpoint-url", "{endpoint}", "cp", "{source}", "s3://{to}"]
    )
if shutil.which("rclone"):
    CONTESTANTS["rclone"] = _tool(["rclone", "copy", "{source}", ":s3:{to}"])


def contestant(name: str) -> None:
    """In a process of its own: read what to do from stdin, print the figures."""
    import boto3  # noqa: F401 - part of the base

    spec = json.loads(sys.stdin.read())
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    small = sorted(Path(spec["small"]).iterdir())
    large_seconds, small_seconds = CONTESTANTS[name](spec, Path(spec["large"]), small)
    usage = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(
        json.dumps(
            {
                "large": large_seconds,
                "small": small_seconds,
                "cpu": sum(u.ru_utime + u.ru_stime for u in usage),
                "rss": max(u.ru_maxrss for u in usage) / 1024,
                "base": base,
            }
        )
    )


def _run(name: str, spec: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--contestant", name],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _resume(spec: dict[str, str], store: Any) -> str:
    """SIGKILL when half of the parts are there; what the next process sends."""
    from distributed_training.store.transfer import Sender, part_size_for

    spec = spec | {"prefix": "killed"}
    large = Path(spec["large"])
    total = -(-large.stat().st_size // part_size_for(large.stat().st_size))
    process = subprocess.Popen(
        [sys.executable, __file__, "--contestant", "ours"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(spec))
    process.stdin.close()
    arrived = 0
    deadline = time.monotonic() + 120
    while arrived < total // 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
        for upload in store.list_multiparts("killed/"):
            arrived = len(store.list_parts(upload.key, upload.upload_id))
    process.send_signal(signal.SIGKILL)
    process.wait()
    from distributed_training.store.journal import Journal

    with Sender(
        store=store,
        journal=Journal(Path(spec["work"]) / "journal.json"),
        deadline=time.monotonic() + 300,
    ) as sender:
        sender.upload_all([(f"killed/{large.name}", large)])
    sent, kept = sender.sent.parts, sender.sent.parts_kept
    left = len(store.list_multiparts())
    return (
        f"SIGKILL with {arrived} of {total} parts at the store: the next process kept {kept}, "
        f"sent {sent}; stuck uploads left: {left}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--small", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        contestant(arguments.contestant)
        return

    from distributed_training.localnet.object_store import ObjectStoreServer

    with tempfile.TemporaryDirectory(prefix="bench-upload-") as name:
        work = Path(name)
        large, small = work / "large.bin", work / "small"
        small.mkdir()
        with large.open("wb") as file:
            for _ in range(int(arguments.gigabytes * 1e9 / 1e6)):
                file.write(os.urandom(1_000_000))
        for n in range(arguments.small):
            (small / f"{n:04d}.bin").write_bytes(os.urandom(20_000))
        megabytes = large.stat().st_size / MIB
        with ObjectStoreServer(folder=work / "server") as server:
            spec = {
                "endpoint": server.endpoint,
                "key": server.credentials.write_key,
                "secret": server.credentials.write_secret,
                "large": str(large),
                "small": str(small),
                "work": str(work),
            }
            store = _store(spec)
            store.create_bucket()
            figures: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
            for number in range(arguments.rounds):
                names = list(CONTESTANTS)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    prefix = f"{name.replace(' ', '-')}-{number}"
                    figures[name].append(_run(name, spec | {"prefix": prefix}))
                    store.delete([o.key for o in store.list_objects(prefix)])
            _table(figures, megabytes, arguments.small)
            print(_resume(spec, store))


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
