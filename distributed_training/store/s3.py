"""Access one bucket over the S3 API: Cloudflare R2, or another store by its endpoint.

Everything specific to R2 is here: region ``auto``, checksums only where the API requires them (R2
refuses botocore's checksum trailers with ``Unauthorized``), path-style addresses, and no transfer
library written in C.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from distributed_training.common.http import answered_at, refuses
from distributed_training.common.proxies import proxy_for, via
from distributed_training.config.settings import StoreSettings
from distributed_training.protocol.keys import OUTER, STATE, r2_endpoint
from distributed_training.protocol.metadata import BucketCredentials

from .base import (
    CONCURRENT,
    MOST_LISTED,
    STORES,
    MultipartInfo,
    ObjectInfo,
    PartInfo,
    Section,
    is_md5,
    md5_of,
    same_etag,
)
from .errors import (
    AccessDeniedError,
    BucketMissingError,
    CertificateError,
    ClockSkewError,
    IntegrityError,
    ObjectMissingError,
    OtherBytesError,
    PreconditionError,
    RefusedError,
    StoreError,
    TransientError,
    UnsupportedError,
    UploadMissingError,
)

# --- what a store answered ----------------------------------------------------------

_PASSING_STATUS = frozenset({408, 429})
# Compare codes as well: S3 sends two of these with status 400, which is otherwise permanent. The
# second line has kinds of 409 that pass, since another request for the same key is still in
# progress. An answer to HEAD has only the status.
_PASSING_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "IncompleteBody", "InternalError"}
    | {"OperationAborted", "ConditionalRequestConflict", "Conflict", "409"}
)
_NEVER = frozenset({501, 505})  # the store does not support the operation
# S3 sends the last two with status 400; they mean that keys are no longer valid.
_BAD_KEYS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "Unauthorized", "ExpiredToken", "InvalidToken"}
)
_CHANGED_HOST = "; if they are right, a proxy before the store changes Host, which it must not"
_NO_PERMISSION = frozenset({"AccessDenied", "Forbidden", "403", ""})
# Some stores answer AccessDenied for these refusals too, and only the message tells them apart.
_OTHER_REASON = re.compile(
    r"\b(caps?|quotas?|exceed\w*|payments?|billing|overdue|suspended|lock\w*|retention)\b", re.I
)
#: Code -> the error and its text, into which the answer is put.
_BY_CODE: dict[str, tuple[type[StoreError], str]] = {
    "NoSuchUpload": (UploadMissingError, "the store does not know this multipart upload ({})"),
    "RequestTimeTooSkewed": (
        ClockSkewError,
        "this machine's clock differs too much from the store's ({}), so no request is accepted: "
        "set the clock (timedatectl set-ntp true)",
    ),
    "BadDigest": (IntegrityError, "other bytes arrived than were sent ({})"),
}
#: The same for statuses, whatever the code is.
_BY_STATUS: dict[int, tuple[type[StoreError], str]] = {
    404: (ObjectMissingError, "no such object ({})"),
    412: (PreconditionError, "the object changed meanwhile ({})"),
    413: (
        RefusedError,
        "the store, or a proxy before it, accepts no body of this size ({}): whoever runs the "
        "proxy must raise its limit to 65 MB, above the largest part of an upload (nginx: "
        "client_max_body_size 65m)",
    ),
}
_LONGEST_SENTENCE = 150
_LIKE_A_SECRET = re.compile(r"[A-Za-z0-9+=]{32,}|(?<=\?)\S+")  # a key, a signed query


_CLIENTS = threading.Lock()  # creating clients from one session is not thread-safe
_MOST_PAGES = 2_000
_READ_CHUNK = 128 * 1024
_LONGEST_READ = 600.0  # seconds for the body of one answer: a trickle never hits the read timeout
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")


@functools.cache
def _session() -> Any:
    """Return the only session of this process.

    With a new session, a client would parse S3's service description again, which takes 0.1 s.
    """
    import boto3
    import botocore.session

    # Our clients pass all settings. Without this, botocore would also read variables, profiles and
    # files in ~/.aws meant for other programs: AWS_PROFILE may name one that this machine lacks.
    known = botocore.session.Session.SESSION_VARIABLES
    ours = {name: (None, None, *rest) for name, (_, _, *rest) in known.items()}
    for name in ("config_file", "credentials_file"):
        ours[name] = (None, None, os.devnull, None)
    session = botocore.session.Session(session_vars=ours)
    return boto3.session.Session(botocore_session=session)


def _authorities() -> str | None:
    """Return the file of authorities that the environment names; None means botocore's own file.

    The variables are checked in botocore's order, followed by the variable of the registry's
    client. Raises ValueError.
    """
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        if path := os.environ.get(name):
            try:
                _load_authorities(path)
            except OSError as error:  # includes ssl's errors
                raise ValueError(
                    f"the certificates of {name}={path:.200} cannot be read ({error.strerror}), so "
                    "no store can be used: correct that variable, or unset it"
                ) from None
            return path
    return None


# Loading all authorities takes a tenth of a second, and a validator opens hundreds of buckets.
@functools.lru_cache(maxsize=4)
def _load_authorities(path: str) -> None:
    ssl.create_default_context(cafile=path)


def endpoint_of(settings: StoreSettings, account_id: str | None = None) -> str:
    """Return the endpoint of our account, or of the account named in another's commitment.

    Raises ValueError if there is neither ``--r2.endpoint_url`` nor a valid account id.
    """
    return settings.endpoint_url or r2_endpoint(account_id or settings.account_id or "")


@dataclass(frozen=True)
class AccessKeys:
    """A key and its secret. ``what`` names them in messages: ours are R2_WRITE and R2_READ."""

    key_id: SecretStr
    secret: SecretStr
    what: str = "R2"


class S3ObjectStore:
    """A :class:`~.base.MultipartStore` that is reached over the S3 API.

    ``settings``: timeouts, and the values in which R2 differs from S3. ``keys``: None to leave
    requests unsigned. ``connect_timeout`` limits how long connecting takes, ``read_timeout`` the
    wait between two pieces of an answer. Connections are made on first use and pooled. ``bucket``:
    ``NAME/PREFIX`` means everything below ``PREFIX/`` in a shared bucket; the keys that methods
    take and return are without this prefix. Raises ValueError for an invalid bucket name.
    """

    def __init__(
        self,
        *,
        bucket: str,
        endpoint_url: str,
        keys: AccessKeys | None,
        settings: StoreSettings,
    ) -> None:
        from botocore import UNSIGNED
        from botocore.config import Config

        container, slash, prefix = bucket.partition("/")
        if not _BUCKET_NAME.fullmatch(container) or (slash and not _PREFIX.fullmatch(prefix)):
            raise ValueError(
                f"{bucket!r:.80} is not a bucket name: use 3 to 63 lower-case letters, digits, "
                "hyphens or dots, e.g. llama-4b-ws-4-007, or BUCKET/PREFIX"
            )
        self._bucket, self._container = bucket, container
        self._prefix = f"{prefix}/" if prefix else ""
        self._endpoint = endpoint_url
        self._is_r2 = (urlsplit(endpoint_url).hostname or "").endswith(".r2.cloudflarestorage.com")
        self._keys = keys or AccessKeys(SecretStr(""), SecretStr(""))
        proxy, scheme = proxy_for(endpoint_url), urlsplit(endpoint_url).scheme
        authorities = _authorities() if scheme == "https" else None
        with _CLIENTS:
            self._client: Any = _session().client(
                "s3",
                endpoint_url=endpoint_url,
                verify=authorities,
                region_name=settings.region,
                aws_access_key_id=self._keys.key_id.get_secret_value(),
                aws_secret_access_key=self._keys.secret.get_secret_value(),
                config=Config(
                    # Otherwise URLs that are signed for others would have signatures of version 2
                    # in some regions.
                    signature_version="s3v4" if keys is not None else UNSIGNED,
                    # R2 refuses the trailers that botocore sends by default (when_supported).
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    # Allow one attempt, since `Retry` repeats it with pauses and a deadline.
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    connect_timeout=settings.connect_timeout.total_seconds(),
                    read_timeout=settings.read_timeout.total_seconds(),
                    # The cleanup and small requests use this client during a transfer too.
                    max_pool_connections=CONCURRENT + 4,
                    tcp_keepalive=True,
                    # Otherwise botocore would use the environment's proxy, even for loopback.
                    proxies={scheme: proxy} if proxy else {},
                    # The store compares every part with its MD5, so the payload need not be hashed
                    # a second time for the signature.
                    s3={
                        "addressing_style": settings.addressing,
                        "payload_signing_enabled": False,
                        "us_east_1_regional_endpoint": "regional",  # whatever the environment says
                    },
                ),
            )

        # After a redirect, botocore asks where the bucket is. If a server redirects that request
        # too, botocore would ask again until its stack overflows: hundreds of times per request.
        self._client.meta.events.register(
            "before-call.s3.HeadBucket",
            lambda context, **_: context.setdefault("s3_redirect", {}).update(redirected=True),
        )

    @classmethod
    def from_settings(cls, settings: StoreSettings, *, bucket: str, write: bool) -> S3ObjectStore:
        """Open a bucket of our own account.

        Raises ValueError, naming the variable, if a key is not set.
        """
        kind = "WRITE" if write else "READ"
        prefix = kind.lower()
        key = getattr(settings, f"{prefix}_access_key_id")
        secret = getattr(settings, f"{prefix}_secret_access_key")
        for name, value in (("ACCESS_KEY_ID", key), ("SECRET_ACCESS_KEY", secret)):
            if value is None or not value.get_secret_value():
                raise ValueError(
                    f"R2_{kind}_{name} is not set, so bucket {bucket} cannot be used: put it into "
                    ".env (at R2: dashboard, Manage API tokens)"
                )
        return cls(
            bucket=bucket,
            endpoint_url=endpoint_of(settings),
            keys=AccessKeys(key, secret, f"R2_{kind}"),
            settings=settings,
        )

    @property
    def bucket(self) -> str:
        return self._bucket

    def close(self) -> None:
        self._client.close()

    def create_bucket(self) -> None:
        """Create the bucket, unless it is already ours. A prefix need not be created."""
        with self._errors("create", self._bucket) as call:
            call(self._client.create_bucket)

    # --- objects --------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with self._errors("read", key) as call:
                answer = call(self._client.head_object, Key=key)
                size, etag = answer["ContentLength"], _etag_of(answer)
                modified = answer["LastModified"].timestamp()
                headers = answer["ResponseMetadata"]["HTTPHeaders"]
                now, cached = answered_at(headers) if "date" in headers else (time.time(), False)
        except ObjectMissingError:
            return None
        except StoreError as refused:
            # An answer to HEAD has no body and so no code. Without a code, wrong keys, a wrong
            # clock and a missing permission look alike, so ask with GET, whose answer has a code.
            if not refused.retryable:
                with contextlib.suppress(ObjectMissingError, IntegrityError, TransientError):
                    self.get_range(key, 0, 1)
            raise
        return ObjectInfo(key, size, etag, modified, now - modified, cached)

    def get(self, key: str, *, limit: int) -> bytes | None:
        """Return the whole object, or None if it does not exist.

        Raises IntegrityError if it is larger than ``limit``.
        """
        try:
            with self._errors("read", key) as call:
                answer = call(self._client.get_object, Key=key)
                with answer["Body"] as body:
                    # Check the size before reading: another member's bucket may hold anything.
                    if answer["ContentLength"] > limit:
                        raise IntegrityError(
                            f"{self._bucket}/{key} has {answer['ContentLength']} bytes, more than "
                            f"the {limit} allowed, so it is not read"
                        )
                    return self._read(key, body, answer["ContentLength"])
        except ObjectMissingError:
            return None

    def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Return a range of an object, or less if the object ends within the range.

        Raises PreconditionError if the object's etag is no longer ``etag``.
        """
        condition = {"IfMatch": f'"{etag}"'} if etag else {}
        with self._errors("read", key) as call:
            answer = call(
                self._client.get_object,
                Key=key,
                Range=f"bytes={start}-{start + length - 1}",
                **condition,
            )
            with answer["Body"] as body:
                # With status 200 instead of 206, this is the whole object: gigabytes of memory.
                if answer["ContentLength"] > length:
                    raise OtherBytesError(f"{self._bucket}/{key}: the store ignored the range")
                return self._read(key, body, answer["ContentLength"])

    def put(self, key: str, data: bytes | Section) -> str:
        """Write ``data``; return the etag. IntegrityError if the store received other bytes."""
        return self._put(key, data)

    def put_new(self, key: str, data: bytes | Section) -> str:
        """Write a new object; return its etag. PreconditionError if it already exists."""
        # Check first, because some stores ignore the condition that the write request carries.
        if self.head(key) is not None:
            raise PreconditionError(f"write {self._bucket}/{key}: the object already exists")
        return self._put_new(key, data)

    def _put_new(self, key: str, data: bytes | Section) -> str:
        """Write an object only if it does not exist yet, if the store supports this condition."""
        try:
            return self._put(key, data, IfNoneMatch="*")
        except UnsupportedError:
            return self._put(key, data)

    def _put(self, key: str, data: bytes | Section, **condition: str) -> str:
        md5 = md5_of(data)
        with self._errors("write", key) as call:
            answer = call(
                self._client.put_object,
                Key=key,
                Body=data,
                ContentMD5=base64_md5(md5),
                **condition,
                **_cache_control(key),
            )
            return self._accepted(key, answer, md5)

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is not an error."""
        with contextlib.suppress(ObjectMissingError), self._errors("delete", key) as call:
            call(self._client.delete_object, Key=key)

    def list_objects(self, prefix: str = "", *, most: int = MOST_LISTED) -> list[ObjectInfo]:
        """List the objects, in the order of their keys. StoreError if over ``most``."""
        with self._errors("list", ""):
            listed = islice(self._entries("list_objects_v2", "Contents", prefix), most + 1)
            found = [
                ObjectInfo(o["Key"], o["Size"], _etag_of(o), o["LastModified"].timestamp())
                for o in listed
            ]
        if len(found) > most:
            raise StoreError(f"{self._bucket}/{prefix} lists more than {most} objects")
        return found

    def presign(self, operation: str, key: str, seconds: float, **signed: Any) -> str:
        """Return a URL that lets others perform one operation, such as ``get_object``.

        The URL expires after ``seconds``. ``signed``: arguments of the operation that others
        cannot change. No request is sent.
        """
        where = {"Bucket": self._container, "Key": self._prefix + key, **signed}
        return str(
            self._client.generate_presigned_url(operation, Params=where, ExpiresIn=round(seconds))
        )

    # --- multipart ------------------------------------------------------------------------------

    def multipart(self) -> S3ObjectStore | None:
        return self

    def create_multipart(self, key: str) -> str:
        with self._errors("write", key) as call:
            begin = self._client.create_multipart_upload
            return str(call(begin, Key=key, **_cache_control(key))["UploadId"])

    def upload_part(self, key: str, upload_id: str, number: int, data: bytes | Section) -> PartInfo:
        """Send one part. IntegrityError if the store received other bytes."""
        md5 = md5_of(data)
        with self._errors("write", key) as call:
            answer = call(
                self._client.upload_part,
                Key=key,
                UploadId=upload_id,
                PartNumber=number,
                Body=data,
                ContentMD5=base64_md5(md5),
            )
            return PartInfo(
                number, len(data), self._accepted(f"{key} (part {number})", answer, md5)
            )

    def _accepted(self, what: str, answer: dict[str, Any], md5: str) -> str:
        """Return the etag of the object or part that was written.

        Raises IntegrityError if other bytes were written. The etags of some stores are not MD5s.
        Those stores received the MD5 with the request, so they refuse other bytes themselves.
        """
        etag = _etag_of(answer)
        if is_md5(etag) and not same_etag(etag, md5):
            raise IntegrityError(
                f"write {self._bucket}/{what}: the store holds other bytes than those sent (MD5 "
                f"{etag} instead of {md5}), or it encrypts with KMS: use AES256 (SSE-S3) instead"
            )
        return etag

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        with self._errors("list", key):
            pages = self._pages("list_parts", Key=self._prefix + key, UploadId=upload_id)
            return [
                PartInfo(part["PartNumber"], part["Size"], _etag_of(part))
                for page in islice(pages, _MOST_PAGES)
                for part in page.get("Parts", ())
            ]

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[PartInfo]) -> str:
        listed = [{"PartNumber": p.number, "ETag": f'"{p.etag}"'} for p in parts]
        with self._errors("write", key) as call:
            answer = call(
                self._client.complete_multipart_upload,
                Key=key,
                UploadId=upload_id,
                MultipartUpload={"Parts": listed},
            )
            return _etag_of(answer)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        with self._errors("abort", key) as call:
            call(self._client.abort_multipart_upload, Key=key, UploadId=upload_id)

    def list_multiparts(self, prefix: str = "") -> list[MultipartInfo]:
        with self._errors("list", ""):
            # The next cleanup lists the rest.
            listed = islice(self._entries("list_multipart_uploads", "Uploads", prefix), MOST_LISTED)
            return [
                MultipartInfo(u["Key"], u["UploadId"], u["Initiated"].timestamp()) for u in listed
            ]

    # --- inside ---------------------------------------------------------------------------------

    def _read(self, key: str, body: Any, size: int) -> bytes:
        """Read an answer of ``size`` bytes. TransientError if bytes are missing or trickle in."""
        pieces, end = [], time.monotonic() + _LONGEST_READ
        while piece := body.read1(_READ_CHUNK):  # read() would wait for all bytes
            pieces.append(piece)
            if time.monotonic() > end:
                raise TransientError(
                    f"read {self._bucket}/{key}: only {sum(map(len, pieces))} of {size} bytes "
                    f"arrived in {_LONGEST_READ:.0f} s"
                )
        data = b"".join(pieces)
        # botocore checks the length in its own read(), which read1() bypasses.
        if len(data) != size:
            raise TransientError(f"read {self._bucket}/{key}: the answer was cut short")
        return data

    def _entries(self, operation: str, kind: str, prefix: str) -> Iterator[dict[str, Any]]:
        # Limit the pages too, since each of them may be empty and still name a next page.
        for page in islice(self._pages(operation, Prefix=self._prefix + prefix), _MOST_PAGES):
            for entry in page.get(kind, ()):
                # Whatever a store lists, a key with another prefix must never pass for ours.
                if entry["Key"].startswith(self._prefix):
                    yield {**entry, "Key": entry["Key"].removeprefix(self._prefix)}

    def _pages(self, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        paginator = self._client.get_paginator(operation)
        yield from paginator.paginate(Bucket=self._container, **arguments)

    @contextlib.contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[Callable[..., dict[str, Any]]]:
        """Raise botocore's exceptions as ours."""
        from botocore.exceptions import BotoCoreError, ClientError, SSLError
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

        def call(operation: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
            if isinstance(body := arguments.get("Body"), Section):
                # An earlier attempt may have stopped in the middle of it.
                body.seek(0)
            if "Key" in arguments:
                arguments["Key"] = self._prefix + arguments["Key"]
            return operation(Bucket=self._container, **arguments)

        try:
            yield call
        except self._client.exceptions.BucketAlreadyOwnedByYou:
            return  # so create_bucket() has nothing to do
        except ClientError as error:
            # Drop the exception chain here and below, since it may contain a signed request.
            raise self._refused(verb, key, error.response) from None
        except SSLError as error:
            place = f"{verb} {self._bucket}/{key}"
            # Either the certificate was not accepted, or the connection broke.
            found = re.search(r"certificate verify failed: (.*?)\.? \(_ssl", str(error))
            if found is None:
                raise TransientError(
                    f"{place}: no answer from {self._endpoint} (SSLError)"
                ) from None
            raise CertificateError(
                f"{place}: the certificate of {self._endpoint} is not accepted ({found[1]}): name "
                "the file of its authority in AWS_CA_BUNDLE, or set this machine's clock "
                "(timedatectl)"
            ) from None
        except (BotoCoreError, HTTPError, OSError) as error:
            # The connection failed, timed out, or our read was interrupted.
            what = "connection refused" if refuses(error) else type(error).__name__
            raise TransientError(
                f"{verb} {self._bucket}/{key}: no answer from {self._endpoint}"
                f"{via(self._endpoint)} ({what})"
            ) from None
        except (LookupError, ValueError, TypeError, ResponseParserError) as error:
            # botocore itself accepts a proxy's page with status 200, and also headers that make no
            # sense.
            what = f"lacks {error}" if isinstance(error, LookupError) else "cannot be read"
            raise TransientError(
                f"{verb} {self._bucket}/{key}: the answer of {self._endpoint} {what}, so it does "
                "not come from an object store"
            ) from None

    def _refused(self, verb: str, key: str, response: Any) -> StoreError:
        """Map botocore's ``ClientError.response`` to an error that quotes the store's own message.

        ``verb``: read, write, list, delete, ...
        """
        error = response.get("Error", {})
        code = str(error.get("Code", ""))
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        sentence = self._sentence(str(error.get("Message", "")))
        answer = self._sentence(f"{status} {code}") + (f': "{sentence}"' if sentence else "")
        place = f"{verb} {self._bucket}/{key}".rstrip("/")
        # Compare codes before statuses: a missing bucket or upload is also a 404, and a wrong clock
        # a 403.
        if code == "NoSuchBucket":
            where = "in the R2 dashboard " if self._is_r2 else ""
            return BucketMissingError(
                f"bucket {self._container} does not exist at {self._endpoint} ({answer}), so "
                "nothing can be read or published there: create it "
                f"{where}under exactly this name"
            )
        if code in _BY_CODE:
            kind, text = _BY_CODE[code]
            return kind(f"{place}: {text.format(answer)}")
        if code in _BAD_KEYS or status == 401:
            what, where = self._keys.what, " from the R2 dashboard" if self._is_r2 else ""
            host = "" if self._is_r2 or code != "SignatureDoesNotMatch" else _CHANGED_HOST
            return AccessDeniedError(
                f"{place}: the store does not accept these keys ({answer}): copy "
                f"{what}_ACCESS_KEY_ID and {what}_SECRET_ACCESS_KEY again{where} into .env, which "
                f"a running miner reads at its next start{host}"
            )
        if status == 403:
            if code not in _NO_PERMISSION or _OTHER_REASON.search(sentence):
                return RefusedError(f"{place}: the store refused this ({answer})")
            needed = "Object Read" if verb in ("read", "list") else "Object Read & Write"
            remedy = (
                f': give its token "{needed}" on bucket {self._container} (R2 dashboard, Manage '
                "API tokens)"
            )
            return AccessDeniedError(
                f"{place}: refused ({answer}): the key in {self._keys.what}_ACCESS_KEY_ID lacks "
                f"the permission to {verb}{remedy if self._is_r2 else ''}"
            )
        # An answer to HEAD has no body, so botocore uses the status as the code.
        if code in ("NoSuchKey", "404", "NotFound"):
            status = 404
        if status in _BY_STATUS:
            kind, text = _BY_STATUS[status]
            return kind(f"{place}: {text.format(answer)}")
        if 300 < status < 304 or status in (307, 308) or code == "AuthorizationHeaderMalformed":
            # Do not follow it, since the other host would get our signature. 302, 303 and 307 may
            # be temporary.
            kind = TransientError if status in (302, 303, 307) else StoreError
            return kind(
                f"{place}: {self._endpoint} redirects elsewhere, or expects another region "
                f"({answer}): correct store.endpoint or store.region of the network's file, or the "
                "proxy before it"
            )
        passes = status in _PASSING_STATUS or status >= 500 or code in _PASSING_CODES
        if passes and status not in _NEVER:
            return TransientError(f"{place}: the store answered {answer}")
        kinds = {409: RefusedError, 501: UnsupportedError}
        kind = kinds.get(status, StoreError)
        return kind(f"{place}: the store answered {answer}")

    def _sentence(self, message: str) -> str:
        """Return a store's message as one short line without secrets."""
        line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
        for secret in (self._keys.key_id, self._keys.secret):
            line = line.replace(secret.get_secret_value() or "\n", "********")
        line = _LIKE_A_SECRET.sub("********", line)
        return line if len(line) <= _LONGEST_SENTENCE else f"{line[:_LONGEST_SENTENCE]}..."


def _cache_control(key: str) -> dict[str, str]:
    """Return the header that tells caches in front of the store how long to keep an object."""
    if key.startswith(OUTER):
        return {"CacheControl": "public, max-age=86400, immutable"}
    # A member that reads an old state would miss closes.
    return {"CacheControl": "no-store"} if key == STATE else {}


def _etag_of(answer: dict[str, Any]) -> str:
    """Return an answer's etag without its quotes and without the mark of a weak etag."""
    return str(answer["ETag"]).removeprefix("W/").strip('"')


def base64_md5(md5: str) -> str:
    return base64.b64encode(bytes.fromhex(md5)).decode()


def _open(
    settings: StoreSettings,
    bucket: str,
    *,
    write: bool,
    credentials: BucketCredentials | None,
) -> S3ObjectStore:
    if credentials is not None:
        keys = SecretStr(credentials.access_key_id), SecretStr(credentials.secret_access_key)
        return S3ObjectStore(
            bucket=bucket,
            endpoint_url=endpoint_of(settings, credentials.account_id),
            keys=AccessKeys(*keys, "commitment"),
            settings=settings,
        )
    return S3ObjectStore.from_settings(settings, bucket=bucket, write=write)


STORES.register("s3", _open)
