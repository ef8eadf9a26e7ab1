"""Provide the store's tests with settings, buckets, and uploads of files."""

from __future__ import annotations

import dataclasses
import os
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from distributed_training.config.settings import StoreSettings
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.store import transfer
from distributed_training.store.errors import StoreError
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.store.transfer import Retry, deadline_in, upload_all

ROW = 8192  # bytes
PART = 5 * 2**20  # bytes
LARGE = "uploads/7/4.0.safetensors"  # key of an :class:`Upload`'s file in parts


def settings_for(server: ObjectStoreServer, **changes: Any) -> StoreSettings:
    """Return the settings with which a member reaches its buckets at ``server``."""
    values: dict[str, Any] = {
        "minimum_valid_inner_step": 5,
        "connect_timeout": timedelta(seconds=3),
        "read_timeout": timedelta(seconds=5),
    }
    return server.settings(**values | changes)


def new_bucket(server: ObjectStoreServer, settings: StoreSettings) -> S3ObjectStore:
    name = f"llama-test-{uuid.uuid4().hex[:10]}"
    store = S3ObjectStore.from_settings(settings, bucket=name, write=True)
    store.create_bucket()
    return store


class Upload:
    """A new bucket of ``server``, and two files for it: one large enough for parts, one small.

    ``rows``: the size of the larger file, in rows of ``ROW`` bytes.
    """

    def __init__(
        self,
        server: ObjectStoreServer,
        folder: Path,
        *,
        rows: int = 2000,
        within: timedelta = timedelta(seconds=60),
        **changes: Any,
    ) -> None:
        self.settings = settings_for(server, **changes)
        self.bucket = new_bucket(server, self.settings)
        self._within = within
        self.files = {LARGE: folder / "large", "small.json": folder / "small"}
        for path, size in zip(self.files.values(), (rows * ROW, 1000), strict=True):
            path.write_bytes(os.urandom(size))

    def send(self, endpoint: str) -> str:
        """Upload the files by way of ``endpoint``; return why that failed."""
        settings = dataclasses.replace(self.settings, endpoint_url=endpoint)
        store = S3ObjectStore.from_settings(settings, bucket=self.bucket.bucket, write=True)
        try:
            with patch.object(transfer, "PART", PART):
                upload_all(store, self.files.items(), until=deadline_in(self._within))
        except (StoreError, OSError) as error:
            return str(error)
        return ""

    def assert_whole(self, failed: str) -> None:
        """Assert that each object holds the bytes of its file, and that no upload is unfinished."""
        assert not failed
        retry = Retry(each=timedelta(seconds=30))  # a busy machine answers slowly
        for key, path in self.files.items():
            assert retry(self.bucket.get, key, limit=1 << 30) == path.read_bytes(), key
        assert self.bucket.list_multiparts() == []
