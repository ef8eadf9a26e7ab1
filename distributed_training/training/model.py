"""The Hugging Face model: built without memory from a ``config.json``, names as it has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distributed_training.config.types import ConfigError

Schema = list[tuple[str, tuple[int, ...]]]

# Keys of the published config.json that are not the model's (protocol page, section 3).
CONFIG_EXTRAS = ("block_list", "inner_step", "outer_step", "last_allreduce_block")

_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


class UnfitModelError(ConfigError):
    """No model can be built, or trained here, from a ``config.json``. A miner has that from the
    global state, which no operator can mend: there it is a fault, tried again."""


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
    """The transformers config object of a ``config.json`` content. Raises UnfitModelError."""
    from transformers import AutoConfig

    content = {k: v for k, v in model_config.items() if k not in CONFIG_EXTRAS}
    kind = content.pop("model_type", None)
    if not kind:
        raise UnfitModelError(
            "config.json names no model_type, so no model can be built: fetch the global "
            "state again or check --neuron.global_model_name"
        )
    try:
        return AutoConfig.for_model(kind, **content)
    except ValueError as error:
        raise UnfitModelError(
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
        raise UnfitModelError(
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
    """The decoder blocks. Raises UnfitModelError when the model has none where Llamas have them."""
    layers = getattr(model.get_decoder(), "layers", None)  # type: ignore[operator]
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise UnfitModelError(
            f"model {type(model).__name__} has no list of decoder blocks, so it cannot be "
            "sharded: use a Llama-like model"
        )
    return layers
