"""An inner step on paper: seconds and MFU of a model on GPUs that nobody has at hand.

``dt-plan`` and ``python -m bench.gpu --plan`` read it. It was held against one H200
(docs/performance.md, *On a GPU*): three models and six ways to train one of them, each within 6 %.
Several GPUs, and other cards, were never measured. They count with an MFU of 48 % at most.

Assumed, and from where:

==========  =====================================================================================
products    a share of the peak that grows with the width, at most 0.65: 0.75 h / (h + 480).
            Fitted to that H200. Eight H100 reach 42 % MFU with a 1B and 46 with a 3B (llm-foundry,
            scripts/train/benchmarking); compiled layers are worth 1.16 times (torchtitan,
            benchmarks/llama3_h100_202412_torchtitan.md), which makes 48 to 53: so 48 % is the goal
            of several.
attention   half of the peak; a causal kernel does half of what MFU counts; backward 2.5 times.
bandwidth   0.85 of the data sheet's, of device memory and of the bus.
traffic     what compiled layers read and write between products, counted by hand at a budget of 0.8
            (common/memory.py): 23 h + 4 (q + k) + 9 i values of bf16 a token and layer.
logits      20 bytes each, in chunks: product, float32, softmax, gradient.
links       ``common/gpus.py``; nothing travels while something is computed.
launches    5 us a kernel, 45 kernels a layer; 200 us a group in FSDP's hooks.
machines    100 Gbit/s between them, of which 0.8; only gradients pass.
holds       an update over the bus and in host memory, where a rank moves 10 GB/s; of the copies
            that are written what lasts longer than a step, since the next optimizer step waits for
            them (training/copies.py).
writing     0.26 ns for each byte that a rank writes during training. Measured: 1.04 s for 30 bytes
            a parameter of the 125M. This was before copies to the GPU were pinned and threads that
            write gave way, so it is an upper bound. The host's cores encode an upload.
==========  =====================================================================================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from distributed_training.common.gpus import Card
from distributed_training.common.memory import (
    MARGIN,
    Arrangement,
    Checkpointing,
    ModelShape,
    checkpoint_bytes,
    device_memory,
    list_ways,
    loss_chunk,
)

GOAL = 0.48  # MFU of what was not measured
COMPILED = 1.16  # times as fast as layers that are not
_MEASURED = "H200"  # one of it
ATTENTION, BANDWIDTH = 0.5, 0.85  # of the data sheet's
_MOST_PRODUCTS = 0.65
_KERNEL, _HOOKS, _KERNELS = 5e-6, 200e-6, 45
_BETWEEN = 0.8 * 100e9 / 8  # bytes a second from one machine to the others
_WRITTEN = 0.26e-9  # seconds that training loses for a byte that a rank writes
_HOST = 10e9  # bytes a second that a rank moves in host memory
_LARGEST_MICRO_BATCH = 32
_CHECKPOINT_SECONDS, _CHECKPOINT_STEPS = 600.0, 25  # between two checkpoints, at least
_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "budget", "selective", "full")


@dataclass(frozen=True)
class Machine:
    """One copy of the model on each of ``machines``, over ``gpus`` of a ``card``."""

    card: Card
    gpus: int = 1
    machines: int = 1

    @property
    def all_gpus(self) -> int:
        return self.gpus * self.machines

    def __str__(self) -> str:
        copies = f"{self.machines} x " if self.machines > 1 else ""
        return f"{copies}{self.gpus} x {self.card.name}"


@dataclass(frozen=True)
class PaperStep:
    """One inner step. ``parts``: seconds by their bottleneck; ``launches``: seconds of the host."""

    how: Arrangement
    tokens: int  # of the whole machine
    device_bytes: int
    parts: dict[str, float]
    launches: float
    at_peak: float  # seconds

    @property
    def seconds(self) -> float:
        return max(sum(self.parts.values()), self.launches)

    @property
    def mfu(self) -> float:
        return self.at_peak / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bound(self) -> str:
        """The largest part, or ``launches`` where the GPUs wait for the host."""
        if self.launches > sum(self.parts.values()):
            return "launches"
        return max(self.parts, key=lambda name: self.parts[name])


def product_share(shape: ModelShape) -> float:
    """Return the share of the peak that products of this model's width reach."""
    return min(_MOST_PRODUCTS, 0.75 * shape.hidden / (shape.hidden + 480))


def trained_parameters(shape: ModelShape) -> int:
    """Return the parameters that take part in a product: an untied input embedding does not."""
    return shape.parameters - (0 if shape.tied else shape.vocab * shape.hidden)


def flops_per_token(shape: ModelShape, length: int) -> float:
    """Return the FLOP of a token that MFU counts (training/throughput.py)."""
    return 6.0 * trained_parameters(shape) + 12.0 * shape.layers * shape.query_width * length


def arrangements(
    shape: ModelShape, machine: Machine, length: int, moments: float = 2
) -> Iterator[Arrangement]:
    """Yield the ways to train that fit, those first that a miner takes by itself.

    ``moments``: tensors that the inner optimizer keeps of a parameter, on average.
    """
    limit = MARGIN * machine.card.memory * 1e9
    largest = max(1, min(_LARGEST_MICRO_BATCH, _LARGEST_MICRO_BATCH * 1024 // length))
    for checkpointing in _CHECKPOINTING:
        how = Arrangement(
            world_size=machine.gpus,
            micro_batch=1,
            sequence_length=length,
            checkpointing=checkpointing,
            loss_chunk=loss_chunk(round(machine.card.memory * 1e9)),
            moments=moments,
        )
        for way in list_ways(how):
            for power in reversed(range(largest.bit_length())):
                fit = replace(way, micro_batch=2**power)
                if device_memory(shape, fit) <= limit:
                    yield fit


def predict(
    shape: ModelShape, machine: Machine, how: Arrangement, *, sequences: int = 512
) -> PaperStep:
    """Return an inner step of ``sequences`` sequences, arranged as ``how``."""
    card, n, length = machine.card, shape.parameters, how.sequence_length
    layers, h, q, k = shape.layers, shape.hidden, shape.query_width, shape.kv_width
    micro_batches = math.ceil(sequences / (how.micro_batch * machine.all_gpus))
    on_each = micro_batches * how.micro_batch * length  # tokens of one GPU
    # Layers of which a part is computed a second time.
    again = {"none": 0.0, "budget": 1.0, "selective": 0.5, "full": 1.0}[how.checkpointing]
    block = (n - shape.embedding_parameters) / layers
    products = 6.0 * trained_parameters(shape)
    products += 2.0 * again * layers * (q * h if how.checkpointing == "budget" else block)
    attention = (7.0 + 2.0 * again) * layers * q * length
    compute = products / product_share(shape) + attention / ATTENTION
    values = 23 * h + 4 * (q + k) + 9 * shape.intermediate
    values += round(again * (9 * h + 2 * (q + k) + 3 * shape.intermediate))
    passing = 2.0 * layers * values + 20.0 * shape.vocab
    memory = BANDWIDTH * card.bandwidth * 1e12
    bus = BANDWIDTH * card.bus * 1e9
    own = n / machine.gpus
    reductions = 1 if how.reduce_at_last else micro_batches
    gathers = 1 if how.keep_unsharded else 2 * micro_batches
    # In bytes a parameter: 10 for each sum of a bf16 gradient into the float32 one, 16 for copies
    # of a reduction, 14 for a gather's casts and copies; 40 of norm, clipping and AdamW.
    sums = micro_batches * (10 * n if how.reduce_at_last else 12 * own)
    moved = sums + 16 * n * reductions + 14 * n * gathers
    sent = (n - own) * (4 * reductions + 2 * gathers)
    copies = 8 * n * (machine.machines - 1) / machine.machines * reductions
    parts = {
        "compute": on_each * compute / card.peak,
        "memory": on_each * passing / memory,
        "reduction": moved / memory + sent / (card.link * 1e9) + copies / _BETWEEN,
        "optimizer": 40 * own / memory
        + (4 * how.moments * own / bus if how.offload_optimizer else 0.0),
    }
    hooks = 2 * (layers + 1) * _HOOKS if n >= 50e6 else 0.0
    kernels = (_KERNELS + 9) * layers + 3  # one more for each tensor's gradient
    at_peak = on_each * flops_per_token(shape, length) / card.peak
    if machine.all_gpus > 1 or card.name != _MEASURED:
        parts["not measured"] = max(0.0, at_peak / GOAL - sum(parts.values()))
    return PaperStep(
        how=how,
        tokens=on_each * machine.all_gpus,
        device_bytes=device_memory(shape, how),
        parts=parts,
        launches=micro_batches * (hooks + kernels * _KERNEL),
        at_peak=at_peak,
    )


@functools.cache
def best_step(
    shape: ModelShape,
    machine: Machine,
    *,
    length: int = 1024,
    sequences: int = 512,
    moments: float = 2,
) -> PaperStep | None:
    """Return the fastest step of all arrangements; None: the model does not fit."""
    largest = max(1, sequences // machine.all_gpus)
    steps = [
        predict(shape, machine, how, sequences=sequences)
        for how in arrangements(shape, machine, length, moments)
        if how.micro_batch <= largest
    ]
    # Of equal ones the first; one that is hardly faster is not worth a flag.
    least = min((step.seconds for step in steps), default=0.0)
    return next((step for step in steps if step.seconds <= 1.01 * least), None)


def _copies(own: float, card: Card, floats: float) -> float:
    """Return the seconds of a rank's copies of ``floats`` float32 values a parameter."""
    return 4 * floats * own / min(BANDWIDTH * card.bus * 1e9, _HOST)


def held_seconds(
    shape: ModelShape, machine: Machine, *, step: float, writes: float = 1, moments: float = 2
) -> float:
    """Return for how long a round holds training, of inner steps of ``step`` seconds.

    The update's preparation in host memory, and ``writes`` times what the writing of the whole
    model costs: longer steps, and copies that are not there when a step ends.
    """
    own, card = shape.parameters / machine.gpus, machine.card
    bus = BANDWIDTH * card.bus * 1e9
    copies = _copies(own, card, 1 + moments)
    written = _WRITTEN * checkpoint_bytes(shape.tensors, moments) / machine.gpus
    return 8 * own / bus + 40 * own / _HOST + writes * (written + max(0.0, copies - step))


@dataclass(frozen=True)
class Publication:
    """The seconds that one publication takes from training, by what takes them.

    ``period``: seconds from one to the next; ``copied``: bytes a rank copies to the host for it
    and for its share of the checkpoints, ``written``: those it writes.
    """

    parts: dict[str, float]
    period: float
    copied: float
    written: float

    @property
    def share(self) -> float:
        return sum(self.parts.values()) / self.period


def publication(
    shape: ModelShape, machine: Machine, step: PaperStep, *, period: float
) -> Publication:
    """Return what an upload of 4 bits a parameter each ``period`` seconds costs, with AdamW."""
    card, own = machine.card, shape.parameters / machine.gpus
    late = max(0.0, _copies(own, card, 3) - step.seconds)  # of one checkpoint
    checkpoints = period / max(_CHECKPOINT_STEPS * step.seconds, _CHECKPOINT_SECONDS)
    checkpoint = checkpoint_bytes(shape.tensors) / machine.gpus - 8 * own  # less its start
    parts = {"copies": 0.0, "writing": 0.0}
    # A checkpoint comes with the upload, of the same copies and with the outer step's start.
    checkpoints = max(1.0, checkpoints)
    copied, written = 0.0, (0.5 + 4 / 256 + 8) * own
    copied += checkpoints * 12 * own
    written += checkpoints * checkpoint
    parts["copies"] += checkpoints * late
    parts["writing"] = _WRITTEN * written
    return Publication(parts, period, copied, written)
