"""Claim a network's global bucket, and find the model that the network's file describes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from bittensor_core import verify

from distributed_training.config import Config, ConfigError
from distributed_training.config.versions import Versions
from distributed_training.network import LARGEST_FILE, LARGEST_SHOWN, Network, Shown
from distributed_training.node.identity import Member
from distributed_training.node.start import WrongPlace
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Master, State
from distributed_training.store.base import ObjectStore
from distributed_training.store.errors import IntegrityError


class GlobalStateError(RuntimeError):
    """The validator cannot continue from the global bucket's content. The text says what to do."""


def network_model(config: Config) -> Mapping[str, Any]:
    """Return the model's configuration from the network's file. Raises ConfigError."""
    if config.network.model is None:
        raise ConfigError(
            "the network's file does not describe its model, so nothing was published or "
            "recomputed: use the file that dt-network init wrote, or start a whole network on this "
            "machine with `make run`"
        )
    return config.network.model


def claim_global_bucket(
    store: ObjectStore,
    network: Network,
    *,
    versions: Versions | None = None,
    member: Member | None = None,
) -> None:
    """Mark the global bucket as the network's.

    Files that are already right are not written again. ``versions``: the versions of the network's
    file, which miners read there; ``network`` is the newest. ``member``: signs if it is the master.

    Raises WrongPlace if the bucket is another founder's: two networks with the same name would
    overwrite each other's model. Raises StoreError.
    """
    master, sign = network.values["chain.master_hotkey"], None
    wanted = Shown.of(network)
    if member is not None and member.hotkey == master:
        sign = member.wallet.hotkey.sign
        wanted = replace(wanted, network=network.values["run_id"])
    shown: Shown | None = None
    with suppress(ValueError, IntegrityError):  # a damaged file is replaced below
        shown = Shown.parse(store.get(keys.NETWORK, limit=LARGEST_SHOWN) or b"")
    owner = master if shown is None else shown.master
    # Anybody can write an unsigned file, or sign a file with a new key.
    proven = shown is not None and shown.network is not None
    if sign is not None and owner != master and (not proven or _is_led(store, network)):
        owner = master
    if owner != master:
        raise WrongPlace(
            f"the global bucket {store.bucket} is another network's (its master is {owner}, not "
            f"{master}), so each would overwrite the other's model and nothing was started: set "
            "another store.global_bucket in this network's file and sign it again"
        )
    for version in versions.known if versions is not None else ():
        key, data = keys.VERSION.format(version.head.version), version.text.encode()
        with suppress(IntegrityError):
            if store.get(key, limit=LARGEST_FILE) == data:
                continue
        store.put(key, data)
    # Write this file last, because miners look for the version that it names.
    if shown != wanted:
        store.put(keys.NETWORK, wanted.to_bytes(sign))


def _is_led(store: ObjectStore, network: Network) -> bool:
    """Return whether the bucket's state is signed by the master of ``network``."""
    master = Master(network.values["run_id"], network.values["chain.master_hotkey"], verify)
    with suppress(ValueError, IntegrityError):
        State.parse(store.get(keys.STATE, limit=State.most_bytes) or b"", master)
        return True
    return False
