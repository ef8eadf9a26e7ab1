"""Join the network; wait for a uid that was lost, and follow how the chain shows this miner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from distributed_training.chain.base import Chain, ChainUnavailable, find
from distributed_training.chain.kinds import how_to_register
from distributed_training.common.backoff import Throttle
from distributed_training.common.files import read_state, write_state
from distributed_training.config import Config
from distributed_training.node.identity import Member, join_subnet, keep_state
from distributed_training.node.start import Deregistered, NotRegistered
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry import MetricsFile
from distributed_training.telemetry.facts import UNREGISTERED, Fact
from distributed_training.telemetry.run_state import report_stage

from .network_watch import pause_start

log = logging.getLogger(__name__)

REGISTRATION_FILE = "registration.json"  # in the run folder
#: While a start waits for the registration: between two writes of how long it has waited; between
#: two lines in the log.
SAVE_AGAIN, SAY_AGAIN = timedelta(minutes=5), timedelta(minutes=30)
#: A list of members that was not read for this long, beyond the interval, says nothing about us.
SILENT = timedelta(minutes=10)
KEEP_AGAIN = 60.0  # seconds between two writes of the chain's state


@dataclass
class RegistrationRecord:
    """The uid this run folder's miner had, and how long it has waited to be registered again."""

    hotkey: str = ""
    uid: int = -1
    # Seconds in which the chain answered and did not show the hotkey; counted, not computed from
    # two dates, since a machine may start with a wrong clock
    waited: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @classmethod
    def load(cls, path: Path) -> RegistrationRecord:
        """Read ``path``; a file that is missing or damaged gives the record of no hotkey."""
        lost = "a miner that lost its registration would not wait for it at this start"
        return read_state(path, cls, lost=lost) or cls()

    def save(self, path: Path) -> None:
        """Write ``path``. A failure is logged: a later start would wait from the beginning."""
        lost = (
            "the next start does not know how long a lost registration was waited for; free the "
            "disk of --neuron.run_folder"
        )
        write_state(path, self, lost=lost)


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
        found = chain.uid(hotkey)
        if found == uid or reported:
            return
        reported = True
        if found is not None:
            line = (
                f"hotkey {hotkey} is uid {found} now, no longer {uid}: it uploads to another "
                "bucket from here on, so the miner starts again"
            )
        elif chain.expelled(hotkey):
            line = (
                f"the founder expelled hotkey {hotkey} from this network, so nothing of it counts "
                "and training stops; its weights are kept: ask the founder, who can let it in "
                "again with `dt-network expel --again`"
            )
        else:
            line = (
                f"hotkey {hotkey} is no longer registered, so nothing of it counts and training "
                f"stops; its weights are kept: register it again with "
                f"`{how_to_register(config.chain)}`, and the miner continues by itself"
            )
        end(line, ExitStatus.FAULT if found is None else ExitStatus.AGAIN)

    chain.on_read = on_read


def join_network(
    config: Config, folder: Path, stack: ExitStack, wanted: Callable[[], bool]
) -> Member:
    """Join the subnet as :func:`join_subnet` does.

    A hotkey that was registered when this run folder's miner ran, and is not now, is waited for;
    one that never was ends the start with :class:`NotRegistered`.
    """
    path = folder / REGISTRATION_FILE
    record = RegistrationRecord.load(path)

    def absent(chain: Chain, hotkey: str, problem: NotRegistered) -> int:
        if record.hotkey != hotkey:
            raise problem
        return wait_for_registration(config, chain, record, folder, wanted)

    member = join_subnet(config, stack, folder=folder, absent=absent)
    # From here on a lost uid is waited for, over restarts too.
    RegistrationRecord(member.hotkey, member.uid).save(path)
    return member


def wait_for_registration(
    config: Config,
    chain: Chain,
    record: RegistrationRecord,
    folder: Path,
    wanted: Callable[[], bool],
) -> int:
    """Wait until the chain shows the record's hotkey; its uid, which may be another.

    Nothing is trained, uploaded or on the GPU meanwhile. Raises Deregistered after
    ``--neuron.deregistered_wait``, StopBeforeStart.
    """
    longest = config.miner.deregistered_wait.total_seconds()
    metrics = MetricsFile(folder / "metrics.prom", every=60.0)
    metrics.registry.set("registered", 0)
    say, save = (
        Throttle(every.total_seconds(), clock=lambda: time.monotonic())
        for every in (SAY_AGAIN, SAVE_AGAIN)
    )
    before = time.monotonic()
    try:
        while (uid := chain.uid(record.hotkey)) is None:
            now = time.monotonic()
            # Only while the chain says so: an outage uses up none of the wait.
            if chain.age() < config.chain.neurons_interval + SILENT:
                record.waited += now - before
            before = now
            if record.waited >= longest:
                record.waited = 0.0  # a start by hand waits again
                raise Deregistered(
                    f"hotkey {record.hotkey} was not registered again within "
                    f"--neuron.deregistered_wait ({longest / 3600:.1f} h), so the miner ends; its "
                    f"weights are kept: register it with `{how_to_register(config.chain)}`, then "
                    "start the miner"
                )
            if say():
                subnet, first, remedy = config.chain.netuid, "", how_to_register(config.chain)
                lost = f"Hotkey {record.hotkey} is not registered on subnet {subnet} any more"
                if chain.expelled(record.hotkey):
                    lost = f"The founder expelled hotkey {record.hotkey} from this network"
                    first = "Ask the founder, who lets it in again by `dt-network expel --again`. "
                    remedy = "ask the founder, who lets it in again by dt-network expel --again"
                report_stage(folder, 2, f"{UNREGISTERED}{lost}: {remedy}")
                log.warning(
                    "%s, so nothing is trained or uploaded; weights and run folder are kept. "
                    "%sRegister it with `%s`, and the miner continues by itself. It ends with "
                    "status 3 in %.1f h (--neuron.deregistered_wait)",
                    lost,
                    first,
                    how_to_register(config.chain),
                    (longest - record.waited) / 3600,
                )
            if save():
                record.save(folder / REGISTRATION_FILE)
            # The loop, which writes them later, is not there yet, and an alert waits for this one.
            metrics.write(lambda: None)
            pause_start(wanted)
    finally:  # what was waited counts for the next start
        record.save(folder / REGISTRATION_FILE)
    log.info("Hotkey %s is registered again, with uid %d: the miner continues", record.hotkey, uid)
    return uid


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
