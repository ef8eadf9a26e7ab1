"""Models by name and a Llama's ``config.json``, for the local subnet, benchmarks and plans.

A real network's model comes from its global bucket; nothing about its shape is fixed in the code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed_training.common.files import read_json_object


def llama_config(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    max_positions: int,
    tied: bool = False,
) -> dict[str, Any]:
    """Return a Hugging Face Llama config as a plain dict, the content of ``config.json``."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }


#: Models that ``dt-plan`` and ``dt-network init`` accept by name. ``tiny`` reads bytes; the others
#: have a vocabulary of 32,000.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden": 192, "layers": 4, "heads": 6, "kv_heads": 6, "intermediate": 512},
    "125m": {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 12, "intermediate": 2048},
    "1b": {"hidden": 2048, "layers": 22, "heads": 32, "kv_heads": 4, "intermediate": 5632},
    "4b": {"hidden": 3072, "layers": 32, "heads": 24, "kv_heads": 8, "intermediate": 8960},
}


def local_llama_config(*, vocab_size: int = 264, sequence_length: int = 256) -> dict[str, Any]:
    """Return the config of a byte-level model (1.9 M parameters), ``dt-network init``'s default."""
    longest = max(512, sequence_length)
    return llama_config(vocab=vocab_size, max_positions=longest, **SHAPES["tiny"])


def named_config(name: str) -> dict[str, Any]:
    """Return a model's config by its size: ``tiny``, ``125m``, ``1b`` or ``4b``.

    They have 1.9 M, 125 M, 1.1 B and 3.6 B parameters. Raises ValueError for any other name.
    """
    if name not in SHAPES:
        raise ValueError(f"model size {name!r} is not one of: {', '.join(SHAPES)}")
    if name == "tiny":
        return local_llama_config()
    return llama_config(vocab=32000, max_positions=2048, **SHAPES[name])


def read_config(model: str) -> dict[str, Any]:
    """Return a model's config by its size, or from a ``config.json`` file. Raises ValueError."""
    path = Path(model)
    if model in SHAPES or not (model.endswith(".json") or path.is_file()):
        return named_config(model)
    try:
        path.open().close()
    except OSError as error:  # its text names the path
        raise ValueError(str(error)) from None
    if (found := read_json_object(path)) is None:
        raise ValueError(f"{path} is not a readable file with one JSON object")
    return found
