"""Build rank 0 of a network whose miners average over hivemind, and each rank's part of a round.

open_connections   wallet, chain, own bucket, global state, before there is a model
RankZero           exchange, controller, server, then telemetry
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil

from distributed_training.chain.base import find
from distributed_training.chain.identity import AddressUnknown
from distributed_training.chain.server import MinerCallbacks, SignedServer
from distributed_training.common.memory import (
    DISK_RESERVE,
    ModelShape,
    checkpoint_bytes,
    snapshot_bytes,
)
from distributed_training.config import Config
from distributed_training.config.versions import Versions, has_versions
from distributed_training.exchange.sn38.supervisor import HostLaunch, SwarmUnavailable
from distributed_training.exchange.sn38.swarm import HivemindSwarm
from distributed_training.health.clock import ClockWatch, measure_offset
from distributed_training.health.machine import arrange, gpu_bytes
from distributed_training.network import FILE
from distributed_training.node import identity
from distributed_training.node.identity import (
    Member,
    check_global_state,
    keep_state,
    public_address,
)
from distributed_training.node.start import (
    NetworkFailure,
    require_data,
)
from distributed_training.protocol import keys, lines
from distributed_training.protocol.keys import Parts
from distributed_training.store.snapshot_folder import describe_full_disk
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.store.uploader import Uploader
from distributed_training.telemetry import EventLog, unix_time
from distributed_training.training.outer_step import read_model_config

from . import events as ev
from .assembly import (
    RankContext,
    Training,
    describe_member,
    describe_size,
    open_block_list,
    open_metrics,
    open_versions,
    prepare_text,
    record_start,
    registration_terms,
    rules_of,
)
from .controller import Controller
from .device import expects_gpu
from .events import GlobalView, MinerState, Mode, Rules
from .global_state import (
    GlobalBucket,
    GlobalEpoch,
    first_global_state,
    open_global_bucket,
)
from .income import Income
from .metrics import limits
from .missed_rounds import MissedRounds
from .own_bucket import OwnBucket, open_own_bucket
from .registration import join_network
from .reporter import Record, Reporter
from .resume import StartupInfo, first_outer_step
from .round import Averaging, RoundTasks, SwarmRank, end_rounds_of
from .round_clock import RoundClock
from .uploads import Uploads

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Connections:
    """The connections that rank 0 opens before there is a model.

    ``address``: where others call this miner. ``global_folder``: files of the global state.
    ``versions``: of the network's file, None where it has none.
    """

    member: Member
    address: str
    own: OwnBucket
    global_bucket: GlobalBucket
    global_folder: Path
    swarm_launch: HostLaunch
    uploader: Uploader
    clock: ClockWatch
    versions: Versions | None = None


def open_connections(
    config: Config,
    folder: Path,
    stack: ExitStack,
    wanted: Callable[[], bool],
    post: Callable[[ev.Event], None],
) -> tuple[Connections, StartupInfo]:
    """Open rank 0's connections; return what they are, and what every rank needs of them.

    Raises ConfigError, NetworkFailure, StopBeforeStart (``wanted`` turned False).
    """
    del post  # what posts events needs the model
    # First: it imports hivemind, for seconds, while all else is asked.
    swarm_launch = HostLaunch(folder / "swarm")
    stack.callback(swarm_launch.end)
    if not has_versions(config) or config.data.own:
        require_data(config)
    # wallet and chain
    member = join_network(config, folder, stack, wanted)
    clock = ClockWatch(partial(measure_offset, config, member.chain))
    stack.callback(clock.close)
    # Before a download of hours: the network's rounds may have stopped.
    if config.is_public and (state := check_global_state(config, member.chain)).status == "warn":
        log.warning("%s", state.line)
    bucket = keys.miner_bucket(config.store.global_model_name, member.uid)
    describe_member(config, member, bucket)
    # addresses and buckets
    address = find_address(config, member)
    own = open_own_bucket(config, member, bucket)
    # After the read key was tried: what is committed stays on the chain for good.
    identity.commit(member, own.commitment)
    global_bucket = open_global_bucket(config, member.chain, folder, wanted)
    resumes = any((folder / "checkpoints").glob("checkpoint-*"))
    outer_step, global_folder, seen = first_global_state(global_bucket, wanted, resumes=resumes)
    model = read_model_config(global_folder)
    log.info("Global state of outer step %d%s", outer_step, describe_size(model, config))
    first = first_outer_step(folder / "checkpoints", outer_step, seen=seen)
    config, versions = open_versions(config, folder, global_bucket, first, global_bucket.follow)
    tokenizer_path, eos_id = prepare_text(config, folder)
    snapshots = folder / "snapshots"
    uploader = Uploader(settings=config.store, bucket=bucket, folder=folder, snapshots=snapshots)
    stack.callback(uploader.close)
    info = StartupInfo(
        uid=member.uid,
        model_config=model,
        tokenizer_path=str(tokenizer_path),
        eos_id=eos_id,
        global_outer_step=outer_step,
        global_seen=seen,
        global_uid=member.chain.uid(config.miner.master_ss58_address),
        first_block=member.chain.block(),
        hotkey=member.hotkey,
        follows=versions is not None,
        rules=versions.in_force.files[FILE] if versions else "",
    )
    connections = Connections(
        member, address, own, global_bucket, global_folder, swarm_launch, uploader, clock, versions
    )
    return connections, info


def find_address(config: Config, member: Member) -> str:
    """Return the address that others call. Raises NetworkFailure."""
    try:
        return public_address(config)
    except AddressUnknown as error:
        # What was right before the restart mostly is; should it not be, no call comes, and the
        # address is asked for again.
        me = find(member.chain.neurons(), member.hotkey)
        if me is None or me.port is None:
            raise NetworkFailure(str(error)) from None
        log.warning("%s. Training continues with %s, which the chain shows for it", error, me.ip)
        return me.ip


class RankZero:
    """Rank 0's own part. Its attributes are built in the order in which they stand."""

    def __init__(
        self,
        context: RankContext,
        info: StartupInfo,
        connections: Connections,
        training: Training,
    ) -> None:
        self._context, self._info = context, info
        self._connections, self._training = connections, training
        config, post, at_end = context.config, context.events.put, context.stack.callback
        trainer, chain = training.trainer, connections.member.chain
        shortest = period = config.miner.blocks_per_allreduce
        # From the network's first success on validators leave more time between two rounds.
        if info.global_outer_step > 0:
            period = max(period, config.miner.blocks_per_allreduce_later)
        last = info.model_config.get("last_allreduce_block")
        self.round_clock = RoundClock(
            chain_block=chain.block,
            blocks_per_allreduce=period,
            later=config.miner.blocks_per_allreduce_later,
            shortest_period=shortest,  # which a validator falls back to when it starts again
            last_allreduce_block=last if isinstance(last, int) else None,
            chain_age=chain.age,
            seconds_per_block=config.chain.seconds_per_block,
        )
        # --- who posts events, apart from the loop itself, the server and the signals
        self.exchange = open_hivemind(config, context.folder, connections, trainer.schema)
        at_end(self.exchange.close)
        averaging = Averaging(self.exchange, post)
        self.global_epoch = GlobalEpoch(
            bucket=connections.global_bucket,
            post=post,
            interval=global_interval(config),
            epoch_start=lambda: (trainer.outer_step, trainer.outer.epoch_start_rows()),
            network=config.network,
            versions=connections.versions,
        )
        at_end(self.global_epoch.close)
        # --- who decides
        self.blocks = open_block_list(
            context, training, chain, uid=info.uid, recent=self.round_clock.half
        )
        self.blocks.newest_published = connections.own.newest_block
        reload = config.miner.round_reload_timeout.total_seconds()
        # A checkpoint ahead of the bucket is no mistake: the validator may still be publishing.
        behind = not info.global_seen or trainer.outer_step != info.global_outer_step
        self.controller = Controller(
            state=MinerState(
                mode=Mode.AWAITING_GLOBAL if behind else Mode.TRAINING,
                outer_step=trainer.outer_step,
                global_due=time.monotonic() + reload,
                view=GlobalView.SAME if info.global_seen else GlobalView.UNREAD,
            ),
            rules=Rules(
                reload_seconds=reload,
                checkpoint_steps=config.miner.checkpoint_steps,
                checkpoint_seconds=config.miner.checkpoint_interval.total_seconds(),
                train_in_rounds=self._trains_in_rounds(),
                content=config.store.content,
                tick_seconds=context.tick.total_seconds(),
            ),
            events=context.events,
            blocks=self.blocks,
            start_task=RoundTasks(averaging, self.global_epoch).start,
            versions=connections.versions,
            global_outer_step=info.global_outer_step,
        )
        self.server = self._open_server(averaging)
        # Closed first, since it was opened last: no call comes into a swarm that ends.
        at_end(self.server.close)
        self._subscribe()

    def _trains_in_rounds(self) -> bool:
        trainer, config = self._training.trainer, self._context.config
        count = sum(math.prod(shape) for _, shape in trainer.schema)
        with suppress(ValueError):  # of sizes that the memory's formula does not know
            return arrange(
                config,
                ModelShape.from_config(self._info.model_config, count),
                ranks=self._context.ranks.local_world_size,
                micro_batch=trainer.micro_batch_size,
                offload=trainer.optimizer.offload,
                gpu=gpu_bytes(config) if self._context.device.type == "cuda" else None,
            ).train_in_rounds
        return config.miner.train_in_rounds is True

    def _open_server(self, averaging: Averaging) -> SignedServer:
        """Return it bound, not yet answering. Raises ConfigError when the port is taken."""
        config, member = self._context.config, self._connections.member
        trainer, exchange, controller = self._training.trainer, self.exchange, self.controller

        def heard(outer_step: int) -> None:
            if outer_step < trainer.outer_step:
                self._context.events.put(ev.ValidatorHeard(outer_step, time.monotonic()))

        def asked() -> None:
            if config.store.content != "all" and not controller.state.model_asked:
                log.info("The validator asks for this miner's model: its next upload has it too")
                self._context.events.put(ev.ModelAsked())

        versions = self._connections.versions

        def rules_id(asked: int | None) -> str:
            if versions is None:
                return config.rules_id
            return versions.at(trainer.outer_step if asked is None else asked).rules_id

        return SignedServer(
            settings=config.chain,
            wallet=member.wallet,
            chain=member.chain,
            master_hotkey=config.miner.master_ss58_address,
            miner=MinerCallbacks(
                epoch=lambda: trainer.outer_step,
                on_all_reduce=averaging.receive_call,
                round_phase=lambda: (
                    "averaging" if controller.state.mode is Mode.AVERAGING else None
                ),
                round_due=self.round_clock.due,
                peer_id=lambda: exchange.peer_id,
                addresses=lambda: exchange.visible_maddrs,
                run_id=rules_id,
                on_validator_epoch=heard,
                on_model_asked=asked,
            ),
            folder=self._context.folder,
        )

    def _subscribe(self) -> None:
        """Build the subscribers that get each event, in this order, after the block list."""
        config, folder = self._context.config, self._context.folder
        trainer, connections = self._training.trainer, self._connections
        chain, blocks, clock = connections.member.chain, self.blocks, self.round_clock
        self.record: Record = EventLog.open(folder).write
        schedule = UploadSchedule(
            upload_steps=config.store.upload_steps,
            minimum_inner_step=config.store.minimum_valid_inner_step,
            age_limit=config.store.age_limit,
            published_at=connections.own.published_at,
        )
        uploaded = limits(
            schedule,
            newest=lambda: blocks.newest_published,
            chain_block=chain.block,
            most_blocks=clock.half,
        )
        reporter = Reporter(
            record=self.record,
            schedule=schedule,
            warnings=lambda report: lines.step_warnings(
                report, expect_gpu=expects_gpu(config, self._context.device)
            ),
            bucket=connections.own.name,
            global_uid=self._info.global_uid,
            reload_timeout=config.miner.round_reload_timeout,
            judged_step=lambda: income.judged_step,
            uploaded_step=connections.own.outer_step,
            clock_fault=connections.clock.fault,
        )
        shapes = [shape for _, shape in trainer.schema]
        moments = len(trainer.optimizer.state)

        def needed(parts: Parts) -> int:
            return snapshot_bytes(shapes, moments, parts)

        # Uploads are put off before the reserve is touched, so the verdict counts it as well.
        room = needed(config.store.content) + checkpoint_bytes(shapes, moments) + DISK_RESERVE
        income = Income(
            hotkey=self._info.hotkey,
            chain=chain,
            rules=replace(
                rules_of(config, self._info.uid),
                uploads=connections.own.uploads(),
                uploads_known=connections.own.known,
            ),
            measured=lambda: {
                "called_at": unix_time(self.server.called_at()),
                "store_silent_since": unix_time(self.global_epoch.unavailable_since),
                "next_round": unix_time(clock.expected_at()),
                "next_upload": unix_time(schedule.next_at(time.monotonic())),
                "fitting_steps": schedule.fitting_steps,
            },
            record=self.record,
            folder=folder,
            needed=room,
        )
        metrics = open_metrics(
            self._context,
            self._training,
            blocks,
            chain,
            uid=self._info.uid,
            needed=room,
            counts={"server": self.server.counters},
            gauges={
                "chain_seconds_per_block": lambda: clock.seconds(1),
                "next_round_timestamp_seconds": lambda: unix_time(clock.expected_at()),
                "dht_peers": self.exchange.known_peers,
                "clock_offset_seconds": connections.clock.seconds,
                "global_run": lambda: connections.global_bucket.run_seen,
                "round_seconds": lambda: reporter.round_seconds,
                **uploaded,
                "last_call_timestamp_seconds": lambda: unix_time(self.server.called_at()),
                **income.gauges(),
            },
        )
        missed = MissedRounds(
            outer_step=trainer.outer_step,
            clock_fault=connections.clock.fault,
            published_within=1.25 * config.miner.round_reload_timeout,
            listens_at=time.monotonic(),
            started=psutil.Process().create_time(),
            interval=global_interval(config),
        )
        uploads = Uploads(
            schedule=schedule,
            round_clock=clock,
            blocks=blocks,
            uploader=connections.uploader,
            disk_problem=lambda: describe_full_disk(folder, needed(self.controller.parts)),
            world_size=trainer.stream.layout.shards,
            run=config.store.run,
        )
        # The reporter before the uploads: a step's line stands above what it led to.
        for subscriber in (income, reporter, metrics, missed, uploads):
            self.controller.subscribe(subscriber.on_event)
        self.controller.subscribe(end_rounds_of(self.server))

    def go_live(self) -> None:
        """Show this miner to others, and begin to follow them. Returns at once."""
        trainer, context, state = self._training.trainer, self._context, self.controller.state
        config, connections, member = context.config, self._connections, self._connections.member
        # Validators read it in the root metadata, to name this peer in their calls.
        connections.uploader.publish_peer_id(self.exchange.peer_id)
        # Before the endpoint is announced: a validator that reads it may call at once.
        self.server.start()
        endpoint = connections.address, config.chain.external_port or self.server.port
        identity.announce(member, *endpoint)

        # A miner that is called has the right address: the services that tell it are not asked.
        def public_ip() -> str | None:
            with suppress(AddressUnknown):
                return public_address(config) if self.round_clock.missed() else None
            return None

        def moved(ip: str) -> None:
            try:
                if (announced := swarm_address(config, ip)) is not None:
                    self.exchange.announce(announced)
            except SwarmUnavailable as error:  # its keeper continues to try, with the new address
                log.warning("%s", error)

        belief, interval = registration_terms(config)
        watcher = identity.follow_registration(
            member,
            endpoint=endpoint,
            commitment=connections.own.commitment,
            stop=lambda why, status: context.events.put(ev.StopRequested(why, status)),
            belief=belief,
            on_read=lambda: keep_state(member.chain, config.chain, context.folder),
            interval=interval,
            public_ip=public_ip,
            moved=moved,
        )
        context.stack.callback(watcher.close)
        self.global_epoch.start()
        # The network's file too: whoever has another version of it trains for nothing.
        if state.view is GlobalView.UNREAD or config.network is not None:
            self.global_epoch.compare_soon()
        if self._training.kept and state.mode is Mode.TRAINING:
            self.global_epoch.compare_weights(trainer.outer_step)  # of the last round, perhaps
        peer_id = self.exchange.peer_id
        record_start(self.record, context, self._info, self._training, peer_id=peer_id)


def open_hivemind(
    config: Config,
    folder: Path,
    connections: Connections,
    schema: Sequence[tuple[str, tuple[int, ...]]],
) -> HivemindSwarm:
    """Open the exchange of kind hivemind. Raises NetworkFailure."""
    try:
        return HivemindSwarm(
            settings=replace(config.swarm, dht_ip=swarm_address(config, connections.address)),
            schema=schema,
            run_folder=folder,
            launch=connections.swarm_launch,
        )
    except SwarmUnavailable as error:
        why = connections.clock.fault()
        raise NetworkFailure(f"{error}; {why}" if why else str(error)) from None


def swarm_address(config: Config, ip: str) -> str | None:
    """Return the address to announce to the swarm, which knows IPv4 only; None: p2pd's own guess.

    ``ip``: at which others reach this machine, where ``--dht.ip`` gives no other.
    """
    return config.swarm.dht_ip or (None if ":" in ip else ip)


def global_interval(config: Config) -> timedelta:
    """Return the time between two looks at the global bucket."""
    blocks = config.miner.epoch_check_blocks
    return timedelta(seconds=blocks * config.chain.seconds_per_block)


def build_exchange(
    context: RankContext, info: StartupInfo, connections: Connections | None, training: Training
) -> tuple[RankZero | None, SwarmRank]:
    """Build rank 0's own part, and this rank's part of rounds. Collective.

    ``connections``: rank 0's, else None. Raises ConfigError, NetworkFailure.
    """
    rank_zero = RankZero(context, info, connections, training) if connections else None
    exchange = rank_zero.exchange if rank_zero else None
    buffers = exchange.buffers if exchange else None
    # The other ranks wait here for rank 0's swarm.
    training.trainer.outer.open_window(buffers, exchange.memory.path if exchange else None)
    snapshots = context.folder / "snapshots"
    return rank_zero, SwarmRank(
        training.trainer, context.ranks, snapshots=snapshots, buffers=buffers
    )
