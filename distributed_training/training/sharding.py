"""Build the model as a rank trains it: sharded by FSDP2, compiled, with the loss fused to the head.

FSDP (fully sharded data parallel; Zhao et al. 2023, arXiv 2304.11277) splits the rows of every
parameter over the ranks, gathers the parameter when it is used, and sends each gradient's rows to
their owners. Between machines that traffic would cross the slow link at every layer. So each
machine has a whole copy, sharded over its own ranks, and only gradients are summed between
machines. This is *hybrid* sharding, HSDP, over a mesh of (copies, shards).

The order in which a model is put together matters: activation checkpointing wraps decoder layers,
torch.compile compiles the wrapped layers, FSDP's hooks go around both, and only then is memory
allocated for the shards (:func:`build_sharded_model`). Weights come from a safetensors file or from
a seed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distributed_training.common.memory import (
    ACTIVATION_BUDGET,
    LIGHT_BUDGET,
    host_bytes,
)
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError

from .collectives import (
    COLLECTIVE_TIMEOUT,
    Layout,
    ParameterShard,
    RowStream,
    row_range,
)
from .memory_plan import MemoryPlan, compute_dtype, plan_memory
from .model import (
    ModelWithLoss,
    attention_line,
    blocks_of,
    build_meta_model,
    count_parameters,
    kind_of,
    plain_name,
)
from .throughput import flops_per_token


@dataclass(frozen=True)
class ShardedModel:
    """One rank's part of the model, which can train once weights are loaded, and facts about it."""

    model: nn.Module  # the Hugging Face model; its parameters are DTensors
    root: ModelWithLoss  # FSDP's root module
    modules: list[FSDPModule]  # the root comes last
    shards: list[ParameterShard]  # shards of the trainable parameters, in state-dict order
    frozen: list[ParameterShard]  # shards of the parameters that are not trained
    device: torch.device
    compute_dtype: torch.dtype
    plan: MemoryPlan
    compiled: bool
    flops_per_token: float

    @property
    def embeddings(self) -> set[str]:
        """The names of the embedding weights."""
        return {
            f"{plain_name(name)}.weight"
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Embedding)
        }

    @property
    def matrices(self) -> set[str]:
        """The names of the decoder layers' matrices."""
        # Compare identities, since a layer does not know its name in the model.
        own = {id(parameter) for parameter in blocks_of(self.model).parameters()}
        return {s.name for s in self.shards if len(s.shape) == 2 and id(s.dtensor) in own}

    def discard_gradients(self) -> None:
        """Drop gathered weights and all accumulated gradients, even after a failed backward.

        Call this after the weights were changed behind FSDP's back, or to abandon a step.
        """
        root: Any = self.modules[-1]
        if root._get_fsdp_state()._is_root is None:
            # FSDP sets itself up in the first forward; before that there is nothing to drop.
            return
        if hasattr(root, "reset_iter_state"):
            root.reset_iter_state()
        else:
            _reset_iter_state(root)
        for holder, name in _gradient_places(self.modules):
            if getattr(holder, name) is not None:
                setattr(holder, name, None)
        for module in self.modules:
            module.reshard()
        for parameter in root.parameters():
            parameter.grad = None

    def uncompile(self) -> None:
        """Run blocks and loss eagerly from now on."""
        for block in blocks_of(self.model):
            block._compiled_call_impl = None
        self.root.kind.compile(False)


def build_sharded_model(
    settings: TrainingSettings,
    model_config: Mapping[str, Any],
    *,
    device: torch.device,
    layout: Layout,
    micro_batch: int,
    rung: int = 0,
    say: Callable[[str], None],
) -> ShardedModel:
    """Build the model and shard it over all ranks. Collective.

    ``micro_batch``: the size to estimate memory for. ``rung``: how many memory arrangements to
    skip because this rank ran out of memory with them. ``say`` gets a line for each decision.
    Raises ConfigError for settings that this model or hardware does not support.
    """
    memory = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    dtype, line = compute_dtype(settings.precision, device)
    say(line)
    length = settings.sequence_length
    model = build_meta_model(model_config)
    config: Any = model.config
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ConfigError(
            f"training.sequence_length {length} exceeds this model's {limit} positions, so it "
            "cannot be trained: correct training.sequence_length in the network's file"
        )
    if device.type == "cuda":
        for line in set_up_gpu(device, model, dtype):
            say(line)
    flops = flops_per_token(model, length)
    parameters, trained = count_parameters(model)
    plan = plan_memory(
        settings,
        model_config=config.to_dict(),
        parameters=parameters,
        part=trained if trained < parameters else None,
        itemsize=min(each.itemsize for each in model.parameters()),
        world_size=layout.shards,
        micro_batch=micro_batch,
        device_bytes=memory,
        host_bytes=None if memory is None else _least(host_bytes()),
        rung=-_least(-rung),
    )
    say(plan.note)
    say(attention_line(config, device, dtype, length))
    compiled = _recompute_and_compile(model, settings, plan.way.checkpointing, device, say)
    root = ModelWithLoss(kind_of(model_config), model)
    root.kind.compile(compiled and device.type == "cuda")
    # Parameters are gathered and used in ``dtype``; shards and gradients are float32. Gradients are
    # also summed in float32, since a step adds up hundreds of micro-batches and bf16 would round
    # the late ones away.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=_make_mesh(device, layout), mp_policy=policy)
    # Save the buffers' values: ``to_empty`` below drops them, and no checkpoint has them.
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    modules: list[FSDPModule] = []
    if plan.per_block:
        dropped = not plan.way.keep_unsharded
        modules += [shard(block, reshard_after_forward=dropped) for block in blocks_of(model)]
        # Fetch the weights of the next block while this one computes.
        for before, after in itertools.pairwise(modules):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    # Do not reshard the root after forward, since backward begins with the head.
    modules.append(shard(root, reshard_after_forward=False))
    root.to_empty(device=device)
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)
    shards, frozen = list[ParameterShard](), list[ParameterShard]()
    # Take references now: between forward and backward the model has gathered tensors instead.
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.data, DTensor), name
        shape = tuple(parameter.shape)
        rows = row_range(shape[0], layout.shards, layout.shard)
        shard_of = ParameterShard(plain_name(name), shape, *rows, parameter)  # type: ignore[arg-type]
        assert shard_of.local.shape[0] == rows[1] - rows[0], (name, shape, rows)
        (shards if parameter.requires_grad else frozen).append(shard_of)
    copies = f", a copy on each of {layout.replicas} nodes" if layout.replicas > 1 else ""
    say(f"FSDP: {len(modules)} group(s) over {layout.shards} rank(s){copies}")
    return ShardedModel(
        model=model,
        root=root,
        modules=modules,
        shards=shards,
        frozen=frozen,
        device=device,
        compute_dtype=dtype,
        plan=plan,
        compiled=compiled,
        flops_per_token=flops,
    )


def _least(here: int | None) -> int:
    """Return the smallest number of any rank (None: no limit), so that all make the same plan."""
    number = torch.tensor(1 << 62 if here is None else here)
    if dist.is_initialized():
        dist.all_reduce(number, dist.ReduceOp.MIN)
    return int(number)


def set_up_gpu(device: torch.device, model: nn.Module, compute_dtype: torch.dtype) -> list[str]:
    """Apply the settings that concern a whole GPU; return a log line for each.

    In bf16, TF32 would affect only one product, position times frequency in the rotary embedding.
    It would round an angle at position 1,000 by up to a quarter of a radian, and the validator and
    other members do not do that. So in bf16 it stays off. In float32 it is on, except in that
    product.
    """
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    allocator = allocator or "torch default; PYTORCH_CUDA_ALLOC_CONF is empty"
    lines = [f"GPU memory allocator: {allocator}"]
    if compute_dtype != torch.float32:
        return [*lines, "TF32: off: the computation is bf16, and its float32 parts stay exact"]
    if torch.cuda.get_device_capability(device) < (8, 0):
        return [*lines, "TF32: not available on this GPU; float32 products are slow"]
    precision = torch.set_float32_matmul_precision
    precision("high")
    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            module.register_forward_pre_hook(lambda *_: precision("highest"))
            module.register_forward_hook(lambda *_: precision("high"), always_call=True)
    return [*lines, "✓ Enabled TF32 for float32 products, except in the rotary embedding"]


def _recompute_and_compile(
    model: nn.Module,
    settings: TrainingSettings,
    mode: str,
    device: torch.device,
    say: Callable[[str], None],
) -> bool:
    """Set up activation checkpointing, then torch.compile; return whether blocks are compiled.

    Blocks are wrapped, then compiled, then sharded, since each stage must see the previous one as
    part of the block. In backward, ``full`` recomputes every block and ``selective`` every second
    block. With ``budget``, torch.compile decides for each block which results are the cheapest to
    recompute, until only half of the activations are kept.
    """
    wanted = settings.compile == "on" or (settings.compile == "auto" and device.type == "cuda")
    problem = None
    if wanted:
        try:
            # Try a small function: it is enough to show the usual failures, such as no C compiler
            # or no Triton.
            probe = torch.compile(lambda x: x * 2 + 1)
            probe(torch.ones(8, device=device))
        except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; eager always works
            # Include the type, since an assertion in the compiler may have no text.
            problem = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    compiled = wanted and problem is None
    if mode == "budget" and not compiled:
        mode = "selective"
        say(
            "Activation checkpointing: every second decoder layer is recomputed, since a budget "
            "needs torch.compile, which is off"
        )
    # This setting is global to the process, and a block reads it in its first run, so set it in
    # every mode.
    functorch_config.activation_memory_budget = (
        ACTIVATION_BUDGET if mode == "budget" else LIGHT_BUDGET
    )
    if mode in ("full", "selective"):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        layers = blocks_of(model)
        for index in range(0, len(layers), 2 if mode == "selective" else 1):
            layers[index] = checkpoint_wrapper(layers[index])
    if compiled:
        # Fix the shapes: otherwise a second size would make torch compile dynamic shapes, which are
        # slower from then on.
        for block in blocks_of(model):
            block.compile(dynamic=False)
    if wanted:
        how = "each decoder layer, for the one shape of a micro-batch"
        say(f"torch.compile: {how if problem is None else 'off: ' + problem}")
    return compiled


def _make_mesh(device: torch.device, layout: Layout) -> DeviceMesh:
    """Make a one-dimensional mesh over the ranks of the model's copy.

    If several machines hold copies, the mesh has two dimensions, and the copies come first. A
    single rank gets a process group if there is none.
    """
    if not dist.is_initialized():
        if layout.world_size != 1:
            raise ConfigError(
                f"world size {layout.world_size} but no process group, so ranks cannot connect: "
                "start the miner with its launcher or torchrun"
            )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if layout.replicas == 1:
        return init_device_mesh(device.type, (layout.world_size,))
    ranks = torch.arange(layout.world_size).view(layout.replicas, layout.shards)
    # Groups created by a mesh use torch's timeout of 30 minutes, not the default group's. Then
    # --neuron.hang_timeout would expire first, without being able to name the rank that hangs.
    groups = [
        dist.new_subgroups_by_enumeration(lists, timeout=COLLECTIVE_TIMEOUT)[0]
        for lists in (ranks.T.tolist(), ranks.tolist())
    ]
    return DeviceMesh.from_group(
        groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard")
    )


def _gradient_places(modules: list[FSDPModule]) -> Iterator[tuple[Any, str]]:
    """Yield the object and attribute of each place where a backward may leave a gradient."""
    for module in modules:
        # A gradient that is kept in the gathered parameter survives a reset and a reshard.
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has at most one group
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for group in groups:
            for param in group.fsdp_params:
                yield param.sharded_param, "grad"
                if hasattr(param, "_unsharded_param"):
                    yield param._unsharded_param, "grad"
                # In torch 2.15 this only reads the gradient above; before 2.15 it is another
                # gradient.
                yield param, "unsharded_accumulated_grad"


def _reset_iter_state(root: Any) -> None:
    """Do in torch 2.11 what ``reset_iter_state`` of torch 2.12 does after a failed backward.

    FSDP clears its flags in a callback at the end of a backward. If the backward raises, that never
    runs: the callback stays marked as queued and every state as being in backward, so all later
    hooks return early. Then nothing is accumulated or reduced any more, and the step's gradient is
    zero.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = root._get_fsdp_state()
    shared, transfers = state._state_ctx, state._comm_ctx
    # Wait for a gather or a reduction in progress: its memory must not be reused before it ends.
    for under_way in (transfers.all_gather_state, transfers.reduce_scatter_state):
        if under_way is not None and under_way.event is not None:
            state._device_handle.current_stream().wait_event(under_way.event)
    transfers.all_gather_state = transfers.reduce_scatter_state = None
    transfers.post_forward_order.clear()
    for each in shared.all_states:
        each._training_state = TrainingState.IDLE
        each._modules_to_run_forward.clear()
        group = each._fsdp_param_group
        if group is not None:
            group.finalize_backward()  # waits for the group's own transfers and forgets them
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


@torch.no_grad()
def load_file(
    shards: Sequence[ParameterShard],
    path: Path,
    stream: RowStream,
    *,
    more: Collection[str] = (),
) -> None:
    """Load weights from rank 0's file at ``path``; every rank passes the same path. Collective.

    The ranks on rank 0's machine read their own rows, and send them to the other machines.
    ``more``: other names in the file, which are not loaded. Raises ValueError on all ranks alike,
    without changing anything.
    """
    error, problem, layout = None, None, stream.layout
    try:
        if layout.on_node_0:
            with safe_open(path, "pt") as file:
                problem = _mismatch(shards, file, more)
    except Exception as failure:  # noqa: BLE001 - foreign bytes; the others wait for this vote
        problem = f"{type(failure).__name__}: {failure}"
    if problem is not None:
        error = f"{path} was not loaded: {problem}. Fetch the global state again"
    # Compare every shape before copying the first row, so that a file of another model changes
    # nothing.
    stream.raise_if_any(error, ValueError)
    with safe_open(path, "pt") if layout.on_node_0 else nullcontext() as opened:
        for shard in shards:
            # safetensors does not accept the empty slice of a rank that has no rows.
            if opened is None or shard.start == shard.stop:
                rows = shard.empty_rows()
            else:
                rows = read_rows(opened, shard.name, shard).float()
            stream.replicate(rows)
            shard.local.copy_(rows)


def read_rows(file: Any, name: str, shard: ParameterShard) -> Tensor:
    """Return the rows of ``shard`` from the tensor ``name`` of an open safetensors file."""
    found = file.get_slice(name)
    whole = file.get_tensor(name).view(1) if not found.get_shape() else found
    rows: Tensor = whole[shard.start : shard.stop]
    return rows


def _mismatch(shards: Sequence[ParameterShard], file: Any, more: Collection[str]) -> str | None:
    unknown = {*file.keys()} - {*more}
    for shard in shards:
        name = shard.name
        if name not in unknown:
            return f"it has no {name}"
        unknown.remove(name)
        found = file.get_slice(name)
        shape, dtype = tuple(found.get_shape()) or (1,), found.get_dtype()
        if shape != shard.shape:
            return f"{name} is {shape}, but the model has {shard.shape}"
        # Refuse it here: otherwise torch would fail on such a type later, after some rows were
        # copied.
        if dtype not in ("F64", "F32", "F16", "BF16"):
            return f"{name} holds {dtype}, not floating-point numbers"
    return f"the model has no {min(unknown)}" if unknown else None
