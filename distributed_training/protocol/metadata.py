"""Read and write a miner's metadata: commitment, ``metadata.json`` and ``config.json``.

The *commitment* is a text on the chain through which others can read a miner's bucket (protocol
page, section 2). It has 128 characters: account id (32), read access key id (32), read secret (64).
Where the network's file names the store, it may be the last two of any length, with a space between
them. It is public by design: only ever put *read* credentials there. ``metadata.json`` and the
extra fields of ``config.json`` name the revision that the files of a bucket belong to (protocol
page, section 3).
"""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .types import Revision

LENGTH = 128
LONGEST_KEY = 512  # characters, of a key or its secret
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
    # First: the text is another's, and may be of any size.
    if any_length and len(text) <= LONGEST and " " in text:  # the other form has no space
        keys = text.split(" ")
        if len(keys) != 2 or not all(0 < len(k) <= LONGEST_KEY and _visible_ascii(k) for k in keys):
            raise CommitmentError("the commitment is not two keys with one space between them")
        return BucketCredentials("", *keys)
    # Only by length: there is no separator between the parts.
    if len(text) != LENGTH:
        raise CommitmentError(f"a commitment has {LENGTH} characters, this one has {len(text)}")
    if not _visible_ascii(text):
        raise CommitmentError("the commitment holds characters that are not visible ASCII")
    return BucketCredentials(text[:32], text[32:64], text[64:])


def _visible_ascii(text: str) -> bool:
    return all("!" <= c <= "~" for c in text)


MAX_METADATA_BYTES = 64 * 1024  # far above any real one; others' files are read up to it
MAX_CONFIG_BYTES = 4 * 1024 * 1024
_BASE58 = frozenset("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz")


class MetadataError(ValueError):
    """A document of a bucket does not have the protocol's form."""


@dataclass(frozen=True)
class Metadata:
    """``metadata.json``, at the root of a bucket or in an epoch's folder.

    ``peer_id``: base58 text of the averager's peer id, empty before there is one.
    """

    run: int
    outer_step: int
    inner_step: int
    peer_id: str

    @classmethod
    def of(cls, revision: Revision, peer_id: str) -> Metadata:
        return cls(revision.run, revision.outer_step, revision.inner_step, peer_id)

    @property
    def revision(self) -> Revision:
        return Revision(self.run, self.outer_step, self.inner_step)

    def to_json(self) -> bytes:
        return _dump(dataclasses.asdict(self))

    @classmethod
    def parse(cls, data: bytes | str) -> Metadata:
        """Read ``metadata.json``; ``run`` may be a number or its decimal text.

        Raises MetadataError.
        """
        raw = _load(data, "metadata.json", MAX_METADATA_BYTES)
        run = raw.get("run")
        # The public code keeps its run as text.
        if isinstance(run, str) and run.isascii() and run.isdigit() and len(run) < 20:
            run = int(run)
        peer_id = raw.get("peer_id")
        if peer_id is None:
            peer_id = ""
        # No closer look: a wrong id costs its owner the rounds, and must not cost the scores.
        if not isinstance(peer_id, str) or len(peer_id) > 128 or not _BASE58.issuperset(peer_id):
            raise MetadataError("metadata.json: peer_id is not base58 text")
        return cls(
            run=_count(run, "metadata.json: run"),
            outer_step=_count(raw.get("outer_step"), "metadata.json: outer_step"),
            inner_step=_count(raw.get("inner_step"), "metadata.json: inner_step"),
            peer_id=peer_id,
        )


@dataclass(frozen=True)
class ConfigExtras:
    """The fields that a miner adds to the Hugging Face ``config.json`` it uploads.

    ``block_list``: chain blocks trained since the previous upload, never empty in a valid upload;
    the validator draws the assigned evaluation's block from it. The others are set by the validator
    in the global bucket and may be inherited: ``total_inner_steps`` is the network's place in the
    learning rate's schedule, which older files do not say, ``total_tokens`` what all miners have
    trained on, where the network counts it.
    """

    block_list: tuple[int, ...]
    inner_step: int
    last_allreduce_block: int | None = None
    total_inner_steps: int | None = None
    total_tokens: int | None = None

    def merge_into(self, config: Mapping[str, Any]) -> bytes:
        """Return ``config.json`` with these extras, replacing those already in ``config``."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return _dump({**config, **known})


def parse_config(data: bytes | str) -> tuple[dict[str, Any], ConfigExtras]:
    """Return the whole ``config.json`` and its extras (absent ones: empty list, 0, None).

    Raises MetadataError if it is not an object or an extra has the wrong type.
    """
    raw = _load(data, "config.json", MAX_CONFIG_BYTES)
    blocks = raw.get("block_list") or []
    # Bounded by number too: 4 MB hold two million of them.
    if not isinstance(blocks, list) or len(blocks) > 100_000:
        raise MetadataError("config.json: block_list is not a list of blocks")
    extras = ConfigExtras(
        block_list=tuple(_count(b, "config.json: block_list") for b in blocks),
        inner_step=_count(raw.get("inner_step", 0), "config.json: inner_step"),
        **{
            name: _count(raw[name], f"config.json: {name}")
            for name in ("last_allreduce_block", "total_inner_steps", "total_tokens")
            if raw.get(name) is not None
        },
    )
    return raw, extras


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=4, sort_keys=True).encode()


_LONGEST_NOTE = 300  # characters


@dataclass(frozen=True)
class RoundNotes:
    """``round.json``: the causes for which miners were not in the validator's last round.

    ``outer_step``: which the round was meant to end; ``miners``: by uid, why one was not called or
    is not in the average.
    """

    outer_step: int
    miners: Mapping[int, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        miners = {str(uid): why[:_LONGEST_NOTE] for uid, why in self.miners.items()}
        return json.dumps({"outer_step": self.outer_step, "miners": miners}).encode()

    @classmethod
    def parse(cls, data: bytes | str) -> RoundNotes:
        """Read ``round.json``. Raises MetadataError."""
        raw = _load(data, "round.json", MAX_METADATA_BYTES)
        miners = raw.get("miners")
        if not isinstance(miners, dict):
            raise MetadataError("round.json: miners is no object")
        outer_step = _count(raw.get("outer_step"), "round.json: outer_step")
        notes = {
            int(uid): " ".join(why.split())[:_LONGEST_NOTE]
            for uid, why in miners.items()
            if re.fullmatch("[0-9]{1,5}", uid) and isinstance(why, str) and why.isprintable()
        }
        return cls(outer_step, notes)


def _load(data: bytes | str, what: str, limit: int) -> dict[str, Any]:
    # Before it is parsed: JSON takes many times its size in memory.
    if len(data) > limit:
        raise MetadataError(f"{what}: {len(data)} bytes are more than the {limit} allowed")
    try:
        raw = json.loads(data)
    # RecursionError: of some thousand brackets in a row.
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


class PayloadError(ValueError):
    """A ``gradients.pt`` that validators would reset, and why."""


@dataclass(frozen=True)
class GradientMetadata:
    """``block``: the newest one trained; ``loss``: of the last inner step, in nats."""

    block: int
    inner_step: int
    outer_step: int
    loss: float

    @classmethod
    def parse(cls, raw: Any) -> GradientMetadata:
        """Read the metadata entry of ``gradients.pt``. Raises PayloadError."""
        if not isinstance(raw, dict):
            raise PayloadError("gradients.pt has no metadata")
        values = {}
        for name in ("block", "inner_step", "outer_step"):
            value = raw.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PayloadError(
                    f"metadata of gradients.pt: {name} is {reprlib.repr(value)}, not a count"
                )
            values[name] = value
        loss = raw.get("loss")
        if isinstance(loss, bool) or not isinstance(loss, (int, float)):
            raise PayloadError(
                f"metadata of gradients.pt: loss is {reprlib.repr(loss)}, not a number"
            )
        try:
            return cls(loss=float(loss), **values)
        except OverflowError:  # a whole number above any float
            raise PayloadError("metadata of gradients.pt: loss is no number of nats") from None
