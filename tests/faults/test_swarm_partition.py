"""A network that falls apart in the middle of a round, and heals: two network namespaces."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.namespaces import Machine, ip, machines
from tests.tools.swarm_world import LinePeer
from tests.tools.waiting import wait_for

SIZE = 3_000_000
GRACE = 10.0
#: A round that takes place with all four, however slow the machine is, or not at all.
WHOLE = {"timeout": 60.0, "group": 4, "chunk": 10.0}
BROKEN = {"timeout": 20.0, "group": 4, "chunk": 2.0}
UNDER_WAY = 2_000_000  # bytes on the line: tensors, of which a round sends many times as much
RATE = "60mbit"  # between the two sides: a round's transfer takes seconds


class Peer(LinePeer):
    def __init__(self, side: Machine, folder: Path, known: list[str]) -> None:
        order = (str(folder), side.address, str(SIZE), json.dumps(known))
        log = folder.parent / f"{folder.name}.log"
        super().__init__("swarm_peer.py", log, *order, prefix=side.prefix)
        self.weight = 0.0

    def result(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.answer())
        return answer


def sent(side: Machine) -> int:
    """Bytes on its line so far."""
    counter = [*side.prefix, "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
    return int(subprocess.run(counter, capture_output=True, text=True, check=True).stdout)


def play(
    peers: list[Peer], terms: dict[str, float], cut: Machine | None = None
) -> list[dict[str, Any]]:
    """One round of all, in the middle of whose transfer ``cut`` loses its line. A peer that did not
    succeed keeps its weight; none is late."""
    already = sent(cut) if cut is not None else 0
    before = [peer.weight for peer in peers]
    for i, peer in enumerate(peers):
        peer.begin(json.dumps({"value": float(i + 1), **terms}))
    if cut is not None:
        wait_for(lambda: sent(cut) - already > UNDER_WAY, "tensors on the line")
        cut.unplug()
    answers = [peer.result() for peer in peers]
    for peer, answer, weight in zip(peers, answers, before, strict=True):
        assert answer["seconds"] < terms["timeout"] + GRACE, answers
        if "fault" in answer:
            assert answer["weight"] == weight, answers
        peer.weight = answer["weight"]
    return answers


@pytest.fixture
def sides() -> Iterator[list[Machine]]:
    with machines(2, network="10.213.77", rate=RATE) as two:
        yield two


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_partition_in_a_round_ends_it_in_time_and_heals(
    sides: list[Machine], tmp_path: Path
) -> None:
    peers: list[Peer] = []
    try:
        known: list[str] = []
        for i in range(4):
            peers.append(Peer(sides[i // 2], tmp_path / str(i), known))
            known = known or peers[0].result()["maddrs"]
        for peer in peers[1:]:  # they start at the same time
            peer.result()
        first = play(peers, WHOLE)
        assert all(a.get("peers") == 4 and not a["partial"] for a in first), first
        assert {a["weight"] for a in first} == {2.5}
        answers = play(peers, BROKEN, sides[0])
        whole = [a for a in answers if "fault" not in a and not a["partial"]]
        assert not whole, f"nobody takes a broken round for a whole one: {answers}"
        sides[0].plug()
        for _ in range(4):  # peers find each other again by themselves
            healed = play(peers, WHOLE)
            if all(a.get("peers") == 4 and not a["partial"] for a in healed):
                break
        else:
            raise AssertionError(f"the swarm did not heal: {healed}")
    finally:
        for peer in peers:
            peer.close()
    for side in sides:
        wait_for(
            lambda name=side.name: not ip("netns", "pids", name).stdout.strip(),
            "no process is left behind",
        )
