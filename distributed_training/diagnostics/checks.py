"""One finding of the doctor (``distributed_training.doctor``), and the checks that need neither
torch nor network: those of the machine that a miner's start asks too."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distributed_training.common.memory import (
    Arrangement,
    ModelShape,
    device_memory,
    host_memory,
)
from distributed_training.config import Config
from distributed_training.config.types import ConfigError
from distributed_training.diagnostics.nvml import NvmlSampler, visible_gpu_count

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found (or why it was not looked at), and the command or flag
    that mends it."""

    name: str
    status: Status
    finding: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """As one error line."""
        return f"{self.finding}: {self.remedy}" if self.remedy else self.finding


def failed(checks: Sequence[Check]) -> bool:
    return any(check.status == "fail" for check in checks)


class ProbeError(Exception):
    """A probe found what it checks broken. The text is the finding."""


def run_probe(name: str, probe: Callable[[], str], *, remedy: str) -> Check:
    """``probe`` returns its finding, or raises ProbeError, ConfigError or OSError."""
    try:
        return Check(name, "ok", probe())
    except (ProbeError, ConfigError, OSError) as error:
        finding = " ".join(str(error).split()) or type(error).__name__  # texts may have lines
        return Check(name, "fail", finding, remedy)


def host_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process may use; None if unknown.

    That is the machine's memory, or less: in Slurm, Docker and systemd the limit of a control group
    counts, at which the kernel kills. ``root``: of /proc and /sys.
    """
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    return min((there, *_memory_limits(root)))


def _memory_limits(root: Path) -> Iterator[int]:
    """Yield the limits of the own control group and of those above it, of both versions."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for group in groups:  # "0::/path", or by version 1 "4:memory:/path"
        controllers, _, path = group.partition(":")[2].partition(":")
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, and the limit lies at the mount.
        own = mount / path.strip("/")
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(mount))):
            try:
                yield int((folder / name).read_text())
            except (OSError, ValueError):  # no such file; "max"
                continue


def start_checks(config: Config, *, folder: Path, ranks: int) -> list[Check]:
    """What a look at the machine tells before anything is started: no torch, no network, < 1 s.

    The miner's launcher refuses to start on a failure unless ``--diagnostics.start_check false``.
    """
    needed = round(config.diagnostics.minimum_disk_gb * 1e9)
    ports = [
        check_port(name, config.get(name))
        for name in ("axon.port", "dht.port")
        if isinstance(config.get(name), int)
    ]
    gpus = check_gpus(wanted=ranks, device=config.miner.device)
    return [*gpus, check_disk(folder, needed_bytes=needed), *ports]


def refuse_model(config: Config, *, ranks: int) -> None:
    """Raise ConfigError where the model of the network's file is larger than this machine can hold,
    whatever the flags: the smallest micro-batch, all recomputed, AdamW's state where there is room.

    ``ranks``: of this machine, which has a copy of the model. Without a known size or memory,
    nothing is refused; nor within a sixth, since the estimate is no more exact.
    """
    network = config.network
    if network is None or network.model is None or not config.diagnostics.start_check:
        return
    try:
        shape = ModelShape.from_config(network.model)
    except ValueError:
        return
    gpu = None if config.miner.device == "cpu" or not visible_gpu_count() else _gpu_bytes()
    host = host_bytes()
    tight = []  # what each way of doing it lacks
    for at_last, offload in itertools.product((False, True), (False, True)):
        how = Arrangement(
            world_size=ranks,
            micro_batch=1,
            sequence_length=config.training.sequence_length,
            checkpointing="full",
            reduce_at_last=at_last,
            offload_optimizer=offload,
            cuda=gpu is not None,
        )
        needs = [("host memory", host_memory(shape, how).needed, host)]
        if gpu is not None:
            needs.append(("GPU memory", device_memory(shape, how).total, gpu))
        lacks = [n for n in needs if n[2] is not None and n[1] > 1.15 * n[2]]
        if not lacks:
            return
        tight.append(lacks[0])
    kind, needed, there = min(tight, key=lambda lack: lack[1])
    raise ConfigError(
        f"--network {network.place}: its model of {shape.parameters / 1e9:.2f} B parameters needs "
        f"about {needed / 1e9:.0f} GB of {kind} and this machine has {(there or 0) / 1e9:.0f}, so "
        "nothing was started: use a larger machine or more GPUs, or join a network with a smaller "
        "model"
    )


def _gpu_bytes() -> int | None:
    """Return the memory of the first GPU; None if the driver does not say."""
    sampler = NvmlSampler.open(0)
    if sampler is None:
        return None
    sample = sampler.sample()
    sampler.close()
    return round(sample.memory_total_gb * 1e9) if sample else None


def check_port(flag: str, port: int) -> Check:
    """Whether ``port`` can be listened on, at all addresses of this machine."""
    name = f"port {flag}"
    if port == 0:
        return Check(name, "ok", "a free one is taken")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # skip TIME_WAIT
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            why = "in use" if in_use else (error.strerror or "not usable")
            finding = f"port {port} (--{flag}) is {why}, so peers could not reach this miner"
            remedy = f"stop what listens there (ss -ltnup 'sport = :{port}') or give --{flag} "
            return Check(name, "fail", finding, f"{remedy}another port")
    return Check(name, "ok", f"{port} is free")


def check_disk(folder: Path, *, needed_bytes: int) -> Check:
    """Whether ``folder``'s file system has ``needed_bytes`` free and can be written."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    finding = f"{free / 1e9:.1f} GB free in {folder}, {needed_bytes / 1e9:.1f} GB needed"
    if not os.access(place, os.W_OK):
        finding = f"{place} cannot be written by this user, so nothing could be saved"
        return Check("disk", "fail", finding, "give --neuron.run_folder a folder of yours")
    if free < needed_bytes:
        finding += ", so checkpoints and uploads would fail"
        remedy = (
            "free space, lower --neuron.keep_checkpoints, or give --neuron.run_folder elsewhere"
        )
        return Check("disk", "fail", finding, remedy)
    if free < 2 * needed_bytes:
        return Check("disk", "warn", finding, "free space soon: less than twice the need is left")
    return Check("disk", "ok", finding)


def check_gpus(*, wanted: int, device: str) -> list[Check]:
    """``wanted``: ranks. ``device``: ``--neuron.device``."""
    count = visible_gpu_count()
    if device == "cpu":
        return [Check("gpu", "ok", "not used: --neuron.device cpu")]
    if count == 0:
        finding = "no NVIDIA GPU is visible; the model would run on CPU, which is very slow"
        if device == "cuda":
            remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or give --neuron.device cpu"
            return [Check("gpu", "fail", finding, remedy)]
        remedy = "fine for --preset local; otherwise check nvidia-smi and CUDA_VISIBLE_DEVICES"
        return [Check("gpu", "warn", finding, remedy)]
    if wanted > count:
        finding = f"{wanted} ranks on {count} visible GPU(s), so ranks would share one"
        remedy = f"give --nproc_per_node {count}, or free CUDA_VISIBLE_DEVICES"
        return [Check("gpu", "fail", finding, remedy)]
    return [_check_gpu(index) for index in range(wanted)]


def _check_gpu(index: int) -> Check:
    name = f"gpu {index}"
    sampler = NvmlSampler.open(index)
    sample = sampler.sample() if sampler else None
    if sampler:
        sampler.close()
    if sample is None:
        return Check(name, "fail", "the driver does not answer for it", "nvidia-smi; then reboot")
    used, total = sample.memory_used_gb, sample.memory_total_gb
    finding = f"{sample.name}, {used:.1f} of {total:.1f} GB in use"
    if used > 0.1 * total:
        return Check(name, "warn", finding, "another program holds memory: nvidia-smi shows which")
    return Check(name, "ok", finding)
