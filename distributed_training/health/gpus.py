"""Read the state of the GPUs from the driver and from torch, and report it at a start.

The driver is asked through NVML, without torch; a figure that it does not have is None. If a driver
hangs, calls to it never return. So each call has its own thread and a time limit, and while one has
not returned, there is no other. The block at a start is printed as the operator guide shows it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from distributed_training.protocol.lines import counted

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds to wait for an answer. The first call after a reboot initializes every card, so it may
#: take long. A sample may not, because it delays an inner step.
START_PATIENCE, SAMPLE_PATIENCE = 60.0, 2.0
_open_question: list[threading.Thread] = []  # the thread whose call has not returned

_kept: list[tuple[Any, list[Any]]] = []  # the driver's library, and the cards at the time it opened
_RULE = "=" * 80


def within(seconds: float, otherwise: T, ask: Callable[[], T]) -> T:
    """Return the driver's answer to ``ask``, or ``otherwise`` if none comes within ``seconds``."""
    if _open_question and _open_question[0].is_alive():
        return otherwise
    _open_question.clear()
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="NVML", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if answers:
        return answers[0]
    _open_question.append(thread)
    log.warning(
        "The NVIDIA driver has not answered for %.0f s: the GPUs seen before are taken to exist, "
        "without figures. Check with nvidia-smi whether the driver hangs; if so, reboot",
        seconds,
    )
    return otherwise


@dataclass(frozen=True)
class GpuSample:
    """Hold one reading of a card. Memory is in GB of 1e9 bytes, for all processes together."""

    name: str
    memory_total_gb: float
    memory_used_gb: float
    utilization: float | None  # percent of the last sampling period in which a kernel ran
    temperature: float | None  # degrees Celsius
    power_watts: float | None


def visible_gpu_count() -> int:
    """Count the GPUs that this process may use. Without a driver, there are 0.

    An empty ``CUDA_VISIBLE_DEVICES`` hides all of them.
    """
    return _ask(START_PATIENCE, 0, lambda nvml: len(_visible_handles(nvml)))


def sample_gpu(device: int = 0, *, patience: float = START_PATIENCE) -> GpuSample | None:
    """Sample the process's ``device``-th visible GPU; None if the driver gives no answer for it.

    The reason may be that there is no NVIDIA driver, no nvidia-ml-py or no such GPU, or that the
    card fell off the bus. ``CUDA_VISIBLE_DEVICES`` may contain numbers and UUIDs.
    """

    def read(nvml: Any, handle: Any) -> GpuSample:
        # Every card has a name and figures for its memory. The other figures may be missing.
        memory, name = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetName(handle)
        heat = partial(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        power = _optional(nvml, partial(nvml.nvmlDeviceGetPowerUsage, handle))
        return GpuSample(
            name=name,
            memory_total_gb=memory.total / 1e9,
            memory_used_gb=memory.used / 1e9,
            utilization=_utilization(nvml, handle),
            temperature=_optional(nvml, heat),
            power_watts=None if power is None else power / 1e3,
        )

    return _of_gpu(device, read, patience)


def gpu_utilization(device: int) -> float | None:
    """Return the utilization in percent, 0 to 100; None if the driver does not answer."""
    return _of_gpu(device, _utilization, SAMPLE_PATIENCE)


def describe_gpu(device: int) -> str:
    """Return the card's name and UUID, as nvidia-smi shows them; empty if there is no such card."""

    def read(nvml: Any, handle: Any) -> str:
        names = (nvml.nvmlDeviceGetName, nvml.nvmlDeviceGetUUID)
        return ", ".join(name(handle) for name in names)

    return _of_gpu(device, read, START_PATIENCE) or ""


def keep_driver_open() -> None:
    """Keep the driver's library open in this process, so that each call takes microseconds.

    The cards keep their current numbers even if one of them is lost.
    """

    def keep() -> None:
        if (nvml := _start()) is not None:
            _kept[:] = [(nvml, _visible_handles(nvml))]

    within(START_PATIENCE, None, keep)


def _of_gpu(device: int, read: Callable[[Any, Any], T], patience: float) -> T | None:
    def read_one(nvml: Any) -> T | None:
        kept = [handles for library, handles in _kept if library is nvml]
        handles = kept[0] if kept else _visible_handles(nvml)
        return read(nvml, handles[device]) if 0 <= device < len(handles) else None

    return _ask(patience, None, read_one)


def _utilization(nvml: Any, handle: Any) -> float | None:
    return _optional(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def _optional(nvml: Any, read: Callable[[], float]) -> float | None:
    try:
        return float(read())
    except nvml.NVMLError:  # this card does not support it, e.g. power on some laptops
        return None


def _ask(patience: float, otherwise: T, read: Callable[[Any], T]) -> T:
    """Return the result of ``read``, or ``otherwise`` if the driver does not answer."""

    def ask() -> T:
        if (nvml := _start()) is None:
            return otherwise
        try:
            return read(nvml)
        except nvml.NVMLError:
            return otherwise
        finally:
            # Without a shutdown for each nvmlInit, the driver's library would stay open.
            with contextlib.suppress(nvml.NVMLError):  # raised if the driver was unloaded meanwhile
                nvml.nvmlShutdown()

    return within(patience, otherwise, ask)


def _start() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _visible_handles(nvml: Any) -> list[Any]:
    """Return the handles of the visible GPUs. As in CUDA, the list ends at the first bad entry."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    handles = []
    if chosen is None:
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError:
            # The driver was updated meanwhile, or a card hangs. Do not raise an error, because the
            # launcher waits for a driver as it waits for a disk.
            return []
        for index in range(count):
            # A card that fell off the bus is still counted, but has no handle.
            with contextlib.suppress(nvml.NVMLError):
                handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        return handles
    for word in (word.strip() for word in chosen.split(",")):
        try:
            if word.startswith(("GPU-", "MIG-")):
                handles.append(nvml.nvmlDeviceGetHandleByUUID(word))
            elif word.isdigit():
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(word)))
            else:  # a word that names no card, such as "-1", hides all cards after it
                break
        except nvml.NVMLError:
            break
    return handles


# --- the report of a start ---------------------------------------------------------------------


def describe_cuda(device: int) -> list[str]:
    """Return the lines about ``device`` as torch sees it. Call this once the model is on it."""
    # Import torch here, because the launcher uses only NVML and must not load torch.
    import torch

    if not torch.cuda.is_available():
        return ["❌ CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)"]
    total = torch.cuda.get_device_properties(device).total_memory
    return [
        "✓ CUDA available: True",
        f"✓ GPU count: {torch.cuda.device_count()}",
        f"✓ Current CUDA device: {device}",
        f"✓ Device name: {torch.cuda.get_device_name(device)}",
        f"✓ GPU total memory: {total / 1e9:.2f} GB",
        f"✓ GPU memory allocated: {torch.cuda.memory_allocated(device) / 1e9:.2f} GB",
    ]


def gpu_report_lines(
    *,
    cuda: Sequence[str],
    model_device: str,
    micro_batch: int,
    effective: int,
    world_size: int,
    expect_gpu: bool = True,
) -> list[str]:
    """Return the lines of the block printed at a start; a line that begins with ❌ is a warning.

    ``cuda``: the lines from :func:`describe_cuda`. ``model_device``: the parameters' device, e.g.
    ``cuda:0``. ``micro_batch`` and ``effective`` count sequences, the latter over all ranks.
    ``expect_gpu``: False if ``--neuron.device cpu`` was given; then there is only one line.
    """
    # Round up. For example, 512 sequences with micro-batches of 2 on 4 ranks take 64 steps.
    steps = -(-effective // (micro_batch * world_size))
    if not expect_gpu:
        return [
            f"✓ Training on the CPU, as --neuron.device cpu asks: {counted(world_size, 'rank')}, "
            f"{micro_batch} sequences in a micro-batch, {effective} in an inner step, "
            f"{steps} micro-batches each"
        ]
    # Operators search for these lines and compare them with the guide, so never change their words.
    lines = [_RULE, "🔍 GPU DIAGNOSTICS", _RULE, *cuda]
    lines.append(f"✓ Model device: {model_device}")
    if model_device.startswith("cuda"):
        lines.append(f"✅ Model correctly on GPU: {model_device}")
    else:
        lines.append("❌ Model is on CPU! This will be EXTREMELY SLOW!")
    return [
        *lines,
        f"✓ Batch size (per GPU): {micro_batch}",
        f"✓ Effective batch size (total): {effective}",
        f"✓ World size (GPUs): {world_size}",
        f"✓ Gradient accumulation steps: {steps}",
        _RULE,
    ]
