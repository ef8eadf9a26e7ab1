"""The DHT peer of a member or validator: its settings, and where others find it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path

from distributed_training.chain.identity import AddressUnknown, identity_file
from distributed_training.config import Config
from distributed_training.node.identity import Member, announce, public_address
from distributed_training.protocol.types import Schema

from .hivemind import Ready, Settings

log = logging.getLogger(__name__)

_MATCHMAKING = (2.0, 15.0)  # seconds, least and most: a tenth of what an all-reduce has
_CHECK = 5.0  # seconds for a connection to our own port


def peer_settings(
    config: Config, schema: Schema, run_folder: Path, *, witness: bool = False
) -> Settings:
    """Return the settings of a peer process. ``witness``: the validator's, which reduces nothing.

    Raises OSError.
    """
    swarm = config.swarm
    left = (config.miner.grace - config.miner.average_after).total_seconds()
    gather = min(max(left / 10, _MATCHMAKING[0]), _MATCHMAKING[1])
    identity = identity_file(run_folder)
    identity.parent.mkdir(parents=True, exist_ok=True)
    address = ""
    if swarm.dht_ip and (port := swarm.dht_external_port or swarm.dht_port):
        address = f"/ip4/{swarm.dht_ip}/tcp/{port}"
    return Settings(
        schema=[(name, tuple(shape)) for name, shape in schema],
        run_id=config.swarm.run_id,
        identity=str(identity.absolute()),
        listen=swarm.dht_listen_ip,
        port=swarm.dht_port,
        address=address,
        witness=witness,
        gather=gather,
        chunk=max(5.0, left / 6),  # a validator that judges holds up its own peer for seconds
        longest=left,
    )


def announcer(config: Config, member: Member) -> Callable[[Ready], None]:
    """Return what writes to the chain where our peer is, each time that it is ready."""

    def ready(peer: Ready) -> None:
        listening = int(peer.addresses[0].split("/tcp/")[1].split("/")[0])
        port = config.swarm.dht_external_port or listening
        try:
            ip = config.swarm.dht_ip or public_address(config)
        except AddressUnknown as error:
            log.warning("%s; it takes part in no all-reduce, and its uploads still count", error)
            return
        announce(member, ip, port, peer.peer_id)
        log.info("DHT peer %s at %s:%d", peer.peer_id, ip, port)
        try:
            socket.create_connection((ip, port), timeout=_CHECK).close()
        except OSError as error:
            log.warning(
                "The DHT peer's port may be closed: this machine cannot reach %s:%d (%s), as "
                "behind routers that lead no machine back to itself. If no all-reduce finishes "
                "with it, open TCP port %d in the firewall, forward it in the router, or give "
                "--dht.ip; its uploads count all the same",
                ip,
                port,
                error.strerror or error,
                listening,
            )

    return ready
