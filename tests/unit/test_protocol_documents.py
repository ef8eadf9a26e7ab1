"""Test the written forms of names, keys and commitments, and which of them are refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distributed_training.protocol import keys
from distributed_training.protocol.metadata import (
    BucketCredentials,
    CommitmentError,
    build_commitment,
    parse_commitment,
)

pytestmark = pytest.mark.timeout(60)


def test_names() -> None:
    assert keys.miner_bucket("llama-4b-ws-4", 7) == "llama-4b-ws-4-007"
    assert keys.r2_endpoint("AB" * 16) == f"https://{'ab' * 16}.r2.cloudflarestorage.com"


@pytest.mark.parametrize("account", ["", "a" * 31, "a" * 33, "evil.example/" + "a" * 19])
def test_an_account_id_cannot_name_another_host(account: str) -> None:
    with pytest.raises(ValueError):
        keys.r2_endpoint(account)


def test_keys() -> None:
    assert keys.epoch_folder(12) == "epoch-12"
    assert keys.outer_key(12, keys.MODEL) == "outer/12/model.safetensors"
    assert keys.merged_key(3, 7) == "outer/3/uploads/7.safetensors"
    assert keys.parse_outer_key(keys.merged_key(3, 7)) == (3, "uploads/7.safetensors")
    assert keys.upload_key(7, 12, 34) == "uploads/7/12.34.safetensors"
    assert keys.parse_upload_key("uploads/7/12.34.safetensors") == (7, 12, 34)


@pytest.mark.parametrize(
    "key",
    [
        *("model.safetensors", "outer/x/a", "outer/01/a", "outer/1/", "outer/1"),
        *("uploads/07/1.2.safetensors", "uploads/7/1.safetensors", "uploads/7/1.2.safetensors.tmp"),
    ],
)
def test_other_keys_have_no_number(key: str) -> None:
    assert keys.parse_outer_key(key) is None and keys.parse_upload_key(key) is None


CREDENTIALS = BucketCredentials("a" * 32, "b" * 32, "c" * 64)


def test_commitment_round_trip() -> None:
    text = build_commitment(CREDENTIALS)
    assert len(text) == 128 and text.isascii()
    assert parse_commitment(text) == CREDENTIALS
    assert "ccc" not in repr(CREDENTIALS)


@pytest.mark.parametrize("text", ["", "a" * 127, "a" * 129, "a" * 127 + "é", "a" * 127 + " "])
def test_bad_commitments(text: str) -> None:
    with pytest.raises(CommitmentError) as caught:
        parse_commitment(text)
    assert "aaa" not in str(caught.value)


def test_a_credential_of_the_wrong_length_is_named_and_not_shown() -> None:
    with pytest.raises(CommitmentError, match="read secret access key has 3") as caught:
        build_commitment(BucketCredentials("a" * 32, "b" * 32, "xyz"))
    assert "xyz" not in str(caught.value)


VISIBLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=512)


@given(VISIBLE, VISIBLE, st.sampled_from(["", "a" * 32]))
@example("AKIA" + "7" * 16, "w/" + "J" * 38, "a" * 32)  # AWS
@example("GK" + "a" * 24, "b" * 64, "")  # Garage
@example("b" * 63, "c" * 64, "")  # 128 characters in all
def test_keys_of_any_length_are_a_commitment_where_the_store_is_known(
    key: str, secret: str, account: str
) -> None:
    mine = BucketCredentials(account, key, secret)
    text = build_commitment(mine, any_length=True)
    if tuple(map(len, (account, key, secret))) != (32, 32, 64):
        mine = BucketCredentials("", key, secret)
        # A program that does not know this form refuses it.
        for early in ({}, {"any_length": False}):
            with pytest.raises(CommitmentError):
                parse_commitment(text, **early)
            with pytest.raises(CommitmentError):
                build_commitment(BucketCredentials(account, key, secret), **early)
    assert parse_commitment(text, any_length=True) == mine


def test_r2s_lengths_have_only_one_form() -> None:
    text = build_commitment(CREDENTIALS)
    assert build_commitment(CREDENTIALS, any_length=True) == text
    assert parse_commitment(text, any_length=True) == CREDENTIALS


@given(st.text(max_size=140) | st.text(st.sampled_from(" ab\x00é"), max_size=1100))
@example("a" * 512 + " " + "b" * 513)
@example("a " * 1_000_000)
@example(" " * 1025)
def test_a_hostile_commitment_is_dropped_or_two_keys(text: str) -> None:
    try:
        found = parse_commitment(text, any_length=True)
    except CommitmentError as error:
        assert len(str(error)) < 120
    else:
        parts = [found.account_id, found.access_key_id, found.secret_access_key]
        assert " ".join(parts[1:]) == text or "".join(parts) == text
        assert all(len(part) <= 512 and part.isascii() and part.isprintable() for part in parts)


@pytest.mark.parametrize(
    ("key", "secret", "named"),
    [
        ("", "s", "key id has 0"),
        ("k", "s" * 513, "secret access key has 513"),
        ("k k", "s", "not visible"),
    ],
)
def test_a_key_that_no_commitment_takes_is_named(key: str, secret: str, named: str) -> None:
    with pytest.raises(CommitmentError, match=named):
        build_commitment(BucketCredentials("", key, secret), any_length=True)
