"""Every kind of process of a network is killed in every phase; everybody is in the next round.

Two kills are in tests/promises/test_networks.py; what the launcher does, in test_launcher_tree.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import kills

pytestmark = pytest.mark.long

# Seconds until a line tells of a killed process: about 1 at rest; two subnets may share two cores.
TOLD_WITHIN = 10


@pytest.mark.timeout(3600)
def test_every_kind_of_process_in_every_phase(tmp_path: Path) -> None:
    outcome = kills.run(tmp_path, seed=1, phases=kills.PHASES, ranks=(2, 1, 1))
    print(*((k.kind, k.phase, k.told, k.step_after) for k in outcome.kills), sep="\n")
    assert outcome.problems == []  # one that no process was killed for is a problem
    assert len(outcome.kills) == len(kills.KINDS) * len(kills.PHASES)
    for kill in outcome.kills:
        assert kill.step_after is not None and kill.rounds is not None and kill.rounds >= 1
        if kill.kind != "launcher":  # which logs it when it is started again
            assert kill.told_after is not None and kill.told_after < TOLD_WITHIN, kill
