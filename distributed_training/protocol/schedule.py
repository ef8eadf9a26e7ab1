"""When things happen, counted in blocks (protocol page, sections 2, 3, 6 and 7).

``bpa`` is blocks per all-reduce. All functions are pure; blocks are chain blocks of 12 s each on
the public network and whatever the clock says on a local one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

SECONDS_PER_BLOCK = 12.0
UPLOAD_AGE_LIMIT = timedelta(seconds=4800)
RANDOM_BLOCK_AHEAD = 20  # the random evaluation's block is drawn from [now + 20, 10 * now)


def round_due(*, block: int, last_allreduce_block: int, bpa: int) -> bool:
    return block - last_allreduce_block >= bpa


def blocks_until_round(*, block: int, last_allreduce_block: int, bpa: int) -> int:
    """0 when the round is due."""
    return max(0, last_allreduce_block + bpa - block)


def scored_epoch(*, outer_step: int, block: int, last_allreduce_block: int, bpa: int) -> int:
    """X, the epoch whose uploads a validator scores: the previous one for half a period.

    For the first bpa/2 blocks after a round the miners' last uploads of the epoch before are
    judged, against the global weights of *that* epoch.
    """
    early = block - last_allreduce_block < bpa / 2
    return outer_step - 1 if early and outer_step != 0 else outer_step


def blocks_are_fresh(block_list: Sequence[int], *, block: int, bpa: int) -> bool:
    """Whether an upload's block list passes: not empty, newest block at most bpa/2 old."""
    return bool(block_list) and block - max(block_list) <= bpa / 2


def upload_age_limit(*, failed_rounds: int, base: timedelta = UPLOAD_AGE_LIMIT) -> timedelta:
    """An upload must be younger than this; each failed round since the last success adds ``base``.

    Failed rounds prolong the period in which no new epoch appears.
    """
    return base * (1 + failed_rounds)


def random_block_range(block: int) -> tuple[int, int]:
    """[low, high) of the block whose pages all uids of a round share in the random evaluation."""
    low = block + RANDOM_BLOCK_AHEAD
    return low, max(low + 1, 10 * block)
