"""A store network of which everything is killed.

Real programs in a local subnet whose miners sleep most of the time. Run with ``-s`` to see figures.
Variables: ``KILLS_STEPS`` (12), the outer steps under kills, and ``KILLS_SEED`` (1): the order.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path

import pytest
from bittensor_core import verify

from bench import kills
from distributed_training.common.files import read_json_object
from distributed_training.config import load_config
from distributed_training.localnet.services import Child, SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master
from distributed_training.protocol.types import Schema
from distributed_training.store.errors import StoreError
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.telemetry import read_events
from distributed_training.training.model import parameter_schema
from tests.tools.store_member import digest_of
from tests.tools.subnet_tools import idle, steps_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
STEP = 1.0  # seconds of an inner step, most of them asleep
PERIOD = 60  # seconds
ROUND = timedelta(seconds=240)  # the longest that an outer step of all may take to come


class Watched:
    """The objects that a bucket has shown: digests of each that may have one content."""

    def __init__(self, subnet: LocalSubnet) -> None:
        assert subnet.services is not None
        self.subnet, self.services = subnet, subnet.services
        self.bucket: S3ObjectStore = subnet.services.open_bucket(subnet.validator.plan)
        self.found: dict[str, set[str]] = defaultdict(set)
        self.starts: dict[int, set[str]] = defaultdict(set)  # outer step -> miners' own digests
        network = ["--network", str(subnet.services.network)]
        config = load_config("validator", network, check=False, dotenv=None)
        self._next_look = 0.0
        self._master = Master(config.swarm.run_id, config.miner.master_ss58_address, verify)

    def look(self) -> None:
        """Note the store's objects once a second; a store that is down shows none."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + 1.0
        with contextlib.suppress(StoreError):
            for info in self.bucket.list_objects(""):
                outer = keys.parse_outer_key(info.key)
                if keys.parse_upload_key(info.key) or (outer and outer[1] == keys.MANIFEST):
                    self.found[info.key].add(info.etag)
        for miner in self.subnet.miners:
            for path in miner.plan.folder.glob("checkpoints/checkpoint-*/rank-0.json"):
                if saved := read_json_object(path):
                    outer_step = saved["progress"]["outer_step"]
                    self.starts[outer_step].add(saved["state"]["epoch_digest"])

    def chain(self) -> list[Manifest]:
        """Return the manifests up to the newest, each of which follows the one before."""
        chain: list[Manifest] = []
        while data := self.bucket.get(
            keys.outer_key(len(chain), keys.MANIFEST), limit=Manifest.most_bytes
        ):
            chain.append(Manifest.parse(data, self._master))
            if len(chain) > 1:
                chain[-1].check_after(chain[-2])
        return chain

    def schema(self) -> Schema:
        config = self.bucket.get(keys.outer_key(0, keys.CONFIG), limit=1 << 20)
        return parameter_schema(json.loads(config or b""))


SERVICES = ("validator", "store", "registry")
VICTIMS = ("rank", "launcher", "fork server", "data worker", "machine", *SERVICES)
OUTER_STEPS = int(os.environ.get("KILLS_STEPS", "12"))


def kill(subnet: LocalSubnet, kind: str, chosen: random.Random) -> Child | None:
    """Kill one program of this kind; return the one that somebody has to start again."""
    assert subnet.services is not None
    miner = chosen.choice(subnet.miners)
    store, registry = subnet.services.children
    children = {"validator": subnet.validator.child, "store": store, "registry": registry}
    child = children.get(kind, miner.child)
    if kind in (*SERVICES, "machine"):
        child.kill_tree()
        return child
    kills.kill_one(miner, kind, chosen)
    return None  # the miner does it, or the subnet as pm2 would


def test_twelve_outer_steps_under_kills_of_everything(tmp_path: Path) -> None:
    seed = int(os.environ.get("KILLS_SEED", "1"))
    chosen, killed = random.Random(seed), Counter[str]()
    options = SubnetOptions(
        folder=tmp_path,
        exchange="store",
        ranks=(2, 1, 1),
        period=PERIOD,
        least_miners=1,
        restart_miners=True,
        rules={"training.sequence_length": 64, "round.grace": "20s"},
    )
    with steps_of(STEP), LocalSubnet(options=idle(options)) as subnet:
        watched, validator = Watched(subnet), subnet.validator
        subnet.wait_until(lambda: all(m.state.losses for m in subnet.miners), ROUND, "steps of all")
        down: list[tuple[float, Child]] = []
        due = time.monotonic()

        def trouble() -> bool:
            nonlocal due
            watched.look()
            now = time.monotonic()
            for again, child in [each for each in down if each[0] <= now]:
                down.remove((again, child))
                if not child.running:  # it may have been killed twice
                    child.start()
            over = validator.state.outer_step >= OUTER_STEPS
            if now >= due and not over:
                due = now + chosen.uniform(10, 30)
                kind = chosen.choice(VICTIMS)
                if all(child.running for child in (validator.child, *watched.services.children)):
                    killed[kind] += 1
                    if (child := kill(subnet, kind, chosen)) is not None:
                        down.append((now + chosen.uniform(0, 8), child))
            return over and not down

        longest = timedelta(seconds=OUTER_STEPS * 4 * PERIOD)
        subnet.wait_until(trouble, longest, f"{OUTER_STEPS} outer steps")
        kills.clean_round(subnet)
        watched.look()
        chain, schema = watched.chain(), watched.schema()
    watched.look()
    moved = sum(not event["ok"] for event in read_events(validator.plan.events, "round"))
    print(f"\nseed {seed}: {killed.total()} kills {dict(killed)}; {len(chain) - 1} outer steps, ")
    print(f"{moved} closes moved; {sum('uploads/' in key for key in watched.found)} uploads seen")
    assert set(killed) == set(VICTIMS)
    assert {key: found for key, found in watched.found.items() if len(found) > 1} == {}
    assert not [*tmp_path.glob("*/exchange/chain/*.other.json")]
    for manifest in chain:
        assert watched.starts[manifest.outer_step] <= {manifest.weights}, manifest.outer_step
    for miner in subnet.miners:
        outer_step = miner.state.outer_step
        start = kills.epoch_start(miner.plan.folder / "checkpoints", outer_step)
        held = digest_of([start[name] for name, _ in schema])
        assert held == chain[outer_step].weights, (miner.plan.name, outer_step)
    assert subnet.problems == []
