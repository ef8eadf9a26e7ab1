"""A store's refusal, told apart by what to do about it: the S3 API's codes as our errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import (
    AccessDeniedError,
    BucketMissingError,
    ClockSkewError,
    ObjectMissingError,
    PreconditionError,
    StoreError,
    TransientError,
    UploadMissingError,
)

_PASSING_STATUS = frozenset({408, 409, 429})
_PASSING_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "BadDigest", "IncompleteBody", "InternalError"}
)
_BAD_KEYS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "Unauthorized"})


@dataclass(frozen=True)
class Refusal:
    """``what`` names the keys in messages: "R2_WRITE" or "R2_READ" for our own."""

    bucket: str
    endpoint: str
    what: str

    def error(self, verb: str, key: str, response: Any) -> StoreError:
        """For botocore's ``ClientError.response``; ``verb``: read, write, list, delete, ..."""
        code = str(response.get("Error", {}).get("Code", ""))
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        place = f"{verb} {self.bucket}/{key}".rstrip("/")
        if code == "NoSuchBucket":
            return BucketMissingError(
                f"bucket {self.bucket} does not exist at {self.endpoint}, so nothing can be "
                "read or published there: create it in the R2 dashboard under exactly this name"
            )
        if code == "NoSuchUpload":
            return UploadMissingError(f"{place}: the store does not know this multipart upload")
        if code == "RequestTimeTooSkewed":
            return ClockSkewError(
                f"{place}: this machine's clock differs too much from the store's, so no request "
                "is accepted: set the clock (timedatectl set-ntp true)"
            )
        if status in (401, 403):
            return AccessDeniedError(self._denied(verb, place, code))
        if code in ("NoSuchKey", "404", "NotFound") or status == 404:
            return ObjectMissingError(f"{place}: no such object")
        if status == 412:
            return PreconditionError(f"{place}: the object changed meanwhile")
        if status in _PASSING_STATUS or status >= 500 or code in _PASSING_CODES:
            return TransientError(f"{place}: the store answered {status} {code}")
        return StoreError(f"{place}: the store answered {status} {code}")

    def _denied(self, verb: str, place: str, code: str) -> str:
        name = f"{self.what}_ACCESS_KEY_ID"
        if code in _BAD_KEYS:
            return (
                f"{place}: the store does not accept these keys ({code}): copy {name} and "
                f"{self.what}_SECRET_ACCESS_KEY again from the R2 dashboard into .env"
            )
        needed = "Object Read" if verb in ("read", "list") else "Object Read & Write"
        return (
            f"{place}: refused ({code or 403}), the key in {name} lacks the permission to {verb}: "
            f'give its token "{needed}" on bucket {self.bucket} (R2 dashboard, Manage API tokens)'
        )
