"""An identity that hivemind takes for its own."""

from __future__ import annotations

from pathlib import Path

from distributed_training.common.swarm_identity import identity_file, make_identity


def test_hivemind_reads_the_identity_and_derives_the_same_peer_id(tmp_path: Path) -> None:
    from hivemind.p2p import PeerID

    peer_id = make_identity(tmp_path)
    assert str(PeerID.from_identity(identity_file(tmp_path).read_bytes())) == peer_id
    assert identity_file(tmp_path).stat().st_mode & 0o777 == 0o600
    assert make_identity(tmp_path / "other") != peer_id
