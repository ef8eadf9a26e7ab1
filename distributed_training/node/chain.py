"""Who this node is on the subnet: its wallet, its view of the chain and its uid."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

from distributed_training.chain.base import Chain, ChainError, Neuron, find, wait_ready
from distributed_training.chain.client import SignedClient
from distributed_training.chain.local import LocalChain
from distributed_training.chain.newest import minutes_behind
from distributed_training.chain.wallet import Wallet, load_wallet
from distributed_training.config import Config
from distributed_training.config.chain import ChainSettings
from distributed_training.node.failures import HotkeyInUse, NetworkFailure, NotRegistered
from distributed_training.protocol import schedule

log = logging.getLogger(__name__)

_SECOND_NODE_TIMEOUT = timedelta(seconds=2.3)  # as long as validators wait for IsAlive

_UNREGISTERED = {
    "miner": "so nobody would score or pay this miner",
    "validator": "so it can neither call miners nor set weights",
}


@dataclass(frozen=True)
class Member:
    """A registered hotkey. ``uid`` is the one it had at the start."""

    wallet: Wallet
    chain: Chain
    uid: int

    @property
    def hotkey(self) -> str:
        return self.wallet.ss58


def open_chain(settings: ChainSettings, wallet: Wallet | None) -> Chain:
    """The local subnet's chain if there is one, else a Subtensor. Close it. Without a wallet it
    can be read, not written."""
    if settings.local_url is not None:
        return LocalChain(url=settings.local_url, wallet=wallet)
    from distributed_training.chain.subtensor import BittensorChain

    return BittensorChain(settings=settings, wallet=wallet)


def follow_chain(settings: ChainSettings, stack: ExitStack, wallet: Wallet | None = None) -> Chain:
    """The chain, once it has answered; closed by ``stack``. Raises NetworkFailure."""
    chain = open_chain(settings, wallet)
    stack.callback(chain.close)
    try:
        wait_ready(chain, settings.start_timeout)
    except ChainError as error:
        raise NetworkFailure(str(error)) from None
    return chain


def join_subnet(config: Config, stack: ExitStack) -> Member:
    """Wallet, chain (closed by ``stack``) and uid. Raises ConfigError, NetworkFailure."""
    wallet = load_wallet(config.chain)
    chain = follow_chain(config.chain, stack, wallet)
    uid = _uid(chain, wallet.ss58, config.chain)
    if uid is None:
        raise NotRegistered(
            f"hotkey {wallet.ss58} is not registered on subnet {config.chain.netuid}, "
            f"{_UNREGISTERED[config.kind]}: register it with `btcli subnet register`, or give "
            "another --wallet.hotkey"
        )
    return Member(wallet, chain, uid)


def _uid(chain: Chain, hotkey: str, settings: ChainSettings) -> int | None:
    """None if two reads of the chain agree that it has none: a node that is behind, or a
    reorganization, may hide it from one, and nothing starts again after "not registered".

    Raises NetworkFailure when the chain cannot be read a second time, or shows none in blocks that
    are old: the registration may be younger.
    """
    uid, reads = chain.uid(hotkey), chain.reads()
    if uid is not None:
        return uid
    patience = settings.neurons_interval + settings.call_timeout
    log.warning(
        "The chain does not show hotkey %s on subnet %d; it is asked once more (at most %.0f s)",
        hotkey,
        settings.netuid,
        patience.total_seconds(),
    )
    deadline = time.monotonic() + patience.total_seconds()
    while chain.reads() == reads:
        if time.monotonic() > deadline:
            raise NetworkFailure(
                "the chain was read once and then no more, so it is not known whether hotkey "
                f"{hotkey} is registered: see --subtensor.chain_endpoint if this comes again"
            )
        time.sleep(0.1)
    uid, behind = chain.uid(hotkey), minutes_behind(chain)
    if uid is None and behind is not None:
        raise NetworkFailure(
            f"the chain as this node reads it is {behind:.0f} minutes behind the clock, so it is "
            f"not known whether hotkey {hotkey} is registered: see whether timedatectl says "
            "'synchronized: yes', or name another node with --subtensor.chain_endpoint"
        )
    return uid


def refuse_second_node(member: Member) -> None:
    """Raises HotkeyInUse if a running node with this hotkey answers at the chain's endpoint."""
    me = find(member.chain.neurons(), member.hotkey)
    if me is None or me.port is None:
        return
    if SignedClient(wallet=member.wallet).answers_for_us(me, _SECOND_NODE_TIMEOUT):
        raise HotkeyInUse(
            f"another miner with hotkey {member.hotkey} answers at {me.ip}:{me.port}, so both "
            "would overwrite each other's uploads: stop it first, or give another --wallet.hotkey"
        )


def miners_of(neurons: Sequence[Neuron], *, minimum_stake: float) -> list[Neuron]:
    """Whom validators call and score: with an endpoint, and not a validator themselves, which is a
    permit and more than ``minimum_stake``."""
    return [
        n
        for n in neurons
        if n.port is not None and not (n.validator_permit and n.stake > minimum_stake)
    ]


def seconds_per_block(config: Config) -> float:
    """12 on the public network; the local subnet's chain makes a block a second."""
    return 1.0 if config.preset == "local" else schedule.SECONDS_PER_BLOCK
