"""One bucket over the S3 API: Cloudflare R2, or another store by its endpoint.

What is particular to R2 is here and nowhere else: region ``auto``, checksums only where the API
requires them (R2 refuses botocore's trailers, as ``Unauthorized``), path-style addresses, one write
per second and key, no transfer library in C.
"""

from __future__ import annotations

import email.utils
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from distributed_training.config.store import StoreSettings
from distributed_training.protocol.commitment import BucketCredentials
from distributed_training.protocol.names import r2_endpoint

from .errors import IntegrityError, ObjectMissingError, Refusal, TransientError
from .uplink import Section

_CLIENTS = threading.Lock()  # creating clients of one session is not thread-safe
_READ_CHUNK = 128 * 1024
_LONGEST_READ = 600.0  # seconds for the body of one answer: the read timeout never ends a trickle
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def endpoint_of(settings: StoreSettings, account_id: str | None = None) -> str:
    """Endpoint of our account or of another's, whose id stands in its commitment.

    Raises ValueError if there is neither ``--r2.endpoint_url`` nor a valid account id.
    """
    if settings.endpoint_url:
        return settings.endpoint_url
    account = account_id or settings.account_id or ""
    url = r2_endpoint(account)
    # Another miner's jurisdiction is not in its commitment; ours is known.
    if account_id in (None, settings.account_id) and settings.jurisdiction != "default":
        url = url.replace(".r2.", f".{settings.jurisdiction}.r2.", 1)
    return url


@dataclass(frozen=True)
class ObjectInfo:
    """``etag``: MD5 in hex of an object put in one piece, ``md5-of-part-md5s`` + ``-n`` of one put
    in n parts. ``modified``: seconds since 1970, the store's clock. ``age_seconds``: by the store's
    clock too, so that a wrong clock of ours does not matter; None in listings.
    """

    key: str
    size: int
    etag: str
    modified: float
    age_seconds: float | None = None


@dataclass(frozen=True)
class PartInfo:
    number: int  # from 1
    size: int
    etag: str  # MD5 in hex


@dataclass(frozen=True)
class MultipartInfo:
    key: str
    upload_id: str
    initiated: float  # seconds since 1970, the store's clock


@dataclass(frozen=True)
class AccessKeys:
    """A key and its secret. ``what`` names them in messages: ours are R2_WRITE and R2_READ."""

    key_id: SecretStr
    secret: SecretStr
    what: str = "R2"


class S3ObjectStore:
    """``settings``: timeouts, concurrency, and how R2 differs from S3. Thread-safe.

    Operations make one attempt each, see :func:`~.retry.patient`. All raise
    :class:`~.errors.StoreError` of the kind that fits. A :class:`~.uplink.Section` is sent from its
    beginning. The tests have a twin in memory that passes the same contract test.

    ``connect_timeout`` runs until the connection stands, ``read_timeout`` between two pieces of an
    answer. Connections are made on first use and pooled. Raises ValueError for a name that no
    bucket can have.
    """

    def __init__(
        self,
        *,
        bucket: str,
        endpoint_url: str,
        keys: AccessKeys,
        settings: StoreSettings,
    ) -> None:
        import boto3
        from botocore.config import Config

        if not _BUCKET_NAME.fullmatch(bucket):
            raise ValueError(
                f"{bucket!r:.80} is not a bucket name: give 3 to 63 lower-case letters, digits, "
                "hyphens or dots, e.g. llama-4b-ws-4-007"
            )
        self._bucket = bucket
        self._endpoint = endpoint_url
        self._refusal = Refusal(bucket, endpoint_url, keys.what)
        self._write_interval = settings.write_interval.total_seconds()
        self._last_write: dict[str, float] = {}
        self._write_lock = threading.Lock()
        with _CLIENTS:
            self._client: Any = boto3.session.Session().client(
                "s3",
                endpoint_url=endpoint_url,
                region_name=settings.region,
                aws_access_key_id=keys.key_id.get_secret_value(),
                aws_secret_access_key=keys.secret.get_secret_value(),
                config=Config(
                    request_checksum_calculation=settings.checksum_mode,
                    response_checksum_validation=settings.checksum_mode,
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    connect_timeout=settings.connect_timeout.total_seconds(),
                    read_timeout=settings.read_timeout.total_seconds(),
                    max_pool_connections=settings.concurrency + 4,
                    tcp_keepalive=True,
                    # Every part's MD5 is compared with the store's, so the payload need not be
                    # hashed a second time for the signature.
                    s3={"addressing_style": "path", "payload_signing_enabled": False},
                ),
            )

    @classmethod
    def from_settings(cls, settings: StoreSettings, *, bucket: str, write: bool) -> S3ObjectStore:
        """Our own account. Raises ValueError, naming the variable, if a key is not set."""
        kind = "WRITE" if write else "READ"
        prefix = kind.lower()
        key = getattr(settings, f"{prefix}_access_key_id")
        secret = getattr(settings, f"{prefix}_secret_access_key")
        for name, value in (("ACCESS_KEY_ID", key), ("SECRET_ACCESS_KEY", secret)):
            if value is None or not value.get_secret_value():
                raise ValueError(
                    f"R2_{kind}_{name} is not set, so bucket {bucket} cannot be used: put it into "
                    ".env (R2 dashboard, Manage API tokens)"
                )
        return cls(
            bucket=bucket,
            endpoint_url=endpoint_of(settings),
            keys=AccessKeys(key, secret, f"R2_{kind}"),
            settings=settings,
        )

    @classmethod
    def of_peer(
        cls, settings: StoreSettings, *, bucket: str, credentials: BucketCredentials
    ) -> S3ObjectStore:
        """Another's bucket, by the read credentials of its commitment. Raises ValueError."""
        key = SecretStr(credentials.access_key_id)
        secret = SecretStr(credentials.secret_access_key)
        return cls(
            bucket=bucket,
            endpoint_url=endpoint_of(settings, credentials.account_id),
            keys=AccessKeys(key, secret, "commitment"),
            settings=settings,
        )

    @property
    def bucket(self) -> str:
        return self._bucket

    def __repr__(self) -> str:
        return f"S3ObjectStore({self._endpoint}, {self._bucket})"

    def close(self) -> None:
        self._client.close()

    def create_bucket(self) -> None:
        """Make the bucket; fine if it is there and ours."""
        with self._errors("create", self._bucket) as call:
            call(self._client.create_bucket)

    # --- objects --------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with self._errors("read", key) as call:
                answer = call(self._client.head_object, Key=key)
                size, etag = answer["ContentLength"], _unquote(answer["ETag"])
                modified = answer["LastModified"].timestamp()
                date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        except ObjectMissingError:
            return None
        now = email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()
        return ObjectInfo(key, size, etag, modified, max(0, now - modified))

    def get(self, key: str, *, limit: int) -> bytes | None:
        """The whole object, None if there is none. IntegrityError if it exceeds ``limit``."""
        try:
            with self._errors("read", key) as call:
                answer = call(self._client.get_object, Key=key)
                with answer["Body"] as body:
                    if answer["ContentLength"] > limit:
                        raise IntegrityError(
                            f"{self._bucket}/{key} has {answer['ContentLength']} bytes, more than "
                            f"the {limit} allowed, so it is not read"
                        )
                    return self._read(key, body, answer["ContentLength"])
        except ObjectMissingError:
            return None

    def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Fewer bytes at the object's end. PreconditionError if its etag is no longer ``etag``."""
        condition = {"IfMatch": f'"{etag}"'} if etag else {}
        with self._errors("read", key) as call:
            answer = call(
                self._client.get_object,
                Key=key,
                Range=f"bytes={start}-{start + length - 1}",
                **condition,
            )
            with answer["Body"] as body:
                if answer["ContentLength"] > length:
                    raise IntegrityError(f"{self._bucket}/{key}: the store ignored the range")
                return self._read(key, body, answer["ContentLength"])

    def put(self, key: str, data: bytes | Section) -> str:
        """Returns the etag. TransientError if the store holds other bytes than those sent."""
        self._await_write_interval(key)
        with self._errors("write", key) as call:
            etag = _unquote(call(self._client.put_object, Key=key, Body=data)["ETag"])
        return _confirm(f"{self._bucket}/{key}", data, etag)

    def delete(self, keys: Sequence[str]) -> None:
        """Missing ones are fine."""
        for key in keys:
            # One by one: bulk deletion needs a checksum that not every store accepts.
            try:
                with self._errors("delete", key) as call:
                    call(self._client.delete_object, Key=key)
            except ObjectMissingError:
                continue

    def list_objects(self, prefix: str = "") -> list[ObjectInfo]:
        with self._errors("list", ""):
            return [
                ObjectInfo(o["Key"], o["Size"], _unquote(o["ETag"]), o["LastModified"].timestamp())
                for page in self._pages("list_objects_v2", Prefix=prefix)
                for o in page.get("Contents", ())
            ]

    # --- multipart ------------------------------------------------------------------------------

    def create_multipart(self, key: str) -> str:
        with self._errors("write", key) as call:
            return str(call(self._client.create_multipart_upload, Key=key)["UploadId"])

    def upload_part(self, key: str, upload_id: str, number: int, data: bytes | Section) -> PartInfo:
        with self._errors("write", key) as call:
            answer = call(
                self._client.upload_part, Key=key, UploadId=upload_id, PartNumber=number, Body=data
            )
            etag = _unquote(answer["ETag"])
        what = f"part {number} of {self._bucket}/{key}"
        return PartInfo(number, len(data), _confirm(what, data, etag))

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        with self._errors("list", key):
            return [
                PartInfo(p["PartNumber"], p["Size"], _unquote(p["ETag"]))
                for page in self._pages("list_parts", Key=key, UploadId=upload_id)
                for p in page.get("Parts", ())
            ]

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[PartInfo]) -> str:
        self._await_write_interval(key)
        listed = [{"PartNumber": p.number, "ETag": f'"{p.etag}"'} for p in parts]
        with self._errors("write", key) as call:
            answer = call(
                self._client.complete_multipart_upload,
                Key=key,
                UploadId=upload_id,
                MultipartUpload={"Parts": listed},
            )
            return _unquote(answer["ETag"])

    def abort_multipart(self, key: str, upload_id: str) -> None:
        with self._errors("abort", key) as call:
            call(self._client.abort_multipart_upload, Key=key, UploadId=upload_id)

    def list_multiparts(self, prefix: str = "") -> list[MultipartInfo]:
        with self._errors("list", ""):
            return [
                MultipartInfo(u["Key"], u["UploadId"], u["Initiated"].timestamp())
                for page in self._pages("list_multipart_uploads", Prefix=prefix)
                for u in page.get("Uploads", ())
            ]

    # --- inside ---------------------------------------------------------------------------------

    def _read(self, key: str, body: Any, size: int) -> bytes:
        """The ``size`` bytes of an answer. TransientError if they are fewer, or trickle in."""
        pieces, end = [], time.monotonic() + _LONGEST_READ
        while piece := body.read1(_READ_CHUNK):  # what is there: read() waits for all it is to read
            pieces.append(piece)
            if time.monotonic() > end:
                raise TransientError(
                    f"read {self._bucket}/{key}: {sum(map(len, pieces))} of {size} bytes came in "
                    f"{_LONGEST_READ:.0f} s"
                )
        data = b"".join(pieces)
        if len(data) != size:
            raise TransientError(f"read {self._bucket}/{key}: the answer was cut short")
        return data

    def _pages(self, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        paginator = self._client.get_paginator(operation)
        yield from paginator.paginate(Bucket=self._bucket, **arguments)

    def _await_write_interval(self, key: str) -> None:
        with self._write_lock:
            now = time.monotonic()
            due = max(now, self._last_write.get(key, 0.0) + self._write_interval)
            self._last_write[key] = due
        if due > now:
            time.sleep(due - now)

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[Callable[..., dict[str, Any]]]:
        """Botocore's exceptions as ours; without their chains, which may hold signed requests."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        def call(operation: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
            if isinstance(body := arguments.get("Body"), Section):
                body.seek(0)
            return operation(Bucket=self._bucket, **arguments)

        try:
            yield call
        except self._client.exceptions.BucketAlreadyOwnedByYou:
            return  # what create_bucket() wants
        except ClientError as error:
            raise self._refusal.error(verb, key, error.response) from None
        except (BotoCoreError, HTTPError, OSError) as error:
            # Connection, timeout, or a read of ours that was interrupted.
            raise TransientError(
                f"{verb} {self._bucket}/{key}: no answer from {self._endpoint} "
                f"({type(error).__name__})"
            ) from None
        except LookupError as error:
            # A page of a proxy, with status 200.
            raise TransientError(
                f"{verb} {self._bucket}/{key}: the answer of {self._endpoint} lacks {error}, so it "
                "is not an object store's"
            ) from None


def _unquote(etag: str) -> str:
    return etag.strip('"')


def _confirm(what: str, data: bytes | Section, etag: str) -> str:
    """The store's MD5 must be that of the bytes that left this machine."""
    if isinstance(data, Section):
        sent = data.md5
    else:
        sent = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if etag != sent:
        # Damaged on the way: sending it again is the cure.
        raise TransientError(f"{what}: the store holds other bytes than those sent")
    return etag
