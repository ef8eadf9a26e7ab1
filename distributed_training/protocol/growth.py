"""Compute the bytes that a network of exchange ``store`` moves and keeps.

An upload and an update have ``bits`` a value and a float32 scale for each group of 256 values
(:mod:`.update_file`). The founder's link, the store's bill and the grace of a round follow from
that and the number of members. ``bench/growth.py`` prints the table of docs/scale.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_GROUP = 256  # as in quantization.py, whose module imports torch
_MARGIN = 60.0  # seconds: until an inner step ends, the snapshot, retries; less in a short period
CHECKPOINT = 20 / 400e6  # seconds a parameter: it lies on a plain disk before anything is sent
_SLACK = 1.2  # of the bytes: requests, and a link that is not always as fast
GB_MONTH = 0.015  # dollars at R2, where traffic is free: developers.cloudflare.com/r2/pricing


def file_bytes(parameters: int, bits: int) -> int:
    """Return the bytes of an upload, or with 4 ``bits`` of an update, but for its header."""
    return parameters * bits // 8 + 4 * math.ceil(parameters / _GROUP)


def grace_seconds(parameters: int, bits: int, link: float, *, period: float) -> int:
    """Return the grace in which a member whose link sends ``link`` Mbit/s has uploaded.

    ``period``: seconds between two closes.
    """
    sending = _SLACK * 8 * file_bytes(parameters, bits) / (link * 1e6)
    return math.ceil(min(_MARGIN, period / 10) + CHECKPOINT * parameters + sending)


@dataclass(frozen=True)
class Growth:
    """A network of ``members``, each of which uploads in each outer step. Results are in bytes."""

    members: int
    parameters: int
    bits: int = 4
    weights_every: int = 8
    keep_uploads: int = 8

    @property
    def upload(self) -> int:
        return file_bytes(self.parameters, self.bits)

    @property
    def update(self) -> int:
        return file_bytes(self.parameters, 4)

    @property
    def state(self) -> int:
        """A set of weights, with the validator's momentum and residual, in float32."""
        return 12 * self.parameters

    @property
    def validator_receives(self) -> int:
        """In an outer step: each upload once."""
        return self.members * self.upload

    @property
    def validator_sends(self) -> int:
        """In an outer step: update, merged uploads for the audit, a share of the weights."""
        return self.update + self.members * self.upload + self.state // self.weights_every

    @property
    def store_sends(self) -> int:
        """In an outer step: uploads to the validator, the update to each member."""
        return self.members * (self.upload + self.update)

    @property
    def stored(self) -> int:
        """Kept at the store: two sets of weights, the updates since, uploads open and merged."""
        updates = 2 * self.weights_every * self.update
        return 2 * self.state + updates + (self.keep_uploads + 1) * self.validator_receives

    @property
    def dollars_a_month(self) -> float:
        """Dollars a month for the bytes in the store, at R2's price."""
        return self.stored / 1e9 * GB_MONTH

    def describe_store(self) -> str:
        """Return a sentence with the bytes in the store and their price."""
        return (
            f"with {self.members} members the store keeps {self.stored / 1e9:.2f} GB (at R2's "
            f"price of {GB_MONTH} $ a GB and month: {self.dollars_a_month:.2f} $)"
        )
