"""Authenticate a request by ``btauth/1``, and name each refusal.

A request is checked in two steps, so that the server can make cheap checks between them:
:func:`read_claim` reads the claims in the headers (nothing is proven yet), and :func:`proven`
verifies the signature (43 us). A signature covers the lines of :func:`_btauth_text`. The scheme is
bittensor's (see its guide "Signed requests"), but a registry's members do not need its client.

A nonce is the caller's clock in nanoseconds. A call is fresh while its nonce is at most a few
seconds old by our clock (:func:`check_fresh`). The program that answers remembers the nonces of
each hotkey.
"""

from __future__ import annotations

import enum
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from bittensor_core import CRYPTO_ED25519, CRYPTO_SR25519
from bittensor_core import verify as verify_signature

from .identity import Wallet


class Refusal(enum.Enum):
    """The reasons to refuse a request: counter's name, HTTP status, text for the caller."""

    TOO_LARGE = ("too_large", 413, "request too large")
    MALFORMED = ("malformed", 400, "malformed request")
    ROUTE = ("unknown_route", 404, "there is nothing here")
    UNSIGNED = ("unsigned", 401, "signature headers are missing, or the scheme is not accepted")
    RATE = ("rate", 429, "too many requests")
    STALE = ("stale", 401, "nonce is too old")
    FUTURE = ("future", 401, "nonce is in the future")
    REPLAY = ("replay", 401, "nonce was used before")
    RECEIVER = ("receiver", 401, "signed for another receiver")
    SIGNATURE = ("signature", 401, "signature does not verify")
    NO_PERMIT = ("no_permit", 403, "only the founder's hotkey may do this")

    def __init__(self, reason: str, status: int, message: str) -> None:
        self.reason = reason
        self.status = status
        self.message = message


class RefusedRequest(Exception):
    """A request is refused. ``more``: fields of the reply in addition to the message."""

    def __init__(self, refusal: Refusal, **more: str) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.fields = {"message": refusal.message, **more}


BTAUTH_MAX_AGE = 10.0  # seconds, as in bittensor

# Bounded, without spaces or control characters, because matches are written to log lines.
HOTKEY = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,60}")
_NONCE = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True)
class Claim:
    """The sender's claims in the headers, unproven."""

    hotkey: str
    receiver: str
    nonce: int  # ns


def read_claim(headers: Mapping[str, str]) -> Claim:
    """Read the claims in ``headers``, which have lower-case names.

    Raises RefusedRequest(UNSIGNED or MALFORMED).
    """
    if "x-bittensor-version" not in headers:
        raise RefusedRequest(Refusal.UNSIGNED)
    hotkey = headers.get("x-bittensor-hotkey", "")
    nonce = headers.get("x-bittensor-nonce", "")
    if not (HOTKEY.fullmatch(hotkey) and _NONCE.fullmatch(nonce)):
        raise RefusedRequest(Refusal.MALFORMED)
    return Claim(hotkey, headers.get("x-bittensor-receiver", ""), int(nonce))


def check_fresh(claimed: Claim, now: int, *, skew: float) -> None:
    """Raise RefusedRequest unless the nonce is fresh by our clock and at most ``skew`` s ahead.

    ``now``: our clock, in nanoseconds.
    """
    age = (now - claimed.nonce) / 1e9
    if -skew <= age <= BTAUTH_MAX_AGE:
        return
    refusal = Refusal.STALE if age > 0 else Refusal.FUTURE
    side = "before" if age > 0 else "after"
    message = (
        f"{refusal.message}: it was signed {abs(age):.0f} s {side} this registry's time; see "
        "whether timedatectl says 'synchronized: yes' on both machines"
    )
    raise RefusedRequest(refusal, message=message)


def proven(claimed: Claim, headers: Mapping[str, str], body: bytes, *, path: str, own: str) -> None:
    """Verify the signature of a claim; the caller has checked that it is fresh and not a replay.

    Raises RefusedRequest(SIGNATURE, RECEIVER or MALFORMED).
    """
    crypto = _CRYPTO.get(headers.get("x-bittensor-crypto", "sr25519").strip().lower())
    if headers["x-bittensor-version"] != _VERSION or crypto is None:
        raise RefusedRequest(Refusal.MALFORMED)
    try:
        signature = bytes.fromhex(headers["x-bittensor-signature"].removeprefix("0x"))
    except (KeyError, ValueError):
        raise RefusedRequest(Refusal.MALFORMED) from None
    if claimed.receiver != own:
        raise RefusedRequest(Refusal.RECEIVER)
    signed = _btauth_text(crypto, path, body, claimed.nonce, claimed.hotkey, claimed.receiver)
    try:
        valid = verify_signature(signed, signature, claimed.hotkey, crypto)
    except ValueError:
        raise RefusedRequest(Refusal.MALFORMED) from None
    if not valid:
        raise RefusedRequest(Refusal.SIGNATURE)


_VERSION = "1"
_SCHEMES = {CRYPTO_ED25519: "ed25519", CRYPTO_SR25519: "sr25519"}
#: The names of a scheme that a header may have.
_CRYPTO = {name: code for code, name in _SCHEMES.items()} | {str(code): code for code in _SCHEMES}


def _btauth_text(
    crypto: int, path: str, body: bytes, nonce: int, sender: str, receiver: str
) -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    lines = ("btauth/1", _SCHEMES[crypto], "POST", path, digest, str(nonce), sender, receiver)
    return "\n".join(lines).encode()


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
