"""Check that we sign and verify ``btauth/1`` as bittensor itself does."""

from __future__ import annotations

import pytest
from bittensor import http_auth
from bittensor_core import CRYPTO_ED25519, CRYPTO_SR25519, Keypair
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.chain.auth import (
    BTAUTH_MAX_AGE,
    Refusal,
    RefusedRequest,
    proven,
    read_claim,
    sign_btauth,
)
from distributed_training.chain.identity import Wallet

SENDERS = [Keypair.create_from_uri("//a", kind) for kind in (CRYPTO_ED25519, CRYPTO_SR25519)]
OWN, OTHER = (Keypair.create_from_uri(uri).ss58_address for uri in ("//b", "//c"))
PATHS = st.from_regex(r"/[a-zA-Z0-9/?=&%]{0,30}", fullmatch=True)


def lowered(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def answer(headers: dict[str, str], body: bytes, path: str) -> Refusal | None:
    try:
        proven(read_claim(headers), headers, body, path=path, own=OWN)
    except RefusedRequest as refused:
        return refused.refusal
    return None


def their_answer(headers: dict[str, str], body: bytes, path: str) -> Refusal | None:
    named = {http_auth.WrongReceiver: Refusal.RECEIVER, http_auth.BadSignature: Refusal.SIGNATURE}
    try:
        nonce = int(headers["x-bittensor-nonce"])
        http_auth.verify(
            headers,
            body,
            method="POST",
            path=path,
            self_hotkey_ss58=OWN,
            nonce_store=http_auth.InMemoryNonceStore(),
            now_ns=nonce,
        )
    except http_auth.AuthError as error:
        return named.get(type(error), Refusal.MALFORMED)
    return None


@given(key=st.sampled_from(SENDERS), body=st.binary(max_size=100), path=PATHS)
def test_each_implementation_verifies_the_others_signature(
    key: Keypair, body: bytes, path: str
) -> None:
    ours = sign_btauth(Wallet(key), path=path, body=body, receiver=OWN)
    theirs = http_auth.sign(key, method="POST", path=path, body=body, receiver_ss58=OWN)
    assert set(ours) == set(theirs) and BTAUTH_MAX_AGE == http_auth.DEFAULT_MAX_AGE
    for headers in map(lowered, (ours, theirs)):
        assert answer(headers, body, path) is their_answer(headers, body, path) is None


HEADERS = ("version", "receiver", "crypto", "signature")
VALUES = st.sampled_from(["", "1", "2", "0", "sr25519", "Ed25519 ", "0x", "0xzz", "00" * 64, OTHER])


@given(
    key=st.sampled_from(SENDERS),
    changed=st.dictionaries(st.sampled_from(HEADERS), VALUES | st.none(), min_size=1),
    more=st.binary(max_size=1),
)
def test_what_was_changed_is_refused_as_bittensor_refuses_it(
    key: Keypair, changed: dict[str, str | None], more: bytes
) -> None:
    headers = lowered(sign_btauth(Wallet(key), path="/a", body=b"", receiver=OWN))
    for name, value in changed.items():
        if value is not None:
            headers[f"x-bittensor-{name}"] = value
        elif name != "version":  # without it, the call would not use this scheme at all
            headers.pop(f"x-bittensor-{name}", None)
    assert answer(headers, more, "/a") is their_answer(headers, more, "/a")


@pytest.mark.parametrize("key", SENDERS)
def test_another_path_or_sender_does_not_verify(key: Keypair) -> None:
    headers = lowered(sign_btauth(Wallet(key), path="/a", body=b"", receiver=OWN))
    assert answer(headers, b"", "/b") is Refusal.SIGNATURE
    assert answer(headers | {"x-bittensor-hotkey": OTHER}, b"", "/a") is Refusal.SIGNATURE
