"""A miner in trouble: an outage over its restart; then its hotkey is lost.

One subnet for both, in this order, without rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest

from distributed_training.chain.base import find
from distributed_training.chain.registry import RegistryChain
from distributed_training.common.processes import command_of
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalNeuron, LocalSubnet
from distributed_training.telemetry import read_events
from tests.tools.subnet_tools import idle

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
WAIT = timedelta(seconds=180)


@pytest.fixture(scope="module")
def subnet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSubnet]:
    folder = tmp_path_factory.mktemp("running") / "subnet"
    options = SubnetOptions(folder=folder, exchange="hivemind", ranks=(1,), period=100_000)
    with LocalSubnet(options=idle(options)) as running:
        (miner,) = running.miners
        running.wait_until(lambda: bool(miner.state.losses), WAIT, "a step")
        yield running


def test_a_restart_while_chain_and_store_are_away_trains_from_the_disk(
    subnet: LocalSubnet,
) -> None:
    """The machine goes down in an outage; all that it needs to train lies on its disk."""
    (miner,) = subnet.miners
    folder = miner.plan.folder
    subnet.wait_until(lambda: (folder / "chain.json").exists(), WAIT, "the kept chain")
    subnet.wait_until(
        lambda: any(folder.glob("checkpoints/checkpoint-*/rank-0.json")), WAIT, "a checkpoint"
    )
    subnet.kill_miner(0)
    last = list(read_events(miner.plan.events, "step"))[-1]
    servers = ("weed server", "network_command serve")
    away = [
        process
        for process in subnet.processes()
        if any(name in command_of(process) for name in servers)
    ]
    assert len(away) == 2
    starts, steps = count(miner, "start"), count(miner, "step")
    for process in away:
        process.suspend()
    try:
        subnet.restart_miner(0)
        subnet.wait_until(
            lambda: count(miner, "step") > steps, timedelta(seconds=240), "an inner step"
        )
    finally:
        for process in away:
            process.resume()
    start = list(read_events(miner.plan.events, "start"))[starts]
    assert start["resumed"] and start["outer_step"] == last["outer_step"]
    assert start["uid"] == miner.plan.uid
    log = (folder / "log.txt").read_text()
    for words in (
        "The chain does not answer: starting with what it showed",
        "starting without a look into it",
    ):
        assert words in log, words


def count(miner: LocalNeuron, kind: str) -> int:
    """Count in all events written until now; the orchestrator's own view may be behind."""
    return len(list(read_events(miner.plan.events, kind)))


@contextmanager
def our_chain(subnet: LocalSubnet) -> Iterator[RegistryChain]:
    (miner,) = subnet.miners
    assert subnet.services is not None
    wallet = subnet.services.wallet(miner.plan)
    with closing(RegistryChain(url=subnet.services.chain_endpoint, wallet=wallet)) as chain:
        yield chain


def test_a_miner_whose_hotkey_gets_another_uid_continues_with_it(subnet: LocalSubnet) -> None:
    """It publishes to another bucket; its weights have not changed."""
    (miner,), services = subnet.miners, subnet.services
    assert services is not None
    with our_chain(subnet) as chain:
        starts, stops = count(miner, "start"), count(miner, "stop")
        other = replace(miner.plan, uid=41)
        with closing(services.open_bucket(other, write=True)) as bucket:
            bucket.create_bucket()
        with closing(services.founders_chain()) as founder:
            founder.enroll(services.wallet(miner.plan).ss58, uid=41)
        subnet.wait_until(lambda: count(miner, "start") > starts, WAIT, "another start")
        stop = list(read_events(miner.plan.events, "stop"))[stops]
        assert stop["exit_status"] == 5 and "is uid 41 now" in stop["reason"]
        steps = count(miner, "step")
        last = list(read_events(miner.plan.events, "step"))[-1]
        subnet.wait_until(lambda: count(miner, "step") > steps, WAIT, "a step")
        start = list(read_events(miner.plan.events, "start"))[starts]
        assert start["uid"] == 41 and start["resumed"]
        assert start["inner_step"] <= last["inner_step"]
        me = find(chain.neurons(), start["hotkey"])
        assert me is not None and me.port == miner.plan.dht_port
