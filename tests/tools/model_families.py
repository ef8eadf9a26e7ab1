"""List families of models, and compare our loss and gradient of each with those of transformers.

If a model were computed differently from what its ``config.json`` says, its training would be
useless, and no loss would show that. So the loss and the gradient of a small copy are compared with
transformers' eager attention, with sequences shorter and longer than the copy's window.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distributed_training.network_command import main
from distributed_training.training.model import (
    ModelWithLoss,
    blocks_of,
    build_meta_model,
    fused_logit_gradient,
    hf_config,
    kind_of,
    plain_name,
)

LENGTHS = (24, 96)  # tokens
TOLERANCE = 1e-4  # in nats per token, and as a share of the gradient's norm
_WINDOW = 32  # tokens; between the two lengths
_LAYERS = 4
_WORDS = 256
_SEQUENCES = 2
_MOST = 50_000_000  # parameters of a copy, which takes seconds on two cores
#: Upper limits for the values of a copy. The width of heads stays, and what depends on it.
_SMALL = {
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": _WINDOW,
    "vocab_size": _WORDS,
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def small_copy(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of a small model with all flags of the given one.

    It keeps one layer of each kind, and the ratio of heads to key-value heads.
    """
    config: dict[str, Any] = hf_config(model_config).to_dict()
    count = config["num_hidden_layers"]
    lists = {k: v for k, v in config.items() if isinstance(v, list) and len(v) == count}
    kinds = list(zip(*lists.values(), strict=True)) or [()] * count
    # Put the first layer of each kind first; the others fill up the number.
    order = sorted(range(count), key=lambda layer: kinds[layer] in kinds[:layer])
    layers = sorted(order[: max(2, min(_LAYERS, len(set(kinds))))])
    copy = config | {name: [values[i] for i in layers] for name, values in lists.items()}
    for name, most in _SMALL.items():
        if isinstance(value := config.get(name), int):
            copy[name] = min(value, most)
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    few = {"num_attention_heads": min(heads, 2)}
    if config.get("num_key_value_heads"):
        few["num_key_value_heads"] = min(groups, 2 if groups == heads else 1)
    # Models without head_dim derive the width of their heads from the hidden size.
    few["hidden_size"] = config["hidden_size"] // heads * few["num_attention_heads"]
    return copy | few | {"num_hidden_layers": len(layers)} | dict.fromkeys(_TOKENS, 0)


def difference(
    model_config: Mapping[str, Any],
    length: int,
    *,
    prepare: Callable[[ModelWithLoss], None] = lambda loss: None,
) -> float:
    """Return how much the loss and the gradient of this model differ from those of transformers.

    The result is the larger of two values: the difference of the losses in nats per token, and the
    norm of the gradients' difference as a share of the gradient's norm. The weights are random, and
    three times as large as those that keep a signal's size. ``prepare`` changes the model before.
    Raises UnfitModelError.
    """
    from transformers import AutoModelForCausalLM

    mine = build_meta_model(model_config)
    if (size := sum(p.numel() for p in mine.parameters())) > _MOST:
        raise ValueError(f"it has {size} parameters")
    # The generator of torch.random belongs to the whole process, so leave it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs: nn.Module = AutoModelForCausalLM.from_config(
            hf_config(model_config), dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 3 * parameter.shape[-1] ** -0.5)
        ids = torch.randint(1, min(_WORDS, model_config["vocab_size"]), (_SEQUENCES, length))
    for module in (mine, theirs):
        module.eval()
    share: dict[str, nn.Parameter] = dict(theirs.named_parameters(remove_duplicate=False))
    own: dict[
        nn.Parameter, nn.Parameter
    ] = {}  # theirs -> ours, with the same values; tied ones once
    for full, _ in list(mine.named_parameters(remove_duplicate=False)):
        module_name, _, last = full.rpartition(".")
        of = share[plain_name(full)]
        own.setdefault(of, nn.Parameter(of.detach()))
        mine.get_submodule(module_name)._parameters[last] = own[of]
    loss = ModelWithLoss(kind_of(model_config), mine)
    prepare(loss)
    tokens = _SEQUENCES * (length - 1)
    computed = loss(ids)[0] / tokens
    computed.backward()
    logits = theirs(input_ids=ids, use_cache=False).logits[:, :-1].float()
    wanted = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    wanted.backward()  # type: ignore[no-untyped-call]
    squares = [torch.zeros(()), torch.zeros(())]
    for of, parameter in own.items():
        none = torch.zeros_like(parameter.detach())
        ours = none if parameter.grad is None else parameter.grad
        reference = none if of.grad is None else of.grad
        squares[0] += (ours - reference).square().sum()
        squares[1] += reference.square().sum()
    of_loss = float((computed - wanted).detach().abs())
    return max(of_loss, float((squares[0] / squares[1]).sqrt()))


_SIZES: dict[str, Any] = {
    **{"vocab_size": 264, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024},
    **{"initializer_range": 0.02, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0},
}
_LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 176}
_WIDE_KEYS = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 32}
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
_GPT_2 = {"n_positions": 1024, "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 264}
#: Family -> the word that names why it is refused (empty: it is computed), and its config.json.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (refused, {"model_type": kind} | (_GPT_2 if kind == "gpt2" else _SIZES | changes))
    for name, kind, refused, changes in (
        (
            *("llama 3, scaled RoPE", "llama", ""),
            {"rope_scaling": {**_LLAMA_3, "original_max_position_embeddings": 256}},
        ),
        ("qwen2", "qwen2", "", {"tie_word_embeddings": True}),
        (
            *("qwen2, window of 64 in half", "qwen2", ""),
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        ),
        ("qwen3", "qwen3", "", {"head_dim": 64}),
        ("gemma", "gemma", "", {"head_dim": 64}),
        ("gemma 2", "gemma2", "attn_logit_softcapping", {"head_dim": 64}),
        ("gemma 3, window of 64", "gemma3_text", "", {"head_dim": 64, "sliding_window": 64}),
        ("mistral, window of 64", "mistral", "", {"sliding_window": 64}),
        ("mixtral", "mixtral", "", {"num_local_experts": 4, "sliding_window": None}),
        ("qwen3_moe", "qwen3_moe", "", {"num_experts": 4, **_EXPERTS}),
        (
            *("deepseek_v3, wider keys than values", "deepseek_v3", ""),
            {"num_key_value_heads": 4, "q_lora_rank": 48, **_EXPERTS, **_GROUPS, **_WIDE_KEYS},
        ),
        ("gpt_oss", "gpt_oss", "sinks", {"num_local_experts": 4, "head_dim": 32}),
        ("granite", "granite", "logits_scaling", {"logits_scaling": 8.0}),
        (
            *("granite, plain logits", "granite", ""),
            {"attention_multiplier": 0.5, "residual_multiplier": 0.2, "embedding_multiplier": 12},
        ),
        ("cohere", "cohere", "logit_scale", {}),
        ("olmo2", "olmo2", "", {}),
        ("phi3, window of 64", "phi3", "", {"sliding_window": 64}),
        ("smollm3", "smollm3", "", {}),
        ("gpt_neox", "gpt_neox", "", {"num_key_value_heads": None}),
        ("gpt2", "gpt2", "transformer.h", {}),
    )
}


def init(folder: Path, config: dict[str, Any]) -> tuple[int, str]:
    """Create a network with the model; return the exit status and the output."""
    model = folder / "config.json"
    model.write_text(json.dumps(config))
    words = ("--name", "lab", "--host", "192.0.2.7", "--registry", "https://registry.example.org",
             "--data-source", "stdlib", "--model", str(model))  # fmt: skip
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        status = main(["init", str(folder / "lab"), "--exchange", "hivemind", *words])
    return status, told.getvalue()


def differences(config: dict[str, Any]) -> list[list[float]]:
    """Return the differences at both lengths, first as a CPU computes, then as a GPU does.

    Both run on this CPU. A GPU uses traced blocks, and the form of the loss that is compiled.
    """

    def as_on_a_gpu(loss: Any) -> None:
        torch.compiler.reset()  # otherwise the compiler gives up after eight shapes
        for block in blocks_of(loss.model):
            block.compile(dynamic=False, backend="aot_eager")
        loss.kind.of_logits = fused_logit_gradient

    copy = small_copy(config)
    return [
        [difference(copy, length, **how) for length in LENGTHS]
        for how in ({}, {"prepare": as_on_a_gpu})
    ]
