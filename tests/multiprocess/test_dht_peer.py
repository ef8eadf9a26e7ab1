"""Test what a peer process leaves on the disk. Its rounds: tests/promises."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hivemind.p2p import P2P

from distributed_training.exchange.hivemind import Ready, Settings, start_peer
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(180)


def test_a_peer_that_is_killed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("long" * 20)  # no socket can be made there
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    others = set(Path("/tmp").glob("hivemind-*"))
    identity, note = tmp_path / "identity", tmp_path / "peer-scratch"
    P2P.generate_identity(str(identity))
    settings = Settings(
        schema=[("weight", (4,))],
        run_id="scratch",
        identity=str(identity),
        listen="127.0.0.1",
        port=0,
    )
    readies: list[Ready] = []
    peer = start_peer(settings, ready=readies.append, answered=lambda answer: None)
    try:
        wait_for(lambda: readies, "the first start", 60)
        first = Path(note.read_text())
        assert any(each.is_socket() for each in first.iterdir())
        os.kill(peer.pid, signal.SIGKILL)
        wait_for(lambda: len(readies) == 2, "the start after the kill", 60)
        second = Path(note.read_text())
        assert second != first and not first.exists()
    finally:
        peer.close()
    wait_for(lambda: not second.exists(), "the end of all processes", 30)
    assert not list(place.iterdir()) and not set(Path("/tmp").glob("hivemind-*")) - others
