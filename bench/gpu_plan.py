"""``python bench/gpu.py --plan``: an inner step on paper, for cards that nobody has at hand.

``gpu_count`` counts a micro-batch of the real model. Here a kernel takes the longer of its
arithmetic and its memory traffic by the card's data sheet; what FSDP, the optimizer and the bus
move is not traced, but added (:func:`traffic`). *ceiling*: at the data sheet's rates, the host
never late. *expected*: at the shares of them that well-made programs reach, and with the host's
time to launch kernels. Those shares and times are assumed (constants below); the first GPU says
how far off they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from bench.gpu_count import Trace, trace
from distributed_training.common.memory import (
    LONGEST_LOSS_CHUNK,
    Arrangement,
    Checkpointing,
    ModelShape,
    device_memory,
)
from distributed_training.config.settings import TrainingSettings
from distributed_training.training.memory_plan import MARGIN, MemoryPlan, named_config, plan_memory
from distributed_training.training.micro_batches import AUTO_AT_MOST
from distributed_training.training.throughput import peak_flops

PRODUCTS, ATTENTION, BANDWIDTH = 0.75, 0.5, 0.85  # shares of the data sheet's rates
CAUSAL = 0.5  # of attention's FLOPs are computed; they are counted whole
LAUNCH, LAUNCH_EAGER = 5e-6, 10e-6  # seconds of the host a kernel: compiled code, PyTorch's own
HOOKS = 200e-6  # seconds of the host in FSDP's hooks, a module and pass
SEQUENCES, LENGTH = 512, 1024  # of a step


@dataclass(frozen=True)
class Card:
    """GB; TB/s of its memory; GB/s one way: of its bus to the host, of its link to another GPU."""

    name: str
    memory: float
    bandwidth: float
    bus: float
    link: float

    @property
    def peak(self) -> float:
        return peak_flops(self.name) or math.nan


CARDS = (
    Card("H200", 141, 4.8, 64, 450),
    Card("H100", 80, 3.35, 64, 450),
    Card("A100", 80, 2.039, 32, 300),
    Card("RTX 4090", 24, 1.008, 32, 32),
)


@dataclass(frozen=True)
class Case:
    """Say how a step is carried out. ``micro_batch`` 0: as ``auto`` finds it."""

    model: str
    card: Card
    gpus: int = 1
    micro_batch: int = 0
    checkpointing: str = "none"
    compiled: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(named_config(self.model))


@functools.cache
def counted(model: str, micro_batch: int, checkpointing: str, compiled: bool) -> Trace:
    config, chunk = named_config(model), LONGEST_LOSS_CHUNK
    return trace(config, micro_batch, LENGTH, checkpointing, chunk=chunk, compiled=compiled)


def memory(case: Case, micro_batch: int) -> tuple[MemoryPlan, float]:
    """The miner's own plan, and the bytes it needs if activations are what was counted."""
    mode = cast(Checkpointing, case.checkpointing)
    plan = plan_memory(
        TrainingSettings(activation_checkpointing=mode, **case.settings),
        model_config=named_config(case.model),
        world_size=case.gpus,
        micro_batch=micro_batch,
        device_bytes=round(case.card.memory * 1e9),
    )
    how = Arrangement(case.gpus, micro_batch, LENGTH, checkpointing=mode)
    saved = micro_batch * counted(case.model, 1, case.checkpointing, case.compiled).saved
    return plan, plan.bytes_needed + 1.08 * (saved - device_memory(case.shape, how).activations)


def fitting(case: Case) -> tuple[int, MemoryPlan] | None:
    """The micro-batch and the plan. As in a start, the plan is made before ``auto`` measures."""
    size, limit = case.micro_batch or 1, MARGIN * case.card.memory * 1e9
    plan, need = memory(case, size)
    if need > limit:
        return None
    fixed = {
        "offload_optimizer": "on" if plan.offload_optimizer else "off",
        "gradient_sync": "every" if plan.sync_every else "last",
        "keep_unsharded": "on" if plan.keep_unsharded else "off",
    }
    case = replace(case, settings=case.settings | fixed)
    while not case.micro_batch and 2 * size <= AUTO_AT_MOST and memory(case, 2 * size)[1] <= limit:
        size *= 2
    return size, plan


def traffic(
    case: Case, plan: MemoryPlan, micro_batches: int
) -> dict[str, tuple[float, float, float]]:
    """Bytes of a step that are not traced: in device memory, over the bus and over the link.

    In bytes a parameter. *reduction*: 10 for each sum of a micro-batch's bf16 gradient into the
    float32 one (12 of this rank's rows, if it is reduced first); 16 for copies into and out of a
    reduction; 14 for a gather: cast to bf16, copy out. Over the link a reduction sends 4 and a
    gather 2, less this rank's own. *optimizer*, of this rank's rows: 12 for norm and clipping, 28
    for AdamW; over the bus 8 each way, both at once, if its moments lie on the host.
    """
    n, own = case.shape.parameters, case.shape.parameters / case.gpus
    reductions = micro_batches if plan.sync_every else 1
    gathers = 1 if plan.keep_unsharded else 2 * micro_batches
    sums = micro_batches * (12 * own if plan.sync_every else 10 * n)
    on_device = sums + n * (16 * reductions + 14 * gathers)
    return {
        "reduction": (on_device, 0, (n - own) * (4 * reductions + 2 * gathers)),
        "optimizer": (40 * own, 8 * own if plan.offload_optimizer else 0, 0),
    }


@dataclass(frozen=True)
class Step:
    """``parts``: seconds of the device by what bounds them; ``host``: to launch all of it."""

    micro_batch: int
    offloaded: bool
    parts: dict[str, float]
    host: float
    mfu_seconds: float  # at the peak

    @property
    def seconds(self) -> float:
        return max(sum(self.parts.values()), self.host)

    @property
    def mfu(self) -> float:
        return self.mfu_seconds / self.seconds

    @property
    def bound(self) -> str:
        if self.host > sum(self.parts.values()):
            return "launches"
        return max(self.parts, key=lambda name: self.parts[name])


def predict(case: Case, *, ceiling: bool = False) -> Step | None:
    """None: does not fit."""
    fits = fitting(case)
    if fits is None:
        return None
    (size, plan), card = fits, case.card
    products, attention, bandwidth = (1, 1, 1) if ceiling else (PRODUCTS, ATTENTION, BANDWIDTH)
    found = counted(case.model, size, case.checkpointing, case.compiled)
    micro_batches = math.ceil(SEQUENCES / (size * case.gpus))
    parts = {"compute": 0.0, "memory": 0.0}
    for kernel in found.kernels:
        share = attention / CAUSAL if kernel.kind == "attention" else products
        arithmetic = kernel.flops / (share * card.peak)
        moving = kernel.bytes / (bandwidth * card.bandwidth * 1e12)
        name = "compute" if arithmetic >= moving else "memory"
        parts[name] += micro_batches * max(arithmetic, moving)
    rates = (card.bandwidth * 1e12, card.bus * 1e9, card.link * 1e9)
    for name, sizes in traffic(case, plan, micro_batches).items():
        parts[name] = sum(b / (bandwidth * r) for b, r in zip(sizes, rates, strict=True))
    # And one a parameter, which adds its gradient.
    launches = sum(kernel.launches for kernel in found.kernels) + len(case.shape.tensors)
    host = launches * (LAUNCH if case.compiled else LAUNCH_EAGER)
    host += 2 * (case.shape.layers + 1) * HOOKS
    return Step(
        micro_batch=size,
        offloaded=plan.offload_optimizer,
        parts=parts,
        host=0.0 if ceiling else micro_batches * host,
        mfu_seconds=micro_batches * found.model_flops / card.peak,
    )


#: One change each of what the miner does by itself.
VARIANTS: dict[str, dict[str, Any]] = {
    "as the miner does it": {},
    "micro-batch 2": {"micro_batch": 2},
    "micro-batch 2, compile off": {"micro_batch": 2, "compiled": False},
    "compile off": {"compiled": False},
    "gradient reduced at every micro-batch": {"settings": {"gradient_sync": "every"}},
    "AdamW's moments in host memory": {"settings": {"offload_optimizer": "on"}},
    "checkpointing budget": {"checkpointing": "budget"},
    "checkpointing selective": {"checkpointing": "selective"},
    "checkpointing full": {"checkpointing": "full"},
}
HEAD = (
    "micro-batch | step | compute, memory, reduction, optimizer | host | bound by "
    "| MFU expected (ceiling) |"
)


def cells(case: Case) -> str:
    step, best = predict(case), predict(case, ceiling=True)
    if step is None or best is None:
        return "does not fit | | | | | |"
    whole = sum(step.parts.values())
    shares = ", ".join(f"{100 * part / whole:.0f}" for part in step.parts.values())
    return (
        f"{step.micro_batch}{', host' if step.offloaded else ''} | {step.seconds:.1f} s "
        f"| {shares} % | {step.host / step.seconds:.0%} | {step.bound} "
        f"| **{step.mfu:.0%}** ({best.mfu:.0%}) |"
    )


def lines() -> Iterator[str]:
    """Markdown: cards with what the miner does by itself, then variations."""
    yield f"| GPUs | model | {HEAD}\n|---|---|---|---|---|---|---|---|"
    for card in CARDS:
        for gpus in (1, 8):
            for model in ("1b", "4b"):
                yield f"| {gpus} x {card.name} | {model} | {cells(Case(model, card, gpus))}"
    yield f"\n| one GPU, model | variation | {HEAD}\n|---|---|---|---|---|---|---|---|"
    for card, model in ((CARDS[0], "1b"), (CARDS[0], "4b"), (CARDS[1], "4b")):
        for name, changes in VARIANTS.items():
            yield f"| {card.name}, {model} | {name} | {cells(Case(model, card, **changes))}"
