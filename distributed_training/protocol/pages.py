"""Draw the pages of text that each member trains on (protocol page, section 3).

All pages of the data are numbered and shuffled by a keyed permutation. The first pages of it are
held out: nobody trains on them. In each outer step, a member has its own order for all other pages,
which depends on the run, its uid and the outer step. The member counts its pages from 0 in this
order, so it sees no page twice in an outer step before it has seen all of them. An upload names the
first and the last page, by this count, that it was trained on.

A *block* of text begins at one of these pages. Its number is a single integer, so that ranks can
pass it on; 0 means no block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SPLIT = "train"  # all pages belong to this split
HELD_OUT_PAGES = 32  # held-out pages, if the network's file does not say how many
JUDGED_PAGES = 8  # consecutive pages that are judged, out of the pages that an upload names
# Sequences that are judged, split by the domains' weights, if members have their own text.
JUDGED_OF_DOMAINS = 64
SMALLEST_CONFIG = 102  # rows; some sources do not list smaller configs
_ROUNDS = 8  # rounds of the Feistel network
MOST_PAGES = 1 << 32  # pages of a member in an outer step

Page = tuple[str, int, str]  # config, first row, split


def block_at(outer_step: int, page: int) -> int:
    """Return the number of the block that begins at a page of an outer step.

    Args:
        outer_step: The outer step, at least 0.
        page: The page's number in the member's order for that outer step, at least 0.
    """
    return outer_step * MOST_PAGES + page + 1


def place_of(block: int) -> tuple[int, int]:
    """Return the outer step and the first page of a block.

    Args:
        block: The block's number, above 0.
    """
    return divmod(block - 1, MOST_PAGES)


@dataclass(frozen=True)
class PageDraw:
    """The rule by which a network draws each member's pages.

    Args:
        run_id: Id of the run.
        key: Names the network. It is the same in all versions of its file, so held-out pages stay
            held out.
        rows_per_page: Rows per page. An incomplete page at the end of a config is never read.
        held_out_pages: Pages that nobody trains on.

    Examples:
        >>> draw = PageDraw("0123456789ab", "lab", rows_per_page=100, held_out_pages=4)
        >>> pages = draw(uid=3, outer_step=7, first=0, count=2, num_rows={"a": 5_000})
        >>> pages
        [('a', 3400, 'train'), ('a', 4200, 'train')]
        >>> set(pages) & set(draw.held_out({"a": 5_000}))
        set()
    """

    run_id: str
    key: str
    rows_per_page: int
    held_out_pages: int

    def __call__(
        self, *, uid: int, outer_step: int, first: int, count: int, num_rows: Mapping[str, int]
    ) -> list[Page]:
        """Return ``count`` pages of a member in an outer step, from number ``first`` on.

        Args:
            uid: The member's uid, at least 0.
            outer_step: The outer step, at least 0.
            first: Number of the first page, from 0. After the last page of the data, the order
                starts again from its first page.
            count: How many pages to return.
            num_rows: Row count of each config of the dataset, in any order.

        Raises:
            ValueError: If the data have no more pages than are held out.
        """
        free = self._free(num_rows)
        key = f"{self.run_id} {uid} {outer_step}"
        places = (permuted(page % free, free, key=key) for page in range(first, first + count))
        return self._pages((self.held_out_pages + place for place in places), num_rows)

    def held_out(self, num_rows: Mapping[str, int]) -> list[Page]:
        """Return the pages that nobody trains on.

        Args:
            num_rows: Row count of each config of the dataset.

        Raises:
            ValueError: If the data have no more pages than are held out.
        """
        self._free(num_rows)
        return self._pages(range(self.held_out_pages), num_rows)

    def _counts(self, num_rows: Mapping[str, int]) -> dict[str, int]:
        """Count the pages of each config, in the order in which they are numbered."""
        return {
            config: rows // self.rows_per_page
            for config, rows in sorted(num_rows.items())
            if rows >= SMALLEST_CONFIG
        }

    def _free(self, num_rows: Mapping[str, int]) -> int:
        count = sum(self._counts(num_rows).values())
        if count <= self.held_out_pages:
            raise ValueError(
                f"the data have {count} pages of {self.rows_per_page} rows and "
                f"{self.held_out_pages} are held out, so none is left to train on"
            )
        return count - self.held_out_pages

    def _pages(self, places: Iterable[int], num_rows: Mapping[str, int]) -> list[Page]:
        counts = self._counts(num_rows)
        count = sum(counts.values())
        pages = []
        for place in places:
            number = permuted(place, count, key=self.key)
            for config, own in counts.items():
                if number < own:
                    pages.append((config, number * self.rows_per_page, SPLIT))
                    break
                number -= own
        return pages


def permuted(place: int, count: int, *, key: str) -> int:
    """Return the value at ``place`` of the permutation of ``range(count)`` that ``key`` names.

    A Feistel network over SHA-256 permutes the numbers below a power of four: 4, 16 or the first
    that is at least ``count``. A result that is not below ``count`` is permuted again until it is.

    Args:
        place: Position in the permutation, ``0 <= place < count``.
        count: How many values there are.
        key: Any text; a different key gives a different permutation.

    Examples:
        >>> sorted(permuted(place, 5, key="lab") for place in range(5))
        [0, 1, 2, 3, 4]
    """
    half = -(-max(1, (count - 1).bit_length()) // 2)  # bits in each half
    while True:
        left, right = divmod(place, 1 << half)
        for number in range(_ROUNDS):
            word = hashlib.sha256(f"{key} {number} {right}".encode()).digest()
            left, right = right, left ^ int.from_bytes(word[:8], "big") & ((1 << half) - 1)
        place = left << half | right
        if place < count:
            return place
