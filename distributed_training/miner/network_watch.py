"""Join the network; follow what chain and bucket say of this miner, the network and its file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distributed_training.chain.base import Chain, ChainUnavailable, find
from distributed_training.chain.kinds import how_to_register
from distributed_training.common.backoff import Throttle
from distributed_training.config import Config
from distributed_training.config.versions import Versions
from distributed_training.network import Network, other_version
from distributed_training.node.identity import Member, join_subnet, keep_state
from distributed_training.node.start import NotRegistered
from distributed_training.protocol.types import ExitStatus
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import StoreError
from distributed_training.telemetry import MetricsFile
from distributed_training.telemetry.facts import Fact

from . import events as ev

log = logging.getLogger(__name__)

KEEP_AGAIN = 60.0  # seconds between two writes of the chain's state


# --- at the start -----------------------------------------------------------------------------


def read_version(reader: BucketReader, number: int) -> str | None:
    """Return a version of the network's file; None: the bucket has none, or cannot be read now."""
    try:
        return reader.version(number)
    except (StoreError, OSError) as error:
        log.warning("The global bucket was not asked for versions of the network's file: %s", error)
        return None


# --- what the bucket says -------------------------------------------------------------------------


class NetworkWatch:
    """Compare what the network's bucket says of its network with the file by which we train.

    ``versions``: that file's, to which this adds what the bucket has; None: there are none.
    """

    def __init__(
        self,
        reader: BucketReader,
        network: Network,
        versions: Versions | None,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._reader = reader
        self._network = network
        self.versions = versions
        self._post = post
        self._other_version = ""
        self._version = 0  # the newest that the bucket has named

    def compare(self) -> None:
        """Post what has changed.

        A bucket that is damaged, or away just now, changes nothing. Nor does what the network's
        master has not signed, or an older version than the bucket has named before.
        """
        try:
            shown, rules, refused = self._reader.network(), self._network, ""
            if shown is None or not shown.counts_for(self._network):
                return
            if shown.version < self._version:
                return
            self._version = shown.version
            if self.versions is not None:
                if shown.version > self.versions.newest.head.version:
                    refused = self.versions.look(self._reader.version)
                rules = self.versions.newest
        except Exception:  # noqa: BLE001 - foreign bytes: no reason to call our file old
            return
        problem = other_version(shown, rules)
        if problem and refused:
            problem = f"{problem}; {refused}"
        if problem != self._other_version:
            self._other_version = problem
            self._post(ev.NetworkDiffers(problem, forked=False))


# --- what the chain says --------------------------------------------------------------------------


def follow_registration(
    config: Config, folder: Path, member: Member, post: Callable[[ev.Event], None]
) -> None:
    """Keep the chain's state after its reads; post a stop once if the uid is ours no longer."""
    chain, hotkey, uid = member.chain, member.hotkey, member.uid
    keep, reported = Throttle(KEEP_AGAIN), False

    def on_read() -> None:
        nonlocal reported
        if keep():
            keep_state(chain, config.chain, folder)
        found, status = chain.uid(hotkey), ExitStatus.FAULT
        if found == uid or reported:
            return
        reported = True
        if found is not None:
            line = (
                f"hotkey {hotkey} is uid {found} now, no longer {uid}: it uploads to another "
                "bucket from here on, so the miner starts again"
            )
            status = ExitStatus.AGAIN
        elif chain.expelled(hotkey):
            status = ExitStatus.DEREGISTERED
            line = (
                f"the founder expelled hotkey {hotkey} from this network, so nothing of it counts "
                "and the miner ends; its weights are kept: ask the founder, who can let it in "
                "again with `dt-network expel --again`, then start the miner"
            )
        else:
            line = (
                f"hotkey {hotkey} is no longer registered, so nothing of it counts and training "
                f"stops; its weights are kept: register it again with "
                f"`{how_to_register(config.chain)}`, and the miner continues by itself"
            )
        post(ev.StopRequested(line, status))

    chain.on_read = on_read


def join_network(config: Config, folder: Path, stack: ExitStack) -> Member:
    """Join the subnet as :func:`join_subnet` does, and show it in metrics if no uid is found."""
    try:
        return join_subnet(config, stack, folder=folder)
    except NotRegistered:
        metrics = MetricsFile(folder / "metrics.prom", every=0.0)
        metrics.registry.set("registered", 0)
        metrics.write(lambda: None)
        raise


def chain_facts(chain: Chain, hotkey: str, now: float) -> dict[str, Any]:
    """Return the facts of a verdict that the chain knows at ``now``, in Unix seconds."""
    try:
        me = find(chain.neurons(), hotkey)
        at = now - chain.age().total_seconds()
    except ChainUnavailable:  # it has not answered once
        return {"chain_trouble": chain.trouble}
    return {
        "chain_trouble": chain.trouble,
        "chain_at": at,
        "registered": Fact(me is not None, at),
        "incentive": None if me is None else Fact(me.incentive, at),
    }
