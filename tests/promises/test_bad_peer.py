"""Test that every close over hivemind leads to an outer step, whatever disturbs the all-reduce.

The DHT peers, the validator, the judge and the merge are real, on loopback. A disturbance may cost
the average of a round, but never the round: all members start each outer step with the same bits,
and the manifest says what was wrong if the uploads show it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from bittensor.sp_core import verify

from distributed_training.common.processes import is_running
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.validator.average import AveragingValidator
from distributed_training.validator.replay import ManifestChain
from tests.tools.hivemind_world import HivemindWorld
from tests.tools.validator_world import one_thread  # noqa: F401
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]
BAD = 5  # uid of the member that misbehaves


@dataclass(frozen=True)
class Disturbance:
    """Describe a disturbance and its outcome.

    ``kind``: how the bad peer misbehaves; ``during``: what else happens in each round; ``sources``:
    what updates may be made from; ``why``: words of the reason in a manifest; ``named``: whether
    the manifest names the bad member among those whose parts differ.
    """

    kind: str = ""
    sources: tuple[str, ...] = ("merge",)
    why: str = ""
    named: bool = False
    during: Callable[[HivemindWorld, int], None] | None = None
    silent: tuple[int, ...] = ()


def _kill_peer(world: HivemindWorld, _: int) -> None:
    with suppress(ProcessLookupError):  # it has not been restarted since the last kill
        os.kill(world.peers[BAD].process.pid, signal.SIGKILL)


def _kill_p2pd(world: HivemindWorld, _: int) -> None:
    with suppress(psutil.NoSuchProcess):  # the same
        for process in psutil.Process(world.peers[BAD].process.pid).children(recursive=True):
            if process.name() == "p2pd":
                process.kill()


def _kill_all_peers(world: HivemindWorld, n: int) -> None:
    """Kill every peer before the third round; they are running again in the fifth."""
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
    "slow": Disturbance("slow", sources=("merge", "average")),  # it may be just in time
    "hangs": Disturbance("hangs", sources=("merge", "average")),
    "late by a minute": Disturbance("late", why="differs by"),
    "two groups": Disturbance(silent=(3,), why="differs by"),
    "peer killed": Disturbance(during=_kill_peer, sources=("merge", "average")),
    "p2pd killed": Disturbance(during=_kill_p2pd, sources=("merge", "average")),
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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HivemindWorld]:
    """Yield a network after its first outer step, which has no average: no norm is known yet."""
    world = HivemindWorld(tmp_path_factory.mktemp("network"))
    first = world.average_round().averaging
    assert first is not None and first.source == "merge" and "nothing was merged" in first.why
    yield world
    world.close()


def run(world: HivemindWorld, case: Disturbance, closes: int) -> list[Manifest]:
    manifests = []
    before = world.state.outer_step
    for n in range(1, closes + 1):
        if case.during is not None:
            case.during(world, n)
        manifests.append(world.average_round(silent=case.silent))
        assert manifests[-1].outer_step == before + n
        for miner in world.miners.values():
            miner.apply()  # asserts the digest of the weights, which each member computes itself
    return manifests


def check(case: Disturbance, manifests: list[Manifest]) -> None:
    for averaging in [manifest.averaging for manifest in manifests]:
        assert averaging is not None and averaging.source in case.sources, averaging
        if averaging.source == "merge" and case.why:
            assert any(word in averaging.why for word in case.why.split("|")), averaging
        if case.named:
            assert BAD in averaging.suspects, averaging


@pytest.mark.parametrize("name", CORE)
def test_a_disturbed_close_leads_to_an_outer_step(name: str, shared: HivemindWorld) -> None:
    case = DISTURBANCES[name]
    shared.peers[BAD].behave(case.kind)
    try:
        check(case, run(shared, case, 1))
    finally:
        shared.peers[BAD].behave("")


@pytest.mark.long
@pytest.mark.parametrize("name", DISTURBANCES)
def test_ten_disturbed_closes_lead_to_ten_outer_steps(
    name: str, world_of: Callable[..., HivemindWorld]
) -> None:
    case = DISTURBANCES[name]
    first, *others = run(world_of(kinds={BAD: case.kind}), case, 10)
    assert first.averaging is not None and first.averaging.source == "merge"
    check(case, others)


def test_a_validator_that_judges_a_sample_fetches_no_other_upload(
    world_of: Callable[..., HivemindWorld],
) -> None:
    world, fetched = world_of(sample=1), set[int]()
    world.average_round()
    for uid, bucket in world.own.items():

        def note(operation: str, key: str, uid: int = uid) -> None:
            if operation.startswith("get") and keys.parse_upload_key(key):
                fetched.add(uid)

        bucket._before = note
    manifest = world.average_round()
    assert manifest.averaged and len(manifest.averaging.participants) == len(world.uids)
    assert len(fetched) == 1 and {one.uid for one in manifest.merged} <= fetched
    assert manifest.averaging.difference is None  # not all uploads were fetched
    entries = world.validator.standings.present()
    assert all(entries[uid].all_reduce and entries[uid].uploaded for uid in world.uids)


def test_a_stranger_joins_aggregates_and_downloads_nothing(shared: HivemindWorld) -> None:
    address = shared.peers[3].readies[-1].address
    words = [sys.executable, "-m", "tests.tools.hivemind_stranger", address]
    out = subprocess.run(
        [*words, f"{shared.run_id}_average"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    found = json.loads(out.splitlines()[-1])
    # The peer refuses the call. If its daemon closes the stream before the caller has sent all or
    # has read the refusal, the caller gets nothing.
    refused = {"PROTOCOL_VIOLATION", "BrokenPipeError", "nothing"}
    assert {found["join"], found["aggregate"]} <= refused
    assert found["download"] == "nothing"


def test_a_validator_killed_after_the_average_and_one_on_an_empty_disk_take_the_step(
    shared: HivemindWorld, tmp_path: Path
) -> None:
    world = shared
    step = world.state.outer_step + 1
    world.train()
    world.until_close()
    for uid in world.uids:
        world.upload(world.miners[uid])
    world.tick()  # the validator has ordered its peer
    for peer in world.peers.values():
        peer.order()
    validator = world.validator
    assert isinstance(validator, AveragingValidator)
    wait_for(lambda: validator._answer, "the average", 60)
    world.restarted()  # killed before it has published anything
    world.until_step(step)
    averaging = world.manifest(step).averaging
    assert averaging.source == "merge"  # its order came too late, or not at all
    world.await_peers()
    manifest = world.average_round()
    assert manifest.averaged and manifest.averaging.difference < 0.01
    assert keys.outer_key(step + 1, keys.AVERAGE) in world.bucket.objects
    # On another disk and in an audit, weights and momentum follow from the published average.
    digests = world.validator.steps.values.digests
    world.restarted(folder=tmp_path / "empty")
    assert world.validator.steps.values.digests == digests
    master = Master(world.run_id, world.master.ss58_address, verify)
    reader = BucketReader(world.bucket)
    audit = ManifestChain(reader, world.schema, tmp_path / "audit", master).audit()
    assert not audit.problems and audit.replayed_from == 0


def test_all_processes_of_a_peer_end_with_any_of_them_and_start_again(
    shared: HivemindWorld, caplog: pytest.LogCaptureFixture
) -> None:
    peer = shared.peers[3]
    for killed in ("peer process", "fork", "p2pd"):
        first, starts = psutil.Process(peer.process.pid), len(peer.readies)
        tree = [first, *first.children(recursive=True)]
        assert len(tree) >= 4  # the peer process, the DHT, p2pd and the averager
        by_kind = {"peer process": first, "fork": first.children()[0]}
        by_kind |= {process.name(): process for process in tree if process.name() == "p2pd"}
        by_kind[killed].kill()
        wait_for(lambda gone=tree: not any(map(is_running, gone)), f"all end with {killed}", 30)
        wait_for(lambda n=starts: len(peer.readies) > n, f"a start after the end of {killed}", 60)
    line = "The DHT peer ended (it was killed by SIGKILL): starting it again"
    assert caplog.text.count(line) == 3, caplog.text
