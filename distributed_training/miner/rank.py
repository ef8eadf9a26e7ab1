"""One rank of the miner, from its arguments to its exit status: builds the rooms, runs the loop."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distributed_training.common.exits import ExitStatus
from distributed_training.common.memory import snapshot_bytes
from distributed_training.common.processes import die_with_parent
from distributed_training.config import Config, ConfigError, load_config
from distributed_training.diagnostics import (
    NvmlSampler,
    cuda_state,
    gpu_report_lines,
    step_warnings,
)
from distributed_training.miner import network
from distributed_training.miner import state as st
from distributed_training.miner.blocks import BlockFeed
from distributed_training.miner.drift import Rows
from distributed_training.miner.global_start import StopBeforeStart
from distributed_training.miner.leader import Leader
from distributed_training.miner.loop import MinerLoop
from distributed_training.miner.orders import ControlChannel, open_control_channel
from distributed_training.miner.process import (
    RankEnvironment,
    rank_environment,
    write_exit_status,
    write_pid_file,
)
from distributed_training.miner.rank_zero import Cadence, RankZeroSide
from distributed_training.node.start import make_run_folder, start_log
from distributed_training.protocol import lines, names
from distributed_training.protocol.types import Progress, Revision
from distributed_training.store.gate import disk_allows
from distributed_training.telemetry import EventLog, MetricsFile

log = logging.getLogger(__name__)

#: Covers every collective of the control channel. Rank 0 comes to a boundary at least every
#: ``idle_wait``; the longest thing between two boundaries is writing the pseudo-gradient, loading
#: weights or compiling the model.
CONTROL_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class StartFacts:
    """What rank 0 found out and every rank needs. JSON over the process group's store."""

    uid: int
    model_config: dict[str, Any]
    tokenizer_path: str
    eos_id: int
    global_outer_step: int
    problem: str = ""  # why there is no start; all ranks leave quietly then

    def pack(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def unpack(cls, text: str) -> StartFacts:
        return cls(**json.loads(text))


def run_rank(argv: list[str]) -> int:
    """Exit status: 0 stopped as asked, 1 a fault, 2 bad configuration, 3 deregistered."""
    me = rank_environment()
    stop = _Stop()
    stop.install()
    die_with_parent()
    config = load_config("miner", argv)
    folder = make_run_folder(config)
    write_pid_file(folder, me.rank)
    start_log(config, folder, name="miner", rank=me.rank)
    status, reason = int(ExitStatus.FAULT), ""
    try:
        with ExitStack() as stack:
            status, reason = _run(config, me, folder, stop, stack)
    except ConfigError as error:
        status, reason = ExitStatus.BAD_CONFIGURATION, str(error)
        log.error("error: %s", error)
    except network.NetworkFailure as error:
        reason = str(error)
        log.error("%s", error)
    except Exception as error:  # the last word of this process: say it in one line, then end
        reason = f"{type(error).__name__}: {error}"
        log.exception("%s", lines.training_loop_failed(error))
    if me.rank == 0:
        write_exit_status(folder, status, reason)
    return status


class _Stop:
    """SIGTERM asks for a stop; SIGINT is the launcher's to handle (a terminal sends it to all)."""

    def __init__(self) -> None:
        self.wanted = False
        self.leader: Leader | None = None

    def install(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        del number, frame
        self.wanted = True
        if self.leader is not None:
            self.leader.post(st.StopRequested("asked to stop"))


def _device(config: Config, me: RankEnvironment) -> torch.device:
    if config.miner.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", me.local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _run(
    config: Config, me: RankEnvironment, folder: Path, stop: _Stop, stack: ExitStack
) -> tuple[int, str]:
    device = _device(config, me)
    channel = open_control_channel(
        environ=os.environ,
        timeout=CONTROL_TIMEOUT,
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
    )
    # The network first, and only on rank 0: what is wrong shows before a model is built.
    outside: network.Outside | None = None
    facts: StartFacts | None = None
    if me.rank == 0:
        try:
            outside = network.connect(config, folder, stack, wanted=lambda: not stop.wanted)
            facts = StartFacts(
                uid=outside.uid,
                model_config=outside.model_config,
                tokenizer_path=str(outside.tokenizer_path),
                eos_id=outside.eos_id,
                global_outer_step=outside.global_outer_step,
            )
        except (ConfigError, network.NetworkFailure, StopBeforeStart) as error:
            channel.share("start", StartFacts(0, {}, "", 0, 0, str(error) or "stopped").pack())
            if isinstance(error, StopBeforeStart):
                return 0, "stopped before the start was complete"
            raise
    facts = StartFacts.unpack(channel.share("start", facts.pack() if facts else None))
    if facts.problem:
        return ExitStatus.FAULT, facts.problem

    from distributed_training.data import DataPipeline, WorkerSpec
    from distributed_training.training import Checkpointer, Trainer

    sampler = NvmlSampler.open(me.local_rank) if device.type == "cuda" else None
    trainer = Trainer(
        settings=config.training,
        model_config=facts.model_config,
        device=device,
        rank=me.rank,
        world_size=me.world_size,
        utilization=sampler.utilization if sampler else lambda: None,
    )
    checkpointer = Checkpointer(
        trainer=trainer, folder=folder / "checkpoints", keep=config.miner.keep_checkpoints
    )
    data = DataPipeline(
        WorkerSpec(
            settings=config.data,
            uid=facts.uid,
            rank=me.rank,
            world_size=me.world_size,
            sequence_length=config.training.sequence_length,
            tokenizer_path=Path(facts.tokenizer_path),
            eos_id=facts.eos_id,
            folder=folder / "data",
            vocabulary=int(facts.model_config["vocab_size"]),
        ),
        micro_batch_size=trainer.micro_batch_size,
        device=device,
    )
    stack.callback(data.close)
    restored = _resume(trainer, checkpointer, facts, outside)
    data.restore(restored.get("data", {}))
    if me.rank == 0:
        for line in gpu_report_lines(
            cuda=cuda_state(device.index),
            model_device=str(device),
            micro_batch=trainer.micro_batch_size,
            effective=config.training.local_batch_size_train_effective,
            world_size=me.world_size,
        ):
            log.info("%s", line)
    zero = None
    if outside is not None:
        zero = _rank_zero(
            config, folder, outside, channel, data, trainer, restored, device, stop, stack
        )
    loop = MinerLoop(
        channel=channel,
        trainer=trainer,
        data=data,
        checkpointer=checkpointer,
        snapshots=folder / "snapshots",
        rank_zero=zero,
    )
    status = loop.run()
    reason = zero.leader.state.stop_reason if zero is not None else ""
    with suppress(RuntimeError):  # the others may be gone already
        channel.close()
    return status, reason


def _resume(
    trainer: Any, checkpointer: Any, facts: StartFacts, outside: network.Outside | None
) -> dict[str, Any]:
    """Weights: the checkpoint where it belongs to the global epoch, else the global state.

    A checkpoint one epoch ahead is kept: this miner was ended between its outer step and the
    validator's publication; comparing epochs later decides. Returns what this rank kept in it.
    """
    restored: tuple[Progress, dict[str, Any]] | None = checkpointer.restore()
    if restored is not None:
        progress, extra = restored
        if progress.outer_step in (facts.global_outer_step, facts.global_outer_step + 1):
            log.info(
                "Resumed at outer step %d, inner step %d", progress.outer_step, progress.inner_step
            )
            return extra
        log.info(lines.epochs_differ(progress.outer_step, facts.global_outer_step))
    folder = outside.global_folder if outside is not None else None
    try:
        trainer.load_global(
            folder / "model.safetensors" if folder else None,
            folder / "outer_optimizer.pt" if folder else None,
            facts.global_outer_step,
        )
    except ValueError as error:  # on all ranks alike; nothing has changed
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # the next start fetches it anew
        if restored is None:
            raise network.NetworkFailure(
                f"the global state cannot be trained on: {error}"
            ) from None
        log.warning("The global state cannot be loaded (%s). Training goes on without it.", error)
        return restored[1]
    return {}


def _rank_zero(
    config: Config,
    folder: Path,
    outside: network.Outside,
    channel: ControlChannel,
    data: Any,
    trainer: Any,
    restored: dict[str, Any],
    device: torch.device,
    stop: _Stop,
    stack: ExitStack,
) -> RankZeroSide:
    events = EventLog.from_settings(config.telemetry, folder)
    record = events.write if events is not None else (lambda kind, **fields: None)
    held = trainer.preview_micro_batches
    blocks = BlockFeed(
        chain_block=outside.chain.block,
        data=data,
        channel=channel,
        micro_batch_size=trainer.micro_batch_size,
        prefetch=lambda: data.depth,
        lead=lambda: data.lead_seconds,
        hold_back=0 if data.holds_back(held) else held,
        recent=config.miner.blocks_per_allreduce // 2,
    )
    blocks.restore(restored.get("rank_zero", {}).get("blocks", {}), restored.get("data", {}))
    swarm = outside.open_swarm(trainer.schema)
    stack.callback(swarm.close)
    publisher = outside.open_publisher(folder / "snapshots")
    stack.callback(publisher.close)
    watch = outside.watch(
        lambda event: leader.post(event),
        lambda: (trainer.outer_step, [Rows(*rows) for rows in trainer.epoch_start_rows()]),
    )
    stack.callback(watch.close)
    behind = trainer.outer_step != outside.global_outer_step
    leader = Leader(
        state=st.MinerState(
            mode=st.Mode.AWAITING_GLOBAL if behind else st.Mode.TRAINING,
            outer_step=trainer.outer_step,
            global_due=time.monotonic() + config.miner.round_reload_timeout.total_seconds(),
        ),
        timing=st.Timing(config.miner.round_reload_timeout.total_seconds()),
        channel=channel,
        swarm=swarm,
        publisher=publisher,
        global_watch=watch,
        blocks=blocks,
        chain_block=outside.chain.block,
        record=record,
    )
    round_clock = outside.round_clock()
    server = outside.open_server(
        epoch=lambda: leader.state.outer_step,
        on_all_reduce=lambda request: leader.post(st.AllReduceCalled(request, time.monotonic())),
        round_phase=lambda: "averaging" if leader.in_round() else None,
        round_due=round_clock.due,
    )
    stack.callback(server.close)

    def submit(folder: Path, revision: Revision, preview_delta: float | None) -> None:
        publisher.submit(
            folder,
            revision,
            channel.world_size,
            peer_id=swarm.peer_id,
            preview_delta=preview_delta,
        )

    needed = snapshot_bytes(shape for _, shape in trainer.schema)
    zero = RankZeroSide(
        leader=leader,
        blocks=blocks,
        swarm=swarm,
        schedule=outside.upload_schedule(),
        round_clock=round_clock,
        disk_problem=lambda: disk_allows(folder, needed),
        submit=submit,
        run=names.RUN,
        bucket=outside.bucket,
        cadence=Cadence(config.miner.checkpoint_steps, config.training.nan_limit),
        record=record,
        warnings=lambda report: step_warnings(
            report, config.diagnostics, expect_gpu=device.type == "cuda"
        ),
        round_over=server.round_ended,
        reload_timeout=config.miner.round_reload_timeout,
        metrics=MetricsFile(folder / "metrics.prom"),
        counts={
            "data": data.counters,
            "chain": outside.chain.counters,
            "server": lambda: {k: v for k, v in server.counters().items() if k != "connections"},
        },
        gauges={
            "server_connections": lambda: server.counters()["connections"],
            "chain_age_seconds": lambda: outside.chain.age().total_seconds(),
        },
    )
    leader.on_publication = zero.publication
    leader.on_round_failed = zero.round_failed
    leader.on_snapshot_dropped = zero.snapshot_dropped
    leader.on_call_ignored = server.round_ended
    stop.leader = leader
    if stop.wanted:
        leader.post(st.StopRequested("asked to stop"))
    publisher.publish_peer_id(swarm.peer_id)
    server.start()
    outside.announce(server.port)
    outside.follow_registration(
        server.port, lambda reason, status: leader.post(st.StopRequested(reason, status)), stack
    )
    watch.start()
    if restored and not behind:
        watch.compare_weights(trainer.outer_step)  # of a round before the restart, perhaps
    record(
        "start",
        uid=outside.uid,
        hotkey=outside.hotkey,
        peer_id=swarm.peer_id,
        outer_step=trainer.outer_step,
        inner_step=trainer.inner_step,
        world_size=channel.world_size,
        resumed=bool(restored),
    )
    return zero
