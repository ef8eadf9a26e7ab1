"""Count what one micro-batch of a model asks of a GPU, without one; for ``bench.gpu_plan``.

Model and loss run on the meta device, where tensors have shapes and no values, the decoder layers
through torch.compile's own partitioner. So recomputation, also that of a memory budget, is what a
GPU would do. Every operation is recorded: FLOPs by ``torch.utils.flop_counter``, bytes of what it
reads and writes. Matrix products and attention are kernels of their own; what lies between two of
them counts as fused: it reads what came from outside and writes what is used outside. Fewer bytes
than that no compiler moves, and few compilers launch fewer kernels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed_training.training.model import CausalLoss, ChunkedLoss, blocks_of, build_meta_model
from distributed_training.training.sharding import checkpoint_activations
from distributed_training.training.throughput import flops_per_token


@torch.library.custom_op("gpu_plan::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Stand for flash attention: no CPU build of torch has a kernel of it to ask."""
    raise NotImplementedError


@torch.library.custom_op("gpu_plan::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


attention.register_autograd(
    lambda ctx, grad, _: attention_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)
_FLOPS = {
    torch.ops.gpu_plan.attention: lambda *shapes, **_: flop_counter.sdpa_flop_count(*shapes),
    torch.ops.gpu_plan.attention_backward: lambda *shapes, **_: (
        flop_counter.sdpa_backward_flop_count(*shapes[:4])
    ),
}
for _operation, _formula in _FLOPS.items():  # the partitioner asks for them, too
    flop_counter.register_flop_formula(_operation)(_formula)


def _attend(_: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    return attention(q, k, v)[0].transpose(1, 2).contiguous(), None


@dataclass
class Operation:
    """``reads``, ``writes``: bytes by storage. ``kind``: product, attention or fused."""

    kind: str
    flops: float
    reads: dict[int, int]
    writes: dict[int, int]


@dataclass(frozen=True)
class Kernel:
    kind: str
    flops: float
    bytes: float
    launches: int


class Recorder(TorchDispatchMode):
    """Records each operation that computes something; views and empty tensors do not."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._alive: list[Any] = []  # else another storage would get the number of one that is gone

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # or compiled code would not run under it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        reads, writes = self._bytes((args, kwargs)), self._bytes(result)
        if not func._schema.is_mutable:
            writes = {key: size for key, size in writes.items() if key not in reads}
        if writes and "empty" not in func.__name__:
            packet, flops, kind = func._overloadpacket, 0.0, "fused"
            if packet in flop_counter.flop_registry:
                kind = "attention" if packet in _FLOPS else "product"
                count = flop_counter.flop_registry[packet]
                flops = count(*args, **(kwargs or {}), out_val=result)
            self.operations.append(Operation(kind, flops, reads, writes))
        return result

    def _bytes(self, tree: Any) -> dict[int, int]:
        found: dict[int, int] = {}
        for tensor in (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            self._alive.append(storage)
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            size = math.prod(n for n, stride in sizes if stride) * tensor.element_size()
            found[storage._cdata] = max(size, found.get(storage._cdata, 0))
        return found


def kernels(operations: Sequence[Operation], *, fuse: bool) -> list[Kernel]:
    """Return what a GPU would launch; ``fuse``: all between two products into as few as possible"""
    last_read = {key: i for i, each in enumerate(operations) for key in each.reads}
    found, start = [], 0
    for end in range(1, len(operations) + 1):
        both = operations[end - 1 : end + 1]
        if fuse and len(both) == 2 and both[0].kind == both[1].kind == "fused":
            continue
        reads, writes = dict[int, int](), dict[int, int]()
        for each in operations[start:end]:
            reads |= {key: size for key, size in each.reads.items() if key not in writes}
            writes |= each.writes
        used = {k: size for k, size in writes.items() if not start <= last_read.get(k, -1) < end}
        launches = max(1, len(set(used.values()))) if fuse else 1  # one for each shape
        flops = sum(each.flops for each in operations[start:end])
        total = sum(reads.values()) + sum(used.values())
        found.append(Kernel(operations[start].kind, flops, total, launches))
        start = end
    return found


@dataclass(frozen=True)
class Trace:
    """One micro-batch. ``saved``: bytes that the decoder keeps from forward to backward;
    ``model_flops``: as MFU counts them."""

    kernels: list[Kernel]
    saved: float
    model_flops: float


def trace(
    config: dict[str, Any], micro_batch: int, length: int, mode: str, *, chunk: int, compiled: bool
) -> Trace:
    """Forward and backward of (``micro_batch``, ``length``) in bf16. ``mode``: as
    ``--neuron.activation_checkpointing`` has it; ``chunk``: of the loss."""
    from transformers import AttentionInterface

    AttentionInterface.register("gpu_plan", _attend)
    model = build_meta_model(config, attention="gpu_plan").to(torch.bfloat16).to("meta")
    checkpoint_activations(model, mode)
    root = CausalLoss(model, ChunkedLoss(chunk=chunk, compiled=False))
    ids = torch.zeros((micro_batch, length), dtype=torch.int64, device="meta")
    own = {p.untyped_storage()._cdata for p in root.parameters()}
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a mode beside compiled code
        if compiled:
            torch._dynamo.reset()
            for block in blocks_of(model):
                block.compile(backend="aot_eager_decomp_partition", dynamic=False)
            root(ids).backward()  # compiles; no mode may be on the stack then
            root.zero_grad(set_to_none=True)
        recorder = Recorder()
        with recorder:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = root(ids)
            loss.backward()
    rows, words, width = micro_batch * length, config["vocab_size"], config["hidden_size"]
    return Trace(
        kernels=kernels(recorder.operations, fuse=compiled),
        # Without the loss's two gradients, which it makes with its forward.
        saved=sum(saved.values()) - 2 * width * (rows + words),
        model_flops=flops_per_token(model, length) * rows,
    )
