"""How much memory training a Llama-like model takes, before it is tried.

With N parameters, W ranks, micro-batch b, sequence length s, hidden size h, key/value width k,
MLP width i, L blocks and vocabulary V, in bytes on each rank's device:

    weights        4 N / W           float32 shards
                 + 2 N               if the gathered bf16 weights are kept through a step, else
                 + 2 * 2 * (N - embeddings) / L + 2 * embeddings    two blocks and the root
    gradients      4 N               if reduced at the last micro-batch only (accumulated whole),
                   4 N / W           if reduced at every micro-batch
    AdamW          8 N / W           two float32 moments; 0 on the device if offloaded
    activations    b s L (2 (6 h + 2 k + 4 i) + 8 h)    what a block keeps for its backward, bf16,
                                     and the two float32 inputs of its norms; with checkpointing of
                                     every block: b s (2 h L + one block), of every second: half
    logits         6 b s V / 8       one chunk of the loss, bf16 and float32, in eighths
    overhead       8 % of the sum + 0.8e9 on CUDA (context, NCCL buffers, fragmentation)

On the host, each rank: 4 N / W epoch-start weights, 4 N / W momentum of the outer step, 8 N / W
AdamW if offloaded, 12 N / W a snapshot under way. On rank 0 besides: 4 N of shared averaging
buffers and 4 N error feedback.

An estimate, meant to tell "fits", "tight" and "does not fit" apart; the finder of
``--neuron.local_batch_size_train auto`` measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class ModelShape:
    """What the formula needs of a ``config.json``."""

    hidden: int
    layers: int
    kv_width: int
    intermediate: int
    vocab: int
    parameters: int
    embedding_parameters: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Of a Hugging Face config of a Llama-like model. Raises KeyError if it is not one."""
        hidden = int(config["hidden_size"])
        layers = int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        intermediate = int(config["intermediate_size"])
        vocab = int(config["vocab_size"])
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        block = attention + 3 * hidden * intermediate + 2 * hidden
        embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
        return cls(
            hidden=hidden,
            layers=layers,
            kv_width=kv_heads * head_dim,
            intermediate=intermediate,
            vocab=vocab,
            parameters=layers * block + embeddings + hidden,
            embedding_parameters=embeddings,
        )


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes. Device figures are per rank; host figures are for all ranks of this machine."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    overhead: int
    host: int

    @property
    def device(self) -> int:
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.logits)
        return sum(parts) + self.overhead


def memory_budget(
    shape: ModelShape,
    *,
    world_size: int,
    micro_batch: int,
    sequence_length: int,
    checkpointing: Checkpointing = "none",
    keep_unsharded: bool = False,
    reduce_at_last: bool = True,
    offload_optimizer: bool = False,
    cuda: bool = True,
) -> MemoryBudget:
    """The estimate of the module's formula."""
    n, w = shape.parameters, world_size
    block = (n - shape.embedding_parameters) / shape.layers
    gathered = 2 * n if keep_unsharded else 2 * (2 * block + shape.embedding_parameters)
    weights = 4 * n / w + gathered
    gradients = 4 * n if reduce_at_last else 4 * n / w
    optimizer = 0.0 if offload_optimizer else 8 * n / w
    tokens = micro_batch * sequence_length
    per_block = tokens * (
        2 * (6 * shape.hidden + 2 * shape.kv_width + 4 * shape.intermediate) + 8 * shape.hidden
    )
    whole = per_block * shape.layers
    recomputed = tokens * 2 * shape.hidden * shape.layers + per_block
    activations = {"none": whole, "selective": (whole + recomputed) / 2, "full": recomputed}
    logits = 6 * tokens * shape.vocab / 8
    device = weights + gradients + optimizer + activations[checkpointing] + logits
    overhead = 0.08 * device + (0.8e9 if cuda else 0.0)
    host: float = (4 + 4 + 12 + (8 if offload_optimizer else 0)) * n + 8 * n
    if not cuda:
        host += (device + overhead) * w
    return MemoryBudget(
        weights=round(weights),
        gradients=round(gradients),
        optimizer=round(optimizer),
        activations=round(activations[checkpointing]),
        logits=round(logits),
        overhead=round(overhead),
        host=round(host),
    )


def disk_needed(parameters: int, *, keep_checkpoints: int) -> int:
    """Bytes under the run folder: the kept checkpoints and one being written (weights and two
    moments, error feedback, float32: 16 bytes a parameter each), a publication's snapshot (12),
    the global state (4)."""
    return parameters * (16 * (keep_checkpoints + 1) + 12 + 4)
