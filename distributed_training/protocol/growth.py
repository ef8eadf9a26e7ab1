"""Compute how many bytes a network moves through its store and keeps there.

Uploads and updates have a few bits per value and a float32 scale for each group of 256 values
(:mod:`.update_file`). The load on the founder's link, the store's bill and a round's grace follow
from that and the number of members. docs/scale.md has a table, and ``dt-plan`` prints your figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .types import OWN_CODECS, UPDATE_CODEC

_GROUP = 256  # the same as GROUP in codecs.py, which imports torch
_MARGIN = 60.0  # seconds to end an inner step, to copy and to retry; less in a short period
_MEETING = 30.0  # seconds until members are connected in one group; less in a short period
# Seconds per parameter to write the checkpoint to an ordinary disk before anything is sent.
CHECKPOINT = 20 / 400e6
_SLACK = 1.2  # factor on the bytes, for requests and for a link that is sometimes slower
# Dollars per GB and month at R2, where traffic is free (developers.cloudflare.com/r2/pricing).
GB_MONTH = 0.015


TOKENS_A_PARAMETER = 20  # compute-optimal by Hoffmann et al. 2022
#: Each row: the largest model for which it applies, in parameters; the highest learning rate (from
#: Pythia, arxiv.org/abs/2304.01373); the length of a period in seconds (docs/found-a-network.md).
_ROWS = (
    (100e6, 1e-3, 720.0),
    (300e6, 6e-4, 720.0),
    (2e9, 3e-4, 1800.0),
    (math.inf, 1.6e-4, 1800.0),
)
_WARM_UP, _LONGEST_WARM_UP = 30, 1000  # the warm-up is a 30th of all inner steps, and 1,000 at most
# The shortest schedule without --tokens, in inner steps, since a small model still learns after 20
# tokens per parameter.
_FEWEST_STEPS = 1000


def file_bytes(parameters: int, codec: str = UPDATE_CODEC) -> int:
    """Return the size of an upload or an update in bytes, without its header.

    Raises UnknownKindError for a ``codec`` that is not registered.
    """
    if (bits := OWN_CODECS.get(codec)) is not None:
        return parameters * bits // 8 + 4 * math.ceil(parameters / _GROUP)
    from .codecs import CODECS  # not at the top, since torch would add a second to each --help

    return math.ceil(parameters * CODECS[codec].bits / 8)


def largest_upload(parameters: int, codec: str) -> int:
    """Return the largest size of an upload in bytes, without its header, whatever its rows are.

    It is a quarter more than :func:`file_bytes`, because each row of 33 to 255 values, such as an
    adapter's, has its own scale. It allows for ``codec`` and for the update's codec. Raises
    UnknownKindError.
    """
    return max(file_bytes(parameters), file_bytes(parameters, codec)) * 5 // 4


def grace_seconds(parameters: int, codec: str, link: float, *, period: float) -> int:
    """Return the grace, in seconds, that a member needs to upload over a link of ``link`` Mbit/s.

    ``period``: seconds between two closes.
    """
    sending = _SLACK * 8 * file_bytes(parameters, codec) / (link * 1e6)
    return math.ceil(min(_MARGIN, period / 10) + CHECKPOINT * parameters + sending)


def average_seconds(parameters: int, link: float, *, period: float) -> int:
    """Return how many seconds an all-reduce gets over a link of ``link`` Mbit/s.

    Each member sends and receives every value in 2 bytes: once its own, and once the average.
    ``period``: seconds between two closes.
    """
    sending = _SLACK * 8 * 4 * parameters / (link * 1e6)
    return math.ceil(min(_MEETING, period / 20) + sending)


def fitting_schedule(
    parameters: int,
    step: int,
    tokens: float | None,
    *,
    trained: int,
    warmup: int | None = None,
    total: int | None = None,
) -> dict[str, float]:
    """Return the rules of ``[training]`` for a model that all members train on ``tokens``.

    If ``tokens`` is None, it is 20 per trained parameter (``trained``). ``parameters``: number of
    all parameters. ``step``: tokens in one inner step of all members together. ``warmup``,
    ``total``: numbers of inner steps, if they were chosen.
    """
    rate = next(rate for most, rate, _ in _ROWS if parameters <= most)
    wanted = max(1.0, (tokens or TOKENS_A_PARAMETER * trained) / step)
    digits = 10 ** max(0, math.floor(math.log10(wanted)) - 2)
    most = max(2, math.ceil(wanted / digits) * digits)  # three digits are enough
    if tokens is None:
        most = max(most, _FEWEST_STEPS, 10 * (warmup or 0))
    most = total or most
    warmup = warmup or min(_LONGEST_WARM_UP, max(1, most // _WARM_UP))
    return {"learning_rate": rate, "warmup_steps": warmup, "total_steps": most}


def amount(count: float) -> str:
    """Return a number in millions or billions."""
    return f"{count / 1e6:,.3g} million" if count < 1e9 else f"{count / 1e9:,.3g} billion"


def fitting_period(parameters: int, trained: int, codec: str, link: float) -> float:
    """Return the length of a period that fits a model, in seconds: a multiple of 12 s.

    ``trained``: how many of its parameters are sent. The period is at least three times the grace
    that a member with a link of ``link`` Mbit/s needs.
    """
    row = next(period for most, _, period in _ROWS if parameters <= most)
    if 3 * grace_seconds(trained, codec, link, period=row) <= row:
        return row
    # A period this long has the full margin, so compute with that.
    return 12.0 * math.ceil(3 * grace_seconds(trained, codec, link, period=math.inf) / 12)


@dataclass(frozen=True)
class Growth:
    """A network of ``members``, each of which uploads in each outer step. Results are in bytes."""

    members: int
    parameters: int
    codec: str = UPDATE_CODEC
    weights_every: int = 8
    keep_uploads: int = 8

    @property
    def upload(self) -> int:
        return file_bytes(self.parameters, self.codec)

    @property
    def update(self) -> int:
        return file_bytes(self.parameters)

    @property
    def state(self) -> int:
        """Bytes of a set of weights with the validator's momentum and residual, in float32."""
        return 12 * self.parameters

    @property
    def validator_receives(self) -> int:
        """Bytes per outer step: each upload once."""
        return self.members * self.upload

    @property
    def validator_sends(self) -> int:
        """Bytes per outer step: the update, merged uploads for audits, a share of the weights."""
        return self.update + self.members * self.upload + self.state // self.weights_every

    @property
    def store_sends(self) -> int:
        """Bytes read from the store per outer step: all uploads, and an update for each member."""
        return self.members * (self.upload + self.update)

    @property
    def stored(self) -> int:
        """Bytes in the store: two sets of weights, the updates since, open and merged uploads."""
        updates = 2 * self.weights_every * self.update
        return 2 * self.state + updates + (self.keep_uploads + 1) * self.validator_receives

    @property
    def dollars_a_month(self) -> float:
        """Dollars per month for the bytes in the store, at R2's price."""
        return self.stored / 1e9 * GB_MONTH

    def describe_store(self) -> str:
        """Return a sentence with the bytes in the store and their price."""
        return (
            f"with {self.members} members the store keeps {self.stored / 1e9:.2f} GB (at R2's "
            f"price of {GB_MONTH} $ a GB and month: {self.dollars_a_month:.2f} $)"
        )
