"""Settings of the object store: keys, publication, cleanup, downloads."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from distributed_training.protocol import names

from .flags import DAY, HOUR, SECOND, SETTINGS, flag
from .values import Bytes, Duration, GlobalBucket, Secret, WebUrl


@dataclass(frozen=True, config=SETTINGS)
class StoreSettings:
    """Where this miner publishes and how. Keys come from the environment or ``.env`` only; they are
    made in the R2 dashboard, Manage API tokens."""

    account_id: str | None = flag("r2.account_id", None, env="R2_ACCOUNT_ID")
    """Cloudflare account id, 32 hexadecimal digits"""
    read_access_key_id: Secret | None = flag(
        "r2.read_access_key_id", None, env="R2_READ_ACCESS_KEY_ID"
    )
    """key that may only read, published on the chain; from the R2 dashboard, Manage API tokens"""
    read_secret_access_key: Secret | None = flag(
        "r2.read_secret_access_key", None, env="R2_READ_SECRET_ACCESS_KEY"
    )
    """secret of the reading key, published on the chain; from the R2 dashboard, Manage API
    tokens"""
    write_access_key_id: Secret | None = flag(
        "r2.write_access_key_id", None, env="R2_WRITE_ACCESS_KEY_ID"
    )
    """key that may read and write, never published; from the R2 dashboard, Manage API tokens"""
    write_secret_access_key: Secret | None = flag(
        "r2.write_secret_access_key", None, env="R2_WRITE_SECRET_ACCESS_KEY"
    )
    """secret of the writing key, never published; from the R2 dashboard, Manage API tokens"""
    endpoint_url: WebUrl | None = flag("r2.endpoint_url", None, env="R2_ENDPOINT_URL")
    """object store to use instead of R2, e.g. http://127.0.0.1:9000"""
    jurisdiction: Literal["default", "eu", "fedramp", "us"] = flag("r2.jurisdiction", "default")
    """R2 jurisdiction the buckets were made in"""
    region: str = flag("r2.region", "auto")
    """region name that requests are signed for"""
    checksum_mode: Literal["when_required", "when_supported"] = flag(
        "r2.checksum_mode", "when_required"
    )
    """when botocore adds checksums of its own; R2 refuses the trailers of when_supported"""
    write_interval: Duration = flag(
        "r2.write_interval", 1.1 * SECOND, ge=0 * SECOND, le=60 * SECOND
    )
    """least time between two writes of one key; R2 allows one a second"""
    connect_timeout: Duration = flag("r2.connect_timeout", 10 * SECOND, ge=SECOND / 10, le=HOUR)
    """wait for a connection to the object store"""
    read_timeout: Duration = flag("r2.read_timeout", 60 * SECOND, ge=SECOND / 10, le=HOUR)
    """wait for the object store's answer, or for the next bytes of a download"""
    global_model_name: GlobalBucket = flag("neuron.global_model_name", names.GLOBAL_MODEL_NAME)
    """bucket of the global model; a miner's own bucket is this name and its uid"""
    upload_steps: int = flag("neuron.upload_steps", 5, ge=1, le=1_000_000)
    """publish at most every so many inner steps"""
    minimum_valid_inner_step: int = flag("neuron.minimum_valid_inner_step", 50, ge=0, le=1_000_000)
    """first inner step of an outer step to publish; lowered, with a warning, if that is too late"""
    age_limit: Duration = flag("neuron.repo_age_limit", 4800 * SECOND, ge=SECOND, le=30 * DAY)
    """age of gradients.pt from which validators count the bucket as stale"""
    upload_slack: Duration = flag("neuron.upload_slack", 240 * SECOND, ge=0 * SECOND, le=DAY)
    """a publication should end at least this long before a round or the age limit"""
    block_on_preview: bool = flag("neuron.block_on_preview", False)
    """do not publish a gradient whose own decode does not lower the loss (default: warn only)"""
    keep_epochs: int = flag("neuron.keep_epochs", 3, ge=1, le=1000)
    """outer steps kept in the bucket; of local snapshots only the newest published one stays"""
    part_size: Bytes = flag("r2.part_size", Bytes(0), ge=Bytes(0), le=Bytes(5 * 2**30))
    """bytes of a multipart upload's parts, e.g. 32MiB; 0: by the file's size"""
    concurrency: int = flag("r2.concurrency", 6, ge=1, le=256)
    """parts sent or fetched at the same time"""
    uploader_nice: int = flag("r2.uploader_nice", 15, ge=0, le=19)
    """the uploader's niceness above training's; less where training fills every core"""
    file_deadline: Duration = flag("r2.file_deadline", 2400 * SECOND, ge=SECOND, le=DAY)
    """longest time a publication, or the download of a state, may take: all files and retries"""
    snapshot_timeout: Duration = flag(
        "neuron.snapshot_timeout", 600 * SECOND, ge=SECOND / 10, le=DAY
    )
    """wait for all ranks to have written their files of a snapshot"""
    take_bucket: bool = flag("r2.take_bucket", False)
    """publish even though another miner claimed this bucket within the last minutes"""
