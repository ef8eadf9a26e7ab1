"""Buckets over S3: the global one to write, the miners' to read.

The options are those Cloudflare R2 needs: no checksum trailers unless required, region ``auto``, no
awscrt transfers.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from distributed_training.validator.buckets import BucketError, ObjectInfo

_PART = 32 * 1024 * 1024
_THREADS = 6
_PIECE = 1024 * 1024


class S3Bucket:
    """A :class:`~.buckets.Bucket`. ``timeout`` covers connecting and each silence of the server,
    not a whole transfer; each request is tried up to ``attempts`` times."""

    def __init__(
        self,
        *,
        endpoint: str,
        bucket: str,
        access_key_id: str,
        secret_access_key: SecretStr,
        timeout: timedelta = timedelta(seconds=20),
        attempts: int = 3,
    ) -> None:
        self._bucket = bucket
        self._client = _client(
            endpoint,
            access_key_id,
            secret_access_key.get_secret_value(),
            timeout.total_seconds(),
            attempts,
        )

    def head(self, key: str) -> ObjectInfo | None:
        answer = self._ask("head_object", key)
        if answer is None:
            return None
        return ObjectInfo(int(answer["ContentLength"]), answer["LastModified"].timestamp())

    def get(self, key: str, *, limit: int) -> bytes | None:
        answer = self._ask("get_object", key)
        if answer is None:
            return None
        self._check_size(key, int(answer["ContentLength"]), limit)
        with answer["Body"] as body:
            return bytes(self._guarded(key, functools.partial(body.read, limit + 1)))

    def download(self, key: str, path: Path, *, limit: int) -> None:
        answer = self._ask("get_object", key)
        if answer is None:
            raise BucketError(f"{self._bucket}/{key} does not exist")
        size = int(answer["ContentLength"])
        self._check_size(key, size, limit)
        temporary = path.with_name(f".{path.name}.part")
        try:
            with answer["Body"] as body, temporary.open("wb") as file:
                while piece := self._guarded(key, functools.partial(body.read, _PIECE)):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                if file.tell() != size:
                    raise BucketError(f"{self._bucket}/{key}: {file.tell()} of {size} bytes came")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def put(self, key: str, data: bytes) -> None:
        self._guarded(
            key,
            functools.partial(self._client.put_object, Bucket=self._bucket, Key=key, Body=data),
        )

    def upload(self, key: str, path: Path) -> None:
        from boto3.s3.transfer import TransferConfig

        config = TransferConfig(
            multipart_threshold=_PART,
            multipart_chunksize=_PART,
            max_concurrency=_THREADS,
            preferred_transfer_client="classic",
        )
        self._guarded(
            key,
            functools.partial(
                self._client.upload_file, str(path), self._bucket, key, Config=config
            ),
        )

    def _ask(self, operation: str, key: str) -> Any:
        """The answer, None if there is no such object."""
        from botocore.exceptions import ClientError

        call = functools.partial(getattr(self._client, operation), Bucket=self._bucket, Key=key)
        try:
            return self._guarded(key, call)
        except BucketError as error:
            cause = error.__cause__
            if isinstance(cause, ClientError):
                code = str(cause.response.get("Error", {}).get("Code"))
                if code in ("404", "NoSuchKey", "NotFound"):
                    return None
            raise

    def _guarded(self, key: str, call: Any) -> Any:
        """``call()``, its errors as BucketError. Their texts hold no credentials but the key id,
        so only their kind is passed on."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return call()
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "?")
            raise BucketError(f"{self._bucket}/{key}: {code}") from error
        except (BotoCoreError, Boto3Error, OSError) as error:
            raise BucketError(f"{self._bucket}/{key}: {type(error).__name__}") from error

    def _check_size(self, key: str, size: int, limit: int) -> None:
        if size > limit:
            raise BucketError(
                f"{self._bucket}/{key} has {size} bytes, more than the {limit} allowed"
            )


@functools.lru_cache(maxsize=512)
def _client(endpoint: str, access_key_id: str, secret: str, timeout: float, attempts: int) -> Any:
    """One client for each set of credentials: making one takes 50 ms. Not for many threads."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access_key_id,
        aws_secret_access_key=secret,
        region_name="auto",
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=timeout,
            read_timeout=timeout,
            retries={"mode": "standard", "total_max_attempts": attempts},
            max_pool_connections=_THREADS + 2,
        ),
    )
