"""Count what a validator fetches over hivemind, where it judges a sample of the uploads.

The all-reduce is computed in this process; ``test_bad_peer.py`` has the one of real DHT peers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed_training.protocol import keys
from tests.tools.instant_average import InstantWorld, count_bytes, fetched_bytes
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def test_a_sample_of_8_among_64_members_needs_a_fifth_of_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = tuple(range(1, 65))
    averaging = InstantWorld(tmp_path / "hivemind", monkeypatch, uids=uids, sample=8)
    averaging.average_round()
    of_store = len(uids) * len(averaging.miners[1].encode())  # there a validator fetches all
    count_bytes(averaging)
    manifest = averaging.average_round()
    assert manifest.averaged and len(manifest.averaging.participants) == 64
    assert len(manifest.merged) <= 8
    assert manifest.averaging.difference is None  # not all uploads were fetched
    entries = averaging.validator.standings.present()
    assert all(entries[uid].all_reduce for uid in uids)
    average = len(averaging.bucket.objects[keys.outer_key(2, keys.AVERAGE)][0])
    of_hivemind = fetched_bytes(averaging) + average
    share = of_hivemind / of_store
    print(f"store {of_store} bytes; hivemind {of_hivemind}, {average} of the average: {share:.3f}")
    assert share <= 0.2
