"""Test what a peer process leaves on the disk; tests/promises tests its rounds."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hivemind.p2p import P2P

from distributed_training.exchange.hivemind import Ready, Settings, start_peer
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("name", ["short", "long" * 20])
def test_a_peer_that_is_killed_leaves_nothing_behind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        place = Path(folder, name)  # no socket fits into the long path
        place.mkdir()
        monkeypatch.setenv("TMPDIR", str(place))
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
        # Torch removes its own folder when the last process has ended.
        left = lambda: second.exists() or list(place.iterdir())
        wait_for(lambda: not left(), "the end of all processes", 30)
