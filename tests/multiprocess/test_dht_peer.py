"""Test what a peer process leaves on the disk. Its rounds: tests/promises."""

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


def test_a_peer_that_is_killed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="peer-") as short:  # sockets are made there
        monkeypatch.setenv("TMPDIR", short)
        others = set(Path("/tmp").glob("hivemind-*"))
        identity = Path(short) / "identity"
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
            (scratch,) = Path(short).glob("dt-peer-*")
            first = set(scratch.iterdir())
            assert any(each.is_socket() for each in first)
            assert peer.pid is not None
            os.kill(peer.pid, signal.SIGKILL)
            wait_for(lambda: len(readies) == 2, "the start after the kill", 60)
            assert not first & set(scratch.iterdir()), "of the killed one"
        finally:
            peer.close()
        wait_for(lambda: not scratch.exists(), "the end of all processes", 30)
        assert [each.name for each in Path(short).iterdir()] == ["identity"]
        assert not set(Path("/tmp").glob("hivemind-*")) - others
