"""Addresses of validators, which are let in while a flood keeps strangers out.

An address becomes trusted when a call of a neuron with a validator permit was verified from it, and
stays so over a restart (:mod:`.kept`), since a flood does not end with one. Endpoints that
validators have written to the chain are trusted too: a validator that has never called gets through
if it calls from the address it serves at.

Trust opens no door: it only spares an address the limits that all strangers share. What is trusted
may still open a few connections at a time only, and its requests are checked like all others.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import OrderedDict
from collections.abc import Iterable

from .kept import MOST_VALIDATORS


def normalize(address: str) -> str:
    """One key per client: IPv4 also when mapped into IPv6, IPv6 by its /64."""
    if "." in address and ":" not in address:
        return address
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False).network_address) + "/64"
    return str(parsed)


class TrustedAddresses:
    """Keys as :func:`normalize` makes them. Thread-safe.

    ``callers``: those kept from before. At most ``MOST_VALIDATORS`` are kept, the latest; the
    chain's endpoints are bounded by its uids.
    """

    def __init__(self, callers: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._endpoints: frozenset[str] = frozenset()
        self._callers: OrderedDict[str, None] = OrderedDict.fromkeys(callers)

    def __contains__(self, address: str) -> bool:
        return address in self._callers or address in self._endpoints

    def add(self, address: str) -> None:
        """A validator called from here."""
        with self._lock:
            if len(self._callers) >= MOST_VALIDATORS and address not in self._callers:
                self._callers.popitem(last=False)
            self._callers[address] = None

    def callers(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._callers)

    def set_endpoints(self, addresses: Iterable[str]) -> None:
        """The endpoints of validators as the chain shows them now."""
        self._endpoints = frozenset(map(normalize, addresses))
