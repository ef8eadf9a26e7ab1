#!/usr/bin/env python3
"""List and abort multipart uploads that were never completed. They are billed, but not visible.

    python scripts/abort_multipart_uploads.py BUCKET [--older-than 1h] [--prefix epoch-12/]
                                              [--network FILE|URL|NAME] [--dry-run] [--yes]
                                              [--plugins MODULE ...]

The network's file names the store; without --network, the network in ``miner.toml`` is used. Keys
are read from the environment and ``.env``, as the miner reads them. The miner cleans up its own
bucket after each upload, so this script is for other buckets, or for a miner that no longer runs.
Choose --older-than so that it does not match the current upload of a running miner.

Exit status: 0 done or nothing to do, 1 the store refused or did not answer, 2 bad input,
130 interrupted.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distributed_training.config import OPERATORS_FILE, ConfigError, exit_with, load_config
from distributed_training.config.loader import Parser, argument
from distributed_training.config.types import DAY, Bucket, Duration, EndpointUrl, Text
from distributed_training.protocol.lines import counted
from distributed_training.protocol.types import ExitStatus

if TYPE_CHECKING:
    from distributed_training.store.base import MultipartInfo, ObjectStore


def build_parser() -> Parser:
    parser = Parser(description="List and abort multipart uploads that were never completed.")
    add = parser.add_argument
    add("bucket", type=argument(Bucket), help="e.g. llama-4b-ws-4-007")
    age = argument(Annotated[Duration, Field(ge=timedelta(0), le=365 * DAY)])
    about = "only uploads that started longer ago than this, e.g. 30m, 1h, 2d (default 1h)"
    add("--older-than", type=age, default=timedelta(hours=1), help=about)
    add("--prefix", type=argument(Text), default="", help="only keys that start with this text")
    add("--dry-run", action="store_true", help="list only")
    add("--yes", action="store_true", help="do not ask")
    add("--endpoint-url", type=argument(EndpointUrl), help="object store to use instead of R2")
    add("--network", type=argument(Text), help="network of the bucket (default: miner.toml's)")
    plugins = "your own modules, e.g. with a kind of object store"
    add("--plugins", type=argument(Text), nargs="+", metavar="MODULE", help=plugins)
    return parser


def _age(age: timedelta) -> str:
    minutes = int(age.total_seconds() // 60)
    days, hours = divmod(minutes // 60, 24)
    return f"{days}d {hours:02d}h" if days else f"{hours}h {minutes % 60:02d}m"


def main() -> int:
    arguments = build_parser().parse_args()
    flags = ["--plugins", *arguments.plugins] if arguments.plugins else []
    if arguments.network:
        flags += ["--network", arguments.network]
    if arguments.endpoint_url:
        flags += ["--r2.endpoint_url", arguments.endpoint_url]
    try:
        settings = load_config("miner", flags, file=OPERATORS_FILE, check=False).store
    except ConfigError as error:
        return exit_with(error)

    # Import these after parsing, so that --help and refusals do not wait for the store's client.
    from distributed_training.store.errors import BucketMissingError, StoreError
    from distributed_training.store.opening import open_store
    from distributed_training.store.transfer import abort_uploads, stuck_uploads

    try:
        store = open_store(settings, arguments.bucket, write=True)
    except ValueError as error:
        return exit_with(ConfigError(str(error)))
    try:
        found = stuck_uploads(
            store,
            prefix=arguments.prefix,
            is_stuck=lambda one: one.age >= arguments.older_than,
        )
        if not found:
            print(f"No multipart uploads older than {_age(arguments.older_than)} in {store.bucket}")
            return 0
        _show(store, found)
        if arguments.dry_run:
            return 0
        if not arguments.yes:
            # In cron or a pipe, nobody would answer, so the script would wait forever.
            if not sys.stdin.isatty():
                print("error: no terminal to ask, so nothing aborted: add --yes", file=sys.stderr)
                return 2
            if input("Abort them? [y/N] ").strip().lower() not in ("y", "yes"):
                print("Nothing was aborted")
                return 0
        failed = abort_uploads(store, found)
    except BucketMissingError:
        where = f"{store.bucket} does not exist at this store, so nothing was aborted"
        print(f"error: bucket {where}: check the name, and --network", file=sys.stderr)
        return 1
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, EOFError):  # Ctrl-D at the question
        print("\ninterrupted; some uploads may remain: run this again", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    print(f"Aborted {counted(len(found) - len(failed), 'upload')}")
    if failed:
        print(f"error: {len(failed)} remain ({failed[-1]}): run this again", file=sys.stderr)
    return 1 if failed else 0


def _show(store: ObjectStore, found: list[MultipartInfo]) -> None:
    from distributed_training.store.errors import StoreError

    in_parts = store.multipart()
    assert in_parts is not None, "there are uploads"

    def sizes_of(one: MultipartInfo) -> list[int] | None:
        try:
            return [part.size for part in in_parts.list_parts(one.key, one.upload_id)]
        except StoreError:
            return None

    width = max(len(u.key) for u in found)
    print(f"{'KEY':{width}}  {'AGE':>9}  {'PARTS':>5}  {'SIZE':>10}  UPLOAD ID")
    total = 0
    with ThreadPoolExecutor(8) as pool:  # each of maybe thousands of uploads needs a request
        for u, sizes in zip(found, pool.map(sizes_of, found), strict=True):
            parts, size = "?", "?"
            if sizes is not None:
                parts, size = str(len(sizes)), f"{sum(sizes) / 1e6:.1f} MB"
                total += sum(sizes)
            print(f"{u.key:{width}}  {_age(u.age):>9}  {parts:>5}  {size:>10}  {u.upload_id:.16}")
    print(f"{counted(len(found), 'upload')}, {total / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(main())
