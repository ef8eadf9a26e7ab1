"""The simulated round keeps the books: bytes, time, deadlines; and what its lookups are made of."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

simpy = pytest.importorskip("simpy", reason="pip install -e .[bench]")

from bench.scale_calibration import CALIBRATED_ON, calibrate, replay  # noqa: E402
from bench.scale_costs import lookup_calls  # noqa: E402
from bench.scale_designs import DESIGNS, WORLDS, World, outcome, population  # noqa: E402
from bench.scale_model import Costs, Peer, Round, Rules, balance  # noqa: E402
from bench.scale_peers import Seen, Terms  # noqa: E402

pytestmark = pytest.mark.timeout(60)

COSTS = Costs(
    framing=1.05, pace=0.9, apart=0.2, settle=0.1, call=0.05, tries=2.0, lookup_calls=12.0
)
RULES = Rules(values=100_000_000)


def played(peers: list[Peer], rules: Rules = RULES) -> Round:
    env = simpy.Environment()
    made = Round(env, peers, COSTS, rules)
    env.run(until=3 * rules.round_deadline)
    return made


@pytest.mark.parametrize("count", [2, 3, 16, 65])
def test_what_is_sent_is_received_and_near_twice_the_values(count: int) -> None:
    dice = random.Random(count)
    peers = [Peer(dice.choice([500.0, 1000.0, 2000.0]), late=dice.random()) for _ in range(count)]
    played(peers)
    sent, received = (sum(getattr(p, way) for p in peers) for way in ("sent", "received"))
    assert sent == pytest.approx(received, rel=1e-9)
    values = 4 * RULES.values * COSTS.framing
    assert sent / count == pytest.approx(2 * (count - 1) / count * values, rel=1e-3)


def test_bytes_are_conserved_when_a_peer_dies_with_uneven_shares() -> None:
    peers = [Peer(rate, late=0.1 * i) for i, rate in enumerate([500.0, 1000.0, 1000.0, 2000.0])]
    peers[1].dies = 0.5
    played(peers)
    assert sum(p.sent for p in peers) == pytest.approx(sum(p.received for p in peers), rel=1e-9)
    assert peers[1].sent < min(p.sent for p in peers if p is not peers[1])


def test_a_peer_that_dies_holds_the_round_for_a_reducers_timeout_and_not_longer() -> None:
    clocks = {}
    for dies in (None, 0.0):
        peers = [Peer(1000.0, late=0.1 * i) for i in range(6)]
        peers[3].dies = dies
        played(peers)
        ended = [p.ended for p in peers if p is not peers[3]]
        assert all(ended)
        assert (peers[3].ended is None) == (dies is not None)
        clocks[dies] = max(e or 0.0 for e in ended)
    # All the rest is moved while its differences are waited for.
    begins = RULES.matchmaking + COSTS.settle + COSTS.apart
    assert clocks[0.0] == pytest.approx(begins + 2 * RULES.chunk_timeout, abs=0.5)
    assert clocks[0.0] > (clocks[None] or 0.0) + RULES.chunk_timeout


def test_a_line_too_slow_for_the_deadline_fails_the_round_of_its_whole_group() -> None:
    peers = [Peer(1000.0, late=0.1 * i) for i in range(6)]
    peers[2].rate = 4 * RULES.values * 8e-6 / RULES.transfer_deadline * 0.9
    played(peers)
    assert [p.ended for p in peers] == [None] * 6


def test_the_slowest_line_sets_the_time_and_shares_spare_it() -> None:
    peers = [Peer(rate, late=0.1 * i) for i, rate in enumerate([100.0, 1000.0, 1000.0, 1000.0])]
    ends = {}
    for balanced in (True, False):
        mine = [replace(peer) for peer in peers]
        played(mine, replace(RULES, balance=balanced))
        ends[balanced] = max(p.ended or 0.0 for p in mine)
    seconds = 4 * RULES.values * COSTS.framing * 8e-6 / (100.0 * COSTS.pace)
    begins = RULES.matchmaking + COSTS.settle + COSTS.apart
    # It sends its own values once; with an equal share it would move 2 (n-1)/n times them.
    assert ends[True] == pytest.approx(begins + seconds, abs=0.5)
    assert ends[False] == pytest.approx(begins + 1.5 * seconds, abs=0.5)


@pytest.mark.parametrize(
    "rates",
    [
        [400.0, 500.0, 600.0, 700.0, 800.0],
        [100.0, 500.0, 1000.0, 1000.0, 2000.0, 2000.0, 2000.0],
        [1000.0] * 6 + [500.0] * 2 + [2000.0] * 2,
    ],
)
def test_shares_are_as_good_as_those_that_hivemind_computes(rates: list[float]) -> None:
    from hivemind.averaging.load_balancing import load_balance_peers

    peers = [Peer(rate) for rate in rates]
    balance(peers, 10_000.0)
    ours = [peer.balanced / len(peers) for peer in peers]
    theirs = [values / 1e6 for values in load_balance_peers(1_000_000, rates, 0)]
    assert sum(ours) == pytest.approx(1.0)

    def slowest(shares: list[float]) -> float:
        moved = [1 + (len(rates) - 2) * share for share in shares]
        return max(m / rate for m, rate in zip(moved, rates, strict=True))

    assert slowest(ours) == pytest.approx(slowest(theirs), rel=1e-3)


def test_too_few_peers_find_no_group_and_late_ones_are_not_in_it() -> None:
    rules = replace(RULES, min_group=3)
    few = [Peer(1000.0), Peer(1000.0, late=1.0)]
    assert not played(few, rules).groups
    assert not any(p.ended for p in few)
    late = [Peer(1000.0, late=0.1 * i) for i in range(4)] + [Peer(1000.0, late=31.0)]
    made = played(late, rules)
    assert [len(g.members) for g in made.groups] == [4]
    assert late[4].ended is None and all(p.ended for p in late[:4])


def test_a_lookup_asks_everybody_in_a_small_network_and_about_a_bucket_in_a_large_one() -> None:
    assert lookup_calls(2) == 1
    assert lookup_calls(16) == 15
    assert 15 < lookup_calls(1024, searches=10) < 40


def test_designs_take_all_of_a_sound_network_but_for_todays() -> None:
    sound = World("sound", rates=((1000.0, 1.0),))
    # Of 4,096 peers the grid's second dimension is as wide as the first: 128 is the smallest.
    seen = {d: outcome(d, sound, 128, COSTS, seeds=1) for d in DESIGNS}
    assert seen["today"].took_part == 0.5
    for design in ("one group", "grid", "rows and columns"):
        assert seen[design].took_part == 1.0
    assert seen["grid"].bytes > 1.4 * seen["one group"].bytes
    assert seen["rows and columns"].bytes == pytest.approx(seen["one group"].bytes, rel=0.02)


def test_a_population_is_the_same_for_a_seed() -> None:
    for world in WORLDS:
        first, second = (population(300, world, random.Random(1)) for _ in range(2))
        assert first == second
    died = [p for p in population(10_000, World("w", vanish=0.01), random.Random(2)) if p.dies]
    assert 60 < len(died) < 140


def test_calibration_gives_back_the_rounds_it_was_made_from() -> None:
    terms = Terms()
    real = []
    for n in CALIBRATED_ON:
        moved = 1.06 * 2 * (n - 1) / n * 4 * terms.values
        transfer = moved * 8e-6 / terms.rate + 0.5 + 0.1 * n
        matchmaking = terms.matchmaking + 0.2 + 0.05 * n
        real.append(Seen(n, matchmaking, transfer, matchmaking + transfer, moved, 12.0 * n))
    kept = {
        "terms": vars(terms),
        "shares": {"factor": 1e-7, "exponent": 2.5},
        "entries": {"bytes": 54.0, "seconds": 5e-7},
    }
    made = calibrate(real, kept)
    for one in real:
        again = replay(made, one.peers)
        assert again.clock == pytest.approx(one.clock, rel=0.05)
        assert again.transfer == pytest.approx(one.transfer, rel=0.05)
        assert again.bytes == pytest.approx(one.bytes, rel=0.05)
    assert made.network(64).apart == pytest.approx(0.7, abs=0.01)
