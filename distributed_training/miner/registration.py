"""Join the network, and follow whether the chain still shows this miner with its uid."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distributed_training.chain.base import Chain, ChainUnavailable, find
from distributed_training.chain.kinds import how_to_register
from distributed_training.common.backoff import Throttle
from distributed_training.config import Config
from distributed_training.node.identity import Member, join_subnet, keep_state
from distributed_training.node.start import NotRegistered
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry import MetricsFile
from distributed_training.telemetry.facts import Fact

KEEP_AGAIN = 60.0  # seconds between two writes of the chain's state


def follow_registration(
    config: Config, folder: Path, member: Member, end: Callable[[str, ExitStatus], None]
) -> None:
    """Keep the chain's state after its reads; call ``end`` once if the uid is ours no longer.

    ``end`` gets the line for the operator and the exit status, in the chain's thread.
    """
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
        end(line, status)

    chain.on_read = on_read


def join_network(config: Config, folder: Path, stack: ExitStack) -> Member:
    """Join the subnet as :func:`join_subnet` does, and show in metrics where no uid is found."""
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
