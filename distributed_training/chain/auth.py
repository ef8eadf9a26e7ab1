"""Authenticate a request: ``btauth/1`` or the legacy dendrite headers. Name each refusal.

Both schemes are checked in two halves, so that the server can put its cheap checks between them:
:func:`read_claim` reads the headers' claims (nothing is proven yet), :func:`proven` verifies the
signature (43 us). The scheme of a call decides nothing about what its caller may do. The legacy
signature covers the hash of nothing in place of the body (protocol/synapses.py).

``btauth/1`` signs the lines of :func:`_btauth_text`. It is bittensor's (its guide "Signed
requests"), and is here since a member of a registry's network needs only the keys of bittensor.

*Replay.* A nonce is the caller's clock in nanoseconds. A call is fresh while its nonce is at most
some seconds old by our clock (:func:`check_fresh`), and a replay when the same call was accepted
before. Both clocks are wall clocks, by protocol, and may be set at any time. So accepted calls are
remembered for much longer than they could stay fresh (``KEPT``), by a monotonic clock. When a call
is forgotten at last, everything as old or older is refused from then on (the floor); one of the
future, accepted while both clocks were ahead, is kept until its time comes. The next process reads
the highest nonce accepted, and whether the end was clean, from one small file of the run folder.
After a clean end that nonce is the floor. After a kill the last nonces may be missing, so for the
first seconds everything is refused that could have been signed before the start.
"""

from __future__ import annotations

import enum
import hashlib
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from bittensor_core import CRYPTO_ED25519, CRYPTO_SR25519
from bittensor_core import verify as verify_signature
from pydantic import Field

from distributed_training.common.files import read_state, remove_leftovers, write_state
from distributed_training.protocol.synapses import (
    LEGACY_ALLOWANCE,
    legacy_signed_text,
)

from .identity import Wallet


class Refusal(enum.Enum):
    """The reasons to refuse a request: name of the counter, HTTP status, text for the caller."""

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
    NOT_DUE = ("not_due", 403, "no round is due")
    OWN_HOTKEY = ("own_hotkey", 403, "signed by this server's own hotkey")

    def __init__(self, reason: str, status: int, message: str) -> None:
        self.reason = reason
        self.status = status
        self.message = message


class Refused(Exception):
    """``more``: fields of the reply other than the message."""

    def __init__(self, refusal: Refusal, **more: str) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.fields = {"message": refusal.message, **more}


BTAUTH = "btauth"
LEGACY = "legacy"
BTAUTH_MAX_AGE = 10.0  # seconds, as bittensor has it

# Bounded, and without spaces or control characters: the matches go into log lines.
HOTKEY = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,60}")
_NONCE = re.compile(r"[0-9]{1,20}")
_SIGNATURE = re.compile(r"0x[0-9a-fA-F]{128}")
_TOKEN = re.compile(r"[0-9A-Za-z-]{1,64}")


@dataclass(frozen=True)
class Claim:
    """The sender's claims in the headers, unproven."""

    scheme: str
    hotkey: str
    receiver: str
    nonce: int  # ns
    salt: str  # legacy: the uuid
    header_timeout: float | None  # legacy, seconds, unsigned


def read_claim(headers: Mapping[str, str], schemes: tuple[str, ...] = (BTAUTH, LEGACY)) -> Claim:
    """Read the claims of ``headers``, by lower-case name. Raises Refused(UNSIGNED or MALFORMED)."""
    if "x-bittensor-version" in headers and BTAUTH in schemes:
        hotkey = headers.get("x-bittensor-hotkey", "")
        nonce = headers.get("x-bittensor-nonce", "")
        receiver = headers.get("x-bittensor-receiver", "")
        salt, timeout, scheme = "", None, BTAUTH
    elif "bt_header_dendrite_signature" in headers and LEGACY in schemes:
        hotkey = headers.get("bt_header_dendrite_hotkey", "")
        nonce = headers.get("bt_header_dendrite_nonce", "")
        receiver = headers.get("bt_header_axon_hotkey", "")
        salt, scheme = headers.get("bt_header_dendrite_uuid", ""), LEGACY
        body_hash = headers.get("computed_body_hash", "")
        if not (
            _TOKEN.fullmatch(salt)
            and (not body_hash or _TOKEN.fullmatch(body_hash))
            and _SIGNATURE.fullmatch(headers["bt_header_dendrite_signature"])
        ):
            raise Refused(Refusal.MALFORMED)
        try:
            timeout = float(headers["timeout"]) if "timeout" in headers else None
        except ValueError:
            raise Refused(Refusal.MALFORMED) from None
        # A nonce's age is compared with it, and no comparison with NaN is ever true.
        if timeout is not None and not (math.isfinite(timeout) and timeout >= 0):
            raise Refused(Refusal.MALFORMED)
    else:
        raise Refused(Refusal.UNSIGNED)
    if not (HOTKEY.fullmatch(hotkey) and _NONCE.fullmatch(nonce)):
        raise Refused(Refusal.MALFORMED)
    return Claim(scheme, hotkey, receiver, int(nonce), salt, timeout)


def check_fresh(claimed: Claim, now: int, *, skew: float, legacy_timeout_cap: float = 0.0) -> None:
    """Raise Refused unless the nonce is fresh by our clock and at most ``skew`` seconds ahead.

    ``now``: our clock, in nanoseconds. ``legacy_timeout_cap``: the most seconds that the
    timeout of a legacy call adds to its life.
    """
    oldest = BTAUTH_MAX_AGE
    if claimed.scheme == LEGACY:
        added = min(claimed.header_timeout or 0.0, legacy_timeout_cap)
        oldest = LEGACY_ALLOWANCE.total_seconds() + added
    age = (now - claimed.nonce) / 1e9
    if age > oldest:
        raise Refused(Refusal.STALE)
    if -age > skew:
        raise Refused(Refusal.FUTURE)


def proven(claimed: Claim, headers: Mapping[str, str], body: bytes, *, path: str, own: str) -> None:
    """Verify the signature of a claim whose freshness and novelty were checked by the caller.

    Raises Refused(SIGNATURE, RECEIVER or MALFORMED).
    """
    if claimed.scheme == LEGACY:
        text = legacy_signed_text(
            nonce=claimed.nonce,
            sender=claimed.hotkey,
            receiver=own,
            uuid=claimed.salt,
            body_hash=headers.get("computed_body_hash", ""),
        )
        # read_claim() has seen that these are 128 hexadecimal digits.
        signature = bytes.fromhex(headers["bt_header_dendrite_signature"][2:])
        try:
            valid = verify_signature(text.encode(), signature, claimed.hotkey)
        except ValueError:
            raise Refused(Refusal.MALFORMED) from None
        if not valid:
            raise Refused(Refusal.SIGNATURE)
        return
    crypto = _CRYPTO.get(headers.get("x-bittensor-crypto", "sr25519").strip().lower())
    if headers["x-bittensor-version"] != _VERSION or crypto is None:
        raise Refused(Refusal.MALFORMED)
    try:
        signature = bytes.fromhex(headers["x-bittensor-signature"].removeprefix("0x"))
    except (KeyError, ValueError):
        raise Refused(Refusal.MALFORMED) from None
    if claimed.receiver != own:
        raise Refused(Refusal.RECEIVER)
    signed = _btauth_text(crypto, path, body, claimed.nonce, claimed.hotkey, claimed.receiver)
    try:
        valid = verify_signature(signed, signature, claimed.hotkey, crypto)
    except ValueError:
        raise Refused(Refusal.MALFORMED) from None
    if not valid:
        raise Refused(Refusal.SIGNATURE)


_VERSION = "1"
_SCHEMES = {CRYPTO_ED25519: "ed25519", CRYPTO_SR25519: "sr25519"}
#: As a header may name it.
_CRYPTO = {name: code for code, name in _SCHEMES.items()} | {str(code): code for code in _SCHEMES}


def _btauth_text(
    crypto: int, path: str, body: bytes, nonce: int, sender: str, receiver: str
) -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    lines = ("btauth/1", _SCHEMES[crypto], "POST", path, digest, str(nonce), sender, receiver)
    return "\n".join(lines).encode()


MOST_VALIDATORS = 1024
_LARGEST_FILE = 256 * 1024  # bytes


@dataclass(frozen=True)
class Kept:
    """``highest``: nonce of any accepted call (ns), -1 without one.

    ``clean``: whether no call can be missing in it. ``validators``: their addresses, the latest
    last, as :func:`.http_server.normalize` returns them.
    """

    # Without defaults: if a file has lost one of these two, every call might be a replay.
    highest: Annotated[int, Field(ge=-1, lt=1 << 63)]
    clean: bool
    validators: Annotated[tuple[str, ...], Field(max_length=MOST_VALIDATORS)] = ()


class KeptFile:
    """The file of callers for the next start, for one thread at a time.

    ``path`` None: none is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._saved: Kept | None = None

    def load(self) -> Kept:
        """Return the saved calls; without a file nothing was ever accepted."""
        if self._path is None:
            return Kept(-1, clean=True)
        remove_leftovers(self._path)
        there = self._path.exists()
        lost = (
            "calls signed before this start are refused for its first seconds, and validators are "
            "untrusted clients until they call"
        )
        kept = read_state(self._path, Kept, lost=lost, at_most=_LARGEST_FILE)
        if kept is None:
            kept = Kept(-1, clean=not there)
            if there:
                # It was set aside. A kill before the first save must leave no missing file, which
                # would count as clean.
                self.save(kept)
        return kept

    def save(self, kept: Kept) -> None:
        """Write the file if it would change. A failure is logged, not raised."""
        lost = (
            "after a restart, calls of the last seconds could be replayed and validators kept out "
            "by a flood; free disk space or correct its permissions"
        )
        if self._path is None or kept == self._saved:
            return
        if write_state(self._path, kept, lost=lost):
            self._saved = kept


KEPT = timedelta(hours=2)
# All hotkeys of a subnet (256) at the rate each may call (5/s) fill this in 25 s: longer than a
# call stays fresh.
MOST_CALLS = 32_768

Call = tuple[str, int, str]  # hotkey, nonce, salt


class NonceMemory:
    """Replay memory. Thread-safe.

    ``window``: the longest age at which any call is accepted plus ``skew``, how far a caller's
    clock may be ahead of ours. ``kept``: from the process before. ``clock`` is the wall clock in
    ns, ``monotonic`` seconds.
    """

    def __init__(
        self,
        *,
        window: timedelta,
        skew: timedelta,
        kept: Kept,
        clock: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._window = _nanoseconds(window)
        self._lock = threading.Lock()
        self._accepted: OrderedDict[Call, float] = OrderedDict()  # when, monotonic
        now = clock()
        # Written while this machine's clock was ahead: as a floor it would shut all out.
        ahead = kept.highest > now + self._window
        self._floor = self.highest = -1 if ahead else kept.highest
        # Nonces up to the first floor are refused until then (monotonic).
        self._first_floor, self._first_until = -1, float("-inf")
        if ahead or not kept.clean:
            self._first_floor = now + _nanoseconds(skew)
            self._first_until = monotonic() + window.total_seconds()

    def used(self, hotkey: str, nonce: int, salt: str = "") -> bool:
        """Return True when this call was accepted before, or may have been. Changes nothing."""
        with self._lock:
            return self._used((hotkey, nonce, salt))

    def _used(self, call: Call) -> bool:
        return (
            call in self._accepted
            or call[1] <= self._floor
            or (call[1] <= self._first_floor and self._monotonic() < self._first_until)
        )

    def use(self, hotkey: str, nonce: int, salt: str = "") -> bool:
        """Record a verified call; False (and nothing recorded) when it was used before."""
        call = (hotkey, nonce, salt)
        with self._lock:
            # One lock for check and record: of two threads with one call, one is refused.
            if self._used(call):
                return False
            now = self._monotonic()
            self._accepted[call] = now
            self.highest = max(self.highest, nonce)
            self._forget(now)
            return True

    def _forget(self, now: float) -> None:
        """Forget calls that are too old or too many. The raised floor keeps them refused."""
        future, oldest = self._clock() + self._window, now - KEPT.total_seconds()
        while len(self._accepted) > MOST_CALLS or next(iter(self._accepted.values())) < oldest:
            call, _ = self._accepted.popitem(last=False)
            if call[1] > future and len(self._accepted) < MOST_CALLS:
                # As a floor it would shut all out until then.
                self._accepted[call] = now
            else:
                self._floor = max(self._floor, call[1])


def _nanoseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1e9)


def sign_btauth(wallet: Wallet, *, path: str, body: bytes, receiver: str) -> dict[str, str]:
    """Return the headers of a ``btauth/1`` call."""
    key, nonce = wallet.hotkey, time.time_ns()
    text = _btauth_text(key.crypto_type, path, body, nonce, key.ss58_address, receiver)
    headers = {
        "X-Bittensor-Version": _VERSION,
        "X-Bittensor-Hotkey": key.ss58_address,
        "X-Bittensor-Receiver": receiver,
        "X-Bittensor-Nonce": str(nonce),
        "X-Bittensor-Signature": "0x" + bytes(key.sign(text)).hex(),
    }
    if key.crypto_type != CRYPTO_SR25519:
        headers["X-Bittensor-Crypto"] = _SCHEMES[key.crypto_type]
    return headers
