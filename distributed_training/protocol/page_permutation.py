"""Draw the pages of a network with ``data.selection = 2`` (protocol page, section 3).

All pages of the pinned data are numbered and shuffled by a keyed permutation. Its first ones are
held out: nobody trains on them. The others form a ring. Each miner reads by *slots*, one for each
page that it may read of a block; a slot starts at a place of its own on the ring and moves one on
with each block. So two slots share no page of a block, and a slot sees every page before it
sees one again. Starts are spread by reversed bits: however few slots are in use, the way from one
to the next is as long as it can be, but for a factor of two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .pages import ROWS_PER_PAGE, SPLIT

#: Returns the pages of one rank and block, as :func:`.pages.select_pages` does.
DrawPages = Callable[..., list[tuple[str, int, str]]]

HELD_OUT_PAGES = 32  # where the network's file does not say it
RANKS = 8  # of a miner whose slots are neighbours
_LEAST_PAGES = 3  # slots of a rank: of a rank with two, two or three ranks may read three
_ROUNDS = 8  # of the Feistel network
_SLOT_BITS = 32


@dataclass(frozen=True)
class PagePermutation:
    """The rule by which a network draws the pages of each uid, rank and block.

    Args:
        key: Names the network, whatever the version of its file.
        rows_per_page: Rows of a page; a config's rest of fewer rows is never read.
        pages_per_block: Pages that a rank reads of a block.
        max_uids: Uids of the network, from 0 on.
        held_out_pages: Pages that nobody trains on.

    Examples:
        >>> draw = PagePermutation("lab", rows_per_page=100, pages_per_block=2, max_uids=8,
        ...                        held_out_pages=4)
        >>> pages = draw(uid=3, local_rank=0, block=1, n_pages=2, num_rows={"a": 5_000})
        >>> len(pages), pages[0][0], pages[0][1] % 100, pages[0][2]
        (2, 'a', 0, 'train')
        >>> set(pages) & set(draw.held_out({"a": 5_000}))
        set()
    """

    key: str
    rows_per_page: int
    pages_per_block: int
    max_uids: int
    held_out_pages: int

    def __call__(
        self,
        *,
        uid: int,
        local_rank: int,
        block: int,
        n_pages: int,
        num_rows: Mapping[str, int],
        split: str = SPLIT,
    ) -> list[tuple[str, int, str]]:
        """Return the first ``n_pages`` pages ``(config, first row, split)`` of a rank at a block.

        Raises ValueError for a uid, rank, block or number that the network does not have, and for
        data of no more pages than are held out.
        """
        pages = max(self.pages_per_block, _LEAST_PAGES)
        if not 0 <= uid < self.max_uids or min(local_rank, block) < 0 or n_pages > pages:
            raise ValueError(
                f"uid {uid}, rank {local_rank}, block {block} has no {n_pages} pages in a network "
                f"of {self.max_uids} uids and {pages} pages a block"
            )
        free = self._free(num_rows)
        # Ranks beyond the eighth come after all others: few miners have them.
        bank, rank = divmod(local_rank, RANKS)
        first = ((bank * self.max_uids + uid) * RANKS + rank) * pages
        places = []
        for slot in range(first, first + n_pages):
            start = int(f"{slot:0{_SLOT_BITS}b}"[::-1], 2) * free >> _SLOT_BITS
            places.append(self.held_out_pages + (start + block) % free)
        return self._pages(places, num_rows, split)

    def held_out(self, num_rows: Mapping[str, int]) -> list[tuple[str, int, str]]:
        """Return the pages that nobody trains on, as ``(config, first row, split)``.

        Args:
            num_rows: Row count of each config of the dataset.

        Raises:
            ValueError: If the data have no more pages than are held out.
        """
        self._free(num_rows)
        return self._pages(range(self.held_out_pages), num_rows, SPLIT)

    def _counts(self, num_rows: Mapping[str, int]) -> dict[str, int]:
        """Count the pages of each config, in the order in which they are numbered."""
        return {
            config: rows // self.rows_per_page
            for config, rows in sorted(num_rows.items())
            # Smaller ones are left out as by the other rule: some sources do not list them.
            if rows >= ROWS_PER_PAGE + 2
        }

    def _free(self, num_rows: Mapping[str, int]) -> int:
        count = sum(self._counts(num_rows).values())
        if count <= self.held_out_pages:
            raise ValueError(
                f"the data have {count} pages of {self.rows_per_page} rows and "
                f"{self.held_out_pages} are held out, so none is left to train on"
            )
        return count - self.held_out_pages

    def _pages(
        self, places: Iterable[int], num_rows: Mapping[str, int], split: str
    ) -> list[tuple[str, int, str]]:
        counts = self._counts(num_rows)
        count = sum(counts.values())
        pages = []
        for place in places:
            number = permuted(place, count, key=self.key)
            for config, own in counts.items():
                if number < own:
                    pages.append((config, number * self.rows_per_page, split))
                    break
                number -= own
        return pages


def permuted(place: int, count: int, *, key: str) -> int:
    """Return the value at ``place`` of the permutation of ``range(count)`` that ``key`` names.

    A Feistel network over SHA-256 permutes the least square of a power of two that holds
    ``count``. A result beyond ``count`` is permuted again until it is below.

    Args:
        place: Position in the permutation, ``0 <= place < count``.
        count: How many values there are.
        key: Any text; another key gives another permutation.

    Examples:
        >>> sorted(permuted(place, 5, key="lab") for place in range(5))
        [0, 1, 2, 3, 4]
    """
    half = -(-max(1, (count - 1).bit_length()) // 2)  # bits
    while True:
        left, right = divmod(place, 1 << half)
        for number in range(_ROUNDS):
            word = hashlib.sha256(f"{key} {number} {right}".encode()).digest()
            left, right = right, left ^ int.from_bytes(word[:8], "big") & ((1 << half) - 1)
        place = left << half | right
        if place < count:
            return place
