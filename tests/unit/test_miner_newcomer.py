"""Test where a first start gets the inner optimizer from."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from distributed_training.config import load_config
from distributed_training.miner import global_state
from distributed_training.miner.global_state import GlobalBucket
from distributed_training.node import buckets
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import Metadata
from distributed_training.protocol.types import Revision
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.s3 import TransientError
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.support_store import publish_state

pytestmark = pytest.mark.timeout(60)


def put_shards(store: MemoryObjectStore, outer_step: int, count: int, folder: Path) -> None:
    for rank in range(count):
        path = folder / "shard.pt"
        torch.save({"rank": torch.tensor(float(rank))}, path)
        store.put(keys.epoch_key(outer_step, keys.inner_optimizer(rank, count)), path.read_bytes())


@pytest.mark.parametrize(
    ("in_global", "in_own", "away", "fetched"),
    [
        (4, 2, False, "epoch-7 4"),
        (-4, 2, False, "epoch-6 4"),  # right after a round: of the outer step before
        (0, 2, False, "epoch-5 2"),  # after a lost disk, in a young network
        (4, 2, True, "epoch-5 2"),
        (4, 0, True, None),
        (0, 0, False, None),
    ],
)
def test_the_network_s_inner_optimizer_else_this_miner_s(
    in_global: int,
    in_own: int,
    away: bool,
    fetched: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def before(operation: str, key: str) -> None:
        if away and operation == "get_range" and "inner_optimizer" in key:
            raise TransientError("the store is away")

    theirs, own = MemoryObjectStore("global", before=before), MemoryObjectStore("own")
    if in_global < 0:
        publish_state(theirs, 6)
        put_shards(theirs, 6, -in_global, tmp_path)
    for store, outer_step, count in ((theirs, 7, max(0, in_global)), (own, 5, in_own)):
        publish_state(store, outer_step)
        root = Metadata.of(Revision(5, outer_step, 0), "")
        store.put(keys.ROOT_METADATA, root.to_json())
        put_shards(store, outer_step, count, tmp_path)
    monkeypatch.setattr(buckets, "open_own", lambda settings, bucket: own)
    reader = BucketReader(theirs, large=timedelta(seconds=1 if away else 60))
    found = global_state.fetch_inner_optimizer(
        load_config("miner", [], environ={}, dotenv=None, check=False),
        GlobalBucket(open_bucket=lambda: reader, folder=tmp_path / "global", run=5),
        7,
        bucket="own",
        folder=tmp_path,
    )
    shards = [] if found is None else sorted(found.glob("inner_optimizer.*"))
    assert (f"{found.name} {len(shards)}" if found else None) == fetched
    # Nobody would ever remove a part of it.
    assert (tmp_path / global_state.INNER_FOLDER).exists() == (found is not None)
    assert ("The network's inner optimizer cannot be fetched" in caplog.text) == away
