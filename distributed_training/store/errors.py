"""What can go wrong with an object store, told apart by what to do about it.

The texts are for the operator and never hold a key, a secret or a signed address.
"""

from __future__ import annotations


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
