"""Find this node's uid, write its entries to the chain, and check that it is the network's chain.

A node writes two things to the chain: the *commitment*, which contains the read credentials of its
bucket, so that others find its uploads; and the *endpoint* of its DHT peer. Chains are slow and
sometimes refuse a write, so threads write both and retry until the chain shows them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from distributed_training.chain.base import Chain, ChainError, ChainState, Neuron, find
from distributed_training.chain.identity import Wallet, external_ip, load_wallet
from distributed_training.chain.kinds import chain_kind, how_to_register
from distributed_training.common.backoff import doubling
from distributed_training.config import Config, ConfigError
from distributed_training.config.settings import ChainSettings
from distributed_training.node.buckets import NoBucket, PeerBuckets
from distributed_training.node.start import Deregistered, NetworkFailure, NotRegistered
from distributed_training.protocol import keys, lines
from distributed_training.protocol.types import Check
from distributed_training.store.errors import StoreError

log = logging.getLogger(__name__)

STATE_FILE = "chain.json"  # file in the run folder
#: The first and the longest pause between two attempts to write: a chain limits how often a hotkey
#: may write, and refuses attempts that come too early.
_FIRST, _LONGEST = timedelta(seconds=2), timedelta(minutes=10)
SOON = timedelta(seconds=30)  # how long to wait for the chain if there is a saved state

_UNREGISTERED = {
    "miner": "so nobody would score or pay this miner",
    "validator": "so it can lead no round",
}


@dataclass(frozen=True)
class Member:
    """A registered hotkey. ``uid`` is the uid that it had at the start."""

    wallet: Wallet
    chain: Chain
    uid: int
    # Used by the threads that write to the chain: only one of them writes at a time, and only the
    # newest endpoint is written.
    writing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    announced: list[tuple[str, int]] = field(default_factory=list, repr=False, compare=False)

    @property
    def hotkey(self) -> str:
        return self.wallet.ss58


def chain_name(settings: ChainSettings) -> str:
    """Return a name for the subnet and its chain that does not depend on the endpoint."""
    network = settings.registry_url or settings.network
    return f"{network}, netuid {settings.netuid}"


def keep_state(chain: Chain, settings: ChainSettings, folder: Path) -> None:
    """Write the chain's state to the run folder, so that a start works during an outage."""
    state = chain.state(chain_name(settings))
    if state is not None:
        state.save(folder / STATE_FILE)


def follow_chain(
    settings: ChainSettings,
    stack: ExitStack,
    wallet: Wallet | None = None,
    *,
    kept: ChainState | None = None,
    master: str | None = None,
) -> Chain:
    """Return the chain, once it has answered; ``stack`` closes it.

    ``master``: the hotkey that must have created the registry, or be on a public chain's list.
    ``kept``: a saved state, used if the chain does not answer soon, while the chain is asked again
    in the background.

    Raises NetworkFailure.
    """
    chain = chain_kind(settings).open(settings, wallet, master)
    stack.callback(chain.close)
    # An outage of the chain for hours must not stop a miner that has already joined from training.
    if kept is not None and not chain.wait_ready(min(settings.start_timeout, SOON)):
        chain.recall(kept)
        log.warning(
            "The chain does not answer: starting with what it showed %.0f minutes ago; it is asked "
            "again in the background. If the outage lasts, choose another node with "
            "--subtensor.chain_endpoint",
            chain.age().total_seconds() / 60,
        )
    if not chain.wait_ready(settings.start_timeout):
        raise NetworkFailure(
            f"the chain did not answer within {settings.start_timeout.total_seconds():.0f} s "
            f"({chain.trouble or 'no answer'}), so we cannot tell who is registered and nothing "
            "can begin: check the network and chain.master_hotkey in its file, or choose another "
            "node with --subtensor.chain_endpoint"
        )
    return chain


def join_subnet(config: Config, stack: ExitStack, *, folder: Path | None = None) -> Member:
    """Load the wallet, connect to the chain (``stack`` closes it) and find the hotkey's uid.

    ``folder``: a run folder, whose saved state of the chain is used while the chain is unavailable.
    Raises ConfigError, NetworkFailure; NotRegistered if the hotkey has no uid, and Deregistered if
    the founder has expelled it.
    """
    # Load the wallet before any network call, so that a wrong name or a locked file is reported at
    # once.
    wallet = load_wallet(config.chain)
    kept = None
    if folder is not None:
        name = chain_name(config.chain)
        kept = ChainState.load(folder / STATE_FILE, chain=name, hotkey=wallet.ss58)
    # Accept no list of members without the master: nobody should pay for a uid on somebody else's
    # subnet.
    master = config.miner.master_ss58_address
    chain = follow_chain(config.chain, stack, wallet, kept=kept, master=master)
    uid = chain.uid(wallet.ss58)
    if uid is None and chain.expelled(wallet.ss58):
        raise Deregistered(
            f"the founder expelled hotkey {wallet.ss58} from this network, "
            f"{_UNREGISTERED[config.kind]}: ask the founder, who can let it in again with "
            "`dt-network expel --again`"
        )
    # If joining is refused, the start ends below with a message that names the hotkey.
    if uid is None and (uid := chain.join()) is None:
        registry = config.chain.registry_url
        where = f"at {registry}" if registry else f"on subnet {config.chain.netuid}"
        raise NotRegistered(
            f"hotkey {wallet.ss58} is not registered {where}, {_UNREGISTERED[config.kind]}: "
            f"register it with `{how_to_register(config.chain)}`, or use another --wallet.hotkey"
        )
    if uid >= config.rounds.max_uids:
        raise ConfigError(
            f"hotkey {wallet.ss58} has uid {uid} and this network's uids are below "
            f"{config.rounds.max_uids} (limits.max_uids in its file), "
            f"{_UNREGISTERED[config.kind]}: "
            "ask the founder for a file with a larger number, or for a lower uid"
        )
    return Member(wallet, chain, uid)


def public_address(config: Config, *, timeout: timedelta = timedelta(seconds=5)) -> str:
    """Return the address at which others reach this machine's DHT peer.

    It is ``--dht.ip`` if given, else the result of :func:`external_ip`. Raises AddressUnknown.
    """
    return config.swarm.dht_ip or external_ip(config.chain, timeout=timeout)


def commit(member: Member, text: str) -> None:
    """Write the commitment unless the chain already has it. Returns at once."""

    def shown() -> bool:
        return member.chain.commitment(member.hotkey) == text

    def write() -> None:
        member.chain.commit(text)
        log.info("%s", lines.METADATA_LOGGED)

    _in_background(member, "commitment", shown, write)


def announce(member: Member, ip: str, port: int, peer: str = "") -> None:
    """Write the endpoint unless the chain already has it. Returns at once.

    ``peer``: the id of the DHT peer at that endpoint, if any.

    The new endpoint replaces one that is still being written.
    """
    mine = ip, port
    member.announced[:] = [mine]

    def shown() -> bool:
        if member.announced != [mine]:
            return True  # a newer endpoint has replaced it, and another thread writes that one
        me = find(member.chain.neurons(), member.hotkey)
        return me is not None and (me.ip, me.port, me.peer) == (*mine, peer)

    def write() -> None:
        member.chain.serve(ip, port, peer)
        log.info("Endpoint %s:%d written to the chain", ip, port)

    _in_background(member, "endpoint", shown, write)


def _in_background(
    member: Member, what: str, shown: Callable[[], bool], write: Callable[[], None]
) -> None:
    """Call ``write`` in a thread until it succeeds or the chain shows the value anyway."""

    def run() -> None:
        failures = 0
        while True:
            try:
                # Write one at a time, since the chain might accept the older of two writes last.
                with member.writing:
                    # Check before each attempt, since a write whose answer was lost may have
                    # succeeded.
                    if not shown():
                        write()
                return
            except ChainError as error:
                failures += 1
                log.warning("The %s was not written (%s). Trying again.", what, error)
            time.sleep(doubling(failures, first=_FIRST, longest=_LONGEST).total_seconds())

    threading.Thread(target=run, name=what, daemon=True).start()


# --- whether the chain is this network's ----------------------------------------------------------

NEWEST_STATE = timedelta(days=1)  # if the newest state is older, the network's rounds have stopped


def check_network(neurons: Sequence[Neuron], *, netuid: int, master: str) -> Check:
    """Check that the validator that leads this network's rounds is on the subnet."""
    leader = find(neurons, master)
    if leader is not None and leader.validator_permit:
        return Check("network", "ok", f"its validator {master} has uid {leader.uid}")
    wrong = "has no validator permit" if leader is not None else "has no uid"
    return Check(
        "network",
        "fail",
        f"the validator that leads this network's rounds ({master}) {wrong} on subnet {netuid} "
        f"({len(neurons)} neurons there), so this is not the network's subnet: no round takes "
        "place and nothing counts",
        "register no hotkey and pay nothing there; a whole network on this machine needs neither: "
        "make run",
    )


def check_global_state(config: Config, chain: Chain) -> Check:
    """Check that the master hotkey has committed its bucket and published within the last day."""
    name, master = "global state", config.miner.master_ss58_address
    try:
        info = PeerBuckets(config.store, chain).of_master(master).head(keys.STATE)
    except (NoBucket, ChainError) as error:
        return Check(
            name,
            "warn",
            f"the master hotkey has committed no bucket that can be read ({error})",
            "wait until its validator runs; ask who runs the network",
        )
    except StoreError as error:
        return Check(name, "skip", f"the global bucket does not answer ({error})")
    if info is None:
        remedy = "wait for the first one"
        return Check(name, "warn", "the master has published no global state yet", remedy)
    age = timedelta(seconds=max(0.0, info.age_seconds or 0.0))
    finding = f"the newest is {age.total_seconds() / 3600:.1f} h old"
    if age <= NEWEST_STATE:
        return Check(name, "ok", finding)
    return Check(
        name,
        "warn",
        f"{finding}, so this network's rounds have stopped and no training counts now",
        "ask who runs the network before you rent a GPU or register",
    )
