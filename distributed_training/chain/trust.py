"""Addresses of validators, which are let in while a flood keeps strangers out.

An address becomes trusted when a call of a neuron with a validator permit was verified from it. The
file keeps these over a restart, since a flood does not end with it. Endpoints that validators have
written to the chain are trusted too: a validator that has never called gets through if it calls
from the address it serves at.

Trust opens no door: it only spares an address the limits that all strangers share. What is trusted
may still open a few connections at a time only, and its requests are checked like all others.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from distributed_training.common.files import read_json_object, write_json

log = logging.getLogger(__name__)

MOST = 1024
_LARGEST_FILE = 256 * 1024  # bytes


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
    """Keys as :func:`normalize` makes them. Thread-safe. ``file`` None: forgotten with the process.

    At most ``MOST`` callers are kept, the latest; the chain's endpoints are bounded by its uids.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._endpoints: frozenset[str] = frozenset()
        self._callers: OrderedDict[str, None] = OrderedDict()
        self._changed = False
        if file is not None and file.exists():
            self._callers.update(dict.fromkeys(self._load(file)))

    @staticmethod
    def _load(file: Path) -> list[str]:
        content = read_json_object(file, at_most=_LARGEST_FILE) or {}
        addresses = content.get("addresses")
        if isinstance(addresses, list) and len(addresses) <= MOST and all(map(_is_key, addresses)):
            return addresses
        log.warning(
            "%s is damaged, so validators that called before this start are strangers until they "
            "call again; nothing needs to be done, the file is written anew",
            file,
        )
        return []

    def __contains__(self, address: str) -> bool:
        return address in self._callers or address in self._endpoints

    def __len__(self) -> int:
        return len(self._callers)

    def add(self, address: str) -> None:
        """A validator called from here."""
        with self._lock:
            self._changed |= address not in self._callers
            self._callers[address] = None
            self._callers.move_to_end(address)
            if len(self._callers) > MOST:
                self._callers.popitem(last=False)

    def set_endpoints(self, addresses: Iterable[str]) -> None:
        """The endpoints of validators as the chain shows them now."""
        self._endpoints = frozenset(map(normalize, addresses))

    def save(self) -> None:
        """Write the file if there is a new address. A failure is logged, not raised."""
        with self._lock:
            if self._file is None or not self._changed:
                return
            callers = list(self._callers)
            self._changed = False
        try:
            write_json(self._file, {"addresses": callers})
        except OSError as error:
            with self._lock:
                self._changed = True
            log.warning(
                "Cannot write %s (%s): after a restart in a flood, validators that called before "
                "could be kept out; free disk space or correct its permissions",
                self._file,
                error.strerror,
            )


def _is_key(address: object) -> bool:
    """Whether :func:`normalize` may have made it."""
    if not isinstance(address, str):
        return False
    try:
        if address.endswith("/64"):
            return str(ipaddress.IPv6Network(address)) == address
        return str(ipaddress.IPv4Address(address)) == address
    except ValueError:
        return False
