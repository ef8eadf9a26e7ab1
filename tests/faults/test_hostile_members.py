"""Test how much hostile members of a store network can harm it.

The real validator takes two outer steps with really trained uploads of a small model. The hostile
members attack in the ways that were found hardest to limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from distributed_training.scoring.evaluator import APPLIED_FRACTION
from tests.tools.store_world import StoreMiner, StoreWorld
from tests.tools.validator_world import LENGTH, one_thread, seed_of, sequences  # noqa: F401

HONEST = (1, 2, 3, 4)
HOSTILE = (40, 41, 42)
Moved = list[Tensor]


def norm_of(moved: Moved) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in moved))


def scaled(moved: Moved, norm: float) -> Moved:
    return [t * (norm / norm_of(moved)) for t in moved]


def noise(miner: StoreMiner, times: float = 1.0) -> Moved:
    """Return noise whose norm is ``times`` the norm of the miner's own training."""
    generator = torch.Generator().manual_seed(miner.uid * 1000 + miner.outer_step)
    drawn = [torch.randn(t.shape, generator=generator) for t in miner.moved]
    return scaled(drawn, times * norm_of(miner.moved))


def gain(miner: StoreMiner, moved: Moved) -> float:
    """Return by how much an upload lowers the loss on the attacker's own text."""
    world, text = miner.world, sequences(20_000_000 + miner.outer_step * 97 + miner.uid, 64)
    miner.model.load(miner.start)
    before = miner.model.loss(text)
    for (name, _), delta in zip(world.schema, moved, strict=True):
        rate = world.validator._outer_rule.learning_rate
        miner.model.subtract(name, delta, APPLIED_FRACTION * rate)
    return before - miner.model.loss(text)


def under_noise(miner: StoreMiner, moved: Moved) -> Moved:
    """Return an upload under as much noise as possible, so that it still lowers the loss."""
    found, times = moved, 0.5
    while times < 9:
        tried = [t + n for t, n in zip(moved, noise(miner, times), strict=True)]
        if gain(miner, tried) <= 0:
            break
        found, times = tried, 2 * times
    return found


def shadow(miner: StoreMiner, steps: int = 2) -> Moved:
    """Train on the pages of the first honest member, for one inner step less."""
    uid, miner.uid = miner.uid, HONEST[0]
    miner.train(steps=steps, learning_rate=1e-3)
    miner.uid = uid
    return miner.moved


def victim(miner: StoreMiner) -> Moved:
    return miner.world.miners[HONEST[HOSTILE.index(miner.uid)]].moved


#: By name: a function that returns what a hostile member uploads. There is one for each defence of
#: the validator: refusing what is worse, clipping, chance, copies, and copies in disguise.
WAYS: dict[str, Callable[[StoreMiner], Moved]] = {
    "sign flipped": lambda m: [-t for t in m.moved],
    "x1000": lambda m: [1000 * t for t in m.moved],
    "training under noise": lambda m: under_noise(m, m.moved),
    "copy": victim,
    "copy under noise": lambda m: [a + 0.6 * b for a, b in zip(victim(m), noise(m), strict=True)],
    "shadow": shadow,
}


def run(way: str) -> tuple[float, Counter[str]]:
    """Return the held-out loss after two outer steps, and the fates of the hostile uploads."""
    bad, fates = HOSTILE if way else (), Counter[str]()
    with TemporaryDirectory() as folder:
        world = StoreWorld(Path(folder), uids=(*HONEST, *bad))
        world.pages = lambda uid, block: sequences(seed_of(uid, block), 32)
        for n in (1, 2):
            for miner in world.miners.values():
                miner.apply()
                miner.train(steps=3, learning_rate=1e-3)
            # The hostile members upload first, which gives them no advantage.
            world.until_close()
            uploads = {uid: WAYS[way](world.miners[uid]) for uid in bad}
            for uid, moved in uploads.items():
                world.miners[uid].upload(moved=moved)
            world.clock.ahead += 1
            for uid in HONEST:
                world.miners[uid].upload()
            world.until_late()
            for _ in range(60):  # on a busy machine a fetch may take several ticks
                world.tick()
                if world.state.outer_step == n:
                    break
            found = world.fates(n)
            assert {uid: found[uid] for uid in HONEST} == dict.fromkeys(HONEST, "merged")
            fates.update(found[uid] for uid in bad)
        loss = world.validator.mean(world.validator._losses)
        world.closing.close()
    return loss, fates


@pytest.fixture(scope="module")
def alone() -> float:
    """Return the held-out loss with only the honest members."""
    return run("")[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_three_hostile_members_of_seven_cost_at_most_two_percent(way: str, alone: float) -> None:
    loss, fates = run(way)
    assert loss <= 1.02 * alone, (loss, fates)
