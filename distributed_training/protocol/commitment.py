"""The 128 characters a miner writes on the chain so that others can read its bucket (protocol page,
section 2): account id (32), read access key id (32), read secret (64). They are public by design:
only ever put *read* credentials here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LENGTH = 128
_PARTS = (("account id", 32), ("read access key id", 32), ("read secret access key", 64))


class CommitmentError(ValueError):
    """Not a commitment of the protocol. The text never holds a credential."""


@dataclass(frozen=True)
class BucketCredentials:
    """Read credentials of a bucket."""

    account_id: str
    access_key_id: str
    secret_access_key: str = field(repr=False)


def build_commitment(credentials: BucketCredentials) -> str:
    """128 ASCII characters. Raises CommitmentError naming the part whose length is wrong."""
    values = (credentials.account_id, credentials.access_key_id, credentials.secret_access_key)
    for value, (name, length) in zip(values, _PARTS, strict=True):
        if len(value) != length:
            raise CommitmentError(
                f"{name} has {len(value)} characters, a commitment needs {length}"
            )
        if not _visible_ascii(value):
            raise CommitmentError(f"{name} holds characters that are not visible ASCII")
    return "".join(values)


def parse_commitment(text: str) -> BucketCredentials:
    """Raises CommitmentError unless ``text`` is exactly 128 visible ASCII characters."""
    if len(text) != LENGTH:
        raise CommitmentError(f"a commitment has {LENGTH} characters, this one has {len(text)}")
    if not _visible_ascii(text):
        raise CommitmentError("the commitment holds characters that are not visible ASCII")
    return BucketCredentials(text[:32], text[32:64], text[64:])


def _visible_ascii(text: str) -> bool:
    return all("!" <= c <= "~" for c in text)
