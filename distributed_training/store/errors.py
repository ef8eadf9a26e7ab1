"""Define the errors of an object store, distinguished by what to do about them.

Their texts are for the operator, and never contain a key, a secret or a signed URL:

    StoreError
        TransientError          wait and try again
            NotGrantedError     wait and try again; the registry did not answer
            OtherBytesError     wait and try again; read another object if it persists
        CertificateError        check the certificate authorities, or the clock
        AccessDeniedError       check the keys
            ClockSkewError      set the clock
        RefusedError            do what the store says
        BucketMissingError, ObjectMissingError, UploadMissingError
        UnsupportedError        do without the operation
        PreconditionError       start over
            TakenError          give up: the other bytes will stay
        IntegrityError          do not use the bytes
        NoRoomError, DeadlineError
    StoppedError                not a fault: the operation was stopped on request
"""

from __future__ import annotations


class StoreError(RuntimeError):
    """An operation on the object store failed. ``retryable``: trying again later may help."""

    retryable = False


class TransientError(StoreError):
    """The store answered 429 or 5xx, or did not answer: wait and try again."""

    retryable = True


class AccessDeniedError(StoreError):
    """The store answered 403: the keys are wrong or lack a permission; the text says which."""


class OtherBytesError(TransientError):
    """The answer is not the requested range: a cache may have cut or ignored the range."""


class NotGrantedError(TransientError):
    """The registry, which grants the store's URLs, did not answer, so the store was not asked."""


class CertificateError(StoreError):
    """The store's certificate is not accepted, because of its authority, its name or its dates."""


class RefusedError(StoreError):
    """The store refuses for a reason that it states: a quota, an unpaid bill, a lock."""


class ClockSkewError(AccessDeniedError):
    """The store refuses our signature because this machine's clock is off."""


class BucketMissingError(StoreError):
    """There is no such bucket."""


class ObjectMissingError(StoreError):
    """There is no such object."""


class UploadMissingError(StoreError):
    """There is no such multipart upload: it was completed or aborted, or it has expired."""


class PreconditionError(StoreError):
    """The store answered 412: the object changed between two requests, or already exists."""


class TakenError(PreconditionError):
    """An object that nobody may replace already exists, with bytes other than ours."""


class UnsupportedError(StoreError):
    """The store answered 501: it does not support the operation or one of its conditions."""


class IntegrityError(StoreError):
    """The store has different bytes than were sent, or a file fails its check.

    The operation does not retry, since it might send the same bytes for an hour. The next upload
    continues with the parts that are missing.
    """


class NoRoomError(StoreError):
    """The disk has no room for a download; the text says whether the bytes so far are kept."""


class DeadlineError(StoreError):
    """An operation ran out of time despite its retries. The text has its last error."""


class StoppedError(Exception):
    """The operation was stopped on request; anything it has already stored stays there.

    It is not a StoreError, because code that reports store failures must not report a stop.
    """
