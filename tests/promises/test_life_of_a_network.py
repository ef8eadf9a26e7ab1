"""Test join, expulsion, audit, rewind and a validator on an empty disk, over each exchange.

The validator, the judge and the merge are real, and over hivemind so is each member's DHT peer.
tests/multiprocess (test_join.py, test_registry.py) and tests/unit/test_chain_command.py test the
commands that operators use for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bittensor.sp_core import verify

from distributed_training.chain_command import go_back
from distributed_training.exchange.hivemind import Membership
from distributed_training.protocol.manifest import Manifest, Master
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.validator.merge import digest_of
from distributed_training.validator.outer_steps import OuterSteps
from distributed_training.validator.replay import ManifestChain
from tests.tools.hivemind_world import HivemindWorld
from tests.tools.store_world import StoreMiner, StoreWorld, keypair
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
NEWCOMER, EXPELLED = 31, 5


class OverStore(StoreWorld):
    """A store network with a bucket for each member, including members that join later."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, own=True, keep_uploads=4)

    def close(self) -> None:
        self.closing.close()

    def take_step(self) -> Manifest:
        return self.round()


class OverHivemind(HivemindWorld):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep_uploads=4)

    def take_step(self) -> Manifest:
        silent = tuple(uid for uid in self.uids if uid not in self.peers)
        return self.average_round(silent=silent)


World = OverStore | OverHivemind


@pytest.fixture(scope="module", params=[OverStore, OverHivemind], ids=["store", "hivemind"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """Yield one network per exchange, which all tests use one after the other."""
    make: Callable[[Path], World] = request.param
    made = make(tmp_path_factory.mktemp("world"))
    yield made
    made.close()


def master_of(world: World) -> Master:
    return Master(world.run_id, world.master.ss58_address, verify)


def audited(world: World, folder: Path) -> ManifestChain:
    """Audit the bucket's chain, assert that there is no problem, and return the chain."""
    chain = ManifestChain(BucketReader(world.bucket), world.schema, folder, master_of(world))
    found = chain.audit()
    assert not found.problems and found.outer_step == world.state.outer_step
    return chain


def test_an_audit_a_rewind_and_a_validator_on_an_empty_disk(world: World, tmp_path: Path) -> None:
    back = world.state.outer_step + 1
    for _ in range(3):
        world.take_step()
    head = back + 2
    chain = audited(world, tmp_path)
    before = digest_of(world.validator.state.weights)
    world.restarted(folder=tmp_path / "moved")
    assert digest_of(world.validator.state.weights) == before == world.manifest(head).weights
    steps = OuterSteps(
        world.bucket, tmp_path / "founder", master_of(world), world.master.sign, keep_uploads=4
    )
    assert steps.load()
    config = world.validator.state.model_config
    go_back(steps, chain, back, config=config, period=1000.0, grace=100.0)
    world.restarted(folder=tmp_path / "after")
    assert world.manifest(head + 1).rewound_to == back
    assert digest_of(world.validator.state.weights) == world.manifest(back).weights
    for miner in world.miners.values():  # after a rewind members fetch whole weights
        miner.start, miner.outer_step = [*world.validator.state.weights], head + 1
    if isinstance(world, OverHivemind):
        world.await_peers()
    assert world.take_step().outer_step == head + 2
    audited(world, tmp_path / "again")


def test_a_newcomer_is_merged_at_its_first_close(world: World) -> None:
    step = world.take_step().outer_step
    world.ledger.register(keypair(f"miner-{NEWCOMER}").ss58_address, uid=NEWCOMER)
    world.own[NEWCOMER] = type(world.own[EXPELLED])(world.clock)
    world.uids = (*world.uids, NEWCOMER)
    newcomer = StoreMiner(world, NEWCOMER)
    newcomer.outer_step = step
    world.miners[NEWCOMER] = newcomer
    manifest = world.take_step()
    assert manifest.outer_step == step + 1
    assert {one.uid for one in manifest.merged} == set(world.uids)
    for miner in world.miners.values():
        miner.apply()  # asserts the digest of the weights
    assert set(manifest.scores) == set(world.uids)


def test_an_expelled_member_has_no_part_and_the_others_lose_nothing(world: World) -> None:
    world.take_step()
    gone = keypair(f"miner-{EXPELLED}").ss58_address
    world.ledger.deregister(gone)
    manifest = world.take_step()
    assert {one.uid for one in manifest.merged} == set(world.uids) - {EXPELLED}
    assert gone not in {one.hotkey for one in manifest.merged}
    assert gone not in {one.hotkey for one in manifest.refused}
    assert EXPELLED not in manifest.scores
    if isinstance(world, OverHivemind):
        master = world.master.ss58_address
        membership = Membership(world.chain.neurons, master, master, 0.0)
        order = membership.build_order(world.state, world.clock(), manifest)
        assert {uid for _, _, uid in order.members} == {*world.peers} - {EXPELLED}
