"""The arena's own arithmetic: fields, ratios, and the buckets that it shows."""

from __future__ import annotations

import random

import pytest

from bench.arena import Bucket, Upload
from bench.arena_field import OURS, PUBLIC, Look, results, score_field, table
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import Metadata, parse_config

pytestmark = pytest.mark.timeout(60)


def looks(improvement: float, seed: int, count: int = 20) -> list[Look]:
    """Return looks at a miner whose own text gains a little more than random text; both vary."""
    dice = random.Random(seed)
    found = []
    for _ in range(count):
        gains = [improvement + extra + dice.gauss(0, 0.02) for extra in (0.0, 0.01)]
        found.append(Look(True, *((5.0, 5.0 * (1 - gain)) for gain in gains)))
    return found


def test_a_field_of_equals_shares_alike_and_a_better_miner_gets_more() -> None:
    equal = {uid: looks(0.1, uid) for uid in (1, 12, 23, 34)}
    shares, totals = score_field(equal)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert sum(totals.values()) == pytest.approx(1.0)
    better, _ = score_field({**equal, 23: looks(0.2, 23)})
    assert better[23] > max(0.5, shares[23])
    worse, totals = score_field({**equal, 23: looks(0.02, 23)})
    assert worse[23] == 0.0 and totals[23] == pytest.approx(0.25 / 4)


def test_each_way_is_a_ratio_to_the_field_it_mines_in(capsys: pytest.CaptureFixture[str]) -> None:
    def by_uid(improvement: float) -> dict[int, list[Look]]:
        return {uid: looks(improvement, uid) for uid in (1, 12, 23)}

    found = results({PUBLIC: by_uid(0.1), OURS: by_uid(0.2)})
    assert found[PUBLIC].share == pytest.approx(1 / 3)
    assert found[OURS].share > 0.9 and found[OURS].scored == 1.0
    assert found[OURS].improvement == pytest.approx(20, abs=2)
    assert results({PUBLIC: by_uid(0.1), OURS: by_uid(0.2)}, OURS)[PUBLIC].share == 0.0
    table({7: found}, PUBLIC)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == [PUBLIC, "1.00"] and len(lines) == 3


def test_a_bucket_names_its_newest_upload_and_holds_that_of_the_outer_step() -> None:
    def upload(outer: int, at: float) -> Upload:
        return Upload(outer, 50, at, at, (7, 9), {}, [], 1.0, content=b"x" * outer)

    bucket = Bucket("mine", upload(3, 90.0), upload(2, 60.0), now=100.0)
    root = bucket.get(keys.ROOT_METADATA, limit=1000)
    assert root is not None and Metadata.parse(root).outer_step == 3
    info = bucket.head("epoch-2/gradients.pt")
    assert info is not None and (info.size, info.age_seconds) == (2, 40.0)
    config = bucket.get("epoch-2/config.json", limit=1000)
    assert config is not None and parse_config(config)[1].block_list == (7, 9)
    assert Bucket("empty", None, None, now=1.0).head("epoch-2/gradients.pt") is None
