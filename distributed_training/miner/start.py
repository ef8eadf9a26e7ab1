"""Run one rank of the miner, from its arguments to its exit status.

Read it from top to bottom:

    run_rank          log, signals
    _connect          rank 0: wallet, chain, buckets; all ranks: what it found there
    build_rank        every rank: model, checkpoint, data, loop
    build_rank_zero   rank 0: swarm, watch of the global bucket, controller, server, subscribers
    Rank.run          until STOP

Tests build the same rank with services of their own.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch

from distributed_training.chain.server import MinerCallbacks, SignedServer
from distributed_training.common.kinds import import_plugins
from distributed_training.common.memory import checkpoint_bytes, snapshot_bytes
from distributed_training.common.processes import die_with_parent, write_stacks_on_signal
from distributed_training.config import Config, ConfigError, exit_with
from distributed_training.data.block_builder import WorkerSpec
from distributed_training.data.pipeline import DataPipeline
from distributed_training.node.start import (
    NetworkFailure,
    Stopped,
    exit_status_of,
    make_run_folder,
    start_log,
)
from distributed_training.protocol import lines
from distributed_training.protocol.types import (
    ExitStatus,
    RankFailedError,
)
from distributed_training.store.bucket_reader import refuse
from distributed_training.swarm.swarm import HivemindSwarm
from distributed_training.telemetry import EventLog, unix_time
from distributed_training.telemetry.trackers import open_trackers
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.collectives import COLLECTIVE_TIMEOUT, Layout
from distributed_training.training.local_evaluation import AwfulWeights
from distributed_training.training.trainer import Trainer

from . import events as ev
from . import services
from .block_list import BlockList
from .controller import Controller, Subscriber
from .device import rank_device, report_device, utilization_of, warnings_of
from .events import GlobalView, MinerState, Mode, Rules
from .global_state import GlobalEpoch, StopBeforeStart
from .income import Income
from .loop import MinerLoop, not_loaded, state_files
from .ranks import Ranks, join_ranks
from .reporter import MachineGauges, Metrics, MissedRounds, Record, Reporter, limits
from .round import Averaging, ignores_calls
from .run_folder import (
    INSTANCE,
    Heartbeat,
    RankEnvironment,
    rank_environment,
    remembered_gpus,
    write_exit_status,
    write_pid_file,
)
from .services import Services, StartupInfo, global_interval
from .signals import RankStop, who_stops
from .uploads import Uploads

log = logging.getLogger(__name__)


#: Covers every collective of the control channel. Rank 0 comes to a boundary at least every 0.2 s
#: while there is nothing to do; the longest thing between two boundaries is writing the
#: pseudo-gradient, loading weights or compiling the model.
CONTROL_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class RankContext:
    """The surroundings in which a rank is built.

    Its settings, folder, device and fellow ranks, rank 0's queue of events, and the stack that
    closes what was opened. ``tick``: of the controller.
    """

    config: Config
    folder: Path
    device: torch.device
    ranks: Ranks
    events: queue.SimpleQueue[ev.Event]
    stack: ExitStack
    tick: timedelta = timedelta(seconds=1)


def run_rank(config: Config) -> int:
    """Train until the miner ends. Return the exit status (:class:`ExitStatus`)."""
    me = rank_environment()
    stop = RankStop()
    stop.install()
    # After the handler: a parent that is gone already is told by SIGTERM at once.
    die_with_parent()
    write_stacks_on_signal()
    try:
        folder = make_run_folder(config)
    except ConfigError as error:  # the launcher could; the disk may be gone since
        exit_with(error, of_service=True)
        return ExitStatus.FAULT
    start_log(config, folder, name="miner", rank=me.local_rank)
    # Compiled kernels outlive a container's /tmp: a restart need not compile again.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((folder / "compiled").absolute()))
    status, reason, outside = int(ExitStatus.FAULT), "", False
    try:
        # From here on a stop goes to rank 0 alone, which saves first; before it ends all ranks.
        write_pid_file(folder, me.local_rank)
        Heartbeat(folder, me.local_rank)()
        with ExitStack() as stack:
            status, reason = _run(config, me, folder, stop, stack)
    except (StopBeforeStart, Stopped):
        status, reason = ExitStatus.STOPPED, f"{who_stops()} before the start was complete"
    except (ConfigError, NetworkFailure) as error:
        # The settings were checked before any rank was started: this was found outside.
        status, reason = exit_status_of(error), str(error)
        outside = status == ExitStatus.FAULT
        if me.local_rank or INSTANCE not in os.environ:  # the launcher reports rank 0's
            log.error("%s", error)
    except Exception as error:  # the last word of this process: say it in one line, then end
        reason = f"{type(error).__name__}: {error}"
        log.exception("%s", lines.training_loop_failed(error))
    if me.local_rank == 0:
        with suppress(OSError):  # no room: to the launcher that is a fault
            write_exit_status(folder, status, reason, outside=outside)
    return status


def _run(
    config: Config,
    me: RankEnvironment,
    folder: Path,
    stop: RankStop,
    stack: ExitStack,
) -> tuple[int, str]:
    import_plugins(config.general.plugins)  # the launcher's own are not those of its fork server
    device = rank_device(config.miner.device, me.local_rank, remembered=remembered_gpus(folder))
    ranks = join_ranks(
        environ=os.environ,
        timeout=CONTROL_TIMEOUT,
        collective_timeout=COLLECTIVE_TIMEOUT,
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
    )
    context = RankContext(config, folder, device, ranks, stop.events, stack)
    # Chain and store may be asked for hours: that is no hang.
    with Heartbeat(folder, me.local_rank).steady():
        services, info = _connect(context, stop)
    if info.problem:
        return ExitStatus.STOPPED, ""  # rank 0 says why; this rank did not fail
    status, reason = build_rank(context, info, services).run()
    with suppress(RuntimeError):  # the others may be gone already
        ranks.close()
    return status, reason


def _connect(context: RankContext, stop: RankStop) -> tuple[Services | None, StartupInfo]:
    """Connect first, and only on rank 0: problems show before a model is built."""
    config, folder, ranks = context.config, context.folder, context.ranks
    if ranks.rank != 0:
        shared = StartupInfo(**ranks.share("start", None))
        return None, services.on_this_node(config, folder, ranks, shared)
    try:
        # A store that is away may take all the time of a stop for one answer.
        with stop.interrupting():
            opened = services.connect(config, folder, context.stack, wanted=lambda: not stop.wanted)
    except (ConfigError, NetworkFailure, StopBeforeStart, Stopped) as error:
        # The other ranks wait for this word, and would end only by the launcher's SIGKILL.
        ranks.share("start", {"problem": str(error) or "stopped"})
        raise
    ranks.share("start", asdict(opened.info))
    return opened, opened.info


# --- every rank ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """The objects that every rank trains with.

    ``kept``: this rank's part of its checkpoint, empty after a fresh start; ``first_block``: the
    block that a fresh start trains on first, else 0.
    """

    trainer: Trainer
    checkpointer: Checkpointer
    data: DataPipeline
    kept: Mapping[str, Any]
    first_block: int


@dataclass(frozen=True)
class Rank:
    """One rank, ready to run. ``rank_zero``: rank 0's own part, else None."""

    training: Training
    rank_zero: RankZero | None
    loop: MinerLoop

    def run(self) -> tuple[int, str]:
        """Train until stopped. Return the exit status and, on rank 0, the reason.

        Rank 0 alone gives the miner's status. A rank that ends by a command has not failed: another
        status than 0 would have the launcher end rank 0 while it still closes what it has.
        """
        if self.rank_zero is None:
            self.loop.run()
            return ExitStatus.STOPPED, ""
        self.rank_zero.go_live()
        status = self.loop.run()
        controller = self.rank_zero.controller
        controller.drain()  # what the last command came to is reported too
        return status, controller.state.stop_reason


def build_rank(context: RankContext, info: StartupInfo, services: Services | None) -> Rank:
    """Build one rank. ``services``: rank 0's, else None. Raises ConfigError, NetworkFailure."""
    alive = Heartbeat(context.folder, context.ranks.local_rank)
    training = build_training(context, info, services, alive)
    # After the model: the swarm's buffers have its shapes.
    rank_zero = build_rank_zero(context, training, services) if services else None
    swarm = rank_zero.swarm if rank_zero else None
    buffers = swarm.buffers if swarm else None
    # Collective: the other ranks wait here for rank 0's swarm.
    training.trainer.outer.open_window(buffers, swarm.memory_path if swarm else None)
    loop = MinerLoop(
        ranks=context.ranks,
        trainer=training.trainer,
        data=training.data,
        checkpointer=training.checkpointer,
        snapshots=context.folder / "snapshots",
        controller=rank_zero.controller if rank_zero else None,
        buffers=buffers,
        alive=alive,
    )
    return Rank(training, rank_zero, loop)


def build_training(
    context: RankContext, info: StartupInfo, services: Services | None, alive: Callable[[], None]
) -> Training:
    """Build model and data, and go on from the last checkpoint or the global state."""
    config, ranks, folder = context.config, context.ranks, context.folder
    trainer = Trainer(
        settings=config.training,
        model_config=info.model_config,
        device=context.device,
        layout=Layout(ranks.rank, ranks.world_size, ranks.local_world_size),
        utilization=utilization_of(context.device),
        run_folder=folder,
    )
    checkpointer = Checkpointer(
        trainer=trainer,
        folder=folder / "checkpoints",
        keep=config.miner.keep_checkpoints,
        owner=info.hotkey,
    )
    alive()
    data = DataPipeline(
        WorkerSpec(
            settings=config.data,
            uid=info.uid,
            rank=ranks.rank,
            world_size=ranks.world_size,
            sequence_length=config.training.sequence_length,
            tokenizer_path=Path(info.tokenizer_path),
            eos_id=info.eos_id,
            folder=folder / "data",
            vocabulary=int(info.model_config["vocab_size"]),
        ),
        micro_batch_size=trainer.micro_batch_size,
        device=context.device,
    )
    context.stack.callback(data.close)
    kept = resume(
        trainer,
        checkpointer,
        info,
        services.global_folder if services else None,
        sample=lambda: _first_sample(data, info.first_block, trainer.measured_sequences, alive),
    )
    data.load_state_dict(kept.get("data", {}))
    first_block = 0 if kept else info.first_block
    if first_block:
        data.request(first_block)  # prepared while the swarm comes
    alive()
    return Training(trainer, checkpointer, data, kept, first_block)


_SAMPLE_PATIENCE = 30.0  # seconds, half of --neuron.stop_timeout: a stop is not looked at here


def _first_sample(
    data: DataPipeline, block: int, count: int, alive: Callable[[], None]
) -> torch.Tensor | None:
    """Return text to measure the global state with, before the loop; None if it does not come."""
    sample = data.sample(count)
    if sample is not None or not block:
        return sample
    data.request(block)  # the block that a fresh start trains on first
    deadline = time.monotonic() + _SAMPLE_PATIENCE
    # A source that is away holds up no start: its workers ask on, beside the swarm's start.
    while data.ready(block) is None and time.monotonic() < deadline:
        alive()
        time.sleep(0.05)
    return data.sample(count)


def resume(
    trainer: Trainer,
    checkpointer: Checkpointer,
    info: StartupInfo,
    global_folder: Path | None,
    *,
    sample: Callable[[], torch.Tensor | None] = lambda: None,
) -> dict[str, Any]:
    """Load the checkpoint where it belongs to the global state, else the global state.

    Returns what was kept in the checkpoint. Without any, training begins at the network's place in
    the learning rate's schedule. ``sample``: text of this rank, to measure the global state with.

    A checkpoint one outer step ahead is kept: this miner was ended between its outer step and the
    validator's upload; comparing outer steps later decides. So is any later one where the global
    state is the newest on the disk, since the bucket did not answer. Raises NetworkFailure.
    """
    restored, outer_step = checkpointer.restore(), info.global_outer_step
    if restored is not None:
        progress, kept = restored
        reached = progress.outer_step
        if reached in (outer_step, outer_step + 1) or (
            reached > outer_step and not info.global_seen
        ):
            log.info("Resumed at outer step %d, inner step %d", reached, progress.inner_step)
            return kept
        log.info(lines.epochs_differ(reached, outer_step))
    try:
        trainer.load_global(*state_files(global_folder), outer_step, sample())
    except ValueError as error:  # on all ranks alike; nothing has changed
        awful, back = None, restored is not None and restored[0].outer_step > outer_step
        if isinstance(error, AwfulWeights):
            awful = lines.awful(info.global_uid, error)
            if restored is not None and back:
                awful = lines.awful_back(outer_step, restored[0].outer_step, error)
        # Not what is awful by the losses of this miner alone, which tries it again as it runs.
        if global_folder is not None and not (awful and back):
            refuse(global_folder, str(error))  # the next start waits for another one
        if restored is None:
            raise NetworkFailure(
                awful
                or f"the global state does not fit this program ({error}), so nothing is trained: "
                "look for a newer version; another state is fetched as soon as it is published"
            ) from None
        if awful is None:
            awful = f"The global state cannot be loaded ({error}). Training goes on without it."
        log.warning("%s", awful)
        return restored[1]
    except RankFailedError as error:  # on all ranks alike, before anything has changed
        if restored is None:
            raise
        log.warning("%s", lines.not_fetched(not_loaded(error)))
        return restored[1]
    if restored is None:
        trainer.begin_schedule(info.model_config.get("total_inner_steps") or 0)
    return {}


# --- rank 0 -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankZero:
    """The controller with those who post events to it and those who subscribe to them."""

    context: RankContext
    services: Services
    training: Training
    swarm: HivemindSwarm
    global_epoch: GlobalEpoch
    blocks: BlockList
    controller: Controller
    server: SignedServer
    record: Record

    def go_live(self) -> None:
        """Show this miner to others, and begin to follow them."""
        trainer, context, state = self.training.trainer, self.context, self.controller.state
        report_device(
            context.config,
            context.device,
            micro_batch=trainer.micro_batch_size,
            world_size=context.ranks.world_size,
        )
        # Validators read it in the root metadata, to name this peer in their calls.
        self.services.uploader.publish_peer_id(self.swarm.peer_id)
        # Before the endpoint is announced: a validator that reads it may call at once.
        self.server.start()
        self.services.announce(
            self.server.port,
            self.swarm,
            lambda why, status: context.events.put(ev.StopRequested(why, status)),
            context.stack,
        )
        self.global_epoch.start()
        # The network's file too: whoever has another version of it trains for nothing.
        if state.view is GlobalView.UNREAD or context.config.network is not None:
            self.global_epoch.compare_soon()
        if self.training.kept and state.mode is Mode.TRAINING:
            self.global_epoch.compare_weights(trainer.outer_step)  # of the last round, perhaps
        self.record(
            "start",
            uid=self.services.info.uid,
            hotkey=self.services.info.hotkey,
            peer_id=self.swarm.peer_id,
            outer_step=trainer.outer_step,
            inner_step=trainer.inner_step,
            world_size=context.ranks.world_size,
            resumed=bool(self.training.kept),
        )


def build_rank_zero(context: RankContext, training: Training, services: Services) -> RankZero:
    """Build what posts events, what decides, and what subscribes, in this order."""
    config, trainer, info = context.config.miner, training.trainer, services.info
    post, at_end = context.events.put, context.stack.callback

    # who posts events, beside the loop itself and the signals
    swarm = services.open_swarm(trainer.schema)
    at_end(swarm.close)
    averaging = Averaging(swarm, post)
    global_epoch = services.watch_global_bucket(
        post, lambda: (trainer.outer_step, trainer.outer.epoch_start_rows())
    )
    at_end(global_epoch.close)

    # who decides
    blocks = _block_list(context, training, services)
    unread, reload = not info.global_seen, config.round_reload_timeout.total_seconds()
    # A checkpoint ahead of the bucket is no mistake: the validator may still be publishing.
    behind = unread or trainer.outer_step != info.global_outer_step
    controller = Controller(
        state=MinerState(
            mode=Mode.AWAITING_GLOBAL if behind else Mode.TRAINING,
            outer_step=trainer.outer_step,
            global_due=time.monotonic() + reload,
            view=GlobalView.UNREAD if unread else GlobalView.SAME,
        ),
        rules=Rules(
            reload_seconds=reload,
            checkpoint_steps=config.checkpoint_steps,
            checkpoint_seconds=config.checkpoint_interval.total_seconds(),
            train_in_rounds=config.train_in_rounds,
        ),
        events=context.events,
        blocks=blocks,
        averaging=averaging,
        global_epoch=global_epoch,
        tick=context.tick,
    )

    def heard(outer_step: int) -> None:
        if outer_step < trainer.outer_step:
            post(ev.ValidatorHeard(outer_step, time.monotonic()))

    def phase() -> str | None:
        return "averaging" if controller.state.mode is Mode.AVERAGING else None

    due = services.round_clock.due
    server = services.open_server(
        MinerCallbacks(
            epoch=lambda: trainer.outer_step,
            on_all_reduce=averaging.receive_call,
            round_phase=phase,
            round_due=due,
            peer_id=lambda: swarm.peer_id,
            addresses=lambda: swarm.visible_maddrs,
            run_id=context.config.swarm.run_id,
            on_validator_epoch=heard,
        )
    )
    # Closed first, since it was opened last: no call comes into a swarm that ends.
    at_end(server.close)

    # who subscribes to them
    events = EventLog.from_settings(context.config.telemetry, context.folder)
    record: Record = events.write if events else (lambda kind, **fields: None)
    rank_zero = RankZero(
        context, services, training, swarm, global_epoch, blocks, controller, server, record
    )
    for subscriber in _subscribers(rank_zero):
        controller.subscribe(subscriber)
    return rank_zero


def _block_list(context: RankContext, training: Training, services: Services) -> BlockList:
    trainer, data, kept = training.trainer, training.data, training.kept
    blocks = BlockList(
        chain_block=services.chain.block,
        data=data,
        ranks=context.ranks,
        micro_batch_size=trainer.micro_batch_size,
        uid=services.info.uid,
        hold_back=trainer.preview_micro_batches,
        recent=services.round_clock.half,
    )
    blocks.load_state_dict(
        kept.get("rank_zero", {}).get("blocks", {}),
        kept.get("data", {}),
        exact=training.checkpointer.exact,
    )
    if training.first_block:
        blocks.begin_with(training.first_block)
    blocks.newest_published = services.published.newest_block
    return blocks


def _subscribers(rank_zero: RankZero) -> list[Subscriber]:
    """Return who is shown each event, in this order, after the block list."""
    context, services = rank_zero.context, rank_zero.services
    trainer, config = rank_zero.training.trainer, context.config
    snapshot = snapshot_bytes(shape for _, shape in trainer.schema)
    blocks, clock = rank_zero.blocks, services.round_clock
    uploaded = limits(
        services.schedule,
        newest=lambda: blocks.newest_published,
        chain_block=services.chain.block,
        most_blocks=clock.half,
    )
    income = Income(
        hotkey=services.info.hotkey,
        chain=services.chain,
        limits=uploaded,
        called_at=rank_zero.server.called_at,
        round_period=lambda: 2 * clock.half() * config.chain.seconds_per_block,
        patience=config.miner.round_reload_timeout.total_seconds(),
        record=rank_zero.record,
    )
    reporter = Reporter(
        record=rank_zero.record,
        metrics=_metrics(rank_zero, snapshot, {**uploaded, **income.gauges()}),
        schedule=services.schedule,
        warnings=warnings_of(config, context.device),
        bucket=services.bucket,
        global_uid=services.info.global_uid,
        reload_timeout=config.miner.round_reload_timeout,
        clock_fault=services.clock.fault,
    )
    missed = MissedRounds(
        outer_step=trainer.outer_step,
        clock_fault=services.clock.fault,
        published_within=1.25 * config.miner.round_reload_timeout,
        listens_at=time.monotonic(),
        started=psutil.Process().create_time(),
        interval=global_interval(context.config),
    )
    uploads = Uploads(
        schedule=services.schedule,
        round_clock=services.round_clock,
        blocks=rank_zero.blocks,
        uploader=services.uploader,
        disk_problem=lambda: services.disk_problem(snapshot),
        world_size=trainer.stream.layout.shards,
        run=config.store.run,
    )
    ends_rounds = end_rounds_of(rank_zero.server)
    # The reporter before the uploads: a step's line stands above what it led to.
    return [income.on_event, reporter.on_event, missed.on_event, uploads.on_event, ends_rounds]


def _metrics(
    rank_zero: RankZero, snapshot: int, measured: Mapping[str, Callable[[], float | None]]
) -> Metrics:
    """Make the metrics. ``snapshot``: bytes of one; ``measured``: of uploads and income."""
    context, services, blocks = rank_zero.context, rank_zero.services, rank_zero.blocks
    trainer, opened = rank_zero.training.trainer, context.stack.enter_context
    config, chain, clock = context.config, services.chain, services.round_clock
    trackers = open_trackers(
        config.telemetry,
        context.folder,
        name=f"{config.miner.name}-{services.info.uid}",
        first_step=trainer.total_inner_steps + 1,
    )
    machine = MachineGauges(
        context.folder,
        needed=snapshot + checkpoint_bytes(shape for _, shape in trainer.schema),
        gpus=context.ranks.local_world_size if context.device.type == "cuda" else 0,
    )
    services.metrics.registry.set("protocol_run", config.store.run)
    return Metrics(
        trackers=[opened(closing(tracker)) for tracker in trackers],
        file=services.metrics,
        counts={
            "data": rank_zero.training.data.counters,
            "chain": chain.counters,
            "server": rank_zero.server.counters,
        },
        gauges={
            "chain_age_seconds": lambda: chain.age().total_seconds(),
            "chain_block": chain.block,
            "chain_seconds_per_block": lambda: clock.seconds(1),
            "block_list_newest_block": lambda: blocks.newest_trained,
            "next_round_timestamp_seconds": lambda: unix_time(clock.expected_at()),
            "dht_peers": rank_zero.swarm.known_peers,
            "clock_offset_seconds": services.clock.seconds,
            "global_run": lambda: services.global_bucket.run_seen,
            **measured,
            **machine.single(),
        },
        by_rank=opened(closing(machine)).by_rank,
    )


def end_rounds_of(server: SignedServer) -> Subscriber:
    """Return a subscriber that marks a call as finished, once it led to nothing more.

    Without it the server keeps answering that a round is running.
    """

    def on_event(event: ev.Event, state: MinerState) -> None:
        match event:
            case ev.ModeChanged(before=Mode.AVERAGING):
                server.round_ended()
            case ev.AllReduceCalled() if ignores_calls(state):
                server.round_ended()

    return on_event
