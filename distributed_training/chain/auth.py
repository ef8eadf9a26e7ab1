"""Who sent a request: ``btauth/1`` and the legacy dendrite headers.

Both are checked in two halves, so that the server can put its cheap checks between them:
:func:`claim` reads what the headers say (nothing is proven yet), :func:`proven` verifies the
signature (43 us). Which scheme a caller used says nothing about what it may do.

The legacy signature covers the hash of nothing in place of the body (protocol/synapses.py).
"""

from __future__ import annotations

import math
import re
import time
import uuid as uuids
from collections.abc import Mapping
from dataclasses import dataclass

from bittensor import http_auth
from bittensor.sp_core import verify as verify_signature

from distributed_training.protocol.synapses import (
    LEGACY_ALLOWANCE,
    LEGACY_BODY_HASH,
    legacy_signed_text,
)

from .refusals import Refusal, Refused
from .wallet import Wallet

BTAUTH = "btauth"
LEGACY = "legacy"
BTAUTH_MAX_AGE: float = http_auth.DEFAULT_MAX_AGE  # seconds

# What a bittensor 10 dendrite says it is; axons refuse callers that are much older.
LEGACY_VERSION = 10005000

_HOTKEY = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,60}")
_NONCE = re.compile(r"[0-9]{1,20}")
_SIGNATURE = re.compile(r"0x[0-9a-fA-F]{128}")
_TOKEN = re.compile(r"[0-9A-Za-z-]{1,64}")


@dataclass(frozen=True)
class Claim:
    """What the headers say, unproven."""

    scheme: str
    hotkey: str
    receiver: str
    nonce: int  # ns
    salt: str  # legacy: the uuid
    header_timeout: float | None  # legacy, seconds, unsigned


def claimed_hotkey(headers: Mapping[str, str]) -> str | None:
    """Whom a request names as its sender, for the log; None if it names nobody."""
    name = headers.get("x-bittensor-hotkey") or headers.get("bt_header_dendrite_hotkey", "")
    return name if _HOTKEY.fullmatch(name) else None


def claim(headers: Mapping[str, str], schemes: tuple[str, ...]) -> Claim:
    """``headers`` by lower-case name. Raises Refused(UNSIGNED or MALFORMED)."""
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
            timeout = float(headers.get("timeout", "0"))
        except ValueError:
            raise Refused(Refusal.MALFORMED) from None
        if not math.isfinite(timeout) or timeout < 0:
            raise Refused(Refusal.MALFORMED)
    else:
        raise Refused(Refusal.UNSIGNED)
    if not (_HOTKEY.fullmatch(hotkey) and _NONCE.fullmatch(nonce)):
        raise Refused(Refusal.MALFORMED)
    return Claim(scheme, hotkey, receiver, int(nonce), salt, timeout)


def max_age(claimed: Claim, *, legacy_timeout_cap: float) -> float:
    """Seconds a nonce stays fresh."""
    if claimed.scheme == BTAUTH:
        return BTAUTH_MAX_AGE
    return LEGACY_ALLOWANCE.total_seconds() + min(claimed.header_timeout or 0.0, legacy_timeout_cap)


def proven(
    claimed: Claim, headers: Mapping[str, str], body: bytes, *, method: str, path: str, own: str
) -> None:
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
        signature = bytes.fromhex(headers["bt_header_dendrite_signature"][2:])
        try:
            valid = verify_signature(text.encode(), signature, claimed.hotkey)
        except ValueError:
            raise Refused(Refusal.MALFORMED) from None
        if not valid:
            raise Refused(Refusal.SIGNATURE)
        return
    try:
        http_auth.verify(
            headers,
            body,
            method=method,
            path=path,
            self_hotkey_ss58=own,
            nonce_store=_NO_STORE,
            # Freshness was decided on the server's clock; here only the signature is of interest.
            now_ns=claimed.nonce,
        )
    except http_auth.WrongReceiver:
        raise Refused(Refusal.RECEIVER) from None
    except http_auth.BadSignature:
        raise Refused(Refusal.SIGNATURE) from None
    except http_auth.AuthError:
        raise Refused(Refusal.MALFORMED) from None


class _NoStore:
    """Replays are the business of :class:`~.replay.NonceMemory`."""

    def check_and_store(self, hotkey_ss58: str, nonce_ns: int) -> bool:
        return True


_NO_STORE = _NoStore()


def sign_legacy(
    wallet: Wallet,
    *,
    route: str,
    receiver: str,
    ip: str,
    port: int,
    timeout: float,
    nonce: int | None = None,
) -> dict[str, str]:
    """Headers of a legacy call of synapse ``route``."""
    nonce = time.time_ns() if nonce is None else nonce
    uuid, sender = str(uuids.uuid1()), wallet.ss58
    text = legacy_signed_text(nonce=nonce, sender=sender, receiver=receiver, uuid=uuid)
    signature = wallet.hotkey.sign(text.encode())
    return {
        "name": route,
        "timeout": str(timeout),
        "bt_header_axon_ip": ip,
        "bt_header_axon_port": str(port),
        "bt_header_axon_hotkey": receiver,
        "bt_header_dendrite_ip": "0.0.0.0",
        "bt_header_dendrite_version": str(LEGACY_VERSION),
        "bt_header_dendrite_nonce": str(nonce),
        "bt_header_dendrite_uuid": uuid,
        "bt_header_dendrite_hotkey": sender,
        "bt_header_dendrite_signature": "0x" + bytes(signature).hex(),
        "header_size": "0",
        "total_size": "0",
        "computed_body_hash": LEGACY_BODY_HASH,
    }


def sign_btauth(wallet: Wallet, *, path: str, body: bytes, receiver: str) -> dict[str, str]:
    """Headers of a ``btauth/1`` call."""
    return http_auth.sign(
        wallet.hotkey, method="POST", path=path, body=body, receiver_ss58=receiver
    )
