"""The model as a rank trains it: sharded by FSDP2, compiled, its loss fused to its head.

FSDP2 (``fully_shard``) splits every parameter along its rows over the ranks and gathers it when it
is used. The order in which a model is put together matters: activation checkpointing wraps blocks,
torch.compile compiles what was wrapped, FSDP hooks go around both, and only then the shards get
memory (:func:`build_sharded_model`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from distributed_training.common.memory import loss_chunk
from distributed_training.config.flags import ConfigError
from distributed_training.config.training import TrainingSettings

from . import attention
from .layout import Layout
from .loss import CausalLoss, ChunkedLoss, choose_loss_kernel
from .model import Schema, blocks_of, build_meta_model, schema_of, tied_names
from .plan import MemoryPlan, check_sequence_length, compute_dtype, plan_memory
from .shards import ParameterShard, shards_of
from .throughput import flops_per_token


@dataclass(frozen=True)
class ShardedModel:
    """One rank's part, ready to train once weights are loaded, and what is known about it."""

    model: nn.Module  # the Hugging Face model; its parameters are DTensors
    root: nn.Module  # int64 (sequences, length) -> summed loss; what FSDP calls the root
    modules: list[FSDPModule]  # root last
    shards: list[ParameterShard]  # in state-dict order
    schema: Schema
    tied: dict[str, str]  # other names of tied parameters -> the name in the schema
    mesh: DeviceMesh  # of the ranks that hold one copy
    device: torch.device
    compute_dtype: torch.dtype
    plan: MemoryPlan
    compiled: bool
    flops_per_token: float

    def discard_gradients(self) -> None:
        """Drop gathered weights and every gradient accumulated so far, also after a failed
        backward. For when weights were changed under FSDP, or a step is abandoned."""
        _discard_gradients(self.modules)

    def uncompile(self) -> None:
        """Run blocks and loss eagerly from here."""
        for block in blocks_of(self.model):
            block._compiled_call_impl = None
        kernel: Any = self.root.kernel
        if isinstance(kernel, ChunkedLoss):
            kernel.uncompile()

    @torch.no_grad()
    def loss_of(self, batch: Tensor) -> Tensor:
        """Summed loss without gradients; collective where weights are gathered."""
        loss: Tensor = self.root(batch.to(self.device))
        return loss


def build_sharded_model(
    settings: TrainingSettings,
    model_config: Mapping[str, Any],
    *,
    device: torch.device,
    layout: Layout,
    micro_batch: int,
    say: Callable[[str], None],
) -> ShardedModel:
    """All ranks call this. ``micro_batch``: for the estimate of memory. ``say`` gets a line for
    each decision. Raises ConfigError for what this model or hardware cannot do."""
    memory = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        for line in set_up_gpu(device):
            say(line)
    dtype, line = compute_dtype(settings.precision, device)
    say(line)
    dropout = float(model_config.get("attention_dropout") or 0.0)
    kind = attention.implementation(device, settings.sequence_length, dropout)
    model = build_meta_model(model_config, attention=kind)
    config: Any = model.config
    check_sequence_length(settings.sequence_length, config)
    schema, tied = schema_of(model), tied_names(model)
    flops = flops_per_token(model, settings.sequence_length)
    plan = plan_memory(
        settings,
        model_config=config.to_dict(),
        world_size=layout.shards,
        micro_batch=micro_batch,
        device_bytes=memory,
    )
    say(plan.note)
    say(attention.kernel_line(config, device, dtype))
    checkpoint_activations(model, settings.activation_checkpointing)
    compiled = False
    if settings.compile == "on" or (settings.compile == "auto" and device.type == "cuda"):
        problem = _compile_blocks(model, device, settings.compile_mode)
        compiled = problem is None
        how = f"each block, mode {settings.compile_mode}, for the one shape of a micro-batch"
        say(f"torch.compile: {how if problem is None else 'off: ' + problem}")
    kernel, line = choose_loss_kernel(
        settings.loss_kernel, device, chunk=loss_chunk(memory), compiled=compiled
    )
    say(line)
    root = CausalLoss(model, kernel)
    mesh = _make_mesh(device, layout)
    modules = _shard(root, model, mesh=mesh, device=device, plan=plan, compute_dtype=dtype)
    copies = f", a copy on each of {layout.nodes} nodes" if layout.replicas > 1 else ""
    say(f"FSDP: {len(modules)} group(s) over {layout.shards} rank(s){copies}")
    return ShardedModel(
        model=model,
        root=root,
        modules=modules,
        shards=shards_of(model, world_size=layout.shards, rank=layout.shard),
        schema=schema,
        tied=tied,
        mesh=mesh if layout.replicas == 1 else mesh["shard"],
        device=device,
        compute_dtype=dtype,
        plan=plan,
        compiled=compiled,
        flops_per_token=flops,
    )


def set_up_gpu(device: torch.device) -> list[str]:
    """What is set for a GPU as a whole, and a line for each."""
    torch.set_float32_matmul_precision("high")
    tf32 = torch.cuda.get_device_capability(device) >= (8, 0)
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return [
        "✓ Enabled TF32 for the products that stay in float32"
        if tf32
        else "TF32: this GPU has none; products that stay in float32 are slow",
        f"GPU memory allocator: {allocator or 'torch default; PYTORCH_CUDA_ALLOC_CONF is empty'}",
    ]


def checkpoint_activations(model: nn.Module, mode: str) -> None:
    """``full``: every block recomputes its activations in backward; ``selective``: every second."""
    if mode == "none":
        return
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = blocks_of(model)
    for index in range(0, len(layers), 2 if mode == "selective" else 1):
        layers[index] = checkpoint_wrapper(layers[index])


def _compile_blocks(model: nn.Module, device: torch.device, mode: str) -> str | None:
    """``torch.compile`` each block in place; None, or the reason why it was left out.

    Shapes are fixed: a second size would otherwise make torch compile for any size, which is
    slower ever after. CUDA graphs stay off, since FSDP moves the weights they would remember.
    """
    modes = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}
    try:
        # The usual failure, no C compiler or no Triton, shows with any function.
        probe = torch.compile(lambda x: x * 2 + 1)
        probe(torch.ones(8, device=device))
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; eager always works
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    for block in blocks_of(model):
        block.compile(dynamic=False, mode=modes[mode])
    return None


def _make_mesh(device: torch.device, layout: Layout) -> DeviceMesh:
    """One dimension over the ranks of a copy; where nodes hold copies, those are the first of two.
    A rank alone gets a process group if there is none."""
    if not dist.is_initialized():
        if layout.world_size != 1:
            raise ConfigError(
                f"world size {layout.world_size} but no process group, so ranks cannot meet: start "
                "the miner through its launcher or torchrun"
            )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if layout.replicas == 1:
        return init_device_mesh(device.type, (layout.world_size,))
    return init_device_mesh(
        device.type, (layout.replicas, layout.shards), mesh_dim_names=("replicate", "shard")
    )


def _shard(
    root: nn.Module,
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    plan: MemoryPlan,
    compute_dtype: torch.dtype,
) -> list[FSDPModule]:
    """``fully_shard`` blocks (if the plan says so) and root; the shards get memory on ``device``.

    Parameters are gathered and used in ``compute_dtype``; the shards the optimizer sees stay
    float32. Gradients are accumulated and reduced in float32: a step adds hundreds of
    micro-batches, and bf16 would round the late ones away. Returns the FSDP modules, root last.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    modules: list[FSDPModule] = []
    if plan.per_block:
        for block in blocks_of(model):
            modules.append(
                fully_shard(
                    block,
                    mesh=mesh,
                    mp_policy=policy,
                    reshard_after_forward=not plan.keep_unsharded,
                )
            )
        for before, after in itertools.pairwise(modules):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    modules.append(fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False))
    root.to_empty(device=device)
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)
    return modules


def _discard_gradients(modules: list[FSDPModule]) -> None:
    root = modules[-1]
    if root._get_fsdp_state()._is_root is None:
        return  # no forward yet: FSDP sets itself up in the first one, and there is nothing to drop
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    for module in modules:
        # torch < 2.12 has no reset_iter_state, and a gradient kept in the gathered parameter
        # survives a reshard in every version.
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for group in groups:
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
        module.reshard()
    for parameter in root.parameters():  # type: ignore[attr-defined]
        parameter.grad = None
