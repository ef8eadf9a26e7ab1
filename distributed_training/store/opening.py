"""Open a bucket at the store that the settings name."""

from __future__ import annotations

from distributed_training.config.settings import StoreSettings
from distributed_training.protocol.metadata import BucketCredentials

from . import folder, s3  # they register themselves
from .base import STORES, ObjectStore

__all__ = ["folder", "open_store", "s3"]


def open_store(
    settings: StoreSettings,
    bucket: str,
    *,
    write: bool = False,
    credentials: BucketCredentials | None = None,
) -> ObjectStore:
    """Open a bucket; see :class:`~.base.OpenStore`. Raises ValueError.

    The scheme of ``--r2.endpoint_url`` names the kind; http, https and no scheme all mean S3.
    """
    scheme = (settings.endpoint_url or "").partition("://")[0]
    kind = "s3" if scheme in ("", "http", "https") else scheme
    return STORES[kind](settings, bucket, write=write, credentials=credentials)
