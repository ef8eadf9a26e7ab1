"""Check whether a subnet is the network whose rules this neuron has.

It is the first check of a start, and of the doctor. A netuid is given to another network when its
own loses the slot. There a miner could be registered, for a fee, and would wait for ever for a
global state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import timedelta

from distributed_training.chain.base import Chain, ChainError, Neuron, find
from distributed_training.chain.subtensor import minutes_behind
from distributed_training.config import Config
from distributed_training.node.buckets import NoBucket, PeerBuckets
from distributed_training.node.failures import NetworkFailure, WrongNetwork
from distributed_training.protocol import keys
from distributed_training.protocol.types import Check
from distributed_training.store.s3 import StoreError

log = logging.getLogger(__name__)

NEWEST_STATE = timedelta(days=1)  # older than this: the network's rounds have stopped


def require_network(config: Config, chain: Chain) -> None:
    """Return once a read of the chain shows the master hotkey.

    Raises WrongNetwork when reads of two endpoints, where two are known, do not show it, and
    NetworkFailure when so many cannot be had: an outage is no other network.
    """
    settings, master = config.chain, config.miner.master_ss58_address
    # Two reads, each of which may hang for the whole timeout of a call.
    patience = 2 * (settings.neurons_interval + settings.call_timeout)
    deadline = time.monotonic() + patience.total_seconds()
    answered: set[str] = set()
    reads = seen = 0
    while True:
        if reads != (reads := chain.reads()):
            check = check_network(chain.neurons(), netuid=settings.netuid, master=master)
            if find(chain.neurons(), master) is not None:
                if check.status != "ok":  # a permit may come back
                    log.warning("%s", check.line)
                return
            # An empty list, or one of old blocks, is no evidence of another network.
            if chain.neurons() and minutes_behind(chain) is None:
                seen += 1
                answered.add(chain.answered_by())
            # Where one endpoint alone is known, two reads of it have to do.
            if seen >= 2 and len(answered) >= min(2, chain.endpoints()):
                raise WrongNetwork(f"this is not {network_name(config)}: {check.line}")
            chain.ask_another()
        if time.monotonic() > deadline:
            raise NetworkFailure(
                f"the chain shows no neurons, or not the master hotkey {master}, and no second "
                "endpoint confirms it, so it is not known whether this is the network: see "
                "--subtensor.chain_endpoint if this comes again"
            )
        time.sleep(0.1)


def network_name(config: Config) -> str:
    """Return what to call the network whose rules this node has."""
    return f"the network {config.network.head.name}" if config.network else "the public network"


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
        f"({len(neurons)} neurons there), so subnet and miner do not belong together: no round is "
        "called, nothing is earned",
        "register no hotkey and pay nothing there; a whole network on this machine needs neither: "
        "make run",
    )


def check_global_state(config: Config, chain: Chain) -> Check:
    """Check that the master hotkey has committed its bucket and published within a day."""
    name, master = "global state", config.miner.master_ss58_address
    try:
        info = PeerBuckets(config.store, chain).of_master(master).head(keys.ROOT_METADATA)
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
    age = timedelta(seconds=info.age_seconds or 0.0)
    finding = f"the newest is {age.total_seconds() / 3600:.1f} h old"
    if age <= NEWEST_STATE:
        return Check(name, "ok", finding)
    return Check(
        name,
        "warn",
        f"{finding}, so this network's rounds have stopped and training earns nothing now",
        "ask who runs the network before you rent a GPU or register",
    )
