"""Build a network over hivemind with the real validator and judge, and real DHT peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, PeerID

from distributed_training.config import Config
from distributed_training.exchange.hivemind import (
    Membership,
    NoAllReduce,
    Ready,
    Settings,
    start_peer,
)
from distributed_training.protocol.manifest import Manifest
from distributed_training.validator.average import AveragingValidator
from tests.tools.store_world import StoreMiner, StoreWorld, keypair
from tests.tools.waiting import wait_for

AFTER, GATHER, LONGEST = 2.0, 3.0, 30.0  # seconds


class AveragingConfig(Config):
    """The configuration of a network over hivemind."""

    averages = property(lambda self: True)  # type: ignore[assignment]


class MemberPeer:
    """Run a member's peer process. ``kind``: how it misbehaves; see :mod:`~.hivemind_peers`."""

    def __init__(self, world: HivemindWorld, uid: int, kind: str = "") -> None:
        self.world, self.uid = world, uid
        folder = world.folder / f"peer-{uid}"
        identity = folder / "swarm" / "identity.key"
        identity.parent.mkdir(parents=True)
        P2P.generate_identity(str(identity))
        self.id = str(PeerID.from_identity(identity.read_bytes()))
        self._kind = identity.parent / "kind"
        self.behave(kind)
        self.readies: list[Ready] = []
        self.process = start_peer(
            world.peer_settings(identity),
            ready=self._on_ready,
            answered=lambda answer: None,
            module="tests.tools.hivemind_peers",
        )

    def behave(self, kind: str) -> None:
        """Misbehave as ``kind`` says from the next order on; with "" behave honestly."""
        self._kind.write_text(kind)

    def _on_ready(self, ready: Ready) -> None:
        port = int(ready.address.split("/")[4])
        self.world.ledger.serve(
            keypair(f"miner-{self.uid}").ss58_address, "127.0.0.1", port, self.id
        )
        self.readies.append(ready)

    def order(self) -> None:
        """Order the all-reduce of the current close, as :class:`HivemindRounds` does."""
        world, state = self.world, self.world.state
        manifest = world.manifest(state.outer_step)
        own = keypair(f"miner-{self.uid}").ss58_address
        upload = str(world.folder / f"upload-{self.uid}.safetensors")
        members = Membership(world.chain.neurons, own, world.master.ss58_address, AFTER)
        with suppress(NoAllReduce):
            self.process.send(members.build_order(state, world.clock(), manifest, upload=upload))


class HivemindWorld(StoreWorld):
    """``kinds``: how the peer of a uid misbehaves."""

    def __init__(
        self, folder: Path, *, uids: Sequence[int] = (3, 5, 17), kinds: Any = None, **changes: Any
    ) -> None:
        super().__init__(folder, uids=uids, own=True, **changes)
        kinds = kinds or {}
        self.peers = {uid: MemberPeer(self, uid, kinds.get(uid, "")) for uid in uids}
        self.await_peers()

    def await_peers(self) -> None:
        def all_ready() -> bool:
            found = [n for n in self.chain.neurons() if n.peer]
            return len(found) == len(self.uids) + 1

        wait_for(all_ready, "every peer is ready", 120)

    def peer_settings(self, identity: Path) -> Settings:
        return Settings(
            schema=[(name, tuple(shape)) for name, shape in self.schema],
            run_id=self.run_id,
            identity=str(identity),
            listen="127.0.0.1",
            port=0,
            gather=GATHER,
            chunk=3.0,
        )

    def restart(self, *, folder: Path | None = None) -> None:
        self.config = _averaging(self.config)
        self.stop_peer()
        super().restart(folder=folder)
        assert isinstance(self.validator, AveragingValidator)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.process.close()
        self.stop_peer()
        self.closing.close()

    def stop_peer(self) -> None:
        """End the validator's peer, as the end of the validator does."""
        if hasattr(self, "validator") and hasattr(self.validator, "peer"):
            self.validator.peer.close()
            self.ledger.serve(self.master.ss58_address, "127.0.0.1", 0, "")

    # --- a round --------------------------------------------------------------------------------

    def upload(self, miner: StoreMiner, **changes: Any) -> None:
        """Let a member upload, and keep the file for its peer."""
        data = miner.encode(**changes)
        (self.folder / f"upload-{miner.uid}.safetensors").write_bytes(data)
        miner.upload(data)

    def average_round(self, *, silent: Sequence[int] = ()) -> Manifest:
        """Let all members train, upload and average, and let the validator end the round.

        ``silent``: members that upload, but do not average.
        """
        before = self.state.outer_step
        self.train()
        self.until_close()
        for uid in self.uids:
            self.upload(self.miners[uid])
        for uid in self.uids:
            if uid not in silent:
                self.peers[uid].order()
        self.until_step(before + 1)
        return self.manifest(self.state.outer_step)

    def until_step(self, outer_step: int) -> None:
        """Let the validator work until that outer step, in real time, because the peers need it."""

        def reached() -> bool:
            self.tick()
            return self.state.outer_step >= outer_step

        wait_for(reached, f"outer step {outer_step}", 120)


def _averaging(config: Config) -> Config:
    swarm = dataclasses.replace(config.swarm, dht_ip="127.0.0.1", dht_port=0)
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    from datetime import timedelta

    grace, after = timedelta(seconds=LONGEST), timedelta(seconds=AFTER)
    fields["rounds"] = dataclasses.replace(config.rounds, grace=grace, average_after=after)
    return AveragingConfig(**{**fields, "swarm": swarm})
