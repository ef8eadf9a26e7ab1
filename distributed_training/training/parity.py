"""Compare a model as it is computed here with ``transformers``, on a small copy, in seconds.

A model that is trained as another function than its ``config.json`` says comes out useless, and no
loss shows it. So loss and gradient of a small copy are compared before a network is created:
with transformers' own by eager attention, at a length below and at one above the copy's window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .model import CausalLoss, UnfitModelError, build_meta_model, hf_config, plain_name

LENGTHS = (24, 96)  # tokens
TOLERANCE = 1e-4  # nats per token, and of the gradient's norm
_WINDOW = 32  # tokens, between the two lengths
_LAYERS = 4
_WORDS = 256
_SEQUENCES = 2
_MOST = 50_000_000  # parameters of a copy: seconds on two cores
#: At most so much in a copy. Widths of heads stay, with all that is computed from them.
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
    """Return the ``config.json`` of a small model of the same kind: all its flags, few parameters.

    It keeps one layer of each kind and the ratios of heads.
    """
    config: dict[str, Any] = hf_config(model_config).to_dict()
    count = config["num_hidden_layers"]
    lists = {k: v for k, v in config.items() if isinstance(v, list) and len(v) == count}
    kinds = list(zip(*lists.values(), strict=True)) or [()] * count
    # Layers that come first of their kind; those that follow make up the number.
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
    # Models without head_dim take their heads' width from this.
    few["hidden_size"] = config["hidden_size"] // heads * few["num_attention_heads"]
    return copy | few | {"num_hidden_layers": len(layers)} | dict.fromkeys(_TOKENS, 0)


def difference(
    model_config: Mapping[str, Any],
    length: int,
    *,
    prepare: Callable[[CausalLoss], None] = lambda loss: None,
) -> float:
    """Return by how much loss and gradient of this very model differ from transformers'.

    The larger of the two: nats per token, and the norm of the gradients' difference as a share of
    their norm. Random weights, three times as large as keeps a signal's size. ``prepare``: what
    a test does to the model before. Raises UnfitModelError.
    """
    from transformers import AutoModelForCausalLM

    mine = build_meta_model(model_config)
    if (size := sum(p.numel() for p in mine.parameters())) > _MOST:
        raise ValueError(f"it has {size} parameters")
    # torch.random's generator is the process's, which no check may move.
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
    own: dict[nn.Parameter, nn.Parameter] = {}  # theirs -> ours, of the same values; tied ones once
    for full, _ in list(mine.named_parameters(remove_duplicate=False)):
        module_name, _, last = full.rpartition(".")
        of = share[plain_name(full)]
        own.setdefault(of, nn.Parameter(of.detach()))
        mine.get_submodule(module_name)._parameters[last] = own[of]
    loss = CausalLoss(mine)
    prepare(loss)
    tokens = _SEQUENCES * (length - 1)
    computed = loss(ids) / tokens
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


def refuse_difference(model_config: Mapping[str, Any]) -> None:
    """Raise UnfitModelError for a model that is not computed here as ``transformers`` does."""
    kind = model_config.get("model_type")
    try:
        copy = small_copy(model_config)
        found = [difference(copy, length) for length in LENGTHS]
    except UnfitModelError:
        raise
    except Exception as error:  # of another's model code, on sizes that are not its own
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnfitModelError(
            f"no small copy of a {kind!r} could be compared with transformers ({why:.200}), so it "
            "may be computed otherwise here: use a Llama-like model"
        ) from error
    for length, value in zip(LENGTHS, found, strict=True):
        if not value <= TOLERANCE:
            raise UnfitModelError(
                f"a small copy of this {kind!r} has another loss or gradient here than in "
                f"transformers (by {value:.2g} at {length} tokens), so another model than its "
                "config.json says would be trained: use a Llama-like model"
            )
