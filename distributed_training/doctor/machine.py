"""What the machine has, against what this model takes (``common.memory``, the one model of it)."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import psutil

from distributed_training.common.memory import (
    Arrangement,
    DeviceMemory,
    HostMemory,
    ModelShape,
    device_memory,
    disk_space,
    host_memory,
    loss_chunk,
)
from distributed_training.config import Config
from distributed_training.diagnostics.checks import Check, check_disk, check_port, host_bytes
from distributed_training.diagnostics.nvml import NvmlSampler, driver_version, visible_gpu_count
from distributed_training.miner.run_folder import mark_of

_SPEED_BYTES = 128 * 1024 * 1024
_CHECKPOINT_BYTES = 16  # a parameter; see common.memory.DiskSpace
_SHARED_MEMORY = 1 << 30  # NCCL's buffers between the GPUs of one machine
_DESCRIPTORS = 1024  # files, shards and connections besides those of the signed server


def check_python() -> Check:
    return Check("python", "ok", f"{platform.python_version()}, {os.cpu_count()} cores")


def check_torch(*, gpus: int | None = None) -> Check:
    """The torch build against what the driver shows. ``gpus``: visible by NVML, None to look."""
    seen = visible_gpu_count() if gpus is None else gpus
    try:
        import torch
    except ImportError as error:
        return Check("torch", "fail", f"torch cannot be imported ({error})", "make setup")
    build = f"torch {torch.__version__}"
    build += f", CUDA {torch.version.cuda}" if torch.version.cuda else ", CPU build"
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
    return Check("torch", "ok", build)


def memory_checks(
    config: Config, shape: ModelShape, *, ranks: int, micro_batch: int
) -> list[Check]:
    training = config.training
    gpu = gpu_bytes() if config.miner.device != "cpu" else None
    how = Arrangement(
        world_size=ranks,
        micro_batch=micro_batch,
        sequence_length=training.sequence_length,
        checkpointing=training.activation_checkpointing,  # type: ignore[arg-type]
        keep_unsharded=training.keep_unsharded == "on",
        reduce_at_last=training.gradient_sync == "last",
        offload_optimizer=training.offload_optimizer == "on",
        cuda=gpu is not None,
        loss_chunk=loss_chunk(gpu),
    )
    return check_memory(
        device_memory(shape, how),
        host_memory(shape, how),
        device_bytes=gpu,
        host_bytes=host_bytes(),
    )


def check_memory(
    device: DeviceMemory, host: HostMemory, *, device_bytes: int | None, host_bytes: int | None
) -> list[Check]:
    """The estimates against what is there; ``device_bytes`` None without a GPU."""
    checks = []
    if device_bytes is not None:
        remedy = (
            "give --neuron.local_batch_size_train 1, --neuron.activation_checkpointing full, "
            "--neuron.offload_optimizer on, or more GPUs"
        )
        checks.append(_fits("gpu memory", device.total, device_bytes, remedy))
    if host_bytes is not None:
        remedy = (
            "use a machine with more memory, raise the memory limit of the Slurm job, container or "
            "systemd unit, or give --neuron.offload_optimizer off if it is on"
        )
        checks.append(_fits("host memory", host.needed, host_bytes, remedy))
    return checks


def _fits(name: str, needed: int, there: int, remedy: str) -> Check:
    finding = f"about {needed / 1e9:.1f} of {there / 1e9:.1f} GB needed"
    if needed > 1.15 * there:  # the estimate is not exact enough to refuse a near miss
        return Check(name, "fail", f"{finding}, so training would run out of memory", remedy)
    if needed > 0.9 * there:
        return Check(name, "warn", f"{finding}: tight", remedy)
    return Check(name, "ok", finding)


def disk_checks(config: Config, shape: ModelShape | None) -> list[Check]:
    """Room for everything a miner of this model keeps, and the minimum beyond it; then whether a
    checkpoint is written in time. ``shape`` None: the minimum alone."""
    needed, folder = round(config.diagnostics.minimum_disk_gb * 1e9), config.run_folder
    if shape is not None:
        most = disk_space(shape, keep_checkpoints=config.miner.keep_checkpoints).total
        needed += max(0, most - bytes_under(folder))
    room = check_disk(folder, needed_bytes=needed)
    if shape is None:
        return [room, Check("disk speed", "skip", "the model's size is not known")]
    if room.status == "fail":
        return [room, Check("disk speed", "skip", "not measured: disk failed")]
    return [room, check_disk_speed(folder, shape, stop_timeout=config.miner.stop_timeout)]


def check_disk_speed(folder: Path, shape: ModelShape, *, stop_timeout: timedelta) -> Check:
    """Writes and syncs 128 MiB, against a checkpoint that is written within a stop."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if shutil.disk_usage(place).free < 2 * _SPEED_BYTES:
        return Check("disk speed", "skip", f"too little room in {place} to measure it")
    block, began = os.urandom(1 << 20), time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            for _ in range(_SPEED_BYTES // len(block)):
                file.write(block)
            file.flush()
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


def check_descriptors(connections: int) -> Check:
    """``connections``: the most that the signed server keeps open. The launcher takes the hard
    limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _DESCRIPTORS + connections
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return Check("descriptors", "ok", f"{hard} open files allowed")
    return Check(
        "descriptors",
        "warn",
        f"{hard} open files allowed, {needed} may be needed",
        "LimitNOFILE=65536 in the unit of pm2 or the miner, or raise the hard limit of nofile in "
        "/etc/security/limits.conf",
    )


def check_shared_memory(*, ranks: int, gpu: bool) -> Check:
    if not gpu or ranks < 2:
        return Check("shared memory", "skip", "only ranks on several GPUs use /dev/shm")
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Check("shared memory", "skip", f"there is no /dev/shm ({error.strerror})")
    finding = f"{free / 1e9:.1f} GB free in /dev/shm"
    if free >= _SHARED_MEMORY:
        return Check("shared memory", "ok", finding)
    remedy = "docker run --shm-size=2g, or mount -o remount,size=2G /dev/shm"
    return Check("shared memory", "warn", f"{finding}; NCCL wants about 1 GB", remedy)


def check_ports(config: Config) -> list[Check]:
    """Whether the miner's ports can be listened on. One that a running miner of this run folder
    holds is as it should be."""
    own = _listening(config.run_folder)
    ports = {name: config.get(name) for name in ("axon.port", "dht.port")}
    return [
        Check(f"port {name}", "ok", f"{port}: the running miner listens there")
        if port in own
        else check_port(name, port)
        for name, port in ports.items()
    ]


def _listening(run_folder: Path) -> set[int]:
    """Ports that the processes of a running miner listen on."""
    mark, ports = mark_of(run_folder), set()
    for process in mark.processes() if mark is not None else []:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr:
                    ports.add(connection.laddr.port)
    return ports


def gpu_bytes() -> int | None:
    """Memory of the first visible GPU."""
    sampler = NvmlSampler.open(0)
    if sampler is None:
        return None
    with sampler:
        sample = sampler.sample()
    return round(sample.memory_total_gb * 1e9) if sample else None


def bytes_under(folder: Path) -> int:
    """What this miner has there already: it needs no further room."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a miner that runs deletes files meanwhile
            total += path.lstat().st_size
    return total


def cannot_train(checks: Sequence[Check]) -> str:
    """The check that says that no training can be measured here; empty if none does."""
    decisive = ("torch", "gpu", "gpu memory", "host memory", "batch")
    return next((c.name for c in checks if c.status == "fail" and c.name.startswith(decisive)), "")
