"""The errors of an object store, told apart by what to do about them.

The texts are for the operator and never hold a key, a secret or a signed address:

    StoreError
        TransientError          back off and try again
            NotGrantedError     by the registry, which does not answer
            OtherBytesError     and look elsewhere if it stays
        CertificateError        the authorities, or the clock
        AccessDeniedError       the keys
            ClockSkewError      the clock
        RefusedError            what the store says
        BucketMissingError, ObjectMissingError, UploadMissingError
        UnsupportedError        do without
        PreconditionError       begin again
            TakenError          other bytes are there, and stay
        IntegrityError          other bytes than they should be
        NoRoomError, DeadlineError
    StoppedError                no fault: the operation was ended on request
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


class OtherBytesError(TransientError):
    """A range came with other bytes than were asked for: a cache may cut or ignore it."""


class NotGrantedError(TransientError):
    """The registry, which grants URLs of the store, gave no answer: the store was not asked."""


class CertificateError(StoreError):
    """The store's certificate is not accepted: by its authority, its name or its time."""


class RefusedError(StoreError):
    """The store refuses for a reason of its own, which it says: a quota, a bill, a lock."""


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


class TakenError(PreconditionError):
    """An object that nobody may replace is there, with other bytes than ours."""


class UnsupportedError(StoreError):
    """501: the store has no such operation, or does not know one of its conditions."""


class IntegrityError(StoreError):
    """The store has other bytes than were sent, or a file fails its check.

    No retry follows in the same operation, since it might send the same bytes for an hour. The next
    sending continues with the parts that are missing.
    """


class NoRoomError(StoreError):
    """The disk has no room for a download; the bytes that came are kept."""


class DeadlineError(StoreError):
    """The retries of an operation used up its time. The text says what the last attempt met."""


class StoppedError(Exception):
    """The operation was ended on request; what the store holds of it stays.

    It is not a StoreError: whoever reports a store that fails must not report a stop.
    """
