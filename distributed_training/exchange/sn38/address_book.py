"""Remember where peers were met: over restarts, and longer than libp2p does.

libp2p forgets the addresses of a peer half an hour after it lost it. With the initial peers away,
peers that all lost each other for longer would never meet again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distributed_training.common.files import read_state, write_state
from distributed_training.protocol.keys import addressed_peer, distance

_MOST_PEERS = 128
_ADDRESSES_EACH = 4


@dataclass(frozen=True)
class _Met:
    prefix: str
    addresses: list[str]  # full ones; of the peer that was met last at the end


class AddressBook:
    """Addresses of peers that were met, in the file ``path``, of the run named by ``prefix``.

    A file that cannot be read or written costs the memory, never a round.
    """

    def __init__(self, path: Path, prefix: str) -> None:
        self._path, self._prefix = path, prefix
        lost = "peers are found only through the initial peers"
        kept = read_state(path, _Met, lost=lost)
        self._peers: dict[str, list[str]] = {}
        known = kept.addresses if kept and kept.prefix == prefix else []
        for peer, addresses in itertools.groupby(known, addressed_peer):
            self._add(peer or "", addresses)

    def _add(self, peer: str, addresses: Iterable[str]) -> None:
        usable = {address for address in addresses if addressed_peer(address) == peer}
        if usable:
            self._peers.pop(peer, None)
            self._peers[peer] = sorted(usable, key=lambda a: (distance(a), a))[:_ADDRESSES_EACH]
        while len(self._peers) > _MOST_PEERS:
            del self._peers[next(iter(self._peers))]

    def add(self, met: Mapping[str, Iterable[str]]) -> None:
        """Remember where peers were met. Blocks for a write of the file, if anything is new."""
        before = dict(self._peers)
        for peer, addresses in met.items():
            self._add(peer, addresses)
        if self._peers != before:
            with contextlib.suppress(OSError):
                write_state(self._path, _Met(self._prefix, self.addresses()))

    def addresses(self) -> list[str]:
        return list(itertools.chain.from_iterable(self._peers.values()))
