"""Print the families of models of docs/model.md, with the differences in loss and gradient.

python -m tests.tools.model_families
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from distributed_training.network_command import main
from distributed_training.training.model import blocks_of, fused_logit_gradient
from distributed_training.training.parity import LENGTHS, difference, small_copy

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
#: Family -> the word by which it is refused (empty: it is computed), and its config.json.
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
    """Create a network on the model; return the exit status and what it says."""
    model = folder / "config.json"
    model.write_text(json.dumps(config))
    words = ("--name", "lab", "--host", "192.0.2.7", "--registry", "https://registry.example.org",
             "--data-source", "stdlib", "--model", str(model))  # fmt: skip
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        status = main(["init", str(folder / "lab"), "--exchange", "hivemind", *words])
    return status, told.getvalue()


def differences(config: dict[str, Any], *, cpu: bool = True) -> list[list[float]]:
    """Return the differences at both lengths on the CPU's path, then on a GPU's, on this CPU.

    ``cpu``: False leaves the CPU's out, which ``init`` compares itself.

    A GPU's path: traced blocks, and the form of the loss that is compiled.
    """

    def as_on_a_gpu(loss: Any) -> None:
        torch.compiler.reset()  # after eight shapes it would give up and trace nothing
        for block in blocks_of(loss.model):
            block.compile(dynamic=False, backend="aot_eager")
        loss._of_logits = fused_logit_gradient

    copy = small_copy(config)
    return [
        [difference(copy, length, **how) for length in LENGTHS]
        for how in [{}, {"prepare": as_on_a_gpu}][not cpu :]
    ]


def rows() -> list[str]:
    """Return the table's lines."""
    lengths = " / ".join(map(str, LENGTHS))
    lines = [
        f"| family | `dt-network init` | CPU, {lengths} tokens | GPU's path, {lengths} tokens |",
        "|---|---|---|---|",
    ]
    for name, (_, config) in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            status, told = init(Path(folder), config)
        answer, cells = "trained", ["", ""]
        if status == 0:
            cells = [" / ".join(f"{x:.0e}" for x in path) for path in differences(config)]
        else:
            answer = f"refused: `{FAMILIES[name][0]}`" if FAMILIES[name][0] in told else told
        lines.append(f"| {name} | {answer} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(rows()))
