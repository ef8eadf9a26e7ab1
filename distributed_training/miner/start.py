"""Run one rank of the miner, from its arguments to its exit status.

Read it from top to bottom:

    run_rank         the process: signals, log, exit status
    train            the device and the other ranks; then the parts below
    build.py         rank 0's connections, and each rank's part of rounds
    build_rank       the model, the data and the checkpoint to continue from; then the loop
    Rank             the loop, until STOP

Everything that may fail because of trouble outside is opened first, and only on rank 0, so that a
missing key or an unregistered hotkey shows up before a model is built. The stack closes the parts
in reverse order.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from distributed_training.common.kinds import import_plugins
from distributed_training.common.processes import die_with_parent, write_stacks_on_signal
from distributed_training.config import Config, ConfigError, exit_with
from distributed_training.health.gpus import (
    describe_cuda,
    describe_gpu,
    gpu_report_lines,
    gpu_utilization,
    keep_driver_open,
    sample_gpu,
    visible_gpu_count,
)
from distributed_training.node.published import require_published
from distributed_training.node.start import (
    NetworkFailure,
    StopNow,
    exit_status_of,
    fetch_tokenizer,
    make_run_folder,
    start_log,
)
from distributed_training.protocol import lines
from distributed_training.protocol.types import ExitStatus
from distributed_training.store.transfer import followed
from distributed_training.telemetry.run_state import report_running, report_stage
from distributed_training.training.collectives import COLLECTIVE_TIMEOUT, Layout
from distributed_training.training.trainer import Trainer

from . import build
from . import events as ev
from .build import Connections, RankContext, RankZero, StartupInfo
from .loop import MinerLoop
from .nodes import Nodes, open_tcp_store, under_torchrun
from .ranks import join_ranks
from .run_folder import (
    RANK_STORE,
    Heartbeat,
    RankEnvironment,
    Watchdog,
    rank_environment,
    remembered_gpus,
    write_exit_status,
    write_pid_file,
)

log = logging.getLogger(__name__)

_LAUNCHER = os.getppid()
#: Covers every collective of the control channel. Rank 0 reaches a boundary at least every 0.2 s
#: while there is nothing to do; the longest work between two boundaries is writing the
#: pseudo-gradient, loading weights or compiling the model.
CONTROL_TIMEOUT = timedelta(minutes=30)


def run_rank(config: Config) -> int:
    """Train until the miner ends. Return the exit status (:class:`ExitStatus`)."""
    me = rank_environment()
    stop = RankStop()
    # The handler must be set by now: the kernel sends SIGTERM at once if the parent is gone.
    die_with_parent()
    write_stacks_on_signal()
    try:
        folder = make_run_folder(config)
    except ConfigError as error:  # the launcher could create it, so the disk has disappeared
        exit_with(error, of_service=True)
        return ExitStatus.FAULT
    start_log(config, rank=me.local_rank)
    # Keep compiled kernels in the run folder: a container loses its /tmp, and a restart would have
    # to compile them again.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((folder / "compiled").absolute()))
    status, reason, outside, nodes = int(ExitStatus.FAULT), "", False, None
    try:
        # From here on a stop goes only to rank 0, which saves first. Before this point a stop ends
        # all ranks.
        write_pid_file(folder, me.local_rank)
        Heartbeat(folder, me.local_rank)()
        with ExitStack() as stack:
            if under_torchrun():
                watchdog = Watchdog(folder, ranks=[me.local_rank], limit=config.miner.hang_timeout)
                nodes = Nodes(
                    open_tcp_store(),
                    me,
                    stop_wanted=lambda: stop.wanted,
                    hangs=watchdog.hangs,
                )
                with Heartbeat(folder, me.local_rank).steady():
                    nodes.join(config, folder, stack)
            status, reason = train(config, me, folder, stop, stack)
    except StopNow:
        status, reason = ExitStatus.STOPPED, f"{who_stops()} before the start was complete"
    except (ConfigError, NetworkFailure) as error:
        # The settings were checked before any rank was started, so the cause lies outside.
        status, reason = exit_status_of(error), str(error)
        outside = status == ExitStatus.FAULT
        if me.local_rank or RANK_STORE not in os.environ:  # the launcher reports rank 0's error
            log.error("%s", error)
    except Exception as error:  # log the last message of this process in one line, then exit
        reason = cuda_failure(error, me.local_rank) or f"{type(error).__name__}: {error}"
        log.exception(lines.TRAINING_LOOP_FAILED, error)
        if reason.startswith("GPU "):
            log.error("%s", reason)
    if me.local_rank == 0:
        with suppress(OSError):  # on a full disk the launcher finds no status and assumes a fault
            write_exit_status(folder, status, reason, outside=outside)
    return status if nodes is None else nodes.close(status, reason)


def train(
    config: Config, me: RankEnvironment, folder: Path, stop: RankStop, stack: ExitStack
) -> tuple[int, str]:
    """Build this rank and train. Return the exit status and, on rank 0, the reason."""
    import_plugins(config.general.plugins)
    device = rank_device(config.miner.device, me.local_rank, remembered=remembered_gpus(folder))
    ranks = join_ranks(
        me,
        timeout=CONTROL_TIMEOUT,
        collective_timeout=COLLECTIVE_TIMEOUT,
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
    )

    def open_connections() -> tuple[Connections, StartupInfo]:
        report_stage(folder, 2, "asking chain and store")

        def loading(done: int, total: int, left: float | None) -> None:
            what = "loading the global state"
            report_stage(folder, 3, what, done=done, total=total, eta=left)

        # Waiting for one answer of an unreachable store may take all the time that a stop has.
        with followed(loading), stop.interrupting():
            return build.open_connections(
                config, folder, stack, stop.events.put, stopped=lambda: stop.wanted
            )

    # A start may wait for the chain and the store for hours, which is not a hang.
    with Heartbeat(folder, me.local_rank).steady():
        rules, info, connections = build.share_start(config, ranks, open_connections)
        node = ranks.rank // ranks.local_world_size
        if info.problem:
            # Rank 0 reports the reason; this rank did not fail. Yet after status 0 another node's
            # torchrun waits 300 s for rank 0's torchrun, which starts again meanwhile.
            failed = node and not stop.wanted
            return (ExitStatus.FAULT, info.problem) if failed else (ExitStatus.STOPPED, "")
        if node:
            # Each of the other machines has its own copy of the tokenizer.
            found = None
            if ranks.local_rank == 0:
                require_published(config)
                found = {"path": str(fetch_tokenizer(config, folder)[0])}
            shared = ranks.share(f"tokenizer-{node}", found)
            info = replace(info, tokenizer_path=shared["path"])
    context = RankContext(rules, folder, device, ranks, stop.events, stack)
    status, reason = build_rank(context, info, connections).run()
    with suppress(RuntimeError):  # the others may be gone already
        ranks.close()
    return status, reason


@dataclass(frozen=True)
class Rank:
    """One rank, ready to run."""

    folder: Path
    rank_zero: RankZero | None  # rank 0's own part
    loop: MinerLoop

    def run(self) -> tuple[int, str]:
        """Train until stopped. Return the exit status and, on rank 0, the reason.

        Only rank 0 returns the miner's status. A rank that ends on a command has not failed: with a
        status other than 0 the launcher would end rank 0 while it is still closing its parts.
        """
        if self.rank_zero is None:
            self.loop.run()
            return ExitStatus.STOPPED, ""
        self.rank_zero.go_live(self.rank_zero.controller.post)
        report_running(self.folder)
        status = self.loop.run()
        controller = self.rank_zero.controller
        controller.drain()  # report the result of the last command too
        return status, controller.state.stop_reason


def build_rank(context: RankContext, info: StartupInfo, connections: Connections | None) -> Rank:
    """Build one rank. Raises ConfigError, NetworkFailure.

    ``connections``: None on all ranks but 0.
    """
    alive = Heartbeat(context.folder, context.ranks.local_rank)
    if connections:
        report_stage(context.folder, 4, "building the model")
    ranks = context.ranks
    trainer = Trainer(
        settings=context.config.training,
        model_config=info.model_config,
        device=context.device,
        layout=Layout(ranks.rank, ranks.world_size, ranks.local_world_size),
        utilization=utilization_of(context.device),
        frozen=context.config.frozen_weights,
        run_folder=context.folder,
    )
    alive()
    data = build.open_data(context, info, trainer.micro_batch_size)
    training = build.resume(context, info, trainer, data, connections)
    alive()
    # This comes after the model, whose shapes it needs.
    if connections:
        report_stage(context.folder, 5, "joining the network")
    rank_zero, round_rank = build.build_rounds(context, info, connections, training)

    loop = MinerLoop(
        ranks=context.ranks,
        trainer=trainer,
        data=data,
        checkpointer=training.checkpointer,
        round_rank=round_rank,
        controller=rank_zero.controller if rank_zero else None,
        alive=alive,
    )
    if rank_zero is not None:
        report_device(
            context.config,
            context.device,
            micro_batch=trainer.micro_batch_size,
            world_size=context.ranks.world_size,
        )
    return Rank(context.folder, rank_zero, loop)


# --- its device ---------------------------------------------------------------------------------


def rank_device(wanted: str, local_rank: int, *, remembered: int = 0) -> torch.device:
    """Return the device for ``--neuron.device``; a GPU becomes the process's current device.

    ``remembered``: the number of GPUs that earlier ranks of this run folder used. Raises
    ConfigError for cuda without a GPU. Raises NetworkFailure if there are fewer GPUs than ranks.
    With auto it also raises NetworkFailure if torch cannot use GPUs that exist or existed before.
    Just after a reboot or a driver upgrade this passes, but a rank that has started on the CPU
    would stay there, and take days for a step.
    """
    if wanted != "cpu" and torch.cuda.is_available():
        if local_rank >= (count := torch.cuda.device_count()):
            raise NetworkFailure(
                f"rank {local_rank} has no GPU, since torch sees {count}: one is lost or hidden "
                "(nvidia-smi -L, dmesg | grep Xid). Reboot, or set --nproc_per_node "
                f"{count}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    if wanted == "cuda":
        raise ConfigError(
            f"--neuron.device cuda, but torch {torch.__version__} sees no GPU, so nothing would be "
            "trained in time: python scripts/diagnose.py says why; --neuron.device cpu uses the "
            "CPU"
        )
    if wanted == "auto" and (gpus := visible_gpu_count() or remembered):
        raise NetworkFailure(
            f"torch {torch.__version__} cannot use the {gpus} GPUs this miner has. Training waits "
            "until it can, instead of using the CPU: nvidia-smi and python "
            "scripts/diagnose.py say why; --neuron.device cpu uses the CPU"
        )
    return torch.device("cpu")


def cuda_failure(error: BaseException | None, gpu: int) -> str | None:
    """Return a line about the failure of GPU ``gpu`` and its effect; None for any other error.

    ``error`` ended a rank. After a GPU failure no further call of the process reaches the GPU, so
    the clean-up may have raised another error on top of it.
    """
    while error is not None:
        first = (str(error).strip().splitlines() or [""])[0]
        lost = isinstance(error, torch.AcceleratorError) or "CUDA error" in first
        if lost and not isinstance(error, torch.OutOfMemoryError):
            break
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    card = describe_gpu(gpu) or "which the driver does not show any more"
    return (
        f"GPU {gpu} ({card}) failed: {first:.200}. All ranks start again from the last "
        "checkpoint, so the inner steps since then are repeated. If it happens again: dmesg | grep "
        "Xid says why; exclude the card with CUDA_VISIBLE_DEVICES"
    )


def utilization_of(device: torch.device) -> Callable[[], float | None] | None:
    """Return a function that measures the device's utilization in percent, or None."""
    if device.type != "cuda":
        return None
    if sample_gpu(device.index) is not None:
        keep_driver_open()
        return partial(gpu_utilization, device.index)
    log.warning(
        "GPU utilization is not reported: NVML is not usable (`python scripts/diagnose.py`)"
    )
    return None


def report_device(
    config: Config, device: torch.device, *, micro_batch: int, world_size: int
) -> None:
    """Log the lines about the GPU, once the model exists; problems are warnings."""
    for line in gpu_report_lines(
        cuda=describe_cuda(device.index),
        model_device=str(device),
        micro_batch=micro_batch,
        effective=config.training.local_batch_size_train_effective,
        world_size=world_size,
        expect_gpu=config.miner.device != "cpu",
    ):
        log.log(logging.WARNING if line.startswith("❌") else logging.INFO, "%s", line)


# --- the signals that stop a rank -----------------------------------------------------------------


def who_stops() -> str:
    """Return why SIGTERM came, as far as a rank can tell: the launcher's end causes it too."""
    if os.getppid() != _LAUNCHER:
        return f"the launcher (pid {_LAUNCHER}) is gone"
    return "asked to stop"


class RankStop:
    """Handles the signals that request a stop: SIGTERM, under torchrun also SIGINT and SIGHUP.

    Otherwise the launcher handles the latter two, since a terminal sends them to all processes. The
    handlers are set on construction, in the main thread. ``events``: rank 0's queue, in which the
    stop arrives as an event like any other.
    """

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self.wanted = False
        self._interrupts = False
        signal.signal(signal.SIGTERM, self._on_signal)
        # torchrun forwards whichever of them it received.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal if under_torchrun() else signal.SIG_IGN)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a stop raise :class:`StopNow` in this context, whatever the main thread waits for."""
        self._interrupts = True
        try:
            if self.wanted:
                raise StopNow
            yield
        finally:
            self._interrupts = False

    def _on_signal(self, number: int, frame: object) -> None:
        del number, frame
        self.wanted = True
        # SimpleQueue.put is reentrant, so the signal may interrupt another put.
        self.events.put(ev.StopRequested(who_stops()))
        if self._interrupts:
            self._interrupts = False  # only once: another StopNow would cut the clean-up short
            raise StopNow
