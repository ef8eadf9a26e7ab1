"""Open the exchange that a network's file names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from bittensor_core import verify

from distributed_training.config import Config
from distributed_training.node.identity import Member
from distributed_training.protocol.manifest import Master
from distributed_training.store.base import ObjectStore

from .own_uploads import OwnUploads
from .store_rounds import StoreRounds


def open_exchange(
    config: Config,
    member: Member,
    folder: Path,
    *,
    store: ObjectStore,
    uploads: ObjectStore,
    at_head: Callable[[], object],
) -> StoreRounds:
    """Return the network's exchange, which is not started.

    Args:
        config: The configuration, with the network's file.
        member: Who takes part.
        folder: The run folder.
        store: The network's bucket.
        uploads: The bucket for this member's uploads.
        at_head: Called in the exchange's thread at each new outer step.
    """
    kind: Callable[..., StoreRounds] = StoreRounds
    if config.averages:
        # Here: a member of a store network has nothing of hivemind in its memory.
        from .hivemind import HivemindRounds, Membership
        from .peer import open_peer

        master, after = config.miner.master_ss58_address, config.miner.average_after.total_seconds()
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
        longest=config.round_period,
        at_head=at_head,
    )


def uploads_folder(folder: Path) -> Path:
    """Return where this member's uploads are written, in its run folder."""
    return folder / "exchange" / "uploads"
