"""A network that falls apart in the middle of a round, and heals: two network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
PEER = ROOT / "tests" / "multiprocess" / "swarm_peer.py"
SIZE = 3_000_000
DEADLINE, GRACE = 10.0, 10.0
RATE = "60mbit"  # between the namespaces: a round's transfer takes seconds


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=check)


class Network:
    """Namespaces ``names``, joined by one line that can be cut."""

    def __init__(self) -> None:
        tag = f"dt{os.getpid() % 100_000}"
        self.names = (f"{tag}a", f"{tag}b")
        self._ends = (f"{tag}x", f"{tag}y")

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        first, second = self._ends
        ip("link", "add", first, "type", "veth", "peer", "name", second)
        for i, (name, end) in enumerate(zip(self.names, self._ends, strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.213.77.{i + 1}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
            shape = ["tbf", "rate", RATE, "burst", "64kb", "latency", "200ms"]
            subprocess.run(
                ["tc", "-n", name, "qdisc", "add", "dev", end, "root", *shape], check=True
            )

    def line(self, *, up: bool) -> None:
        ip("-n", self.names[0], "link", "set", self._ends[0], "up" if up else "down")

    def close(self) -> None:
        for name in self.names:
            ip("netns", "del", name, check=False)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        said = getattr(error, "stderr", None) or error
        pytest.skip(f"network namespaces cannot be made here: {said}")
    try:
        yield made
    finally:
        made.close()


class Peer:
    def __init__(self, namespace: str, address: str, folder: Path, known: list[str]) -> None:
        self._process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                namespace,
                sys.executable,
                str(PEER),
                str(folder),
                address,
                str(SIZE),
                json.dumps(known),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder.parent / f"{folder.name}.log").open("w"),
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self.weight = 0.0

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the peer ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def go(self, value: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"value": value, "timeout": DEADLINE}) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def play(peers: list[Peer], cut: threading.Timer | None = None) -> list[dict[str, Any]]:
    """One round of all. A peer that did not succeed keeps its weight; none is late."""
    before = [peer.weight for peer in peers]
    for i, peer in enumerate(peers):
        peer.go(float(i + 1))
    if cut is not None:
        cut.start()
    answers = [peer.answer() for peer in peers]
    for peer, answer, weight in zip(peers, answers, before, strict=True):
        assert answer["seconds"] < DEADLINE + GRACE, answers
        if "fault" in answer:
            assert answer["weight"] == weight, answers
        peer.weight = answer["weight"]
    return answers


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_partition_in_a_round_ends_it_in_time_and_heals(network: Network, tmp_path: Path) -> None:
    peers: list[Peer] = []
    try:
        known: list[str] = []
        for i in range(4):
            side = i // 2
            peers.append(
                Peer(network.names[side], f"10.213.77.{side + 1}", tmp_path / str(i), known)
            )
            known = known or peers[0].answer()["maddrs"]
        for peer in peers[1:]:  # they start beside each other
            peer.answer()
        first = play(peers)
        assert all(a.get("peers") == 4 and not a["partial"] for a in first), first
        assert {a["weight"] for a in first} == {2.5}
        # Matchmaking takes two seconds and a little; then the tensors are on the line.
        answers = play(peers, threading.Timer(3.2, network.line, kwargs={"up": False}))
        whole = [a for a in answers if "fault" not in a and not a["partial"]]
        assert not whole, f"nobody takes a broken round for a whole one: {answers}"
        network.line(up=True)
        for _ in range(4):  # peers find each other again by themselves
            healed = play(peers)
            if all(a.get("peers") == 4 and not a["partial"] for a in healed):
                break
        else:
            raise AssertionError(f"the swarm did not heal: {healed}")
    finally:
        closing = [threading.Thread(target=peer.close) for peer in peers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(30)
    for name in network.names:
        wait_for(
            lambda name=name: not ip("netns", "pids", name).stdout.strip(),
            "no process is left behind",
        )
