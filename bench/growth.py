"""Compute what validator, registry and store of a store network move in an outer step, by members.

    python -m bench.growth                                   # 4 billion parameters
    python -m bench.growth --parameters 1e8 --period 1200    # another network

Nothing is measured here: bytes are those of ``distributed_training/protocol/growth.py``, which
tests compare with real files. Judging an upload takes three forward passes, over the text that all
share and over its own; without the upload the shared text is judged once for all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from bench.common import parser, table
from distributed_training.protocol.growth import Growth, grace_seconds
from distributed_training.protocol.types import SMALLEST, UPDATE_CODEC

MEMBERS = (4, 16, 64, 256, 1024)
_PASSES = 3


@dataclass(frozen=True)
class Network:
    """The network of the table. ``link`` of the validator in Mbit/s, ``tokens`` of one look."""

    parameters: int
    period: float
    grace: float
    link: float
    tokens: int
    tflops: float

    @property
    def judging(self) -> float:
        """Seconds for one upload."""
        return _PASSES * 2 * self.parameters * self.tokens / (self.tflops * 1e12)

    def receiving(self, growth: Growth) -> float:
        """Seconds until the validator has all uploads."""
        return 8 * growth.validator_receives / (self.link * 1e6)

    def most(self, codec: str) -> int:
        """Return the members whose uploads the validator has received when the grace ends."""
        one = self.receiving(Growth(1, self.parameters, codec))
        return int(self.grace / one)

    @property
    def most_judged(self) -> int:
        """The uploads that are judged before the next close."""
        return int((self.period - self.grace) / self.judging)


def rows(network: Network, codec: str) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows; a column for each number of members."""
    grown = [Growth(members, network.parameters, codec) for members in MEMBERS]

    def row(name: str, texts: Iterator[str]) -> tuple[str, ...]:
        return (f"{name}, {codec}", *texts)

    yield row("validator receives", (size(g.validator_receives) for g in grown))
    yield row("validator receives for", (duration(network.receiving(g)) for g in grown))
    if codec == UPDATE_CODEC:
        yield ("validator judges for", *(duration(g.members * network.judging) for g in grown))
    yield row("validator sends", (size(g.validator_sends) for g in grown))
    yield row("store sends", (size(g.store_sends) for g in grown))
    yield row("store keeps", (size(g.stored) for g in grown))
    yield row("R2 costs a month", (f"{g.dollars_a_month:,.0f} $" for g in grown))


def size(count: float) -> str:
    """Return bytes in three digits."""
    for unit in ("MB", "GB"):
        count /= 1e3 if unit != "MB" else 1e6
        if count < 1000:
            break
    return f"{count:,.{max(0, 2 - len(str(int(count))) + 1)}f} {unit}"


def duration(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--parameters", type=float, default=4e9)
    arguments.add_argument("--period", type=float, default=4800.0, help="seconds [4800]")
    arguments.add_argument("--slowest-link", type=float, default=20.0, help="a member's up [20]")
    arguments.add_argument("--link", type=float, default=1000.0, help="the validator's [1000]")
    arguments.add_argument("--tokens", type=int, default=2 * 100 * 1024, help="of two pages")
    arguments.add_argument("--tflops", type=float, default=400.0, help="of its GPU, used [400]")
    given = arguments.parse_args(argv)
    count = int(given.parameters)
    grace = float(grace_seconds(count, UPDATE_CODEC, given.slowest_link, period=given.period))
    network = Network(count, given.period, grace, given.link, given.tokens, given.tflops)
    one = Growth(1, count)
    print(f"{count / 1e9:g} billion parameters, a close every {duration(given.period)}")
    print(f"a member sends {size(one.upload)} within {grace:.0f} s, receives {size(one.update)}")
    most, smallest = network.most(UPDATE_CODEC), network.most(SMALLEST)
    print(f"received within the grace: {most} uploads; of {SMALLEST} {smallest}")
    print(f"judged before the next close: {network.most_judged}")
    titles = ("members", *(f"{members:,}" for members in MEMBERS))
    table(titles, [*rows(network, UPDATE_CODEC), *rows(network, SMALLEST)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
