"""Test a miner's start with its own bucket, after an earlier process has published."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.chain.base import ChainUnavailable
from distributed_training.chain.identity import AddressUnknown
from distributed_training.config.settings import StoreSettings
from distributed_training.miner import own_bucket, start_hivemind
from distributed_training.miner.own_bucket import OwnBucket, read_newest
from distributed_training.node import identity
from distributed_training.node.identity import Member
from distributed_training.node.start import NetworkFailure
from distributed_training.protocol import keys
from distributed_training.protocol.types import Revision
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import TransientError
from distributed_training.store.journal import Journal, Submission
from distributed_training.store.uploader_process import Publication
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_world import MINER
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.miner_parts import config_of
from tests.tools.support_store import PEER_ID, write_snapshot

pytestmark = pytest.mark.timeout(30)
REVISION = Revision(5, 3, 50)
CONFIG = keys.epoch_key(REVISION.outer_step, keys.CONFIG)


class Bucket:
    """A bucket with one upload, ten minutes old. Reading ``lost`` fails."""

    def __init__(self, folder: Path) -> None:
        self.ahead, self.lost = 0.0, ""
        self.store = MemoryObjectStore(before=self._before, clock=lambda: time.time() + self.ahead)
        write_snapshot(folder / "s", REVISION, world_size=1, blocks=(1000, 1007, 1003))
        settings = StoreSettings(write_interval=timedelta(0))
        publication = Publication(self.store, Journal(folder / "uploads.json"), settings, "me")
        assert publication.run(Submission(folder / "s", REVISION, 1, PEER_ID)).ok
        self.ahead = 600.0

    def _before(self, operation: str, key: str) -> None:
        if key == self.lost:
            raise TransientError("the store is away")

    def read(self) -> OwnBucket:
        return read_newest(BucketReader(self.store, large=timedelta(seconds=1)))


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


def test_a_start_knows_how_old_the_upload_and_its_blocks_are(bucket: Bucket) -> None:
    found = bucket.read()
    assert found.published_at == pytest.approx(time.monotonic() - 600, abs=20)
    assert (found.newest_block, found.outer_step, found.known) == (1007, REVISION.outer_step, True)
    (upload,) = found.uploads()
    assert upload.at == pytest.approx(time.time() - 600, abs=20) and upload.block == 1007


def test_an_empty_bucket_tells_nothing() -> None:
    empty = BucketReader(MemoryObjectStore(), large=timedelta(seconds=1))
    assert read_newest(empty) == OwnBucket("", "") and OwnBucket("", "").uploads() == ()


@pytest.mark.parametrize(
    ("spoilt", "lost", "unknown"),
    [
        (b"{", "", "the uploaded block list"),
        (b'{"block_list": 5}', "", "the uploaded block list"),
        (None, CONFIG, "the uploaded block list"),  # the age of the upload itself is known
        (None, keys.ROOT_METADATA, "the newest upload"),
    ],
)
def test_unreadable_object_of_the_bucket_stops_no_start(
    bucket: Bucket, spoilt: bytes | None, lost: str, unknown: str, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.lost = lost
    if spoilt is not None:
        bucket.store.put(CONFIG, spoilt)
    found = bucket.read()
    assert (found.published_at is None) == (lost == keys.ROOT_METADATA) == (not found.known)
    assert found.newest_block is None
    (line,) = [m for m in caplog.messages if "is not known before the next upload" in m]
    assert line.startswith(f"The age of {unknown} is not known")


class Outage:
    """A registered miner, and no service outside that answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger = MemoryLedger()
        uid = self.ledger.register(MINER.ss58)
        chain = MemoryChain(hotkey=MINER.ss58, ledger=self.ledger)
        self.member = Member(MINER, chain, uid)
        self.config: Any = SimpleNamespace(chain=None, store=None)

        def away(*_: object, **named: object) -> None:
            raise NetworkFailure("the store is away")

        def unknown(*_: object) -> None:
            raise AddressUnknown("the public address of this machine is unknown")

        monkeypatch.setattr(own_bucket.buckets, "open_own", away)
        monkeypatch.setattr(start_hivemind, "public_address", unknown)
        monkeypatch.setattr(own_bucket.buckets, "commitment_text", lambda _: "our read keys")


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    return Outage(monkeypatch)


def test_a_start_in_an_outage_uses_the_kept_chain_state_of_this_miner(outage: Outage) -> None:
    outage.ledger.serve(MINER.ss58, "1.2.3.4", 8091)
    outage.ledger.commit(MINER.ss58, "our read keys")
    assert start_hivemind.find_address(outage.config, outage.member) == "1.2.3.4"
    found = own_bucket.open_own_bucket(outage.config, outage.member, "mine")
    assert found == OwnBucket("mine", "our read keys", known=False)


@pytest.mark.parametrize("committed", [None, "other read keys", "not read yet"])
def test_unchecked_keys_are_not_used_offline(
    committed: str | None, outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if committed == "not read yet":

        def not_read(_: str) -> str:
            raise ChainUnavailable("the commitments of the subnet could not be read yet")

        monkeypatch.setattr(outage.member.chain, "commitment", not_read)
    elif committed is not None:
        outage.ledger.commit(MINER.ss58, committed)
    with pytest.raises(NetworkFailure, match="the store is away"):
        own_bucket.open_own_bucket(outage.config, outage.member, "mine")
    with pytest.raises(NetworkFailure, match="address"):
        start_hivemind.find_address(outage.config, outage.member)


@pytest.mark.parametrize(
    ("flags", "calls", "swarm"),
    [
        ((), "8.8.4.4", "8.8.4.4"),
        (("--axon.external_ip", "9.9.9.9"), "9.9.9.9", "9.9.9.9"),
        (("--dht.ip", "9.9.9.9"), "9.9.9.9", "9.9.9.9"),
        (("--dht.ip", "9.9.9.9", "--axon.external_ip", "1.1.1.1"), "1.1.1.1", "9.9.9.9"),
        (("--axon.external_ip", "2600::1"), "2600::1", None),  # the swarm knows IPv4 only
    ],
)
def test_the_swarm_announces_the_address_that_is_found_for_calls(
    flags: tuple[str, ...],
    calls: str,
    swarm: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(*flags)
    monkeypatch.setattr(identity, "external_ip", lambda c, **_: c.external_ip or "8.8.4.4")
    opened: list[Any] = []
    monkeypatch.setattr(start_hivemind, "HivemindSwarm", lambda **given: opened.append(given))
    member: Any = None
    connections: Any = SimpleNamespace(
        address=start_hivemind.find_address(config, member), swarm_launch=None
    )
    start_hivemind.open_hivemind(config, tmp_path, connections, [])
    assert (connections.address, opened[0]["settings"].dht_ip) == (calls, swarm)
