"""Check this machine; the doctor and a miner's start make the same checks.

Nothing here needs a network. Only the check of torch imports torch. A start must be quick, so it
leaves that check out. ``common.memory`` estimates the memory that a model needs.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from distributed_training.chain.kinds import chain_kind
from distributed_training.common.files import free_bytes
from distributed_training.common.memory import (
    DISK_RESERVE,
    Arrangement,
    ModelShape,
    device_memory,
    disk_space,
    host_bytes,
    host_memory,
    list_ways,
    loss_chunk,
)
from distributed_training.common.ports import listen
from distributed_training.common.webhook import service_of
from distributed_training.config import Config, ConfigError, problems
from distributed_training.config.settings import TrainingSettings
from distributed_training.data.sources import kind_of
from distributed_training.health.gpus import sample_gpu, visible_gpu_count
from distributed_training.protocol.types import Check

_SHARED_MEMORY = 1 << 30  # bytes for NCCL's buffers between the GPUs of one machine
_COMFORTABLE = 0.9  # above this share of the memory, the fit is called tight
_MOST_SPARE = 10_000_000_000  # bytes of disk for data and logs, on top of all that a miner keeps
_SPARE_BYTES = 100  # bytes per parameter for all that a miner keeps (docs/requirements.md)
_TOO_MUCH = 1.15  # refused above this share of the memory, because the estimate is not exact


@dataclass
class Examination:
    """Describe a miner as its configuration would start it here, with the findings so far.

    ``model``: a ``config.json`` and its origin, instead of the one in the network's file.
    ``offline``: True if no other machine may be contacted. ``running``: True if a miner of this run
    folder is running; it listens on ``own_ports``. The check of the model sets ``shape``, and the
    check of the chain sets ``uid``.
    """

    config: Config
    ranks: int
    model: tuple[dict[str, Any], str] | None = None
    offline: bool = False
    uid: int | None = None
    running: bool = False
    own_ports: frozenset[int] = frozenset()
    shape: ModelShape | None = None
    found: list[Check] = field(default_factory=list)

    def failed(self, *names: str) -> str:
        """Return the name of the first failed check that starts with one of ``names``, or ""."""
        return next(
            (c.name for c in self.found if c.status == "fail" and c.name.startswith(names)), ""
        )


#: A check yields its findings: none if it does not concern this miner, or several for several GPUs.
Checker = Callable[[Examination], Iterable[Check]]


def start_checks(config: Config, *, ranks: int) -> list[Check]:
    """Check the machine before a start, without torch or a network, in less than 1 s.

    The miner's launcher refuses to start if a check fails.
    """
    start = Examination(config, ranks)
    for check in CHECKS:
        if check is not check_torch:
            start.found += check(start)
    return start.found


# --- configuration, torch, gpus, batch ----------------------------------------------------------


def check_configuration(examination: Examination) -> Iterator[Check]:
    """Check the settings, without looking at the machine."""
    config = examination.config
    wrong = problems(config)
    try:
        refuse_unknown_kinds(config)
    except ConfigError as error:
        wrong = list(dict.fromkeys([*wrong, str(error)]))
    for line in (*wrong, *config.warnings):
        # The text after the last colon of a line is its remedy.
        cause, _, remedy = line.rpartition(": ")
        status: Literal["fail", "warn"] = "fail" if line in wrong else "warn"
        yield Check("configuration", status, cause or line, remedy if cause else "")
    if not wrong and not config.warnings:
        yield Check("configuration", "ok", f"{examination.ranks} rank(s)")


def refuse_unknown_kinds(config: Config) -> None:
    """Raise ConfigError if the kind of the chain, or of ``--data.source``, is unknown."""
    chain_kind(config.chain)
    kind_of(config.data.spec)


def check_torch(examination: Examination) -> Iterator[Check]:
    """Compare the torch build with the driver."""
    name, seen = "torch", visible_gpu_count()
    if examination.running:  # importing torch would take seconds from the ranks
        yield Check(name, "ok", f"torch {version('torch')}; the running miner trains with it")
        return
    try:
        import torch
    except ImportError as error:
        yield Check(name, "fail", f"torch cannot be imported ({error})", "make setup")
        return
    build = f"torch {torch.__version__}"
    build += f", CUDA {torch.version.cuda}" if torch.version.cuda else ", CPU build"
    # Check this first: is_available() is False in this case too, but a newer driver would not help.
    if seen and not torch.version.cuda:
        finding = f"{build}, but the driver shows {seen} GPU(s), which would stay idle"
        yield Check(name, "fail", finding, "rm -rf .venv && DT_TORCH=cuda make setup")
    elif seen and not torch.cuda.is_available():
        finding = f"{build} cannot use the {seen} GPU(s) with this driver"
        remedy = (
            "upgrade the NVIDIA driver (nvidia-smi shows its CUDA version), or install a torch "
            "built for it"
        )
        yield Check(name, "fail", finding, remedy)
    else:
        yield Check(name, "ok", build)


def check_gpus(examination: Examination) -> Iterator[Check]:
    """Check that each rank has a GPU that no other program fills."""
    device, wanted, count = examination.config.miner.device, examination.ranks, visible_gpu_count()
    if device == "cpu":
        yield Check("gpu", "ok", "not used: --neuron.device cpu")
    elif count == 0:
        finding = "no NVIDIA GPU is visible; the model would run on CPU, which is very slow"
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --neuron.device cpu"
        if device == "cuda":
            yield Check("gpu", "fail", finding, remedy)
        else:
            yield Check("gpu", "warn", finding, f"fine for a tiny model; otherwise {remedy}")
    elif wanted > count:
        finding = f"{wanted} ranks on {count} visible GPU(s), so ranks would share one"
        remedy = f"use --nproc_per_node {count}, or let CUDA_VISIBLE_DEVICES name more"
        yield Check("gpu", "fail", finding, remedy)
    else:
        for index in range(wanted):
            name, sample = f"gpu {index}", sample_gpu(index)
            if sample is None:
                finding = "the driver does not answer for this GPU"
                yield Check(name, "fail", finding, "nvidia-smi; then reboot")
                continue
            used, total = sample.memory_used_gb, sample.memory_total_gb
            finding = f"{sample.name}, {used:.1f} of {total:.1f} GB in use"
            if examination.running:
                yield Check(name, "ok", f"{finding}, by the running miner")
            elif used > 0.1 * total:  # the driver itself uses less than that
                remedy = "another program uses its memory: nvidia-smi shows which"
                yield Check(name, "warn", finding, remedy)
            else:
                yield Check(name, "ok", finding)


# --- model, memory ------------------------------------------------------------------------------


def check_model(examination: Examination) -> Iterator[Check]:
    """Check that the model's size is known, and record it for the checks of memory and disk."""
    network, given = examination.config.network, examination.model
    if given is None and network.model is None:
        return  # the model's config.json comes with the network's weights
    try:
        if given is None or given[0] == network.model:
            origin = f"--network {network.place}"
            examination.shape = network.shape
        else:
            origin = given[1]
            examination.shape = ModelShape.from_config(given[0])
    except ValueError as error:
        remedy = "set --model to the config.json of a Llama-like model"
        yield Check("model", "warn", f"{origin}: {error}: size not known", remedy)
        return
    finding = f"{examination.shape.parameters / 1e6:.1f} M parameters ({origin})"
    yield Check("model", "ok", finding)


def gpu_bytes(config: Config) -> int | None:
    """Return the first GPU's memory; None if no GPU is used, or the driver does not answer."""
    sample = None if config.miner.device == "cpu" else sample_gpu()
    return round(sample.memory_total_gb * 1e9) if sample else None


def check_memory(examination: Examination) -> Iterator[Check]:
    """Check that device and host memory can hold this model at all.

    The estimate is for the least memory that training takes, with the smallest micro-batch, all
    activations recomputed, and the optimizer's state and the gradients where they fit best.
    Training itself finds out how much more fits.
    """
    config, shape = examination.config, examination.shape
    if shape is None:
        return
    gpu = gpu_bytes(config)
    least = Arrangement(
        world_size=examination.ranks,
        micro_batch=1,
        sequence_length=config.training.sequence_length,
        checkpointing="full",
        cuda=gpu is not None,
        compiled=False,
        loss_chunk=loss_chunk(gpu),
        moments=count_moments(config.training, shape),
        workers=examination.ranks,
        peer_process=config.averages,
    )
    has = {kind: there for kind, there in (("gpu", gpu), ("host", host_bytes())) if there}
    ways = [
        ({"gpu": device_memory(shape, way)} if way.cuda else {}) | {"host": host_memory(shape, way)}
        for way in list_ways(least, keep=[False])
    ]
    if config.kind == "validator":  # for weights, momentum, a round's buffers and their average
        ways = [{"host": 16 * shape.trained + shape.frozen_bytes}]
    shares = [{kind: way[kind] / has[kind] for kind in way if kind in has} for way in ways]
    for kind, share in min(shares, key=lambda share: max(share.values(), default=0.0)).items():
        finding = f"at least {share * has[kind] / 1e9:.1f} of {has[kind] / 1e9:.1f} GB needed"
        if share > _TOO_MUCH:
            remedy = "use a machine with more memory (the limit of a Slurm job, a container or a "
            remedy += "systemd unit counts too), more GPUs, or a network with a smaller model"
            finding += ", so training would run out of memory"
            yield Check(f"{kind} memory", "fail", finding, remedy)
        elif share > _COMFORTABLE:
            remedy = "use more GPUs, or a machine with more memory"
            yield Check(f"{kind} memory", "warn", f"{finding}: tight", remedy)
        else:
            yield Check(f"{kind} memory", "ok", finding)


def count_moments(training: TrainingSettings, shape: ModelShape) -> float:
    """Count the tensors that the network's inner optimizer keeps per parameter, on average."""
    # Avoid importing torch for the usual optimizers, because that would delay a start.
    if (known := {"adamw": (2, 2), "muon": (2, 1)}.get(training.optimizer)) is not None:
        return shape.moments(*known)
    from distributed_training.training.inner_optimizer import moments_of

    # The miner itself reports an optimizer that is unknown or refused.
    with contextlib.suppress(ConfigError):
        return shape.moments(*moments_of(training))
    return 2


def refuse_model(config: Config, *, ranks: int) -> None:
    """Raise ConfigError if the model in the network's file does not fit into this machine.

    ``ranks``: the number of ranks on this machine, which share a copy of the model. A model is not
    refused if its size or the memory is unknown, or if the estimate, which is not exact, exceeds
    the memory by at most 15 %.
    """
    asked = Examination(config, ranks)
    for check in (*check_model(asked), *check_memory(asked)):
        if check.status == "fail":
            raise ConfigError(
                f"--network {config.network.place}: {check.name}: {check.finding}, so nothing was "
                f"started: {check.remedy}"
            )


# --- disk, shared memory, webhook, ports --------------------------------------------------------


def check_room(examination: Examination) -> Iterator[Check]:
    """Check that the run folder is writable and has disk space.

    If the model is known, the need is all that its miner keeps; otherwise it is a minimum.
    """
    config, shape = examination.config, examination.shape
    name, folder, needed = "disk", config.run_folder.absolute(), _MOST_SPARE
    if shape is not None:
        keep, moments = config.miner.keep_checkpoints, count_moments(config.training, shape)
        most = disk_space(shape, keep_checkpoints=keep, moments=moments)
        # Files that exist already are part of the need. If they were counted again, a restart on a
        # disk of the documented size would fail.
        needed = min(needed, most) + max(0, most - bytes_under(folder))
    else:
        needed = min(needed, _SPARE_BYTES * config.network.head.parameters)
    # Downloads and uploads wait until there is so much space that they leave the reserve free.
    needed = max(needed, DISK_RESERVE)
    place = folder
    while not os.path.exists(place):  # Path.exists raises if a parent folder may not be entered
        place = place.parent
    try:
        free = free_bytes(place)
    except OSError as error:
        finding = f"the disk of {place} does not answer ({error.strerror}), so nothing could be "
        remedy = "mount it again, or set --neuron.run_folder to a folder on another disk"
        yield Check(name, "fail", f"{finding}saved", remedy)
        return
    told = "its file system does not say how much is" if free is None else f"{free / 1e9:.1f} GB"
    finding = f"{told} free in {folder}, {needed / 1e9:.1f} GB needed"
    if not (place.is_dir() and os.access(place, os.W_OK)):
        why = "cannot be written by this user" if place.is_dir() else "is not a folder"
        finding = f"{place} {why}, so nothing could be saved"
        yield Check(name, "fail", finding, "set --neuron.run_folder to a folder of yours")
    elif free is None:
        yield Check(name, "warn", finding, "make sure of that yourself: nothing checks it there")
    elif free < needed:
        finding += ", so checkpoints and uploads would fail"
        yield Check(name, "fail", finding, "free disk space, or move --neuron.run_folder elsewhere")
    elif free < 2 * needed:
        yield Check(name, "warn", finding, "free disk space soon: less than twice the need is left")
    else:
        yield Check(name, "ok", finding)


def bytes_under(folder: Path) -> int:
    """Return the bytes that this miner already stores in ``folder``."""
    total = 0
    for place, _, names in os.walk(folder):  # rglob raises if a folder disappears meanwhile
        for name in names:
            with contextlib.suppress(OSError):  # a running miner may delete files meanwhile
                total += Path(place, name).lstat().st_size
    return total


def check_shared_memory(examination: Examination) -> Iterator[Check]:
    """Check /dev/shm, through which ranks on several GPUs exchange data. Containers get 64 MB."""
    if gpu_bytes(examination.config) is None or examination.ranks < 2:
        return
    with contextlib.suppress(OSError):  # raised if this system has no /dev/shm
        free = free_bytes(Path("/dev/shm"))
        if free is not None and free < _SHARED_MEMORY:
            finding = f"{free / 1e9:.1f} GB free in /dev/shm; NCCL wants about 1 GB"
            remedy = "docker run --shm-size=2g, or mount -o remount,size=2G /dev/shm"
            yield Check("shared memory", "warn", finding, remedy)


def check_webhook(examination: Examination) -> Iterator[Check]:
    """Report which service gets this miner's messages. Yield nothing if no service is set."""
    if (url := examination.config.telemetry.notify_url) is not None:
        finding = f"messages go to {service_of(url)}; dt-doctor --notify sends one now"
        yield Check("notify", "ok", finding)


def check_ports(examination: Examination) -> Iterator[Check]:
    """Check whether the DHT peer can listen on its port, on all addresses of this machine."""
    port, name = examination.config.swarm.dht_port, "port dht.port"
    if examination.config.rounds.exchange != "hivemind":
        return
    if port in examination.own_ports:
        yield Check(name, "ok", f"{port}: the running miner listens there")
        return
    try:
        listen("0.0.0.0", port).close()
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        why = "in use" if in_use else (error.strerror or "not usable")
        finding = f"port {port} (--dht.port) is {why}, so peers could not reach this miner"
        remedy = f"stop what listens there (ss -ltnup 'sport = :{port}') or give --dht.port "
        yield Check(name, "fail", finding, f"{remedy}another port")
    else:
        yield Check(name, "ok", f"{port} is free" if port else "any free port will be used")


#: The order matters, because the check of the model sets the shape for those of memory and disk.
CHECKS: tuple[Checker, ...] = (
    *(check_configuration, check_torch, check_gpus, check_model, check_memory),
    *(check_room, check_shared_memory, check_webhook, check_ports),
)
