"""A store network whose members have a bucket each: real programs, then what they left.

What other networks do is in tests/promises/test_networks.py.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.protocol import keys
from tests.end_to_end.test_doctor import doctor
from tests.tools.subnet_tools import paced, steps_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WAIT = timedelta(seconds=400)


def test_members_with_a_bucket_each(tmp_path: Path) -> None:
    options = SubnetOptions(
        folder=tmp_path,
        exchange="store",
        ranks=(1, 1),
        outer_steps=2,
        period=60,
        rules={"round.grace": "20s", "store.access": "own", "training.sequence_length": 64},
    )
    with steps_of(1.0), LocalSubnet(options=paced(options, samples=4)) as subnet:
        subnet.wait_for_outer_steps(2, WAIT)
        services = subnet.services
        assert services is not None
        with contextlib.closing(services.open_bucket(subnet.validator.plan)) as bucket:
            objects = {found.key for found in bucket.list_objects("")}
        assert not [key for key in objects if key.startswith("uploads/")]
        for miner in subnet.miners:
            uid = miner.plan.uid
            assert keys.merged_key(2, uid) in objects
            with contextlib.closing(services.open_bucket(miner.plan)) as bucket:
                kept = {found.key for found in bucket.list_objects("")} - {keys.progress_key(uid)}
            steps = {keys.parse_upload_key(key) for key in kept}
            assert steps and all(place and place[0] == uid and place[1] > 0 for place in steps)
        status, checks, _ = doctor(
            *services.flags(subnet.miners[-1].plan),
            folder=tmp_path,
            environ=services.environment(subnet.miners[-1].plan),
        )
    assert status == 0, checks
    assert {checks[name]["status"] for name in ("global state", "commitment", "bucket")} == {"ok"}
    assert subnet.problems == []
