"""Join the network, and follow what the chain and the bucket say about it and about this miner."""

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
    """Return a version of the network's file, or None if the bucket lacks it or cannot be read."""
    try:
        return reader.version(number)
    except (StoreError, OSError) as error:
        log.warning("The global bucket was not asked for versions of the network's file: %s", error)
        return None


# --- what the bucket says -------------------------------------------------------------------------


class NetworkWatch:
    """Compares the network that the bucket describes with the network's file that we train by.

    ``versions``: the versions of that file, to which this adds newer ones from the bucket; None if
    there are none.
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
        self._version = 0  # the newest version that the bucket has named

    def compare(self) -> None:
        """Post an event if the difference has changed.

        A damaged or unreachable bucket changes nothing. Neither does anything that the network's
        master has not signed, nor a version older than one that the bucket has named before.
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
        except Exception:  # noqa: BLE001 - foreign bytes must not make our file look old
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
    """Save the chain's state after reads; post a stop, only once, if the uid is no longer ours."""
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
                f"hotkey {hotkey} is uid {found} now, no longer {uid}: its uploads now go to "
                "another bucket, so the miner starts again"
            )
            status = ExitStatus.AGAIN
        elif chain.expelled(hotkey):
            status = ExitStatus.DEREGISTERED
            line = (
                f"the founder expelled hotkey {hotkey} from this network, so its uploads no longer "
                "count and the miner ends; its weights are kept: ask the founder to let it in "
                "again with `dt-network expel --again`, then start the miner"
            )
        else:
            line = (
                f"hotkey {hotkey} is no longer registered, so its uploads no longer count and "
                f"training stops; its weights are kept: register it again with "
                f"`{how_to_register(config.chain)}`, and the miner continues on its own"
            )
        post(ev.StopRequested(line, status))

    chain.on_read = on_read


def join_network(config: Config, folder: Path, stack: ExitStack) -> Member:
    """Join the subnet with :func:`join_subnet`; without a uid, say so in the metrics file."""
    try:
        return join_subnet(config, stack, folder=folder)
    except NotRegistered:
        metrics = MetricsFile(folder / "metrics.prom", every=0.0)
        metrics.registry.set("registered", 0)
        metrics.write(lambda: None)
        raise


def chain_facts(chain: Chain, hotkey: str, now: float) -> dict[str, Any]:
    """Return the chain's facts for a verdict at the time ``now``, in Unix seconds."""
    try:
        me = find(chain.neurons(), hotkey)
        at = now - chain.age().total_seconds()
    except ChainUnavailable:  # it has never answered
        return {"chain_trouble": chain.trouble}
    return {
        "chain_trouble": chain.trouble,
        "chain_at": at,
        "registered": Fact(me is not None, at),
        "incentive": None if me is None else Fact(me.incentive, at),
    }
