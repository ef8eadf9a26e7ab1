"""The model as ranks hold it: built without memory, sharded by FSDP2, names as Hugging Face has."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from distributed_training.config.flags import ConfigError

log = logging.getLogger(__name__)

Schema = list[tuple[str, tuple[int, ...]]]

# Keys of the published config.json that are not the model's (protocol page, section 3).
CONFIG_EXTRAS = ("block_list", "inner_step", "outer_step", "last_allreduce_block")

# Below this many parameters the whole model is one FSDP group. Each group costs a collective, and
# over gloo a collective costs about as much as moving 10 MB: measured with 1.7 M parameters on two
# CPU ranks, one group takes 0.81 s a step where a group per block takes 1.04 s.
ROOT_ONLY_BELOW = 50_000_000

_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def plain_name(name: str) -> str:
    """A parameter's name without what activation checkpointing and torch.compile put into it."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device, their buffers for real.

    Buffers such as rotary frequencies are computed at construction and are in no checkpoint: on
    the meta device they would be lost.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is not None and not param.is_meta:  # a meta one is being tied: keep its identity
            module._parameters[name] = nn.Parameter(
                param.detach().to("meta"), requires_grad=param.requires_grad
            )

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def hf_config(model_config: Mapping[str, Any]) -> Any:
    """The transformers config object of a ``config.json`` content. Raises ConfigError."""
    from transformers import AutoConfig

    content = {k: v for k, v in model_config.items() if k not in CONFIG_EXTRAS}
    kind = content.pop("model_type", None)
    if not kind:
        raise ConfigError(
            "config.json names no model_type, so no model can be built: fetch the global "
            "state again or check --neuron.global_model_name"
        )
    try:
        return AutoConfig.for_model(kind, **content)
    except ValueError as error:
        raise ConfigError(
            f"transformers knows no model_type {kind!r}, so no model can be built: "
            "upgrade transformers or check --neuron.global_model_name"
        ) from error


def build_meta_model(model_config: Mapping[str, Any], *, attention: str = "sdpa") -> nn.Module:
    """The Hugging Face model with parameters on the meta device (no memory) and real buffers.

    ``attention``: as transformers names it.
    """
    from transformers import AutoModelForCausalLM

    with _parameters_on_meta():
        model: nn.Module = AutoModelForCausalLM.from_config(
            hf_config(model_config), dtype=torch.float32, attn_implementation=attention
        )
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    config: Any = model.config
    scaled = [
        key
        for key in ("final_logit_softcapping", "logits_scaling", "logit_scale")
        if getattr(config, key, None) not in (None, 1.0)
    ]
    if head is None or getattr(head, "bias", None) is not None or scaled:
        raise ConfigError(
            f"model_type {config.model_type!r} does not end in a plain linear head "
            f"({', '.join(scaled) or 'bias or no head'}), which the chunked loss needs, so it "
            "cannot be trained here: use a Llama-like model"
        )
    return model


def parameter_schema(model_config: Mapping[str, Any]) -> Schema:
    """Names and shapes in state-dict order; what peers average and publish.

    Tied weights appear once, under the first of their names. Needs no memory for weights.
    """
    return schema_of(build_meta_model(model_config))


def schema_of(model: nn.Module) -> Schema:
    return [(plain_name(n), tuple(p.shape)) for n, p in model.named_parameters()]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters -> the name they have in the schema."""
    first: dict[nn.Parameter, str] = {}
    tied: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in first:
            tied[plain_name(name)] = first[param]
        else:
            first[param] = plain_name(name)
    return tied


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The decoder blocks. Raises ConfigError when the model has none where Llamas have them."""
    layers = getattr(model.get_decoder(), "layers", None)  # type: ignore[operator]
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ConfigError(
            f"model {type(model).__name__} has no list of decoder blocks, so it cannot be "
            "sharded: use a Llama-like model"
        )
    return layers


def checkpoint_activations(model: nn.Module, mode: str) -> None:
    """``full``: every block recomputes its activations in backward; ``selective``: every second."""
    if mode == "none":
        return
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = blocks_of(model)
    for index in range(0, len(layers), 2 if mode == "selective" else 1):
        layers[index] = checkpoint_wrapper(layers[index])


def compile_blocks(model: nn.Module, device: torch.device) -> str | None:
    """``torch.compile`` each block in place; None, or the reason why it was left out."""
    try:
        # The usual failure, no C compiler or no Triton, shows with any function.
        probe = torch.compile(lambda x: x * 2 + 1)
        probe(torch.ones(8, device=device))
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; eager always works
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    for block in blocks_of(model):
        block.compile()
    return None


def uncompile_blocks(model: nn.Module) -> None:
    for block in blocks_of(model):
        block._compiled_call_impl = None


def shard(
    root: nn.Module,
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    per_block: bool,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> list[FSDPModule]:
    """``fully_shard`` blocks (if ``per_block``) and root; the shards get memory on ``device``.

    Parameters are gathered and used in ``compute_dtype``; the shards the optimizer sees stay
    float32. Gradients are accumulated and reduced in float32: a step adds hundreds of
    micro-batches, and bf16 would round the late ones away. Returns the FSDP modules, root last.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    modules: list[FSDPModule] = []
    if per_block:
        for block in blocks_of(model):
            modules.append(
                fully_shard(
                    block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
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


def discard_gradients(modules: list[FSDPModule]) -> None:
    """Drop gathered weights and every gradient accumulated so far, also after a failed backward.

    Use it when weights were changed under FSDP or a step is abandoned. ``modules``: root last.
    """
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
