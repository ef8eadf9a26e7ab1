"""Open the exchange that the network's file names and, for hivemind, the DHT peer it needs."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bittensor_core import verify

from distributed_training.chain.identity import AddressUnknown
from distributed_training.common.processes import ChildProcess
from distributed_training.config import Config
from distributed_training.node.identity import Member, announce, public_address
from distributed_training.protocol.manifest import Master
from distributed_training.protocol.types import Schema
from distributed_training.store.base import ObjectStore

from .own_uploads import OwnUploads
from .store_rounds import StoreRounds

if TYPE_CHECKING:
    from .hivemind import Answer, Ready

log = logging.getLogger(__name__)

_MATCHMAKING = (2.0, 15.0)  # seconds, least and most; otherwise a tenth of the all-reduce's time
_CHECK = 5.0  # seconds for a connection to our own port


def open_exchange(
    config: Config,
    member: Member,
    folder: Path,
    *,
    store: ObjectStore,
    uploads: ObjectStore,
    at_head: Callable[[], object],
) -> StoreRounds:
    """Return the network's exchange, not yet started.

    Args:
        config: The configuration, with the network's file.
        member: The member that takes part.
        folder: The run folder.
        store: The network's bucket.
        uploads: The bucket for this member's uploads.
        at_head: Called in the exchange's thread at each new outer step.
    """
    kind: Callable[..., StoreRounds] = StoreRounds
    if config.averages:
        # Import it only here, so that members of a store network load nothing of hivemind.
        from .hivemind import HivemindRounds, Membership

        master = config.miner.master_ss58_address
        after = config.rounds.average_after.total_seconds()
        kind = partial(
            HivemindRounds,
            membership=Membership(member.chain.neurons, member.hotkey, master, after),
            open_peer=partial(open_peer, config, member, folder),
        )
    return kind(
        store,
        folder / "exchange",
        master=Master(config.swarm.run_id, config.miner.master_ss58_address, verify),
        uploads=OwnUploads(uploads, uploads_folder(folder), member.uid),
        longest=config.rounds.period,
        at_head=at_head,
    )


def uploads_folder(folder: Path) -> Path:
    """Return the folder inside the run folder to which this member's uploads are written."""
    return folder / "exchange" / "uploads"


def open_peer(
    config: Config, member: Member, folder: Path, schema: Schema, answered: Callable[[Answer], None]
) -> ChildProcess:
    """Start a member's peer process. ``folder``: the run folder. Raises OSError."""
    from .hivemind import Settings, start_peer

    swarm, identity = config.swarm, (folder / "swarm" / "identity.key").absolute()
    identity.parent.mkdir(parents=True, exist_ok=True)
    left = (config.rounds.grace - config.rounds.average_after).total_seconds()
    port = swarm.dht_external_port or swarm.dht_port
    settings = Settings(
        schema=[(name, tuple(shape)) for name, shape in schema],
        run_id=swarm.run_id,
        identity=str(identity),
        listen=swarm.dht_listen_ip,
        port=swarm.dht_port,
        address=f"/ip4/{swarm.dht_ip}/tcp/{port}" if swarm.dht_ip and port else "",
        gather=min(max(left / 10, _MATCHMAKING[0]), _MATCHMAKING[1]),
        chunk=max(5.0, left / 3),  # a validator that is fetching and judging slows its peer down
    )
    return start_peer(settings, ready=partial(announce_peer, config, member), answered=answered)


def announce_peer(config: Config, member: Member, peer: Ready) -> None:
    """Announce our peer's address on the chain; warn if this machine cannot reach it there."""
    listening = int(peer.address.split("/")[4])
    port = config.swarm.dht_external_port or listening
    try:
        ip = public_address(config)
    except AddressUnknown as error:
        log.warning("%s; it takes part in no all-reduce, and its uploads still count", error)
        return
    announce(member, ip, port, peer.peer_id)
    log.info("DHT peer %s at %s:%d", peer.peer_id, ip, port)
    try:
        socket.create_connection((ip, port), timeout=_CHECK).close()
    except OSError as error:
        log.warning(
            "The DHT peer's port may be closed: this machine cannot reach %s:%d (%s). Some routers "
            "never route a machine back to itself. If no all-reduce finishes with this peer, open "
            "TCP port %d in the firewall, forward it in the router, or set --dht.ip; uploads "
            "count all the same",
            *(ip, port, error.strerror or error, listening),
        )
