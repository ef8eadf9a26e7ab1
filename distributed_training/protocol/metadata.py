"""Read and write a bucket's commitment, and the ``config.json`` next to whole weights.

The *commitment* is a text on the chain with which others can read a member's own bucket (protocol
page, section 1). It has 128 characters: account id (32), read access key id (32), read secret (64).
If the network's file names the store, it may be only the key id and the secret, of any length, with
a space between them. It is public by design: only ever put *read* credentials there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Key in ``config.json`` for the network file's model settings that transformers does not know:
#: ``kind``, its ``settings``, and ``trainable``, patterns for the names of the trained parameters.
MODEL_RULES = "distributed_training"
LENGTH = 128
LONGEST_KEY = 512  # characters in a key id or its secret
LONGEST = 2 * LONGEST_KEY + 1
_PARTS = (("account id", 32), ("read access key id", 32), ("read secret access key", 64))


class CommitmentError(ValueError):
    """A text is not a valid commitment. The message never contains a credential."""


@dataclass(frozen=True)
class BucketCredentials:
    """Read credentials for a bucket."""

    account_id: str
    access_key_id: str
    secret_access_key: str = field(repr=False)


def build_commitment(credentials: BucketCredentials, *, any_length: bool = False) -> str:
    """Return the commitment: 128 ASCII characters if the parts are as long as R2's.

    ``any_length``: all peers know the store, so a commitment may have only the keys.

    Raises CommitmentError naming the part whose length is wrong.
    """
    values = (credentials.account_id, credentials.access_key_id, credentials.secret_access_key)
    alone = any_length and [len(value) for value in values] != [length for _, length in _PARTS]
    for value, (name, length) in list(zip(values, _PARTS, strict=True))[alone:]:
        if not (1 <= len(value) <= LONGEST_KEY if alone else len(value) == length):
            wanted = f"1 to {LONGEST_KEY}" if alone else length
            raise CommitmentError(
                f"{name} has {len(value)} characters, a commitment takes {wanted}"
            )
        if not _visible_ascii(value):
            raise CommitmentError(f"{name} holds characters that are not visible ASCII")
    return " ".join(values[1:]) if alone else "".join(values)


def parse_commitment(text: str, *, any_length: bool = False) -> BucketCredentials:
    """Parse a commitment; the form with only the keys needs ``any_length``.

    Raises CommitmentError for any other text.
    """
    # Check the length first, since the text comes from somebody else and may have any size. Only
    # the form with keys of any length has a space.
    if any_length and len(text) <= LONGEST and " " in text:
        keys = text.split(" ")
        if len(keys) != 2 or not all(0 < len(k) <= LONGEST_KEY and _visible_ascii(k) for k in keys):
            raise CommitmentError("the commitment is not two keys with one space between them")
        return BucketCredentials("", *keys)
    # There is no separator, so only the lengths tell where a part ends.
    if len(text) != LENGTH:
        raise CommitmentError(f"a commitment has {LENGTH} characters, this one has {len(text)}")
    if not _visible_ascii(text):
        raise CommitmentError("the commitment holds characters that are not visible ASCII")
    return BucketCredentials(text[:32], text[32:64], text[64:])


def _visible_ascii(text: str) -> bool:
    return all("!" <= c <= "~" for c in text)


MAX_CONFIG_BYTES = 4 * 1024 * 1024


class MetadataError(ValueError):
    """A ``config.json`` does not have the protocol's form."""


def with_rules(
    config: Mapping[str, Any],
    kind: str | None,
    trainable: Sequence[str] | None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return ``config`` with the network file's model settings added, which readers follow."""
    rules: dict[str, Any] = {} if kind is None else {"kind": kind}
    rules |= {} if trainable is None else {"trainable": [*trainable]}
    rules |= {} if settings is None else {"settings": {**settings}}
    return {**config, MODEL_RULES: rules} if rules else {**config}


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """Return a ``config.json`` that is byte-identical on all machines."""
    return json.dumps(config, indent=4, sort_keys=True).encode()


def parse_config(data: bytes | str) -> dict[str, Any]:
    """Parse a ``config.json``. Raises MetadataError if it is too large or not a JSON object."""
    # Check the size before parsing, since parsed JSON takes many times its size in memory.
    if len(data) > MAX_CONFIG_BYTES:
        raise MetadataError(
            f"config.json: {len(data)} bytes are more than the {MAX_CONFIG_BYTES} allowed"
        )
    try:
        raw = json.loads(data)
    # Thousands of nested brackets raise RecursionError.
    except (ValueError, RecursionError) as error:
        raise MetadataError(f"config.json is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise MetadataError("config.json is not a JSON object")
    return raw
