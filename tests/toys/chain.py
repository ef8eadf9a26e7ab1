"""A chain in this process's memory: ``chain.kind = "memory"`` in the network's file.

A hotkey that opens it gets a uid at once.
"""

from __future__ import annotations

from distributed_training.chain.base import Chain
from distributed_training.chain.identity import Wallet
from distributed_training.chain.kinds import CHAINS, ChainKind
from distributed_training.config.settings import ChainSettings
from tests.tools.chain_memory import MemoryChain, MemoryLedger

LEDGER = MemoryLedger()


class OpenChain(MemoryChain):
    """A chain that takes whoever comes."""

    def join(self) -> int:
        return self.ledger.register(self.hotkey)


def open_memory(settings: ChainSettings, wallet: Wallet | None, master: str | None) -> Chain:
    return OpenChain(hotkey=wallet.ss58 if wallet is not None else "", ledger=LEDGER)


CHAINS.register("memory", ChainKind(open_memory, lambda settings: "nothing: it takes everybody"))
