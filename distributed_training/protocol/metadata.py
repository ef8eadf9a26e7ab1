"""Read and write a bucket's commitment, and the ``config.json`` next to whole weights.

The *commitment* is a text on the chain through which others can read a member's own bucket
(protocol page, section 1). It has 128 characters: account id (32), read access key id (32), read
secret (64). Where the network's file names the store, it may be the last two of any length, with a
space between them. It is public by design: only ever put *read* credentials there.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Key of ``config.json`` for what the network's file says about the model and transformers does not
#: know: ``kind``, its ``settings``, and ``trainable``, patterns for the names of the trained
#: parameters.
MODEL_RULES = "distributed_training"
LENGTH = 128
LONGEST_KEY = 512  # characters of a key or of its secret
LONGEST = 2 * LONGEST_KEY + 1
_PARTS = (("account id", 32), ("read access key id", 32), ("read secret access key", 64))


class CommitmentError(ValueError):
    """A text that is no commitment of the protocol; the message never holds a credential."""


@dataclass(frozen=True)
class BucketCredentials:
    """Read credentials of a bucket."""

    account_id: str
    access_key_id: str
    secret_access_key: str = field(repr=False)


def build_commitment(credentials: BucketCredentials, *, any_length: bool = False) -> str:
    """Return the commitment: 128 ASCII characters where the lengths are R2's.

    ``any_length``: the store is known to all peers, so a commitment may have only the keys.

    Raises CommitmentError naming the part whose length is wrong.
    """
    values = (credentials.account_id, credentials.access_key_id, credentials.secret_access_key)
    parts = [(value, *part) for value, part in zip(values, _PARTS, strict=True)]
    alone = any_length and any(len(value) != length for value, _, length in parts)
    for value, name, length in parts[1:] if alone else parts:
        if alone and not 1 <= len(value) <= LONGEST_KEY:
            raise CommitmentError(
                f"{name} has {len(value)} characters, a commitment takes 1 to {LONGEST_KEY}"
            )
        if not alone and len(value) != length:
            raise CommitmentError(
                f"{name} has {len(value)} characters, a commitment needs {length}"
            )
        if not _visible_ascii(value):
            raise CommitmentError(f"{name} holds characters that are not visible ASCII")
    return " ".join(values[1:]) if alone else "".join(values)


def parse_commitment(text: str, *, any_length: bool = False) -> BucketCredentials:
    """Read a commitment; the form of only keys needs ``any_length``.

    Raises CommitmentError for any other text.
    """
    # The length comes first, since the text comes from somebody else and may have any size.
    # The form without lengths has a space, the other has none.
    if any_length and len(text) <= LONGEST and " " in text:
        keys = text.split(" ")
        if len(keys) != 2 or not all(0 < len(k) <= LONGEST_KEY and _visible_ascii(k) for k in keys):
            raise CommitmentError("the commitment is not two keys with one space between them")
        return BucketCredentials("", *keys)
    # Only the length tells where a part ends, since there is no separator.
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


@dataclass(frozen=True)
class ConfigExtras:
    """The fields that the validator adds to the Hugging Face ``config.json`` it publishes.

    None: the file does not say.
    """

    total_inner_steps: int | None = None  # the network's place in the learning rate's schedule
    total_tokens: int | None = None  # tokens on which all members have trained

    def merge_into(self, config: Mapping[str, Any]) -> bytes:
        """Return ``config.json`` with these extras, replacing those already in ``config``."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return _dump({**config, **known})


def with_rules(
    config: Mapping[str, Any],
    kind: str | None,
    trainable: Sequence[str] | None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return ``config`` with what a network's file says of its model; readers follow that."""
    rules: dict[str, Any] = {} if kind is None else {"kind": kind}
    rules |= {} if trainable is None else {"trainable": [*trainable]}
    rules |= {} if settings is None else {"settings": {**settings}}
    return {**config, MODEL_RULES: rules} if rules else {**config}


def parse_config(data: bytes | str) -> tuple[dict[str, Any], ConfigExtras]:
    """Return the whole ``config.json`` and its extras.

    Raises MetadataError if it is not an object or an extra has the wrong type.
    """
    raw = _load(data, "config.json", MAX_CONFIG_BYTES)
    extras = ConfigExtras(
        **{
            name: _count(raw[name], f"config.json: {name}")
            for name in ("total_inner_steps", "total_tokens")
            if raw.get(name) is not None
        },
    )
    return raw, extras


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=4, sort_keys=True).encode()


def _load(data: bytes | str, what: str, limit: int) -> dict[str, Any]:
    # Compare the size before parsing, since parsed JSON takes many times its size in memory.
    if len(data) > limit:
        raise MetadataError(f"{what}: {len(data)} bytes are more than the {limit} allowed")
    try:
        raw = json.loads(data)
    # Some thousand brackets in a row raise RecursionError.
    except (ValueError, RecursionError) as error:
        raise MetadataError(f"{what} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise MetadataError(f"{what} is not a JSON object")
    return raw


def _count(value: Any, what: str) -> int:
    """Return a non-negative integer below 2**53 (so that any JSON reader keeps it exact).

    Raises MetadataError for any other value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise MetadataError(f"{what} is {reprlib.repr(value)}, not a non-negative integer")
    return value
