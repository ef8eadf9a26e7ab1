"""Whether the nodes of a miner of several machines can meet, and who else could join in."""

from __future__ import annotations

import ipaddress
import os
import random
import socket
from datetime import timedelta

from distributed_training.config import Config, ConfigError
from distributed_training.diagnostics.checks import Check
from distributed_training.miner.several_nodes import VARIABLES, address_of, interface_of

_TIMEOUT = timedelta(seconds=5)


def check_nodes(config: Config, *, offline: bool) -> list[Check]:
    """None for one machine; without ``--rdzv_endpoint`` the configuration's check says so."""
    settings = config.nodes
    if not settings.several or settings.rdzv_endpoint is None:
        return []
    try:
        address, port = address_of(settings.rdzv_endpoint)
        if settings.leads:
            own, found = address, f"other nodes find this one at {settings.rdzv_endpoint}"
        elif offline:
            return [Check("nodes", "skip", "--offline: node 0 is not asked")]
        else:
            with socket.create_connection((address, port), _TIMEOUT.total_seconds()) as line:
                own = line.getsockname()[0].partition("%")[0]
            found = f"node 0 answers at {settings.rdzv_endpoint}"
            if problem := _blocked(address):
                found += f", but not at port {problem}, so its ranks could not be reached"
                remedy = f"let all TCP ports through from {own} in the firewall of node 0"
                return [Check("nodes", "fail", found, f"{remedy}: docs/several-machines.md")]
        interface = interface_of(own)
    except ConfigError as error:
        finding, _, remedy = str(error).rpartition(": ")
        return [Check("nodes", "fail", finding, remedy)]
    except OSError as error:
        finding = f"node 0 does not answer at {settings.rdzv_endpoint} ({error.strerror or error})"
        remedy = "start node 0, and open all TCP ports between the nodes (docs/several-machines.md)"
        return [Check("nodes", "warn", finding, remedy)]
    checks = [Check("nodes", "ok", f"{found}, interface {interface}")]
    if ipaddress.ip_address(own).is_global:
        finding = f"{own} is a public address, and what nodes tell each other has no password"
        remedy = f"let only the nodes reach interface {interface}: docs/several-machines.md"
        checks.append(Check("nodes' firewall", "warn", finding, remedy))
    else:
        checks.append(Check("nodes' firewall", "ok", f"{own} is no public address"))
    for name in VARIABLES:
        if (wanted := os.environ.get(name)) and interface not in wanted:
            finding = f"{name} is {wanted}, the rendezvous goes through {interface}"
            checks.append(Check("nodes' interface", "warn", finding, f"unset {name}, if not meant"))
    return checks


def _blocked(address: str) -> str | None:
    """A port such as ranks listen at, and why it cannot be reached. Where nobody listens a machine
    itself refuses at once, and a firewall keeps silent or says that it is one."""
    port = random.randrange(32768, 60999)
    try:
        socket.create_connection((address, port), _TIMEOUT.total_seconds()).close()
    except ConnectionRefusedError:
        return None
    except OSError as error:
        return f"{port} ({error.strerror or error})"
    return None
