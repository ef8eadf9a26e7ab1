"""A store network in trouble: everything is killed, members are slow, one is hostile.

Real programs in local subnets whose miners sleep most of the time. Run with ``-s`` to see figures.
Variables: ``SOAK_MINUTES`` (30) of five miners in trouble; ``KILLS_STEPS`` (12), the outer steps
under kills, and ``KILLS_SEED`` (1) of who is killed when.
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
from urllib.parse import urlsplit

import pytest
from bittensor_core import verify

from bench import kills
from distributed_training.common.files import read_json_object
from distributed_training.config import load_config
from distributed_training.localnet.services import Child, SubnetOptions
from distributed_training.localnet.subnet import LocalNeuron, LocalSubnet
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master
from distributed_training.protocol.types import Schema
from distributed_training.store.errors import StoreError
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.telemetry import read_events
from distributed_training.training.model import parameter_schema
from tests.tools.store_member import digest_of
from tests.tools.subnet_tools import PACED, idle, steps_of
from tests.tools.thin_link import ThinLink, thin_link

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
STEP = 1.0  # seconds of an inner step, most of them asleep
PERIOD, GRACE = 60, 20  # seconds
ROUND = timedelta(seconds=240)  # the longest that an outer step of all may take to come
RULES = {"training.sequence_length": 64, "round.grace": f"{GRACE}s"}


def options_of(folder: Path, **more: object) -> SubnetOptions:
    given: dict[str, object] = {"period": PERIOD, "least_miners": 1, **more}
    return idle(
        SubnetOptions(
            folder=folder,
            exchange="store",
            restart_miners=True,
            rules=RULES,
            **given,  # type: ignore[arg-type]
        )
    )


class Watched:
    """The objects that a bucket has shown: digests of each that may have one content."""

    def __init__(self, subnet: LocalSubnet) -> None:
        assert subnet.services is not None
        self.subnet, self.services = subnet, subnet.services
        self.bucket: S3ObjectStore = subnet.services.open_bucket(subnet.validator.plan)
        self.found: dict[str, set[str]] = defaultdict(set)
        self.published: dict[int, float] = {}  # outer step -> when, by the store's clock
        self.starts: dict[int, set[str]] = defaultdict(set)  # outer step -> miners' own digests
        network = ["--network", str(subnet.services.network)]
        config = load_config("validator", network, check=False, dotenv=None)
        self.chain_read: list[Manifest] = []
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
                if outer and outer[1] == keys.MANIFEST:
                    self.published[outer[0]] = info.modified
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


def times_of(miner: LocalNeuron, kind: str) -> list[float]:
    return [event["time"] for event in read_events(miner.plan.events, kind)]


# --- kills ----------------------------------------------------------------------------------------

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
    with steps_of(STEP), LocalSubnet(options=options_of(tmp_path, ranks=(2, 1, 1))) as subnet:
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


# --- slow members ---------------------------------------------------------------------------------

SOAK_PERIOD = 180  # seconds: half of it fits a validator killed while it judges five uploads
MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
FAST, SLOW, THIN, DYING = (0, 1), 2, 3, 4  # of the miners
#: A link that needs a tenth of the period for an upload, and 2 % of it.
FULL, SHARE = 0.1, 0.02
KILL_MINER, KILL_VALIDATOR = 120.0, 300.0  # seconds
BACK = 5.0  # seconds until somebody starts it again
HELD, PUBLISHED = 0.95, 0.95  # of a lone miner's inner steps, of the updates


def start_again(subnet: LocalSubnet, index: int, *before: str, **environment: str) -> None:
    """Start a miner once more behind a command, with more variables."""
    subnet.kill_miner(index)
    child = subnet.miners[index].child
    child.command[:0], child.environment = before, {**child.environment, **environment}
    subnet.restart_miner(index)


def pace_of(miner: LocalNeuron, since: float, until: float) -> float:
    """Return inner steps a second."""
    return sum(since <= at < until for at in times_of(miner, "step")) / (until - since)


def lone_pace(folder: Path) -> float:
    """Return the inner steps a second of a single miner, up to its first close."""
    with LocalSubnet(options=options_of(folder, ranks=(1,), period=SOAK_PERIOD)) as subnet:
        (miner,) = subnet.miners
        subnet.wait_until(lambda: bool(times_of(miner, "close")), 2 * ROUND, "a close")
        first, *_, last = times_of(miner, "step")
        return pace_of(miner, first + 1e-3, last + 1e-3)


def test_members_in_trouble_cost_themselves(tmp_path: Path) -> None:
    given = {"ranks": (1,) * 5, "period": SOAK_PERIOD}
    options = options_of(tmp_path / "subnet", **given)
    with steps_of(STEP):
        lone = lone_pace(tmp_path / "lone")
        subnet = LocalSubnet(options=options)
        with subnet:
            services = subnet.services
            assert services is not None
            ports = (
                urlsplit(url).port for url in (services.store_endpoint, services.chain_endpoint)
            )
            with thin_link(*[port or 0 for port in ports]) as link:
                began, until, watched = _in_trouble(subnet, link)
    chain = watched.chain_read
    due = [m for m in chain[1:] if m.closed_at >= began and m.closed_at + 1.5 * SOAK_PERIOD < until]
    moved = [e for e in read_events(subnet.validator.plan.events, "round") if not e["ok"]]
    late = {
        m.outer_step: over
        for m in due
        if (over := watched.published[m.outer_step] - m.closed_at - GRACE - SOAK_PERIOD / 2) > 0
    }
    in_time = (len(due) - len(late)) / max(1, len(due) + len(moved))
    merged = Counter(one.uid for m in due for one in m.merged)
    refused = Counter((one.uid, one.cause) for m in due for one in m.refused)
    print(f"\n{(until - began) / 60:.1f} minutes; a single miner: {lone:.3f} inner steps a second")
    print("uid, which, share of a lone miner's inner steps, merged, refused")
    shares = []
    for index, what in enumerate(("fast", "fast", "a tenth", "thin link", "killed")):
        miner = subnet.miners[index]
        shares.append(pace_of(miner, began, until) / lone)
        causes = {cause: n for (uid, cause), n in refused.items() if uid == miner.plan.uid}
        print(miner.plan.uid, what, f"{shares[-1]:.3f}", merged[miner.plan.uid], causes, sep=", ")
    print(f"{len(due)} updates, {in_time:.1%} in time; late by {late} s; {len(moved)} closes moved")
    print(f"the thin link moved {link.moved[0]} bytes out, {link.moved[1]} in")
    assert len(due) >= 0.7 * (until - began) / SOAK_PERIOD - 2, "outer steps continue"
    assert in_time >= PUBLISHED
    assert all(shares[index] >= HELD for index in FAST)
    assert subnet.problems == []


def _in_trouble(subnet: LocalSubnet, link: ThinLink) -> tuple[float, float, Watched]:
    """Run the members in trouble; return when that began and ended, and the events seen."""
    watched = Watched(subnet)
    start_again(subnet, SLOW, PACED_STEP=str(10 * STEP))
    start_again(subnet, THIN, *link.prefix)
    subnet.wait_until(lambda: all(m.state.losses for m in subnet.miners), 2 * ROUND, "all")
    subnet.wait_until(lambda: subnet.validator.state.outer_step > 0, 2 * ROUND, "an outer step")
    size = next(iter(watched.bucket.list_objects(keys.outer_key(1, keys.UPDATE)))).size
    link.rate = SHARE * size / (FULL * SOAK_PERIOD)
    began = time.time()
    down: dict[str, tuple[float, Child]] = {}
    due = {"miner": began + KILL_MINER, "validator": began + KILL_VALIDATOR}
    children = {"miner": subnet.miners[DYING].child, "validator": subnet.validator.child}
    every = {"miner": KILL_MINER, "validator": KILL_VALIDATOR}

    def over() -> bool:
        watched.look()
        now = time.time()
        for name, child in children.items():
            if name in down and now >= down[name][0]:
                del down[name]
                child.start()
            elif now >= due[name]:
                child.kill_tree()
                down[name], due[name] = (now + BACK, child), due[name] + every[name]
        return now - began >= 60 * MINUTES and not down

    subnet.wait_until(over, timedelta(minutes=MINUTES + 5), "the end of it")
    watched.chain_read = watched.chain()
    return began, time.time(), watched


# --- an attack ------------------------------------------------------------------------------------


def test_a_hostile_member_is_named_at_its_first_close_and_costs_no_outer_step(
    tmp_path: Path,
) -> None:
    """Its uploads have the sign flipped; its hotkey is a real one."""
    options = options_of(tmp_path, ranks=(1, 1, 1), least_miners=2)
    with steps_of(STEP), LocalSubnet(options=options) as subnet:
        *honest, hostile = subnet.miners
        at = hostile.child.command.index(str(PACED))
        hostile.child.command[at] = str(PACED.with_name("hostile_miner.py"))
        start_again(subnet, len(honest), HOSTILE_FACTOR="-1")

        def reached() -> bool:
            sent = [e for e in read_events(hostile.plan.events, "publication") if e["ok"]]
            taken = [e["outer_step"] for e in read_events(hostile.plan.events, "outer_step")]
            return len(sent) >= 2 and subnet.validator.state.outer_step >= 3 and bool(taken)

        subnet.wait_until(reached, 3 * ROUND, "two closes with all")
        watched = Watched(subnet)
        chain, published = watched.chain(), read_events(hostile.plan.events, "publication")
        sent = {int(e["revision"].partition(".")[0]) for e in published if e["ok"]}
        rounds = list(read_events(subnet.validator.plan.events, "round"))
        log = hostile.child.log.read_text()
    fates = {m.outer_step: {one.uid: one.cause for one in m.refused} for m in chain[1:]}
    print(f"\nrefused by outer step: {fates}; the hostile one sent for {sorted(sent)}")
    for manifest in chain[1:]:
        merged, refused = {one.uid for one in manifest.merged}, fates[manifest.outer_step]
        assert hostile.plan.uid not in merged and refused.keys() <= {hostile.plan.uid}, manifest
        if manifest.outer_step - 1 in sent:  # at the very close that it was for
            assert refused[hostile.plan.uid] in ("worse", "spoiler"), manifest
        # At the first close one may still be starting.
        assert manifest.outer_step == 1 or merged == {miner.plan.uid for miner in honest}
    assert all(event["ok"] for event in rounds if event["outer_step"]), "no outer step is lost"
    assert "; worse: " in log, "the trouble is logged"
    assert subnet.problems == []
