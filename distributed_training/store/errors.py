"""What can go wrong with an object store, told apart by what to do about it.

The texts are for the operator and never hold a key, a secret or a signed address. :class:`Refusal`
makes them out of the S3 API's codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributed_training.common.files import is_full


class StoreError(RuntimeError):
    """An operation on the object store failed. ``retryable``: trying again later may help."""

    retryable = False


class TransientError(StoreError):
    """429, 5xx, a timeout, a dropped connection: back off and try again."""

    retryable = True


class AccessDeniedError(StoreError):
    """403: the keys are wrong or lack a permission; the text says which."""


class ClockSkewError(AccessDeniedError):
    """The store refuses our signature because this machine's clock is off."""


class BucketMissingError(StoreError):
    """There is no such bucket."""


class ObjectMissingError(StoreError):
    """There is no such object."""


class UploadMissingError(StoreError):
    """There is no such multipart upload: completed, aborted, or expired."""


class PreconditionError(StoreError):
    """412: the object changed between two requests that had to see the same one."""


class IntegrityError(StoreError):
    """Bytes at the store differ from those sent, or a file is not what it should be."""


class DeadlineError(StoreError):
    """The retries of an operation used up its time. The text says what the last attempt met."""


class StoppedError(StoreError):
    """The operation was ended on request; a journal keeps what was done."""


# --- what a store, or the disk, answered ----------------------------------------------------------

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


def disk_problem(error: OSError) -> str:
    """One line: what the disk said, where, and what to do about a full one."""
    line = f"{error.filename or 'the disk'}: {error.strerror or error}"
    if not is_full(error):
        return line
    return (
        f"{line}. This revision is not published and training goes on: free the disk or "
        "move --neuron.run_folder"
    )
