"""Kill every kind of process in every phase; all members must take part in the next round.

tests/promises/test_networks.py has two more kills. test_launcher_tree.py tests the launcher.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import kills

pytestmark = pytest.mark.long

# Seconds until a line reports a killed process: about 1 on an idle machine, but more on a busy one.
TOLD_WITHIN = 10


@pytest.mark.timeout(3600)
def test_every_kind_of_process_in_every_phase(tmp_path: Path) -> None:
    outcome = kills.run(tmp_path, seed=1, phases=kills.PHASES, ranks=(2, 1, 1))
    print(*((k.kind, k.phase, k.told, k.step_after) for k in outcome.kills), sep="\n")
    assert outcome.problems == []  # a phase in which no process was killed is a problem
    assert len(outcome.kills) == len(kills.KINDS) * len(kills.PHASES)
    for kill in outcome.kills:
        assert kill.step_after is not None and kill.rounds is not None and kill.rounds >= 1
        if kill.kind != "launcher":  # the launcher logs it after its restart
            assert kill.told_after is not None and kill.told_after < TOLD_WITHIN, kill
