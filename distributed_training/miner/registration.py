"""Join the network; wait for a uid that was lost, and follow how the chain shows this miner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from distributed_training.chain.base import Chain
from distributed_training.chain.kinds import how_to_register
from distributed_training.chain.registration import RegistrationRecord, believable
from distributed_training.common.backoff import Throttle
from distributed_training.config import Config
from distributed_training.node.identity import Member, join_subnet, require_network
from distributed_training.node.start import Deregistered, NotRegistered
from distributed_training.telemetry import MetricsFile
from distributed_training.telemetry.run_state import report_stage
from distributed_training.telemetry.verdict import UNREGISTERED

from .network_watch import pause_start

log = logging.getLogger(__name__)

REGISTRATION_FILE = "registration.json"  # in the run folder
#: While a start waits for the registration: between two questions to another chain endpoint, and
#: two writes of how long it has waited; between two lines in the log.
ASK_ANOTHER, SAY_AGAIN = timedelta(minutes=5), timedelta(minutes=30)
#: Neurons that were not read for this long, beyond the interval, say nothing about us.
SILENT = timedelta(minutes=10)


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

    def belongs(chain: Chain) -> None:
        if config.is_public:  # the local subnet's master may be registered after its miners
            require_network(config, chain)

    member = join_subnet(config, stack, folder=folder, belongs=belongs, absent=absent)
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
    say, ask = (
        Throttle(every.total_seconds(), clock=lambda: time.monotonic())
        for every in (SAY_AGAIN, ASK_ANOTHER)
    )
    silent = (config.chain.neurons_interval + SILENT).total_seconds()
    before = read_at = time.monotonic()
    reads = chain.reads()
    try:
        while (uid := chain.uid(record.hotkey)) is None:
            now = time.monotonic()
            # The list has no date of its own: while the chain is away it is an old one.
            if reads != chain.reads():
                reads, read_at = chain.reads(), now
            if now - read_at < silent and believable(
                chain.neurons(), config.miner.master_ss58_address
            ):
                # Only while a list that can be true says so: an outage uses up none of the wait.
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
                    first = "Ask the founder, who lets it in again by `dt-registry expel --again`. "
                    remedy = "ask the founder, who lets it in again by dt-registry expel --again"
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
            if ask():
                chain.ask_another()
                record.save(folder / REGISTRATION_FILE)
            # The loop, which writes them later, is not there yet, and an alert waits for this one.
            metrics.write(lambda: None)
            pause_start(wanted)
    finally:  # what was waited counts for the next start
        record.save(folder / REGISTRATION_FILE)
    log.info("Hotkey %s is registered again, with uid %d: the miner continues", record.hotkey, uid)
    return uid
