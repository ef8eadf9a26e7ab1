"""What ``bench.scale`` cannot see with 16 peers, taken from hivemind's own code by itself.

How many peers a lookup in a DHT of thousands asks, what its hottest node spends on an answer, and
how long the shares of a group are computed (a linear program).
"""

from __future__ import annotations

import asyncio
import bisect
import math
import random
import time
import warnings
from collections.abc import Collection
from dataclasses import dataclass

from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.dht.node import DEFAULT_NUM_WORKERS
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.traverse import traverse_dht
from hivemind.utils import MSGPackSerializer

BUCKET = 20  # hivemind's: neighbors in an answer, peers of a bucket, width of a search
WORKERS = DEFAULT_NUM_WORKERS  # of a search: calls at a time
REPLICAS = 5  # nodes that hold a value
_BITS = 160


@dataclass(frozen=True)
class Power:
    """``factor * n ** exponent``: seconds."""

    factor: float
    exponent: float

    def __call__(self, n: float) -> float:
        return self.factor * n**self.exponent


class _Tables:
    """Routing tables as Kademlia keeps them: of each distance the nearest 20 that it met."""

    def __init__(self, peers: int, dice: random.Random) -> None:
        self._dice = dice
        self.ids = sorted({dice.getrandbits(_BITS) for _ in range(peers)})

    def nearest(self, node: int, query: int) -> list[int]:
        """What ``node`` answers: known to it, and nearest to ``query``."""
        known: set[int] = set()
        # The subtree that holds the query and not the node, then ever larger ones around it.
        shared = _BITS - (node ^ query).bit_length()
        for depth in range(min(shared + 1, _BITS), -1, -1):
            inside = [i for i in self._subtree(query, depth) if i != node]
            known.update(self._dice.sample(inside, min(BUCKET, len(inside))))
            if len(known) >= BUCKET:
                break
        return sorted(known, key=lambda i: i ^ query)[:BUCKET]

    def _subtree(self, query: int, depth: int) -> list[int]:
        low = query >> (_BITS - depth) << (_BITS - depth)
        high = low + (1 << (_BITS - depth))
        return self.ids[bisect.bisect_left(self.ids, low) : bisect.bisect_left(self.ids, high)]


def lookup_calls(peers: int, *, searches: int = 30, seed: int = 0) -> float:
    """How many peers a search of hivemind's for one key asks in a DHT of ``peers``, on average.
    The routing tables are made up."""
    dice = random.Random(seed)
    tables = _Tables(peers, dice)
    asked = 0

    async def one(own: int, query: int) -> None:
        nonlocal asked

        async def neighbors(
            peer: DHTID, queries: Collection[DHTID]
        ) -> dict[DHTID, tuple[tuple[DHTID, ...], bool]]:
            nonlocal asked
            asked += 1
            return {
                q: (tuple(map(DHTID, tables.nearest(int(peer), int(q)))), False) for q in queries
            }

        key = DHTID(query)
        await traverse_dht(
            queries=[key],
            initial_nodes=[DHTID(i) for i in tables.nearest(own, query)],
            beam_size=BUCKET,
            num_workers=WORKERS,
            queries_per_call=1,
            get_neighbors=neighbors,
            visited_nodes={key: {DHTID(own)}},
        )

    for _ in range(searches):
        asyncio.run(one(dice.choice(tables.ids), dice.getrandbits(_BITS)))
    return asked / searches


def shares(*sizes: int) -> Power:
    """Seconds for the shares of a group by size, when its peers tell their bandwidths."""
    taken = []
    for n in sizes:
        bandwidths = [random.Random(i).choice([300.0, 1000.0, 2000.0]) for i in range(n)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy's, of the method that hivemind chose
            best = math.inf
            for _ in range(3 if n < 1024 else 1):
                began = time.perf_counter()
                load_balance_peers(1_000_000_000, bandwidths, 0)
                best = min(best, time.perf_counter() - began)
            taken.append(best)
    exponent = math.log(taken[-1] / taken[0]) / math.log(sizes[-1] / sizes[0])
    return Power(taken[-1] / sizes[-1] ** exponent, exponent)


@dataclass(frozen=True)
class Entries:
    """Of a key's value, which has an entry for each peer that seeks a group."""

    bytes: float  # of one entry in an answer
    seconds: float  # to write it at the node that answers, and as much to read it


def entries(count: int = 1000) -> Entries:
    value = DictionaryDHTValue()
    for i in range(count):
        value.store(
            random.Random(i).randbytes(38), MSGPackSerializer.dumps(True), time.time() + 1e4
        )
    began = time.perf_counter()
    data = MSGPackSerializer.dumps(value)
    return Entries(len(data) / count, (time.perf_counter() - began) / count)
