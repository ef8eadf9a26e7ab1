"""Checks across settings. Each problem is one line: cause, consequence, remedy.

These need neither network nor GPU; ``diagnostics`` looks at the machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from datetime import timedelta

from pydantic import SecretStr

from distributed_training.protocol.names import NETUID

from .flags import ConfigError
from .model import Config
from .schema import schema
from .swarm import PUBLIC_PART_SIZE

# Waiting times from the innermost to the outermost. Each must end before the one around it, or an
# inner failure is never seen as what it is. Names a room does not (yet) have are skipped.
TIMEOUT_HIERARCHY = (
    "neuron.next_chunk_timeout",
    "neuron.allreduce_timeout",
    "neuron.round_timeout",
    "neuron.round_reload_timeout",
)

_COMMITMENT_PARTS = (
    ("R2_ACCOUNT_ID", 32),
    ("R2_READ_ACCESS_KEY_ID", 32),
    ("R2_READ_SECRET_ACCESS_KEY", 64),
)
_REQUIRED_KEYS = (
    "R2_ACCOUNT_ID",
    "R2_READ_ACCESS_KEY_ID",
    "R2_READ_SECRET_ACCESS_KEY",
    "R2_WRITE_ACCESS_KEY_ID",
    "R2_WRITE_SECRET_ACCESS_KEY",
)


def problems(config: Config) -> list[str]:
    """What keeps this configuration from running; empty if nothing does."""
    return [line for check in CHECKS for line in check(config)]


def notices(config: Config) -> list[str]:
    """What an operator should know but need not change."""
    lines = []
    micro, effective = _batch_sizes(config)
    world = config.get("nproc_per_node")
    if micro and effective and world and effective % (micro * world):
        rounded = -(-effective // (micro * world)) * micro * world
        lines.append(
            f"--neuron.local_batch_size_train_effective {effective} does not divide by micro-batch "
            f"{micro} x world size {world}: rounded up to {rounded}"
        )
    return lines


def _batch_sizes(config: Config) -> tuple[int | None, int | None]:
    micro = config.get("neuron.local_batch_size_train")
    effective = config.get("neuron.local_batch_size_train_effective")
    return (
        micro if isinstance(micro, int) and micro > 0 else None,  # "auto" is not known yet
        effective if isinstance(effective, int) and effective > 0 else None,
    )


def check_network(config: Config) -> Iterator[str]:
    netuid = config.get("netuid")
    if config.is_public and netuid is not None and netuid != NETUID:
        yield (
            f"--netuid {netuid} is not this subnet, so no peer would be found: "
            f"give --netuid {NETUID}, or --preset local for a subnet on this machine"
        )
    if config.is_public and config.get("neuron.use_dct"):
        yield (
            "--neuron.use_dct changes the meaning of the gradient's indices, so every validator of "
            "the public network would reject the uploads: remove the flag"
        )
    part = config.get("neuron.part_size_bytes")
    if config.is_public and part != PUBLIC_PART_SIZE:
        yield (
            f"--neuron.part_size_bytes {part} is not how the public network cuts tensors "
            f"({PUBLIC_PART_SIZE}), so every round with this miner would fail for its whole group: "
            "remove the flag"
        )


def check_batches(config: Config) -> Iterator[str]:
    micro, effective = _batch_sizes(config)
    if micro and effective and micro > effective:
        yield (
            f"--neuron.local_batch_size_train {micro} is larger than "
            f"--neuron.local_batch_size_train_effective {effective}, so an inner step would hold "
            f"more than asked: give --neuron.local_batch_size_train {effective} or less"
        )


def check_timeouts(config: Config) -> Iterator[str]:
    known = [(n, config.get(n)) for n in TIMEOUT_HIERARCHY]
    inner_name, inner = "", None
    for name, value in known:
        if not isinstance(value, timedelta):
            continue
        if inner is not None and inner >= value:
            yield (
                f"--{inner_name} ({inner.total_seconds():g}s) is not shorter than --{name} "
                f"({value.total_seconds():g}s), so a slow peer would use up the whole wait: "
                f"give --{inner_name} less than {value.total_seconds():g}s"
            )
        inner_name, inner = name, value


def check_ports(config: Config) -> Iterator[str]:
    used: dict[int, str] = {}
    for name, value in config.values.items():
        if name.rpartition(".")[2] != "port" or not isinstance(value, int):
            continue
        if value and value in used:
            yield (
                f"--{name} and --{used[value]} are both {value}, so the second could not listen: "
                f"give --{name} another port"
            )
        used[value] = name


def check_addresses(config: Config) -> Iterator[str]:
    for name in ("axon.external_ip", "dht.ip"):
        value = str(config.get(name) or "auto").strip("[]")
        if config.is_public and value != "auto" and _is_nowhere(value):
            yield (
                f"--{name} {value} cannot be reached from other machines, so no validator and no "
                "peer could call this miner: give its public address, or remove the flag"
            )


def _is_nowhere(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return address.is_unspecified or address.is_loopback or address.is_multicast


def check_sources(config: Config) -> Iterator[str]:
    try:
        config.data.sources  # noqa: B018
    except ConfigError as error:
        yield str(error)


def check_keys(config: Config) -> Iterator[str]:
    by_variable = {s.env: config.get(s.name) for s in schema(config.kind) if s.env}
    present = {name: _plain(by_variable[name]) for name in _REQUIRED_KEYS if name in by_variable}
    missing = [name for name, text in present.items() if not text]
    if missing:
        yield (
            f"{', '.join(missing)} not set, so nothing could be published: put them into .env "
            "(R2 dashboard, Manage API tokens; one token to read, one to read and write)"
        )
        return
    for part in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        if present[f"R2_READ_{part}"] == present[f"R2_WRITE_{part}"]:
            yield (
                f"R2_READ_{part} and R2_WRITE_{part} are equal, and the read key is published on "
                "the chain for ever, so anybody could overwrite this bucket: make a second token "
                "that may only read (R2 dashboard, Manage API tokens) and put it into .env"
            )
    if not config.is_public:
        return
    for variable, length in _COMMITMENT_PARTS:
        text = present.get(variable)
        if text is not None and len(text) != length:
            yield (
                f"{variable} has {len(text)} characters instead of {length}, so validators would "
                "drop this miner's commitment: copy it again from the R2 dashboard into .env"
            )


def _plain(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value) if value else ""


CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    check_network,
    check_batches,
    check_timeouts,
    check_ports,
    check_addresses,
    check_sources,
    check_keys,
)
