"""Models of many kinds: computed as transformers computes them, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed_training.common.memory import ModelShape
from distributed_training.training.model import (
    CAUSAL,
    CausalLoss,
    UnfitModelError,
    blocks_of,
    build_meta_model,
    hf_config,
    plain_name,
    sdpa_causal,
)

pytestmark = pytest.mark.timeout(60)

LENGTH = 96
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    **{f"{token}_token_id": 0 for token in ("bos", "eos", "pad")},
}
DEEPSEEK = {
    **{"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"moe_intermediate_size": 32, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
#: Kind, what it changes, and the name by which it is refused; empty: it is computed.
MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, ""),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ""),
    ("llama", {"attention_bias": True, "head_dim": 32, "tie_word_embeddings": True}, ""),
    ("mistral", {"sliding_window": 16}, "sliding_window of 16"),
    ("mistral", {"sliding_window": LENGTH - 1}, "sliding_window of 95"),
    ("mistral", {"sliding_window": LENGTH}, ""),
    ("mistral", {"sliding_window": None}, ""),
    ("qwen2", {"sliding_window": 16}, ""),  # it is not used
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "window"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "window"),
    ("qwen3", {"head_dim": 16}, ""),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 16}, "sliding_window of 16"),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 512}, ""),
    ("gemma2", {"head_dim": 16}, "final_logit_softcapping|Gemma2.* not support"),
    (
        "gemma2",
        {"head_dim": 16, "final_logit_softcapping": None},
        "attn_logit_softcapping|Gemma2.* not support",
    ),
    ("phi3", {"sliding_window": 16}, "sliding_window of 16"),
    ("olmo2", {}, ""),
    ("granite", {"attention_multiplier": 0.5, "residual_multiplier": 0.5}, ""),
    ("granite", {"logits_scaling": 4.0}, "logits_scaling"),
    (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        "sinks|GptOss.* not support",
    ),
    ("deepseek_v3", DEEPSEEK, ""),
    ("cohere", {}, "logit_scale"),
    ("gpt_neox", {}, ""),
    ("mixtral", {"num_local_experts": 4, "sliding_window": None}, ""),
]


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return float(CausalLoss(model.eval())(ids)) / (ids.shape[0] * (ids.shape[1] - 1))


@pytest.mark.parametrize(("kind", "changes", "refused"), MODELS)
def test_a_model_is_what_its_config_says_or_is_refused_by_name(
    kind: str, changes: dict[str, Any], refused: str
) -> None:
    from transformers import AutoModelForCausalLM

    config = SMALL | {"model_type": kind} | changes
    if refused:
        with pytest.raises(UnfitModelError, match=refused):
            build_meta_model(config, attention=CAUSAL, sequence_length=LENGTH)
        return
    mine = build_meta_model(config, attention=CAUSAL, sequence_length=LENGTH)
    blocks_of(mine)
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(
        hf_config(config), dtype=torch.float32, attn_implementation="eager"
    )
    weights = {plain_name(n): p for n, p in theirs.named_parameters(remove_duplicate=False)}
    for full, _ in list(mine.named_parameters(remove_duplicate=False)):
        module, _, last = full.rpartition(".")
        mine.get_submodule(module)._parameters[last] = weights[plain_name(full)]
    ids = torch.randint(1, 250, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    assert loss_of(mine, ids) == pytest.approx(loss_of(theirs, ids), abs=1e-4)
    assert ModelShape.from_config(config).tied == (
        theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    )


def test_an_option_that_is_not_known_is_refused() -> None:
    """Of models to come: whatever a decoder layer says, and nothing that it leaves as it is."""
    values = torch.randn(1, 4, 8, 16)
    plain, _ = sdpa_causal(torch.nn.Identity(), values, values, values, None)
    same = {
        "sliding_window": 8,
        "softcap": None,
        "is_causal": True,
        "position_ids": values,
        "x": None,
    }
    assert torch.equal(
        sdpa_causal(torch.nn.Identity(), values, values, values, None, **same)[0], plain
    )
    for name in ("softcap", "s_aux", "position_bias", "indices", "anything_new"):
        with pytest.raises(UnfitModelError, match=f"has {name},"):
            sdpa_causal(torch.nn.Identity(), values, values, values, None, **{name: 3.0})
    with pytest.raises(UnfitModelError, match="sliding_window"):
        sdpa_causal(torch.nn.Identity(), values, values, values, None, sliding_window=7)
