"""Settings of the object store: keys, publication, cleanup, downloads."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from pydantic import SecretStr

from .flags import flag
from .units import parse_bytes

_TOKENS = "from the R2 dashboard, Manage API tokens"


@dataclass(frozen=True)
class StoreSettings:
    """Where this miner publishes and how. Keys come from the environment or ``.env`` only."""

    account_id: str | None = flag(
        "r2.account_id", None, "Cloudflare account id, 32 hexadecimal digits", env="R2_ACCOUNT_ID"
    )
    read_access_key_id: SecretStr | None = flag(
        "r2.read_access_key_id",
        None,
        f"key that may only read, published on the chain; {_TOKENS}",
        env="R2_READ_ACCESS_KEY_ID",
        secret=True,
    )
    read_secret_access_key: SecretStr | None = flag(
        "r2.read_secret_access_key",
        None,
        f"secret of the reading key, published on the chain; {_TOKENS}",
        env="R2_READ_SECRET_ACCESS_KEY",
        secret=True,
    )
    write_access_key_id: SecretStr | None = flag(
        "r2.write_access_key_id",
        None,
        f"key that may read and write, never published; {_TOKENS}",
        env="R2_WRITE_ACCESS_KEY_ID",
        secret=True,
    )
    write_secret_access_key: SecretStr | None = flag(
        "r2.write_secret_access_key",
        None,
        f"secret of the writing key, never published; {_TOKENS}",
        env="R2_WRITE_SECRET_ACCESS_KEY",
        secret=True,
    )
    endpoint_url: str | None = flag(
        "r2.endpoint_url",
        None,
        "object store to use instead of R2, e.g. http://127.0.0.1:9000",
        env="R2_ENDPOINT_URL",
    )
    jurisdiction: str = flag(
        "r2.jurisdiction",
        "default",
        "R2 jurisdiction the buckets were made in",
        choices=("default", "eu", "fedramp", "us"),
    )
    region: str = flag("r2.region", "auto", "region name that requests are signed for")
    checksum_mode: str = flag(
        "r2.checksum_mode",
        "when_required",
        "when botocore adds checksums of its own; R2 refuses the trailers of when_supported",
        choices=("when_required", "when_supported"),
    )
    write_interval: timedelta = flag(
        "r2.write_interval",
        timedelta(seconds=1.1),
        "least time between two writes of one key; R2 allows one a second",
    )
    connect_timeout: timedelta = flag(
        "r2.connect_timeout", timedelta(seconds=10), "wait for a connection to the object store"
    )
    read_timeout: timedelta = flag(
        "r2.read_timeout",
        timedelta(seconds=60),
        "wait for the object store's answer, or for the next bytes of a download",
    )
    global_model_name: str = flag(
        "neuron.global_model_name",
        "llama-4b-ws-4",
        "bucket of the global model; a miner's own bucket is this name and its uid",
    )
    upload_steps: int = flag(
        "neuron.upload_steps",
        5,
        "publish at most every so many inner steps; with --neuron.error_feedback upload the error "
        "feedback drifts with each",
    )
    minimum_valid_inner_step: int = flag(
        "neuron.minimum_valid_inner_step",
        50,
        "do not publish before this inner step of an outer step",
    )
    age_limit: timedelta = flag(
        "neuron.repo_age_limit",
        timedelta(seconds=4800),
        "age of gradients.pt from which validators count the bucket as stale",
    )
    upload_slack: timedelta = flag(
        "neuron.upload_slack",
        timedelta(seconds=240),
        "a publication should end at least this long before a round or the age limit",
    )
    block_on_preview: bool = flag(
        "neuron.block_on_preview",
        False,
        "do not publish a gradient whose own decode does not lower the loss (default: warn only)",
    )
    keep_epochs: int = flag(
        "neuron.keep_epochs",
        3,
        "outer steps kept in the bucket; local snapshots go once published or given up",
    )
    part_size: int = flag(
        "r2.part_size",
        0,
        "bytes of a multipart upload's parts, e.g. 32MiB; 0: by the file's size",
        parse=parse_bytes,
    )
    concurrency: int = flag("r2.concurrency", 6, "parts sent or fetched at the same time")
    uploader_nice: int = flag(
        "r2.uploader_nice",
        15,
        "the uploader's niceness above training's; less where training fills every core",
    )
    file_deadline: timedelta = flag(
        "r2.file_deadline",
        timedelta(minutes=40),
        "longest time one publication, or one file's download, may take with all its retries",
    )
    snapshot_timeout: timedelta = flag(
        "neuron.snapshot_timeout",
        timedelta(minutes=10),
        "wait for all ranks to have written their files of a snapshot",
    )
    take_bucket: bool = flag(
        "r2.take_bucket",
        False,
        "publish even though another miner claimed this bucket within the last minutes",
    )
