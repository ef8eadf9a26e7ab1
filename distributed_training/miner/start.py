"""One rank of the miner, from its arguments to its exit status. It reads top to bottom:

    run_rank        settings, log, signals
    _meet_network   rank 0: wallet, chain, buckets; all ranks: what it found there
    Miner           every rank: model, checkpoint, data, loop
    RankZero        swarm, uploader, watch of the global bucket; controller, server; subscribers
    Miner.run       until STOP

Tests build the same :class:`Miner` with a network of their own.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distributed_training.common.exits import ExitStatus
from distributed_training.common.memory import checkpoint_bytes, snapshot_bytes
from distributed_training.common.processes import die_with_parent, write_stacks_on_signal
from distributed_training.config import Config, ConfigError, exit_with
from distributed_training.diagnostics.nvml import NvmlSampler, visible_gpu_count
from distributed_training.diagnostics.report import cuda_state, gpu_report_lines, step_warnings
from distributed_training.node.failures import NetworkFailure, exit_status_of
from distributed_training.node.start import make_run_folder, start_log
from distributed_training.protocol import lines
from distributed_training.protocol.types import StepReport
from distributed_training.store.bucket_reader import refuse
from distributed_training.store.upload_rules import disk_allows
from distributed_training.telemetry import EventLog, MetricsFile, unix_time
from distributed_training.telemetry.trackers import open_trackers
from distributed_training.training.collectives import COLLECTIVE_TIMEOUT

from . import services
from . import state_machine as ev
from .block_list import BlockList
from .controller import Averaging, Controller
from .global_state import Rows, StopBeforeStart
from .loop import MinerLoop
from .ranks import Ranks, join_ranks
from .reporter import MachineGauges, Metrics, MissedRounds, Record, Reporter, limits
from .run_folder import (
    INSTANCE,
    RankEnvironment,
    rank_environment,
    remembered_gpus,
    write_exit_status,
    write_pid_file,
)
from .services import Facts, Outside
from .state_machine import MinerState, Mode, Rules, ignores_calls
from .uploads import Publishing
from .watchdog import Heartbeat

log = logging.getLogger(__name__)


class DeviceAway(RuntimeError):
    """There are GPUs, but torch cannot use them now. Exit status 1: just after a reboot or a
    driver's upgrade that passes."""


def rank_device(wanted: str, local_rank: int, *, remembered: int = 0) -> torch.device:
    """Of ``--neuron.device``; a GPU becomes the process's current one. ``remembered``: GPUs that
    earlier ranks of this run folder ran on.

    Raises ConfigError for cuda without a GPU. Raises DeviceAway for auto if there are GPUs, or were
    before: once on the CPU, a rank would stay there, and take days for a step.
    """
    if wanted != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    if wanted == "cuda":
        raise ConfigError(
            f"--neuron.device cuda, but torch {torch.__version__} sees no GPU, so nothing would be "
            "trained in time: python scripts/diagnose.py says why; --neuron.device cpu takes the "
            "CPU"
        )
    if wanted == "auto" and (gpus := visible_gpu_count() or remembered):
        raise DeviceAway(
            f"torch {torch.__version__} cannot use the {gpus} GPUs this miner has, so nothing is "
            "trained until it can, rather than on the CPU: nvidia-smi and python "
            "scripts/diagnose.py say why; --neuron.device cpu takes the CPU"
        )
    return torch.device("cpu")


def warnings_of(config: Config, device: torch.device) -> Callable[[StepReport], list[str]]:
    """What tells the warnings of an inner step. One that used no GPU memory is wrong where a GPU
    is used, or is there to be used."""

    def expects_gpu() -> bool:
        return device.type == "cuda" or (config.miner.device != "cpu" and visible_gpu_count() > 0)

    return lambda report: step_warnings(report, config.diagnostics, expect_gpu=expects_gpu())


def utilization_of(device: torch.device) -> Callable[[], float | None]:
    """What tells the device's utilization in percent; None where nobody measures it."""
    sampler = NvmlSampler.open(device.index) if device.type == "cuda" else None
    if sampler is not None:
        return sampler.utilization
    if device.type == "cuda":
        log.warning(
            "GPU utilization is not reported: NVML is not usable (`python scripts/diagnose.py`)"
        )
    return lambda: None


def report_device(
    config: Config, device: torch.device, *, micro_batch: int, world_size: int
) -> None:
    """The GPU block, once the model is there; what is wrong as a warning."""
    for line in gpu_report_lines(
        cuda=cuda_state(device.index),
        model_device=str(device),
        micro_batch=micro_batch,
        effective=config.training.local_batch_size_train_effective,
        world_size=world_size,
        expect_gpu=config.miner.device != "cpu",
    ):
        log.log(logging.WARNING if line.startswith("❌") else logging.INFO, "%s", line)


class RankStop:
    """SIGTERM asks for a stop; SIGINT is the launcher's to handle (a terminal sends it to all).

    ``events``: rank 0's queue, in which the stop arrives as an event like any other.
    """

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self.wanted = False

    def install(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        del number, frame
        self.wanted = True
        self.events.put(ev.StopRequested("asked to stop"))


#: Covers every collective of the control channel. Rank 0 comes to a boundary at least every 0.2 s
#: while there is nothing to do; the longest thing between two boundaries is writing the
#: pseudo-gradient, loading weights or compiling the model.
CONTROL_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Place:
    """Where a rank is built: its settings, folder, device and fellow ranks, rank 0's queue of
    events, and the stack that closes what was opened."""

    config: Config
    folder: Path
    device: torch.device
    ranks: Ranks
    events: queue.SimpleQueue[ev.Event]
    stack: ExitStack


def run_rank(config: Config) -> int:
    """Train until the miner ends. Return the exit status (:class:`ExitStatus`)."""
    me = rank_environment()
    stop = RankStop()
    stop.install()
    die_with_parent()
    write_stacks_on_signal()
    try:
        folder = make_run_folder(config)
    except ConfigError as error:  # the launcher could; the disk may be gone since
        exit_with(error)
        return ExitStatus.FAULT
    start_log(config, folder, name="miner", rank=me.local_rank)
    # Compiled kernels outlive a container's /tmp: a restart need not compile again.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((folder / "compiled").absolute()))
    status, reason, outside = int(ExitStatus.FAULT), "", False
    try:
        write_pid_file(folder, me.local_rank)
        Heartbeat(folder, me.local_rank)()
        with ExitStack() as stack:
            status, reason = _run(config, me, folder, stop, stack)
    except StopBeforeStart:
        status, reason = ExitStatus.STOPPED, "stopped before the start was complete"
    except (ConfigError, NetworkFailure, DeviceAway) as error:
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
    device = rank_device(config.miner.device, me.local_rank, remembered=remembered_gpus(folder))
    ranks = join_ranks(
        environ=os.environ,
        timeout=CONTROL_TIMEOUT,
        collective_timeout=COLLECTIVE_TIMEOUT,
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
    )
    place = Place(config, folder, device, ranks, stop.events, stack)
    with Heartbeat(folder, me.local_rank).steady():
        outside, facts = _meet_network(place, wanted=lambda: not stop.wanted)
    if facts.problem:
        return ExitStatus.STOPPED, ""  # rank 0 says why; this rank did not fail
    status, reason = Miner(place, facts, outside).run()
    with suppress(RuntimeError):  # the others may be gone already
        ranks.close()
    return status, reason


def _meet_network(place: Place, *, wanted: Callable[[], bool]) -> tuple[Outside | None, Facts]:
    """The network first, and only on rank 0: what is wrong shows before a model is built."""
    ranks = place.ranks
    if ranks.rank != 0:
        return None, services.on_this_node(
            place.config, place.folder, ranks, Facts(**ranks.share("start", None))
        )
    try:
        outside = services.connect(place.config, place.folder, place.stack, wanted=wanted)
    except (ConfigError, NetworkFailure, StopBeforeStart) as error:
        ranks.share("start", {"problem": str(error) or "stopped"})
        raise
    ranks.share("start", asdict(outside.facts))
    return outside, outside.facts


# --- every rank ---------------------------------------------------------------------------------


class Miner:
    """One rank, built top to bottom and ready to run. ``outside``: rank 0's, else None.

    Raises ConfigError, NetworkFailure.
    """

    def __init__(self, place: Place, facts: Facts, outside: Outside | None) -> None:
        from distributed_training.data.block_builder import WorkerSpec
        from distributed_training.data.pipeline import DataPipeline
        from distributed_training.training.checkpoint import Checkpointer
        from distributed_training.training.collectives import Layout
        from distributed_training.training.trainer import Trainer

        config, ranks, device = place.config, place.ranks, place.device
        alive = Heartbeat(place.folder, ranks.local_rank)

        # training
        self.trainer = Trainer(
            settings=config.training,
            model_config=facts.model_config,
            device=device,
            layout=Layout(ranks.rank, ranks.world_size, ranks.local_world_size),
            utilization=utilization_of(device),
            run_folder=place.folder,
        )
        self.checkpointer = Checkpointer(
            trainer=self.trainer,
            folder=place.folder / "checkpoints",
            keep=config.miner.keep_checkpoints,
            owner=facts.hotkey,
        )
        alive()

        # data
        self.data = DataPipeline(
            WorkerSpec(
                settings=config.data,
                uid=facts.uid,
                rank=ranks.rank,
                world_size=ranks.world_size,
                sequence_length=config.training.sequence_length,
                tokenizer_path=Path(facts.tokenizer_path),
                eos_id=facts.eos_id,
                folder=place.folder / "data",
                vocabulary=int(facts.model_config["vocab_size"]),
            ),
            micro_batch_size=self.trainer.micro_batch_size,
            device=device,
        )
        place.stack.callback(self.data.close)

        # where it stood: what this rank kept in its checkpoint, empty after a fresh start
        self.kept = self._resume(facts, outside.global_folder if outside else None)
        self.data.load_state_dict(self.kept.get("data", {}))
        self.first_block = 0 if self.kept else facts.first_block
        if self.first_block:
            self.data.request(self.first_block)  # prepared while the swarm comes
        alive()

        # what rank 0 has besides
        self.rank_zero = RankZero(place, self, facts, outside) if outside else None
        swarm = self.rank_zero.swarm if self.rank_zero else None
        buffers = swarm.buffers if swarm else None
        self.trainer.outer.open_window(buffers, swarm.memory_path if swarm else None)
        self.loop = MinerLoop(
            ranks=ranks,
            trainer=self.trainer,
            data=self.data,
            checkpointer=self.checkpointer,
            snapshots=place.folder / "snapshots",
            controller=self.rank_zero.controller if self.rank_zero else None,
            buffers=buffers,
            alive=alive,
        )

    def _resume(self, facts: Facts, global_folder: Path | None) -> dict[str, Any]:
        """Weights: the checkpoint where it belongs to the global epoch, else the global state.

        A checkpoint one epoch ahead is kept: this miner was ended between its outer step and the
        validator's publication; comparing epochs later decides. So is any later one where the
        global state is the newest on the disk, since the bucket did not answer.
        """
        restored, outer_step = self.checkpointer.restore(), facts.global_outer_step
        if restored is not None:
            progress, kept = restored
            reached = progress.outer_step
            if reached in (outer_step, outer_step + 1) or (
                reached > outer_step and not facts.global_seen
            ):
                log.info("Resumed at outer step %d, inner step %d", reached, progress.inner_step)
                return kept
            log.info(lines.epochs_differ(reached, outer_step))
        try:
            self.trainer.load_global(
                global_folder / "model.safetensors" if global_folder else None,
                global_folder / "outer_optimizer.pt" if global_folder else None,
                outer_step,
            )
        except ValueError as error:  # on all ranks alike; nothing has changed
            if global_folder is not None:
                refuse(global_folder, str(error))  # the next start waits for another one
            if restored is None:
                raise NetworkFailure(f"the global state cannot be trained on: {error}") from None
            log.warning(
                "The global state cannot be loaded (%s). Training goes on without it.", error
            )
            return restored[1]
        return {}

    def run(self) -> tuple[int, str]:
        """Until stopped. Exit status and, on rank 0, the reason.

        Rank 0 alone gives the miner's status. A rank that ends as ordered has not failed: another
        status than 0 would have the launcher end rank 0 while it still closes what it has."""
        if self.rank_zero is not None:
            self.rank_zero.open_doors()
        status = self.loop.run()
        if self.rank_zero is None:
            return ExitStatus.STOPPED, ""
        controller = self.rank_zero.controller
        controller.drain()  # what the last order came to is reported too
        return status, controller.state.stop_reason


# --- rank 0 -------------------------------------------------------------------------------------


class RankZero:
    """The controller with those who post events to it and those who subscribe to them."""

    def __init__(self, place: Place, miner: Miner, facts: Facts, outside: Outside) -> None:
        self._place, self._miner, self._outside = place, miner, outside
        config, trainer, post = place.config, miner.trainer, place.events.put
        opened = place.stack.enter_context
        reload = config.miner.round_reload_timeout.total_seconds()

        # who posts events, besides the loop itself and the signals
        self.swarm = opened(closing(outside.open_swarm(trainer.schema)))
        self.publisher = opened(closing(outside.open_publisher(place.folder / "snapshots")))
        self.global_epoch = opened(closing(outside.watch(post, self._epoch_start)))

        # who decides
        unseen = not facts.global_seen
        self.behind = unseen or trainer.outer_step != facts.global_outer_step
        self.round_clock = outside.round_clock()
        self.blocks = self._block_list()
        self.controller = Controller(
            state=MinerState(
                mode=Mode.AWAITING_GLOBAL if self.behind else Mode.TRAINING,
                outer_step=trainer.outer_step,
                global_due=time.monotonic() + reload,
                unpublished=unseen,
                unseen=unseen,
            ),
            rules=Rules(
                reload_seconds=reload,
                checkpoint_steps=config.miner.checkpoint_steps,
                checkpoint_seconds=config.miner.checkpoint_interval.total_seconds(),
            ),
            events=place.events,
            blocks=self.blocks,
            averaging=Averaging(swarm=self.swarm, post=post),
            global_epoch=self.global_epoch,
        )
        self.server = outside.open_server(
            epoch=lambda: trainer.outer_step,
            on_all_reduce=lambda request: post(ev.AllReduceCalled(request, time.monotonic())),
            round_phase=lambda: (
                "averaging" if self.controller.state.mode is Mode.AVERAGING else None
            ),
            round_due=self.round_clock.due,
        )
        place.stack.callback(self.server.close)

        # who subscribes to them
        self.schedule = outside.upload_schedule()
        events = EventLog.from_settings(config.telemetry, place.folder)
        self._record: Record = events.write if events else (lambda kind, **fields: None)
        missed = MissedRounds(
            outer_step=trainer.outer_step,
            published_within=1.25 * config.miner.round_reload_timeout,
        )
        for see in (self._reporter().see, missed.see, self._publishing().see, self._tell_server):
            self.controller.subscribe(see)

    def open_doors(self) -> None:
        """From here on others find this miner, and it finds out about them."""
        outside, miner, port = self._outside, self._miner, self.server.port
        place = self._place
        post = place.events.put
        report_device(
            place.config,
            place.device,
            micro_batch=miner.trainer.micro_batch_size,
            world_size=place.ranks.world_size,
        )
        self.publisher.publish_peer_id(self.swarm.peer_id)
        self.server.start()
        outside.announce(port)
        outside.follow_registration(
            port,
            lambda why, status: post(ev.StopRequested(why, status)),
            self._place.stack,
            round_missed=self.round_clock.missed,
        )
        self.global_epoch.start()
        if self.controller.state.unseen:
            self.global_epoch.compare_soon()
        if miner.kept and not self.behind:
            # Of the last round, perhaps.
            self.global_epoch.compare_weights(miner.trainer.outer_step)
        self._record(
            "start",
            uid=outside.uid,
            hotkey=outside.hotkey,
            peer_id=self.swarm.peer_id,
            outer_step=miner.trainer.outer_step,
            inner_step=miner.trainer.inner_step,
            world_size=place.ranks.world_size,
            resumed=bool(miner.kept),
        )

    def _epoch_start(self) -> tuple[int, list[Rows]]:
        """What the global weights are compared with: our outer step, rank 0's rows of its start."""
        trainer = self._miner.trainer
        return trainer.outer_step, [Rows(*rows) for rows in trainer.epoch_start_rows()]

    def _block_list(self) -> BlockList:
        trainer, data, kept = self._miner.trainer, self._miner.data, self._miner.kept
        held = trainer.preview_micro_batches
        blocks = BlockList(
            chain_block=self._outside.chain.block,
            data=data,
            ranks=self._place.ranks,
            micro_batch_size=trainer.micro_batch_size,
            uid=self._outside.uid,
            hold_back=held,
            holds_back=data.holds_back(held),
            recent=self.round_clock.half,
        )
        blocks.load_state_dict(
            kept.get("rank_zero", {}).get("blocks", {}),
            kept.get("data", {}),
            exact=self._miner.checkpointer.exact,
        )
        if self._miner.first_block:
            blocks.begin_with(self._miner.first_block)
        blocks.newest_published = self._outside.published.newest_block
        return blocks

    def _reporter(self) -> Reporter:
        place, outside, opened = self._place, self._outside, self._place.stack.enter_context
        config, on_gpu = place.config, place.device.type == "cuda"
        trackers = open_trackers(
            config.telemetry,
            place.folder,
            name=f"{config.miner.name}-{outside.uid}",
            first_step=self._miner.trainer.total_inner_steps + 1,
        )
        machine = MachineGauges(
            place.folder,
            needed=self._bytes_needed()
            + checkpoint_bytes(s for _, s in self._miner.trainer.schema),
            gpus=place.ranks.local_world_size if on_gpu else 0,
        )
        metrics = Metrics(
            trackers=[opened(closing(tracker)) for tracker in trackers],
            file=MetricsFile(place.folder / "metrics.prom"),
            counts={
                "data": self._miner.data.counters,
                "chain": outside.chain.counters,
                "server": self.server.counters,
            },
            gauges={
                "chain_age_seconds": lambda: outside.chain.age().total_seconds(),
                "chain_block": outside.chain.block,
                "block_list_newest_block": lambda: self.blocks.newest_trained,
                "next_round_timestamp_seconds": lambda: unix_time(self.round_clock.expected_at()),
                "dht_peers": self.swarm.known_peers,
                "global_run": lambda: outside.global_bucket.run_seen,
                **limits(
                    self.schedule,
                    newest=lambda: self.blocks.newest_published,
                    chain_block=outside.chain.block,
                    most_blocks=self.round_clock.half,
                ),
                **machine.single(),
            },
            by_rank=opened(closing(machine)).by_rank,
        )
        return Reporter(
            record=self._record,
            metrics=metrics,
            schedule=self.schedule,
            warnings=warnings_of(config, place.device),
            bucket=outside.bucket,
            reload_timeout=config.miner.round_reload_timeout,
        )

    def _bytes_needed(self) -> int:
        return snapshot_bytes(shape for _, shape in self._miner.trainer.schema)

    def _publishing(self) -> Publishing:
        needed = self._bytes_needed()
        return Publishing(
            schedule=self.schedule,
            round_clock=self.round_clock,
            blocks=self.blocks,
            publisher=self.publisher,
            disk_problem=lambda: disk_allows(self._place.folder, needed),
            world_size=self._miner.trainer.stream.layout.shards,
        )

    def _tell_server(self, event: ev.Event, state: MinerState) -> None:
        """Until it is told that a call led to nothing more, it answers that a round is running."""
        match event:
            case ev.ModeChanged(before=Mode.AVERAGING):
                self.server.round_ended()
            case ev.AllReduceCalled() if ignores_calls(state):
                self.server.round_ended()
