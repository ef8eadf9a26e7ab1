"""The model a new network starts from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributed_training.config.flags import ConfigError
from distributed_training.training.model import CONFIG_EXTRAS, hf_config, schema_of


def small_llama(*, vocabulary: int, sequence_length: int, eos_token: int) -> dict[str, Any]:
    """``config.json`` of a Llama of 1 to 2 million parameters for up to 4096 words."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": 160,
        "intermediate_size": 432,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "max_position_embeddings": sequence_length,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": eos_token,
        "pad_token_id": eos_token,
    }


def read_model_config(path: Path, vocabulary: int) -> dict[str, Any]:
    """The content of a ``config.json``. Raises ConfigError if it is none or its vocabulary is too
    small for the tokenizer."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as a config.json ({error}), so there is no model to publish: "
            "correct --validator.model_config"
        ) from None
    if not isinstance(content, dict) or int(content.get("vocab_size", 0)) < vocabulary:
        raise ConfigError(
            f"the model of {path} has fewer words than the tokenizer's {vocabulary}, so it cannot "
            "be trained on its tokens: correct --validator.model_config"
        )
    return {k: v for k, v in content.items() if k not in CONFIG_EXTRAS}


def initial_weights(model_config: Mapping[str, Any], *, seed: int) -> list[Tensor]:
    """Float32 weights in schema order as transformers initializes them, the same for one seed."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf_config(model_config), dtype=torch.float32)
    parameters = dict(model.named_parameters())
    return [parameters[name].detach().clone() for name, _ in schema_of(model)]
