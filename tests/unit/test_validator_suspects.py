"""The hunt for miners that spoil rounds: halving, rests and forgiveness."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter

from distributed_training.validator.suspects import LONGEST_REST, Choice, Suspects

pytestmark = pytest.mark.timeout(60)


class Network:
    """``n`` miners, of which those in ``bad`` spoil a round they are in with ``chance``."""

    def __init__(
        self, n: int, bad: Collection[int], *, chance: float = 1.0, least: int = 2, seed: int = 0
    ) -> None:
        self.uids = list(range(n))
        self.bad, self.chance, self.least = set(bad), chance, least
        self.rng = random.Random(seed)
        self.suspects = Suspects()
        self.failed = self.rounds = 0
        self.called: Counter[int] = Counter()

    def round(self) -> Choice:
        choice = self.suspects.choose(self.uids, least=self.least, most=64, rng=self.rng)
        assert self.least <= len(choice.called) <= 64
        assert not set(choice.called) & choice.left_out.keys()
        assert {*choice.called, *choice.left_out} == set(self.uids)
        fails = any(u in self.bad and self.rng.random() < self.chance for u in choice.called)
        self.suspects.ended(choice.called, fault="NOT_FINITE" if fails else "")
        self.rounds += 1
        self.failed += fails
        self.called.update(choice.called)
        return choice


def sizes() -> list[tuple[int, int]]:
    """Each group of 3 to 64 miners, and how many of them are bad: fewer than leave no choice."""
    return [(n, k) for n in range(3, 65) for k in {1, 2, 3, n // 4} if 1 <= k <= n - 2 and k <= 6]


def test_bad_miners_cost_a_logarithm_of_the_rounds_and_no_honest_one_is_lost() -> None:
    """Try all sizes of groups with one to six of them bad, for 100 rounds each."""
    for case, (n, k) in enumerate(sizes()):
        drawn = random.Random(case)
        network = Network(n, drawn.sample(range(n), k), least=min(2, n - k), seed=case)
        for _ in range(100):
            network.round()
        # Each is halved down to once, and comes back after 1, 2, 4, ... good rounds.
        most = k * (2 * math.log2(n) + math.log2(100) + 1)
        assert network.failed <= most, (n, k)
        honest = set(range(n)) - network.bad
        assert min(network.called[uid] for uid in honest) >= 100 / (k + 1), (n, k)


@pytest.mark.parametrize("chance", [0.2, 0.5])
def test_an_occasional_spoiler_costs_half_of_its_possible_damage(chance: float) -> None:
    for case, (n, k) in enumerate(size for size in sizes() if size[1] <= 2):
        network = Network(n, range(k), chance=chance, seed=case)
        for _ in range(100):
            network.round()
        unguarded = 100 * (1 - (1 - chance) ** k)
        assert network.failed <= max(0.75 * unguarded, 20) + 15, (n, k)
        assert min(network.called.values()) > 0, (n, k)


def test_repaired_miner_takes_part_again() -> None:
    network = Network(12, {3, 7})
    for _ in range(60):
        network.round()
    network.bad.clear()
    for _ in range(4 * LONGEST_REST):
        network.round()
    assert not network.suspects.sentences and not network.suspects.failures
    network.called.clear()
    network.round()
    assert set(network.called) == set(network.uids)


def test_only_the_named_suspect_rests_and_its_round_is_explained() -> None:
    network = Network(8, ())
    assert set(network.suspects.ended(range(8), causes={5: "it sent NaN"})) == {5}
    choice = network.round()
    assert choice.left_out == {5: "it sent NaN"}
    assert 5 in network.round().called  # one good round later
    found = network.suspects.ended(range(8), fault="PEER_FAILED", causes={5: "silent", 6: "silent"})
    assert found[5].rest == 1 and found[6].rest == 1  # the good round took 5 one step back
    assert not network.suspects.failures
    assert set(network.round().left_out) == {5, 6}


def test_each_return_that_fails_doubles_the_rest_up_to_a_bound() -> None:
    network = Network(6, {2})
    rests: list[int] = []
    while len(rests) < 8:
        before = network.suspects.sentences.get(2)
        network.round()
        after = network.suspects.sentences.get(2)
        if after is not None and after is not before:
            rests.append(after.rest)
    assert rests == [1, 2, 4, 8, 16, 32, LONGEST_REST, LONGEST_REST]


@pytest.mark.parametrize(("n", "bad"), [(2, {0}), (3, {0, 1}), (4, {0, 1, 2})])
def test_the_least_group_is_called_and_it_is_said_that_no_choice_is_left(
    n: int, bad: set[int]
) -> None:
    network = Network(n, bad)
    choices = [network.round() for _ in range(30)]
    without = [choice for choice in choices if choice.no_choice]
    assert without and all(bad & set(choice.no_choice) for choice in without)
    network.bad.clear()
    later = [network.round() for _ in range(40)]
    assert not any(choice.no_choice for choice in later[2:]) and not later[-1].left_out


def test_no_more_than_a_call_holds_are_called_and_others_take_the_places_of_the_resting() -> None:
    suspects, rng = Suspects(), random.Random(0)
    suspects.ended(range(64), causes={0: "slow"})
    choice = suspects.choose(range(100), least=2, most=64, rng=rng)
    assert choice.called == tuple(range(1, 65)) and choice.left_out == {0: "slow"}


def test_a_uid_with_another_owner_is_as_new() -> None:
    suspects = Suspects()
    suspects.ended([1, 2, 3], fault="TIMEOUT")
    suspects.ended([4], fault="TIMEOUT", causes={4: "silent"})
    for uid in (1, 4):
        suspects.forget(uid)
    assert suspects.failures == [[2, 3]] and not suspects.sentences and 1 not in suspects.doubts


def test_a_restart_continues_the_search_for_the_spoiler() -> None:
    network = Network(9, {4})
    for _ in range(3):
        network.round()
    kept = json.dumps(asdict(network.suspects))
    again = TypeAdapter(Suspects).validate_json(kept, strict=True)
    assert again == network.suspects and again is not network.suspects
