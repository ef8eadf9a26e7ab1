"""Decide when rounds, scoring and uploads are due, counted in blocks.

Miners have different clocks, and the chain's block number is one that all can read. So a round is
due ``bpa`` (blocks per all-reduce) blocks after the last (protocol page, sections 2 and 6). For the
first half of that time validators score the uploads of the outer step before, then those of the
present one (protocol page, section 3).

An upload earns only while it is *fresh*, so that old work does not earn for ever: its newest block
is at most ``bpa / 2`` old, and its file is younger than the age limit (protocol page, section 7). A
miner that is found without a fresh upload is scored as if its training had improved nothing.

All functions are pure. A block takes 12 s on the public network, and any time on a local one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

SECONDS_PER_BLOCK = 12.0
UPLOAD_AGE_LIMIT = timedelta(seconds=4800)
RANDOM_BLOCK_AHEAD = 20  # the random evaluation's block is drawn from [now + 20, 10 * now)


def round_due(*, block: int, last_allreduce_block: int, bpa: int) -> bool:
    """Return whether ``bpa`` blocks have passed since the last round."""
    return block - last_allreduce_block >= bpa


def scored_epoch(*, outer_step: int, block: int, last_allreduce_block: int, bpa: int) -> int:
    """Return the outer step whose uploads a validator scores at ``block``.

    For the first bpa/2 blocks after a round that is the outer step before: the miners' last uploads
    of it are judged, against the global weights of *that* outer step.
    """
    early = block - last_allreduce_block < bpa / 2
    return outer_step - 1 if early and outer_step != 0 else outer_step


def blocks_are_fresh(block_list: Sequence[int], *, block: int, bpa: int) -> bool:
    """Return whether an upload's block list passes: not empty, newest block at most bpa/2 old."""
    # A block of the future passes, as it does on the public network.
    return bool(block_list) and block - max(block_list) <= bpa / 2


def upload_age_limit(*, failed_rounds: int, base: timedelta = UPLOAD_AGE_LIMIT) -> timedelta:
    """Return the age that an upload must stay below; each failed round adds ``base``.

    ``failed_rounds``: since the last success. They prolong the time in which no new outer step
    appears.
    """
    return base * (1 + failed_rounds)


def random_block_range(block: int) -> tuple[int, int]:
    """Return [low, high) for the block whose pages all uids share in the random evaluation."""
    low = block + RANDOM_BLOCK_AHEAD
    # In a chain's first blocks 10 * block is below low, and the range would be empty.
    return low, max(low + 1, 10 * block)
