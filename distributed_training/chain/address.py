"""The address validators reach this miner at."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import timedelta

import httpx

from distributed_training.config.chain import ChainSettings

# Each answers a GET with the caller's address as text.
SERVICES = (
    "https://checkip.amazonaws.com",
    "https://api.ipify.org",
    "https://icanhazip.com",
)


class AddressUnknown(RuntimeError):
    """Nobody told a global address: the network may be away for a while."""


def external_ip(
    settings: ChainSettings,
    *,
    services: Sequence[str] = SERVICES,
    timeout: timedelta = timedelta(seconds=5),
) -> str:
    """``--axon.external_ip``; else the listening address if it is a definite one; else what the
    first of ``services`` to answer says. ``timeout`` covers one question.

    Raises AddressUnknown when none of them tells a global address: an endpoint written to the chain
    that nobody can reach earns nothing.
    """
    if settings.external_ip:
        return settings.external_ip.strip("[]")
    own = settings.axon_ip.strip("[]")
    if own and not ipaddress.ip_address(own).is_unspecified:
        return own
    for service in services:
        try:
            reply = httpx.get(service, timeout=timeout.total_seconds(), follow_redirects=False)
            reply.raise_for_status()
            found = ipaddress.ip_address(reply.text.strip()[:64])
        except (httpx.HTTPError, ValueError):
            continue
        if found.is_global:
            return str(found)
    raise AddressUnknown(
        "the public address of this machine is unknown, so validators could not reach the miner: "
        "give it with --axon.external_ip"
    )
