"""Compare a network over hivemind with one over the store, whose members train alike.

The all-reduce is computed in this process; ``test_bad_peer.py`` has the one of real DHT peers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed_training.protocol import keys
from tests.tools.instant_average import InstantWorld, count_bytes, fetched_bytes
from tests.tools.store_world import StoreWorld
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def test_a_sample_of_8_among_64_members_needs_a_fifth_of_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = tuple(range(1, 65))
    store = StoreWorld(tmp_path / "store", uids=uids, own=True)
    count_bytes(store)
    store.train()
    store.until_close()
    for miner in store.miners.values():
        miner.upload()
    size = len(store.miners[1].encode())
    store.tick(3)
    assert store.state.outer_step == 1
    of_store = fetched_bytes(store)
    assert of_store >= 64 * 0.99 * size, "all were fetched"

    averaging = InstantWorld(tmp_path / "hivemind", monkeypatch, uids=uids, sample=8)
    averaging.average_round()
    count_bytes(averaging)
    manifest = averaging.average_round()
    assert manifest.averaged and len(manifest.averaging.participants) == 64
    assert len(manifest.merged) <= 8
    average = len(averaging.bucket.objects[keys.outer_key(2, keys.AVERAGE)][0])
    of_hivemind = fetched_bytes(averaging) + average
    share = of_hivemind / of_store
    print(f"store {of_store} bytes; hivemind {of_hivemind}, {average} of the average: {share:.3f}")
    assert share <= 0.2
