"""Checks across settings. Each problem is one line: cause, consequence, remedy.

These need neither network nor GPU; ``diagnostics`` looks at the machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from itertools import pairwise

from pydantic import SecretStr

from .model import Config
from .settings import ChainSettings, SwarmSettings
from .types import ConfigError, show

# Waiting times from the innermost to the outermost. Each must end before the one around it, or an
# inner failure is never seen as what it is.
TIMEOUT_HIERARCHY = (
    "neuron.next_chunk_timeout",
    "neuron.allreduce_timeout",
    "neuron.round_timeout",
    "neuron.round_reload_timeout",
)

# Fields of StoreSettings, and how many characters R2 gives each. A commitment on the chain has no
# separators: validators drop one whose parts are longer or shorter.
_KEYS = {
    "account_id": 32,
    "read_access_key_id": 32,
    "read_secret_access_key": 64,
    "write_access_key_id": 32,
    "write_secret_access_key": 64,
}
#: The variables that hold them.
KEY_VARIABLES = tuple(f"R2_{name.upper()}" for name in _KEYS)


def problems(config: Config) -> list[str]:
    """List the lines that keep this configuration from running; empty if nothing does."""
    return [line for check in CHECKS for line in check(config)]


def check_network(config: Config) -> Iterator[str]:
    source = config.sources.get("network")
    if source is not None and config.general.network is None:  # a shell's variable was not set
        yield (
            f"{source} is empty, so the miner would join the public network: give a file or its "
            "https:// URL, or remove it"
        )
    if not config.is_public or config.network is not None:  # of a network's file: in the loader
        return
    if config.chain.netuid != (netuid := ChainSettings().netuid):
        yield (
            f"--netuid {config.chain.netuid} is not this subnet, so no peer would be found: "
            f"give --netuid {netuid}, or --preset local for a subnet on this machine"
        )
    if config.training.use_dct:
        yield (
            "--neuron.use_dct changes the meaning of the gradient's indices, so every validator of "
            "the public network would reject the uploads: remove the flag"
        )
    if config.swarm.part_size != (public := SwarmSettings().part_size):
        yield (
            f"--neuron.part_size_bytes {config.swarm.part_size} is not how the public network cuts "
            f"tensors ({public}), so every round with this miner would fail for its "
            "whole group: remove the flag"
        )


def check_batches(config: Config) -> Iterator[str]:
    micro = config.training.local_batch_size_train
    effective = config.training.local_batch_size_train_effective
    if micro != "auto" and micro > effective:
        yield (
            f"--neuron.local_batch_size_train {micro} is larger than "
            f"--neuron.local_batch_size_train_effective {effective}, so an inner step would hold "
            f"more than asked: give --neuron.local_batch_size_train {effective} or less"
        )


def check_nodes(config: Config) -> Iterator[str]:
    nodes = config.nodes
    if not nodes.several:
        return
    if nodes.rdzv_endpoint is None:
        yield (
            f"--nnodes (or SLURM_NNODES) {nodes.nnodes} without --rdzv_endpoint, so the nodes "
            "cannot meet: give all of them HOST:PORT of node 0"
        )
    if nodes.node_rank >= nodes.most:
        yield (
            f"--node_rank (or SLURM_NODEID) {nodes.node_rank} is not one of {nodes.most} nodes, "
            "which count from 0, so it has no part: "
            f"give --node_rank 0 to {nodes.most - 1}"
        )


def check_timeouts(config: Config) -> Iterator[str]:
    for (name, inner), (around, outer) in pairwise((n, config.get(n)) for n in TIMEOUT_HIERARCHY):
        # Equal ones too: chance would decide which of the two ends first.
        if inner >= outer:
            yield (
                f"--{name} ({show(inner)}) is not shorter than --{around} ({show(outer)}), so a "
                f"slow peer would use up the whole wait: give --{name} less than {show(outer)}"
            )


def check_run_folder(config: Config) -> Iterator[str]:
    source = config.sources.get("neuron.run_folder")
    if source is not None and config.miner.run_folder is None:  # a shell's variable was not set
        yield (
            f"{source} is empty, so the miner would begin again in {config.run_folder} and leave "
            "its checkpoints where they are: give a folder, or remove it"
        )


def check_ports(config: Config) -> Iterator[str]:
    first, second = config.chain.axon_port, config.swarm.dht_port
    # Two times 0 are two free ports.
    if first == second != 0:
        yield (
            f"--axon.port and --dht.port are both {first}, so the second could not listen: give "
            "--dht.port another port"
        )


def check_addresses(config: Config) -> Iterator[str]:
    for name in ("axon.external_ip", "dht.ip"):
        value = (config.get(name) or "").strip("[]")
        if config.is_public and value and _is_nowhere(value):
            yield (
                f"--{name} {value} cannot be reached from other machines, so no validator and no "
                "peer on the public network could call this miner: give its public address, or "
                "remove the flag"
            )
    port = config.swarm.dht_external_port
    if config.kind == "validator" and port is not None and config.swarm.dht_ip is None:
        yield (
            f"--dht.external_port {port} without --dht.ip, so a validator would announce neither: "
            "give its public address too"
        )


def _is_nowhere(text: str) -> bool:
    """Return whether an address cannot be reached from the internet.

    It is of this machine, of a local network, of many machines (broadcast and multicast) or of
    nobody (reserved, of documents).
    """
    address = ipaddress.ip_address(text)
    # Asked apart: Python calls most multicast addresses global.
    return address.is_multicast or not address.is_global


def check_sources(config: Config) -> Iterator[str]:
    try:
        sources = config.data.sources
    except ConfigError as error:
        yield str(error)
        return
    if len(sources) > 1 and (config.data.revision, config.data.rows) != (None, None):
        yield (
            f"--data.source {config.data.source} names several sources and the network's file pins "
            "one, so its pages would not be those of the other peers: give one"
        )


def check_keys(config: Config) -> Iterator[str]:
    if not config.nodes.leads:
        return  # nothing is published there
    keys = {f"R2_{name.upper()}": _plain(getattr(config.store, name)) for name in _KEYS}
    missing = [variable for variable, text in keys.items() if not text]
    # Alone: of keys that are not there no comparison is worth a line.
    if missing:
        yield (
            f"{', '.join(missing)} not set, so nothing could be uploaded: put them into .env "
            "(R2 dashboard, Manage API tokens; one token to read, one to read and write)"
        )
        return
    for part in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        if keys[f"R2_READ_{part}"] == keys[f"R2_WRITE_{part}"]:
            yield (
                f"R2_READ_{part} and R2_WRITE_{part} are equal, and the read key is published on "
                "the chain for ever, so anybody could overwrite this bucket: make a second token "
                "that may only read (R2 dashboard, Manage API tokens) and put it into .env"
            )
    if not config.is_public or config.store.endpoint_url is not None:
        return  # the lengths are R2's
    for (variable, text), length in zip(keys.items(), _KEYS.values(), strict=True):
        if len(text) == length:
            continue
        if "_WRITE_" in variable:
            consequence = "the store would refuse every upload"
        else:
            consequence = "validators would drop this miner's commitment"
        yield (
            f"{variable} has {len(text)} characters instead of {length}, so {consequence}: copy it "
            "again from the R2 dashboard into .env"
        )


def _plain(value: SecretStr | str | None) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else value or ""


# A start shows the first problem alone: what makes the others pointless stands first.
CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    check_network,
    check_batches,
    check_nodes,
    check_timeouts,
    check_run_folder,
    check_ports,
    check_addresses,
    check_sources,
    check_keys,
)
