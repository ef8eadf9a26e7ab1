"""Why a request is refused, and how often an operator is told."""

from __future__ import annotations

import enum
import logging
import time
from collections import OrderedDict

log = logging.getLogger(__name__)

_LOG_INTERVAL = 60.0
_LOG_LINES = 20  # per interval, all callers together


class Refusal(enum.Enum):
    """Why a request is refused: name of the counter, HTTP status, text for the caller."""

    TOO_LARGE = ("too_large", 413, "request too large")
    HEADERS = ("headers_too_large", 431, "headers too large")
    LENGTH = ("no_length", 411, "send Content-Length, not Transfer-Encoding")
    TIMEOUT = ("timeout", 408, "request not received in time")
    SILENT = ("silent", 408, "nothing was sent")
    MALFORMED = ("malformed", 400, "malformed request")
    ROUTE = ("unknown_route", 404, "unknown synapse")
    METHOD = ("method", 405, "only POST is answered")
    UNSIGNED = ("unsigned", 401, "signature headers are missing or of a scheme not accepted here")
    UNKNOWN_HOTKEY = ("unknown_hotkey", 403, "hotkey is not registered")
    RATE = ("rate", 429, "too many requests")
    STALE = ("stale", 401, "nonce is too old")
    FUTURE = ("future", 401, "nonce is in the future")
    REPLAY = ("replay", 401, "nonce was used before")
    RECEIVER = ("receiver", 401, "signed for another receiver")
    SIGNATURE = ("signature", 401, "signature does not verify")
    NO_PERMIT = ("no_permit", 403, "validator permit is missing")
    LOW_STAKE = ("low_stake", 403, "stake is below the minimum")
    NOT_DUE = ("not_due", 403, "no round is due, and the legacy signature covers no call")
    OWN_HOTKEY = ("own_hotkey", 403, "signed by this server's own hotkey")

    def __init__(self, reason: str, status: int, message: str) -> None:
        self.reason = reason
        self.status = status
        self.message = message


class Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class RefusalLog:
    """At most one line a minute for each caller, and few for all of them together."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, float] = OrderedDict()  # when last told
        self._window = (0.0, 0)  # its start, lines in it

    def tell(self, reason: str, caller: str) -> None:
        now = time.monotonic()
        if now - self._callers.get(caller, -_LOG_INTERVAL) < _LOG_INTERVAL:
            return
        start, lines = self._window
        if now - start > _LOG_INTERVAL:
            start, lines = now, 0
        if lines >= _LOG_LINES:
            return
        self._window = (start, lines + 1)
        self._callers[caller] = now
        self._callers.move_to_end(caller)
        if len(self._callers) > 1024:
            self._callers.popitem(last=False)
        log.warning("Refused a call of %s: %s", caller, reason)
