"""From real rounds to the costs of ``bench.scale_model``.

The real peers share one machine: what each computes takes the longer the more there are. So what
matchmaking and transfer take besides waiting and moving bytes is a straight line in the number of
peers. Rounds of this machine are replayed with the whole line; in a network each peer has a machine
of its own, so there the line's value at two peers on two cores is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import simpy

from bench import scale_costs
from bench.scale_model import Costs, Peer, Round, Rules
from bench.scale_peers import Seen, Terms

CALIBRATED_ON = (2, 4, 8)
_ALONE = 2  # peers for which this machine has a core each
_MEGABIT = 1e6 / 8
_SPREAD = 0.02  # seconds within which the real peers' rounds are called


@dataclass(frozen=True)
class Calibration:
    terms: Terms
    costs: Costs  # but for what grows with the peers: the two lines, the calls of a lookup
    settle: tuple[float, float]  # at no peers, and for each peer
    apart: tuple[float, float]

    def here(self, peers: int) -> Costs:
        """Of so many peers on this machine."""
        settle, apart = (max(0.0, a + b * peers) for a, b in (self.settle, self.apart))
        return replace(self.costs, settle=settle, apart=apart, lookup_calls=_calls(peers))

    def network(self, peers: int) -> Costs:
        """Of a network of so many, each on a machine of its own."""
        return replace(self.here(_ALONE), lookup_calls=_calls(peers))


@cache
def _calls(peers: int) -> float:
    return scale_costs.lookup_calls(peers)


def calibrate(real: Sequence[Seen], kept: Mapping[str, Any]) -> Calibration:
    """``real``: medians by number of peers. ``kept``: what ``bench.scale`` measured besides."""
    used = [one for one in real if one.peers in CALIBRATED_ON]
    terms = Terms(**kept["terms"])
    payload = [_payload(terms, one.peers) for one in used]
    (framing, message_bytes), *_ = np.linalg.lstsq(
        np.array([[p, one.messages] for p, one in zip(payload, used, strict=True)]),
        np.array([one.bytes for one in used]),
    )
    on_the_line = [p * framing / (terms.rate * _MEGABIT) for p in payload]
    apart = _line(used, [s.transfer - t for s, t in zip(used, on_the_line, strict=True)])
    settle = _line(used, [one.matchmaking - terms.matchmaking for one in used])
    costs = Costs(
        framing=float(framing),
        message_bytes=float(message_bytes),
        entry_bytes=kept["entries"]["bytes"],
        entry_seconds=kept["entries"]["seconds"],
        shares_factor=kept["shares"]["factor"],
        shares_exponent=kept["shares"]["exponent"],
    )
    made = Calibration(terms, costs, settle, apart)

    def wrong(call: float, tries: float) -> float:
        tried = replace(made, costs=replace(costs, call=call, tries=tries))
        return sum((replay(tried, one.peers).messages / one.messages - 1) ** 2 for one in used)

    # A grid, since the function is a staircase.
    grid = itertools.product(np.linspace(0.1, 0.4, 7), np.linspace(0, 8, 17))
    call, tries = min(grid, key=lambda both: wrong(*both))
    return replace(made, costs=replace(costs, call=float(call), tries=float(tries)))


def replay(calibration: Calibration, peers: int) -> Seen:
    """A round of this machine, simulated."""
    terms, costs = calibration.terms, calibration.here(peers)
    rules = Rules(
        values=terms.values, matchmaking=terms.matchmaking, latency=0.0, request_timeout=3.0
    )
    env = simpy.Environment()
    members = [Peer(terms.rate, late=_SPREAD * i / peers) for i in range(peers)]
    Round(env, members, costs, rules)
    env.run()
    matched = max(peer.matched or rules.round_deadline for peer in members)
    ended = max(peer.ended or rules.round_deadline for peer in members)
    messages = sum(peer.messages for peer in members) / peers
    return Seen(
        peers=peers,
        matchmaking=matched,
        transfer=ended - matched,
        clock=ended,
        bytes=sum(peer.sent for peer in members) / peers + messages * costs.message_bytes,
        messages=messages,
    )


def _payload(terms: Terms, peers: int) -> float:
    """Bytes of values that a butterfly moves through a peer in each direction."""
    return 2 * (peers - 1) / peers * 4 * terms.values


def _line(used: Sequence[Seen], values: Sequence[float]) -> tuple[float, float]:
    slope, start = np.polyfit([one.peers for one in used], values, 1)
    return float(start), float(slope)
