"""Draw the pages of the data set that belong to a block (protocol page, section 3).

Miner and validator must agree on every draw, so the sequence of draws is part of the protocol, the
discarded one included.
"""

from __future__ import annotations

from collections.abc import Mapping

SPLIT = "train"  # every page is of this split
ROWS_PER_PAGE = 100  # left free at a config's end, whatever data.rows_per_page says
VALIDATOR_PAGES = 2  # of the five that a miner fetches, the first two
JUDGED_OF_DOMAINS = 64  # sequences, by the domains' weights, where members have text of their own
JUDGED_RANKS = 4  # validators look at the pages of ranks 0..3, however many ranks a miner has


def select_pages(
    *,
    uid: int,
    local_rank: int,
    block: int,
    n_pages: int,
    num_rows: Mapping[str, int],
    split: str = SPLIT,
) -> list[tuple[str, int, str]]:
    """Return the pages of text that one rank of a miner trains on at a block.

    A page is ``ROWS_PER_PAGE`` rows from its first row on. Neighbours share data by construction:
    uid u's rank 1 has the pages of uid u + 1's rank 0, and block b + 3 repeats the last three of
    block b's five pages.

    Args:
        uid: The miner's, at least 0.
        local_rank: The rank's number on its machine, at least 0.
        block: The chain block that the pages belong to.
        n_pages: How many pages to draw.
        num_rows: Row count of each config of the dataset, without ``default``, in any order.
        split: Split of the dataset, copied into each page.

    Returns:
        ``n_pages`` tuples ``(config, first row, split)``.

    Raises:
        ValueError: For negative arguments, no configs, or a config of fewer than 102 rows.
    """
    import numpy as np  # here: config, which --help waits for, knows this function

    if min(uid, local_rank, block, n_pages) < 0:
        raise ValueError("uid, local_rank, block and n_pages must not be negative")
    # Sorted: a server may list them in another order to each peer.
    configs = sorted(num_rows)
    if not configs:
        raise ValueError("num_rows names no config, so there is nothing to select from")
    generator = np.random.PCG64((uid + local_rank) & 0xFFFFFFFF)
    generator.advance(block)
    rng = np.random.Generator(generator)
    pages = []
    for _ in range(n_pages):
        config = configs[rng.integers(0, len(configs))]
        rng.integers(0, len(configs))  # drawn and thrown away by every peer
        # The public code's bound, by which a config's last two rows are never read.
        last = num_rows[config] - ROWS_PER_PAGE - 1
        if last < 1:
            raise ValueError(f"config {config} has {num_rows[config]} rows; a page needs 102")
        pages.append((config, int(rng.integers(0, last)), split))
    return pages


def pages_read_by(*, rank: int, world_size: int, n_pages: int) -> list[tuple[int, int]]:
    """List the pages of a block that one rank reads.

    A validator evaluates the first two pages of ranks 0 to 3 (protocol page, section 3). A miner of
    four ranks or more reads as the public one does: each rank its own pages, in order. A smaller
    one deals the pages of four ranks out among its own, the judged ones first, so that all of them
    are trained on. Every rank gets equally many: ``n_pages``, or as many more as the judged pages
    take.

    Args:
        rank: The reading rank, from 0.
        world_size: Number of ranks of this miner.
        n_pages: Pages that a rank of the public miner reads of a block, at least 1.

    Returns:
        Tuples ``(rank whose page it is, number of the page)``.

    Raises:
        ValueError: Unless ``0 <= rank < world_size`` and ``n_pages >= 1``.
    """
    if not 0 <= rank < world_size or n_pages < 1:
        raise ValueError(f"rank {rank} of {world_size} cannot read {n_pages} pages")
    owners = max(JUDGED_RANKS, world_size)
    judged = JUDGED_RANKS * min(VALIDATOR_PAGES, n_pages)
    count = max(n_pages, -(-judged // world_size))
    dealt = range(rank, count * world_size, world_size)
    return [(place % owners, place // owners) for place in dealt]
