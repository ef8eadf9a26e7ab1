"""Register the kinds of chains, by the name that a network's file has as ``chain.kind``.

To add your own kind, write a subclass of :class:`.base.Chain`, and one line::

    CHAINS.register("mine", ChainKind(open_mine, register=lambda settings: "a command"))

in a module that ``--plugins`` names. A kind's client is imported when a chain is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distributed_training.common.kinds import Kinds
from distributed_training.config.settings import ChainSettings
from distributed_training.config.types import choose_kind

if TYPE_CHECKING:
    from .base import Chain
    from .identity import Wallet


@dataclass(frozen=True)
class ChainKind:
    """One kind of chain.

    ``open`` takes the settings, the hotkey that signs (None: the chain is only read) and the hotkey
    that must have created the network. It returns at once, and the chain answers later.
    ``register`` returns the command that gives a hotkey a uid.
    """

    open: Callable[[ChainSettings, Wallet | None, str | None], Chain]
    register: Callable[[ChainSettings], str]


CHAINS: Kinds[ChainKind] = Kinds("chain")


def chain_kind(settings: ChainSettings) -> ChainKind:
    """Return the kind of chain that the settings name. Raises ConfigError."""
    return choose_kind(CHAINS, settings.kind, key="chain.kind")


def how_to_register(settings: ChainSettings) -> str:
    """Return the command that gives a hotkey a uid on this network."""
    return chain_kind(settings).register(settings)


# --- built-in kinds -------------------------------------------------------------------------------


def _open_registry(settings: ChainSettings, wallet: Wallet | None, master: str | None) -> Chain:
    from .registry import RegistryChain

    return RegistryChain(settings, wallet, master)


def _open_subtensor(settings: ChainSettings, wallet: Wallet | None, master: str | None) -> Chain:
    from .subtensor import BittensorChain

    return BittensorChain(settings=settings, wallet=wallet, master=master)


CHAINS.register("registry", ChainKind(_open_registry, lambda settings: "dt-join INVITATION"))
CHAINS.register(
    "bittensor",
    ChainKind(
        _open_subtensor, lambda settings: f"btcli subnet register --netuid {settings.netuid}"
    ),
)
