"""Rounds over hivemind with each disturbance: every close leads to an outer step.

Real DHT peers on loopback, the real validator, judge and merge. A disturbance may cost the average
of a round, never the round: all members start each outer step with the same bits, and the manifest
says what was wrong where the uploads show it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from distributed_training.protocol.manifest import Manifest
from tests.tools.hivemind_world import HivemindWorld
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]
BAD = 5  # uid of the member that misbehaves


@dataclass(frozen=True)
class Disturbance:
    """``kind``: of the bad peer; ``during``: what else happens in each round.

    ``sources``: what updates may follow from; ``why``: words of the reason in a manifest;
    ``named``: the manifest names the culprit among those whose parts differ.
    """

    kind: str = ""
    sources: tuple[str, ...] = ("merge",)
    why: str = ""
    named: bool = False
    during: Callable[[HivemindWorld, int], None] | None = None
    absent: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()


def _kill_peer(world: HivemindWorld, _: int) -> None:
    os.kill(world.peers[BAD].process.pid, signal.SIGKILL)


def _kill_all_peers(world: HivemindWorld, n: int) -> None:
    """Kill every peer before the third round; they are back for the fifth."""
    if n == 3:
        for peer in world.peers.values():
            os.kill(peer.process.pid, signal.SIGKILL)


DISTURBANCES = {
    "nothing": Disturbance(sources=("average",)),
    "nan": Disturbance("nan"),
    "weight": Disturbance("weight"),
    "lies to all": Disturbance("lie-all", why="differs by", named=True),
    "lies in one value": Disturbance("lie-one-value", why="norm|differs", named=True),
    "lies to the validator": Disturbance("lie-to-one", why="differs by", named=True),
    "lies to a member": Disturbance("lie-to-a-member", sources=("average",)),
    "poison in the all-reduce": Disturbance("poison", why="differs by"),
    "silent": Disturbance("silent"),
    "slow": Disturbance("slow"),
    "hangs": Disturbance("hangs", sources=("merge", "average")),
    "late by a minute": Disturbance("late", why="differs by"),
    "two groups": Disturbance(silent=(3,), why="differs by"),
    "peer killed": Disturbance(during=_kill_peer, sources=("merge", "average")),
    "all peers lost": Disturbance(during=_kill_all_peers, sources=("merge", "average")),
}
CORE = ("nothing", "lies to the validator", "poison in the all-reduce")


@pytest.fixture
def world_of(tmp_path: Path) -> Iterator[Callable[..., HivemindWorld]]:
    made: list[HivemindWorld] = []

    def make(**given: object) -> HivemindWorld:
        made.append(HivemindWorld(tmp_path / "network", **given))
        return made[-1]

    yield make
    for world in made:
        world.close()


def run(world: HivemindWorld, case: Disturbance, closes: int) -> list[Manifest]:
    manifests = []
    for n in range(1, closes + 1):
        if case.during is not None:
            case.during(world, n)
        manifests.append(world.average_round(absent=case.absent, silent=case.silent))
        assert manifests[-1].outer_step == n
        for miner in world.miners.values():
            miner.apply()  # asserts the digest of the weights that each computes by itself
    return manifests


def check(case: Disturbance, manifests: list[Manifest]) -> None:
    first, *others = [manifest.averaging for manifest in manifests]
    assert first is not None and first.source == "merge" and "nothing was merged" in first.why
    for averaging in others:
        assert averaging is not None and averaging.source in case.sources, averaging
        if averaging.source == "merge" and case.why:
            assert any(word in averaging.why for word in case.why.split("|")), averaging
        if case.named:
            assert BAD in averaging.suspects, averaging


@pytest.mark.parametrize("name", CORE)
def test_a_disturbed_close_leads_to_an_outer_step(
    name: str, world_of: Callable[..., HivemindWorld]
) -> None:
    case = DISTURBANCES[name]
    check(case, run(world_of(kinds={BAD: case.kind}), case, 3))


@pytest.mark.long
@pytest.mark.parametrize("name", DISTURBANCES)
def test_ten_disturbed_closes_lead_to_ten_outer_steps(
    name: str, world_of: Callable[..., HivemindWorld]
) -> None:
    case = DISTURBANCES[name]
    check(case, run(world_of(kinds={BAD: case.kind}), case, 10))
