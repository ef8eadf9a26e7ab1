"""Check this machine: the doctor runs all checks, a miner's start those with ``at_start``.

Nothing here needs a network, except the check of a miner's other machines. Only the check of torch
imports torch. The memory that a model needs comes from ``common.memory``.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import platform
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from distributed_training.chain.kinds import chain_kind
from distributed_training.common.control_groups import usable_cores
from distributed_training.common.files import free_bytes
from distributed_training.common.memory import (
    DISK_RESERVE,
    MOST_WORKERS,
    Arrangement,
    ModelShape,
    device_memory,
    disk_space,
    host_bytes,
    host_memory,
    loss_chunk,
)
from distributed_training.common.ports import listen
from distributed_training.common.webhook import service_of
from distributed_training.config import Config, ConfigError, problems
from distributed_training.config.settings import Exchange, TrainingSettings
from distributed_training.data.sources import kind_of
from distributed_training.health.gpus import (
    accumulation_steps,
    driver_version,
    gpus_hidden_by_mig,
    sample_gpu,
    visible_gpu_count,
)
from distributed_training.protocol.types import Check

if TYPE_CHECKING:
    from distributed_training.health.clock import Offset

_SPEED_BYTES = 128 * 1024 * 1024
_CHECKPOINT_BYTES = 16  # a parameter; see common.memory.disk_space
_SHARED_MEMORY = 1 << 30  # NCCL's buffers between the GPUs of one machine
_DESCRIPTORS = 1024  # files, shards and connections
_COMFORTABLE = 0.9  # share of the memory
TESTED_TORCH = "2.13.0"  # the newest one, as constraints.txt has it
_MOST_SPARE = 10_000_000_000  # bytes of disk beside all that a miner keeps, for data and logs
_SPARE_BYTES = 100  # of a parameter, of all that a miner keeps (docs/requirements.md)
_TOO_MUCH = 1.15  # share of the memory; the estimate is not exact enough to refuse a near miss


@dataclass
class Examination:
    """A miner as its configuration would start it here, and the findings up to now.

    ``model``: a ``config.json``, and where it comes from; without it disk is asked for the minimum.
    ``offline``: nothing is asked of the network. ``running``: a miner of this run folder runs, so
    the doctor trains nothing. It listens at ``own_ports``, and its last inner steps took
    ``step``; None: it has made none since its start. The check of the model sets ``shape``, that of
    the chain ``uid`` and ``by_chain``.
    """

    config: Config
    ranks: int
    model: tuple[dict[str, Any], str] | None = None
    offline: bool = False
    uid: int | None = None
    running: bool = False
    step: timedelta | None = None
    own_ports: frozenset[int] = frozenset()
    shape: ModelShape | None = None
    by_chain: Offset | None = None  # of this machine's clock
    found: list[Check] = field(default_factory=list)

    @property
    def micro_batch(self) -> int | None:
        """Return the sequences of a micro-batch; None for ``auto``."""
        training = self.config.training
        wanted = training.local_batch_size_train
        most = training.local_batch_size_train_effective
        return min(wanted, most) if isinstance(wanted, int) else None

    def failed(self, *names: str) -> str:
        """Return the first check that failed whose name begins with one of these, or nothing."""
        return next(
            (c.name for c in self.found if c.status == "fail" and c.name.startswith(names)), ""
        )


Finder = TypeVar("Finder", bound=Callable[[Examination], Check | Iterable[Check]])


class Entry(NamedTuple):
    """A check of a list. It may have several findings, as of several GPUs.

    ``at_start``: a miner's start makes it too. ``note``: shown before a check that takes long.
    ``exchange``: of the networks that it is for; empty: all. ``alone``: it mostly waits, and needs
    no other's findings, so it runs at the same time as they do.
    """

    find: Callable[[Examination], Check | Iterable[Check]]
    at_start: bool = False
    note: str = ""
    exchange: Exchange | Literal[""] = ""
    alone: bool = False

    def check(self, examination: Examination) -> list[Check]:
        """Make the check, if it is for this network."""
        if self.exchange not in ("", examination.config.exchange):
            return []
        found = self.find(examination)
        return [found] if isinstance(found, Check) else [*found]


#: In the order in which they are made, this file's; some need what an earlier one found.
CHECKS: list[Entry] = []


def listed(
    checks: list[Entry],
    *,
    at_start: bool = False,
    note: str = "",
    exchange: Exchange | Literal[""] = "",
    alone: bool = False,
) -> Callable[[Finder], Finder]:
    """Return a decorator that adds a check to a list; see :class:`Entry`."""

    def add(find: Finder) -> Finder:
        checks.append(Entry(find, at_start, note, exchange, alone))
        return find

    return add


def start_checks(config: Config, *, ranks: int) -> list[Check]:
    """Check the machine before anything is started: no torch, no network, below 1 s.

    The miner's launcher refuses to start on a failure.
    """
    start = Examination(config, ranks)
    return [check for entry in CHECKS if entry.at_start for check in entry.check(start)]


# --- configuration, python, gpus, batch ---------------------------------------------------------


@listed(CHECKS)
def check_configuration(examination: Examination) -> list[Check]:
    """Check the settings, without a look at the machine."""
    config, found = examination.config, []
    wrong = problems(config)
    try:
        refuse_unknown_kinds(config)
    except ConfigError as error:
        wrong = list(dict.fromkeys([*wrong, str(error)]))
    for line in (*wrong, *config.warnings):
        # Each ends with its remedy, after the last colon.
        cause, _, remedy = line.rpartition(": ")
        status: Literal["fail", "warn"] = "fail" if line in wrong else "warn"
        found.append(Check("configuration", status, cause or line, remedy if cause else ""))
    return found or [Check("configuration", "ok", f"{examination.ranks} rank(s)")]


@listed(CHECKS)
def check_python(examination: Examination) -> Check:
    return Check("python", "ok", f"{platform.python_version()}, {usable_cores()} cores")


@listed(CHECKS)
def check_torch(examination: Examination) -> Check:
    """Compare the torch build with the driver."""
    seen = visible_gpu_count()
    if examination.step is not None:  # its import takes seconds from the ranks
        return Check("torch", "ok", f"torch {version('torch')}; the running miner trains with it")
    try:
        import torch
    except ImportError as error:
        return Check("torch", "fail", f"torch cannot be imported ({error})", "make setup")
    build = f"torch {torch.__version__}"
    build += f", CUDA {torch.version.cuda}" if torch.version.cuda else ", CPU build"
    # Before is_available, which is False here too: a newer driver would help nothing.
    if seen and not torch.version.cuda:
        finding = f"{build}, but the driver shows {seen} GPU(s), which would stay idle"
        return Check("torch", "fail", finding, "rm -rf .venv && DT_TORCH=cuda make setup")
    if seen and not torch.cuda.is_available():
        finding = f"{build} cannot use the {seen} GPU(s) of driver {driver_version() or '?'}"
        remedy = (
            "upgrade the NVIDIA driver (nvidia-smi shows its CUDA version), or install a torch "
            "built for it"
        )
        return Check("torch", "fail", finding, remedy)
    newest = tuple(map(int, TESTED_TORCH.split(".")[:2]))
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) > newest:
        finding = f"{build}, with which nothing was tested: the newest tested one is {TESTED_TORCH}"
        return Check("torch", "warn", finding, "pip install -c constraints.txt torch")
    return Check("torch", "ok", build)


@listed(CHECKS, at_start=True)
def check_gpus(examination: Examination) -> Iterator[Check]:
    """Check that each rank has a GPU, which no other program fills."""
    device, wanted, count = examination.config.miner.device, examination.ranks, visible_gpu_count()
    if device == "cpu":
        yield Check("gpu", "ok", "not used: --neuron.device cpu")
        return
    if count == 0:
        finding = "no NVIDIA GPU is visible; the model would run on CPU, which is very slow"
        if device == "cuda":
            remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or give --neuron.device cpu"
            yield Check("gpu", "fail", finding, remedy)
            return
        remedy = "fine for a tiny model; otherwise check nvidia-smi and CUDA_VISIBLE_DEVICES"
        yield Check("gpu", "warn", finding, remedy)
        return
    if hidden := gpus_hidden_by_mig():
        finding = f"CUDA shows a process one instance of MIG, so {hidden} more stay idle"
        remedy = "start a miner for each, with its own run folder and hotkey, or turn MIG off"
        yield Check("mig", "warn", finding, remedy)
    if wanted > count:
        finding = f"{wanted} ranks on {count} visible GPU(s), so ranks would share one"
        remedy = f"give --nproc_per_node {count}, or free CUDA_VISIBLE_DEVICES"
        yield Check("gpu", "fail", finding, remedy)
        return
    for index in range(wanted):
        name, sample = f"gpu {index}", sample_gpu(index)
        if sample is None:
            finding = "the driver does not answer for it"
            yield Check(name, "fail", finding, "nvidia-smi; then reboot")
            continue
        used, total = sample.memory_used_gb, sample.memory_total_gb
        finding = f"{sample.name}, {used:.1f} of {total:.1f} GB in use"
        if examination.running:
            yield Check(name, "ok", f"{finding}, by the running miner")
        elif used > 0.1 * total:  # the driver's own share is less than that
            remedy = "another program holds memory: nvidia-smi shows which"
            yield Check(name, "warn", finding, remedy)
        else:
            yield Check(name, "ok", finding)


@listed(CHECKS)
def check_batch(examination: Examination) -> Check:
    name, micro_batch, ranks = "batch", examination.micro_batch, examination.ranks
    effective = examination.config.training.local_batch_size_train_effective
    if micro_batch is None:
        return Check(name, "ok", f"micro-batch auto, {effective} sequences per inner step")
    steps = accumulation_steps(effective=effective, micro_batch=micro_batch, world_size=ranks)
    actual = steps * micro_batch * ranks
    finding = f"{actual} sequences = {steps} micro-batches of {micro_batch} on {ranks} rank(s)"
    if actual != effective:
        finding += f": rounded up from {effective}"
        return Check(name, "warn", finding, "give --neuron.local_batch_size_train auto")
    return Check(name, "ok", finding)


# Before memory and room, which need its shape. No start makes it: room is then the minimum.
@listed(CHECKS)
def check_model(examination: Examination) -> Check:
    """Check that the model's size is known, and note it."""
    content, origin = examination.model or ({}, "no model")
    network = examination.config.network
    try:
        of_network = network is not None and content == network.model
        shape = network.shape if network and of_network else ModelShape.from_config(content)
        examination.shape = shape
    except ValueError as error:
        remedy = "give --model with the config.json of a Llama-like model"
        return Check("model", "warn", f"{origin}: {error}: size not known", remedy)
    return Check("model", "ok", f"{shape.parameters / 1e6:.1f} M parameters ({origin})")


# --- memory -------------------------------------------------------------------------------------


def gpu_bytes(config: Config) -> int | None:
    """Return the memory of the first GPU; None if none is used, or the driver does not say."""
    sample = None if config.miner.device == "cpu" else sample_gpu()
    return round(sample.memory_total_gb * 1e9) if sample else None


def arrange(
    config: Config,
    shape: ModelShape,
    *,
    ranks: int,
    micro_batch: int,
    offload: bool,
    gpu: int | None,
) -> Arrangement:
    """Return how this machine trains the model; ``gpu``: bytes of its first, None without one."""
    training, recompute = config.training, config.training.activation_checkpointing
    return Arrangement(
        world_size=ranks,
        micro_batch=micro_batch,
        sequence_length=training.sequence_length,
        checkpointing="full" if recompute == "auto" else recompute,
        keep_unsharded=training.keep_unsharded == "on",
        reduce_at_last=training.gradient_sync == "last",
        offload_optimizer=offload,
        cuda=gpu is not None,
        compiled=training.compile != "off",
        loss_chunk=loss_chunk(gpu),
        moments=count_moments(training, shape),
        workers=ranks * (MOST_WORKERS if config.data.workers == "auto" else config.data.workers),
    )


@listed(CHECKS)
def check_memory(examination: Examination) -> Iterator[Check]:
    """Check that this model fits device and host memory with these flags."""
    shape, training = examination.shape, examination.config.training
    if shape is None:
        return
    gpu = gpu_bytes(examination.config)
    how = arrange(
        examination.config,
        shape,
        ranks=examination.ranks,
        # auto goes down to 1 before it gives up; below, auto takes the way that needs least.
        micro_batch=examination.micro_batch or 1,
        offload=training.offload_optimizer == "on",
        gpu=gpu,
    )
    for name, needed, there, remedy in (
        (
            "gpu memory",
            device_memory(shape, how),
            gpu,
            "give --neuron.local_batch_size_train auto, --neuron.activation_checkpointing auto, "
            "--neuron.offload_optimizer on, or more GPUs",
        ),
        (
            "host memory",
            host_memory(shape, how),
            host_bytes(),
            "use a machine with more memory, raise the memory limit of the Slurm job, container or "
            "systemd unit, or give --neuron.offload_optimizer off if it is on",
        ),
    ):
        if there is None:
            continue
        finding = f"about {needed / 1e9:.1f} of {there / 1e9:.1f} GB needed"
        if needed > _TOO_MUCH * there:
            yield Check(name, "fail", f"{finding}, so training would run out of memory", remedy)
        elif needed > _COMFORTABLE * there:
            yield Check(name, "warn", f"{finding}: tight", remedy)
        else:
            yield Check(name, "ok", finding)


def count_moments(training: TrainingSettings, shape: ModelShape) -> float:
    """Count the tensors that the network's inner optimizer keeps of a parameter, on average."""
    # Without torch, for which the checks at a start have no time.
    if (known := {"adamw": (2, 2), "muon": (2, 1)}.get(training.optimizer)) is not None:
        return shape.moments(*known)
    from distributed_training.training.inner_optimizer import moments_of

    with contextlib.suppress(ConfigError):  # unknown, or refused: the miner says so itself
        return shape.moments(*moments_of(training))
    return 2


def refuse_unknown_kinds(config: Config) -> None:
    """Raise ConfigError where the kind of the chain, or of ``--data.source``, is unknown."""
    chain_kind(config.chain)
    kind_of(config.data.spec)


def refuse_model(config: Config, *, ranks: int) -> None:
    """Raise ConfigError where the model of the network's file does not fit into this machine.

    It must not fit whatever the flags: the smallest micro-batch, all recomputed, AdamW's state in
    host memory. ``ranks``: of this machine, which has a copy of the model. Without a known size or
    memory, nothing is refused; nor within a sixth, since the estimate is no more exact.
    """
    network = config.network
    if network is None or network.model is None:
        return
    try:
        shape = network.shape
    except ValueError:
        return
    gpu = gpu_bytes(config)
    # Unknown counts as enough: nothing is refused on a guess.
    has = {"host memory": host_bytes() or math.inf, "GPU memory": gpu or math.inf}
    ways: list[dict[str, float]] = []  # each: the bytes it takes at least, by the kind of memory
    if config.kind == "validator":  # weights, momentum, a round's buffers and their average
        ways.append({"host memory": 16 * shape.parameters})
    else:
        for at_last, offload in itertools.product((False, True), (False, True)):
            how = Arrangement(
                world_size=ranks,
                micro_batch=1,
                sequence_length=config.training.sequence_length,
                checkpointing="full",
                reduce_at_last=at_last,
                offload_optimizer=offload,
                cuda=gpu is not None,
                moments=count_moments(config.training, shape),
                workers=ranks,  # auto starts with one each
            )
            ways.append({"host memory": host_memory(shape, how)})
            if how.cuda:
                ways[-1]["GPU memory"] = device_memory(shape, how)
    tight = []  # for each arrangement, the memory that it lacks
    for needs in ways:
        lacks = [(kind, need) for kind, need in needs.items() if need > _TOO_MUCH * has[kind]]
        if not lacks:
            return
        tight.append(lacks[0])
    kind, needed = min(tight, key=lambda lack: lack[1])
    raise ConfigError(
        f"--network {network.place}: its model of {shape.parameters / 1e9:.2f} B parameters needs "
        f"about {needed / 1e9:.0f} GB of {kind} and this machine has {has[kind] / 1e9:.0f}, so "
        "nothing was started: use a larger machine or more GPUs, or join a network with a smaller "
        "model"
    )


# --- disk ---------------------------------------------------------------------------------------


@listed(CHECKS, at_start=True)
def check_room(examination: Examination) -> Check:
    """Check for room: the minimum and, where the model is known, all that a miner of it keeps.

    The folder's file system must take a file, too.
    """
    config, shape = examination.config, examination.shape
    needed = _MOST_SPARE
    if config.network is not None and examination.shape is None:  # at a start
        needed = min(needed, _SPARE_BYTES * config.network.head.parameters)
    folder = config.run_folder.absolute()
    if shape is not None:
        keep, moments = config.miner.keep_checkpoints, count_moments(config.training, shape)
        most = disk_space(shape, keep_checkpoints=keep, moments=moments)
        needed = max(min(needed, most), DISK_RESERVE)  # a small model writes little else too
        # What is there is part of the need: counted twice, a restart on a disk of the documented
        # size would be refused.
        needed += max(0, most - bytes_under(folder))
    # A download and an upload wait for room as long as the reserve is not left free.
    needed = max(needed, DISK_RESERVE)
    place = _existing(folder)
    try:
        free = free_bytes(place)
    except OSError as error:
        return _silent_disk(place, error)
    told = "its file system does not tell how much is" if free is None else f"{free / 1e9:.1f} GB"
    finding = f"{told} free in {folder}, {needed / 1e9:.1f} GB needed"
    if not (place.is_dir() and os.access(place, os.W_OK)):
        why = "cannot be written by this user" if place.is_dir() else "is no folder"
        finding = f"{place} {why}, so nothing could be saved"
        return Check("disk", "fail", finding, "give --neuron.run_folder a folder of yours")
    if free is None:
        return Check("disk", "warn", finding, "see to that yourself: room is not checked there")
    if free < needed:
        finding += ", so checkpoints and uploads would fail"
        remedy = "free space, or give --neuron.run_folder elsewhere"
        return Check("disk", "fail", finding, remedy)
    if free < 2 * needed:
        return Check("disk", "warn", finding, "free space soon: less than twice the need is left")
    return Check("disk", "ok", finding)


def bytes_under(folder: Path) -> int:
    """Return the bytes that this miner has there already: they need no further space."""
    total = 0
    for path in files_under(folder):
        with contextlib.suppress(OSError):  # a miner that runs deletes files meanwhile
            total += path.lstat().st_size
    return total


def files_under(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that may be in use, at any depth."""
    for place, _, names in os.walk(folder):  # rglob raises when a folder goes while it looks
        yield from (Path(place, name) for name in names)


def _silent_disk(place: Path, error: OSError) -> Check:
    finding = f"the disk of {place} does not answer ({error.strerror}), so nothing could be saved"
    remedy = "mount it again, or give --neuron.run_folder a folder of another disk"
    return Check("disk", "fail", finding, remedy)


def _existing(folder: Path) -> Path:
    """Return ``folder``, or the nearest above it that is there."""
    place = folder.absolute()
    while not os.path.exists(place):  # Path's own raises where a folder above may not be entered
        place = place.parent
    return place


@listed(CHECKS)
def check_disk_speed(examination: Examination) -> Check:
    """Write and sync 128 MiB, against a checkpoint that is written within a stop."""
    folder, shape = examination.config.run_folder, examination.shape
    stop_timeout = examination.config.miner.stop_timeout
    if shape is None:
        return Check("disk speed", "skip", "the model's size is not known")
    if examination.failed("disk"):
        return Check("disk speed", "skip", "not measured: disk failed")
    if examination.running:
        return Check("disk speed", "skip", "not measured: a miner runs in this run folder")
    place = _existing(folder)
    try:
        free = free_bytes(place)
    except OSError as error:
        return replace(_silent_disk(place, error), name="disk speed")
    if free is not None and free < 2 * _SPEED_BYTES:
        return Check("disk speed", "skip", f"too little room in {place} to measure it")
    # Not zeros: a file system that compresses would write them for nothing.
    block, began = os.urandom(1 << 20), time.perf_counter()
    try:
        # Without a name: a doctor that is killed leaves nothing. In the run folder, since /tmp is
        # often another disk, or memory.
        with tempfile.TemporaryFile(dir=place) as file:
            for _ in range(_SPEED_BYTES // len(block)):
                file.write(block)
            file.flush()
            # Else the memory of the page cache would be measured.
            os.fsync(file.fileno())
    except OSError as error:
        remedy = "give --neuron.run_folder a folder of yours with room"
        return Check("disk speed", "fail", f"{place} cannot be written ({error.strerror})", remedy)
    speed = _SPEED_BYTES / (time.perf_counter() - began)
    seconds = _CHECKPOINT_BYTES * shape.parameters / speed
    finding = f"{speed / 1e6:.0f} MB/s, so a checkpoint takes about {seconds:.0f} s to write"
    if seconds < 0.8 * stop_timeout.total_seconds():
        return Check("disk speed", "ok", finding)
    finding += f"; a stop may take {stop_timeout.total_seconds():.0f} s, and ends the ranks then"
    remedy = f"give --neuron.stop_timeout {round(1.5 * seconds) + 10}s, or a faster disk"
    return Check("disk speed", "warn", finding, remedy)


# --- what the kernel allows ---------------------------------------------------------------------


@listed(CHECKS)
def check_descriptors(examination: Examination) -> Check:
    # The hard limit: each process raises its soft one to that (limit_resources).
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _DESCRIPTORS
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return Check("descriptors", "ok", f"{hard} open files allowed")
    return Check(
        "descriptors",
        "warn",
        f"{hard} open files allowed, {needed} may be needed",
        "LimitNOFILE=65536 in the unit of pm2 or the miner, or raise the hard limit of nofile in "
        "/etc/security/limits.conf",
    )


@listed(CHECKS)
def check_shared_memory(examination: Examination) -> Check:
    if gpu_bytes(examination.config) is None or examination.ranks < 2:
        return Check("shared memory", "skip", "only ranks on several GPUs use /dev/shm")
    try:
        # Docker gives a container 64 MB of it by default.
        free = free_bytes(Path("/dev/shm"))
    except OSError as error:
        return Check("shared memory", "skip", f"there is no /dev/shm ({error.strerror})")
    if free is None:
        return Check("shared memory", "skip", "/dev/shm does not tell its free space")
    finding = f"{free / 1e9:.1f} GB free in /dev/shm"
    if free >= _SHARED_MEMORY:
        return Check("shared memory", "ok", finding)
    remedy = "docker run --shm-size=2g, or mount -o remount,size=2G /dev/shm"
    return Check("shared memory", "warn", f"{finding}; NCCL wants about 1 GB", remedy)


@listed(CHECKS)
def check_webhook(examination: Examination) -> list[Check]:
    """Report which service gets this miner's messages; nothing if there is none."""
    if (url := examination.config.telemetry.notify_url) is None:
        return []
    finding = f"messages go to {service_of(url)}; dt-doctor --notify sends one now"
    return [Check("notify", "ok", finding)]


@listed(CHECKS, at_start=True, exchange="hivemind")
def check_ports(examination: Examination) -> Check:
    """Check whether the DHT peer can listen on its port, at all addresses of this machine."""
    port, name = examination.config.swarm.dht_port, "port dht.port"
    if port in examination.own_ports:
        return Check(name, "ok", f"{port}: the running miner listens there")
    if port == 0:
        return Check(name, "ok", "a free one is taken")
    try:
        listen("0.0.0.0", port).close()
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        why = "in use" if in_use else (error.strerror or "not usable")
        finding = f"port {port} (--dht.port) is {why}, so peers could not reach this miner"
        remedy = f"stop what listens there (ss -ltnup 'sport = :{port}') or give --dht.port "
        return Check(name, "fail", finding, f"{remedy}another port")
    return Check(name, "ok", f"{port} is free")
