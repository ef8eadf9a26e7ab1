"""Compute the device memory, host memory and disk space that a miner needs, before it is run.

This is the only model of them: the trainer's plan, the doctor, the operator guide and the check
before an upload all use these functions. They are pure arithmetic, except for :func:`host_bytes`; a
test compares the disk figures with the files that are really written.

All values are in bytes, for N parameters, of which T are trained and the others have F bytes each,
W ranks, micro-batch b, sequence length s, L decoder layers; hidden size h, query width q, key and
value width k, MLP width i, vocabulary V:

*Device*, each rank:

    weights        (4 T + F (N - T)) / W    shards, those that are trained in float32
                 + 2 N               if the gathered bf16 weights are kept through a step, else
                 + 2 (2 (N - embeddings) / L + embeddings)    two layers and the root
    gradients      4 T + 4 T / W     if reduced at the last micro-batch only: accumulated whole, and
                                     reduced into another stream's memory (one rank: 4 T), or
                   4 T / W + 8 T / N (N - embeddings) / L    if reduced at every micro-batch
    optimizer      4 M T / W         M float32 tensors: AdamW's two moments (Muon: one for a layer's
                                     matrix, otherwise two); 0 on the device if offloaded
    activations    b s L (2 (6 h + 2 k + 4 i) + 8 h)    what a layer keeps for its backward pass in
                                     bf16, and its norms' two float32 inputs; compiled layers keep
                                     half of it (0.45 measured). With every layer checkpointed:
                                     b s (2 h L + one layer); with every second layer: the mean of
                                     both; with a budget: b s L 2 (h + q + 2 k + 2 i)
    loss           10 min(b s V, CHUNK)    one chunk of logits: float32, its gradient, bf16 copies
                 + 6 V h + 2 b s h   gradients of the head (float32 and bf16) and of its input
    overhead       8 % of the sum + 0.8e9 on CUDA (context, NCCL buffers, fragmentation)

*Host*, for all ranks of the machine together: see :func:`host_memory`. *Disk*: see
:func:`disk_space`.

Device figures are estimates that distinguish "fits", "tight" and "does not fit";
``--neuron.local_batch_size_train auto`` measures instead.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from distributed_training.common.control_groups import group_folders

DISK_RESERVE = 1_000_000_000  # bytes that a miner always leaves free

Checkpointing = Literal["none", "budget", "selective", "full"]
#: Fraction of the activations that a compiled block keeps for its backward pass. At one half, the
#: partitioner keeps the results of matrix multiplications, but not the last one's input or the
#: attention's queries.
ACTIVATION_BUDGET = 0.5
#: The same fraction for all other compiled blocks. They recompute the norms' outputs and the MLP's
#: pointwise product, which needs no matrix multiplication.
LIGHT_BUDGET = 0.8
#: Fraction of the formula's bytes that a compiled layer keeps. Measured on an H200: 0.45.
_COMPILED = 0.5

LOSS_CHUNK = 1 << 24  # minimum of float32 logits in memory at once (training.model)
LONGEST_LOSS_CHUNK = 1 << 27
_FILE = 0.52  # bytes per value in an upload or an update: 4 bits, and its share of a scale
MOST_WORKERS = 4  # the most data workers per rank that --data.workers auto starts
#: Host memory of a data worker. Measured: 0.13 GB with a tokenizer of 50,000 words.
WORKER_BYTES = 200_000_000


# Configurations may come from others, and a list for 10**18 layers would fill the memory.
_LARGEST = 1 << 20  # the largest number in a config.json


# Model types whose configuration ties the embeddings and the head by default.
_TIED = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "cohere", "cohere2", "smollm3",
    "starcoder2", "ernie4_5",
}  # fmt: skip
# Model types with the parameters of a Llama, except for biases and norms.
_COUNTED = {
    None, "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2",
    "granite", "smollm3",
}  # fmt: skip


def _size(config: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = config.get(name) or default
    if not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise ValueError(f"{name} is {reprlib.repr(config.get(name))} instead of 1 to {_LARGEST}")
    return value


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a ``config.json`` that the formulas use.

    ``part``: how many parameters are trained, if not all of them are. The other parameters have
    ``itemsize`` bytes each, and are not in checkpoints, in copies or in the optimizer.
    """

    hidden: int
    layers: int
    query_width: int
    kv_width: int
    # MLP width that a token passes through; in a mixture of experts, of all its experts together.
    intermediate: int
    vocab: int
    tied: bool
    mlp: int  # MLP width of a Llama with the same number of parameters
    part: int | None = None
    itemsize: int = 4

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        parameters: int | None = None,
        *,
        part: int | None = None,
        itemsize: int = 4,
    ) -> ModelShape:
        """Read the sizes of a Hugging Face config.

        ``parameters``: the true number of parameters; needed if the formula for a Llama does not
        give it, as with a mixture of experts. Raises ValueError.
        """
        if parameters is None and (kind := config.get("model_type")) not in _COUNTED:
            raise ValueError(f"the parameters of a {kind!r:.40} model cannot be counted from it")
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        head_dim = _size(config, "head_dim", hidden // heads)
        wide = _size(config, "intermediate_size")
        expert = _size(config, "moe_intermediate_size", wide)
        shape = cls(
            hidden=hidden,
            layers=_size(config, "num_hidden_layers"),
            query_width=heads * head_dim,
            kv_width=_size(config, "num_key_value_heads", heads) * head_dim,
            intermediate=max(wide, expert * _size(config, "num_experts_per_tok", 1)),
            vocab=_size(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", config.get("model_type") in _TIED)),
            mlp=wide,
            part=part,
            itemsize=itemsize,
        )
        if parameters is None:
            return shape
        more = (parameters - shape.parameters) / (3 * hidden * shape.layers)
        return replace(shape, mlp=max(1, wide + round(more)))

    @property
    def tensors(self) -> list[tuple[int, ...]]:
        """The shape of every parameter."""
        h, q, k, i = self.hidden, self.query_width, self.kv_width, self.mlp
        block: list[tuple[int, ...]] = [(q, h), (k, h), (k, h), (h, q), (i, h), (i, h), (h, i)]
        embeddings = [(self.vocab, h)] * (1 if self.tied else 2)
        return [*block, (h,), (h,)] * self.layers + embeddings + [(h,)]

    @property
    def parameters(self) -> int:
        one = replace(self, layers=1)  # listing all tensors of a deep model would be slow
        total = sum(map(math.prod, one.tensors))
        return total + (self.layers - 1) * (total - self.embedding_parameters - self.hidden)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def trained(self) -> int:
        """The number of parameters that are trained."""
        return self.parameters if self.part is None else self.part

    @property
    def frozen_bytes(self) -> int:
        """The bytes of the parameters that are not trained."""
        return self.itemsize * max(0, self.parameters - self.trained)

    def moments(self, plain: int, of_matrices: int) -> float:
        """Return how many values an optimizer keeps per parameter, on average.

        ``of_matrices``: values per parameter in the matrices of decoder layers; ``plain``: in all
        other tensors. Nearly all parameters outside the embeddings are in such matrices; if only a
        part of the model is trained, all of it counts as such.
        """
        if plain == of_matrices:
            return plain
        share = 1 - self.embedding_parameters / self.parameters if self.part is None else 1.0
        return plain + (of_matrices - plain) * share


def loss_chunk(device_bytes: int | None) -> int:
    """Return how many float32 logits to hold at once on a device of this memory (None: no GPU).

    The gradient of the head is read and written once per chunk. So on a GPU a chunk is as long as
    fits into 1/64 of the memory at 10 bytes per logit, between LOSS_CHUNK and LONGEST_LOSS_CHUNK.
    """
    return min(max(LOSS_CHUNK, (device_bytes or 0) // 640), LONGEST_LOSS_CHUNK)


@dataclass(frozen=True)
class Arrangement:
    """How an inner step is arranged; see the flags of the training package."""

    world_size: int
    micro_batch: int
    sequence_length: int
    checkpointing: Checkpointing = "none"
    keep_unsharded: bool = False
    reduce_at_last: bool = True
    offload_optimizer: bool = False
    cuda: bool = True
    compiled: bool = True  # matters only on a GPU
    loss_chunk: int = LOSS_CHUNK
    moments: float = 2  # tensors that the inner optimizer keeps per parameter, on average
    workers: int = 0  # data workers of all ranks together
    peer_process: bool = False  # one that averages over hivemind


# Fraction of the device's memory to use; the rest is for the allocator and other libraries.
MARGIN = 0.90


def list_ways(
    how: Arrangement,
    *,
    keep: Sequence[bool] = (True, False),
    every: Sequence[bool] = (False, True),
    offload: Sequence[bool] = (False, True),
) -> list[Arrangement]:
    """List the ways to arrange a step, the fastest first.

    ``keep``: keep the gathered weights through a step. ``every``: reduce gradients at each
    micro-batch. ``offload``: keep the optimizer's state in host memory. The last option varies
    fastest, because it costs least: offloading AdamW moves 16 bytes per parameter over the bus in
    each step. Reducing at each micro-batch costs more than that in each of a step's hundred
    micro-batches, and gathering each time costs more than reducing.
    """
    return [
        replace(how, keep_unsharded=keeps, reduce_at_last=not reduces, offload_optimizer=offloads)
        for keeps, reduces, offloads in itertools.product(keep, every, offload)
    ]


def device_memory(shape: ModelShape, how: Arrangement) -> int:
    """Estimate the bytes on one rank's device with the formula of this module."""
    n, t, w = shape.parameters, shape.trained, how.world_size
    block = (n - shape.embedding_parameters) / shape.layers
    gathered = 2 * n if how.keep_unsharded else 2 * (2 * block + shape.embedding_parameters)
    weights = (4 * t + shape.frozen_bytes) / w + gathered
    reduced = 4 * t / w if w > 1 else 0.0
    gradients = 4 * t + reduced if how.reduce_at_last else 4 * t / w + 8 * block * t / n
    optimizer = 0.0 if how.offload_optimizer else 4 * how.moments * t / w
    tokens = how.micro_batch * how.sequence_length
    bf16_parts = 6 * shape.hidden + 2 * shape.kv_width + 4 * shape.intermediate
    one_block = tokens * (2 * bf16_parts + 8 * shape.hidden)
    every = one_block * shape.layers
    recomputed = tokens * 2 * shape.hidden * shape.layers + one_block
    in_budget = shape.hidden + shape.query_width + 2 * shape.kv_width + 2 * shape.intermediate
    none = every * (_COMPILED if how.cuda and how.compiled else 1.0)
    kept = {
        "none": none,
        "budget": tokens * 2 * in_budget * shape.layers,
        "selective": (none + recomputed) / 2,
        "full": recomputed,
    }
    activations = kept[how.checkpointing]
    loss = 10 * min(tokens * shape.vocab, how.loss_chunk)
    loss += 6 * shape.vocab * shape.hidden + 2 * tokens * shape.hidden
    parts = weights + gradients + optimizer + activations + loss
    return round(1.08 * parts + (0.8e9 if how.cuda else 0.0))


def host_memory(shape: ModelShape, how: Arrangement) -> int:
    """Return the peak of host memory in bytes, for all ranks of the machine together.

    In bytes per trained parameter:

    *Always* 12: the outer step's start, the residual and the values that the upload was written
    from. With AdamW offloaded, 8 more, or 10.6 on a GPU with the shapes of public models: there
    torch pins each tensor in a block whose size is a power of two. For another inner optimizer,
    here and below, 4 for each tensor that it keeps replaces AdamW's 8.
    *Averaging* 8, only in the peer process of a network over hivemind (bench.average measures it).
    *Temporarily* 16: a checkpoint's copies of the weights, AdamW's two moments and the residual,
    while they are written. Applying an update takes 12 (the next outer step's start, the next
    residual and the new weights), and 4 more if a roll-back has lost the values that the upload was
    written from (training/outer_step.py).

    *Model*: without GPUs, everything that would be on them. *Data*: the data workers, which fetch
    and tokenize, take WORKER_BYTES each.
    """
    n = shape.trained
    on_device = 0 if how.cuda else device_memory(shape, how) * how.world_size
    moments = 0.0
    if how.offload_optimizer:
        tensors = shape.tensors if shape.part is None else [(n,)]
        # torch pins each rank's float32 rows in a block whose size is a power of two.
        sizes = (math.ceil(s[0] / how.world_size) * math.prod(s[1:]) for s in tensors)
        pinned = sum(how.world_size * 4 * 2 ** (size - 1).bit_length() for size in sizes)
        moments = how.moments * (pinned if how.cuda else 4 * n)
    passing = (8 + 4 * how.moments) * n
    kept = (12 + 8 * how.peer_process) * n
    return round(kept + moments + passing + on_device) + how.workers * WORKER_BYTES


def disk_space(shape: ModelShape, *, keep_checkpoints: int, moments: float = 2) -> int:
    """Return the peak of a miner's disk use in bytes; ``moments``: as in :class:`Arrangement`.

    In bytes per trained parameter:

    *Checkpoints* 24 each: 16 for weights, AdamW's two moments and the residual of uploads, and 8
    for the outer step's start weights and outer momentum, which are written once per outer step, so
    at most once per checkpoint. This counts the kept checkpoints and the one being written.
    *Uploads and updates* 0.52 each: the upload of the last close, a newer upload, the update in use
    and the update being fetched. *Global states* 8 each for weights and outer momentum: the state
    in use, the previous state, and the state being fetched.

    The file of the untrained parameters is added once. Kept data and events are not included; they
    have their own limits (2 GB, 2 GiB).
    """
    checkpoints = (max(1, keep_checkpoints) + 1) * checkpoint_bytes(shape.trained, moments)
    return checkpoints + round((4 * _FILE + 3 * 8) * shape.trained) + shape.frozen_bytes


def checkpoint_bytes(trained: int, moments: float = 2) -> int:
    """Return the bytes on disk of one checkpoint of a model that trains ``trained`` parameters.

    This includes the outer step's start and momentum, which its first checkpoint also writes.
    """
    return round((8 + 4 * moments + 8) * trained)


def host_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process may use; None if unknown.

    That is the machine's memory, or less under Slurm, Docker or systemd: the limit of a control
    group, at which the kernel kills processes. ``root``: the folder that contains /proc and /sys.
    """
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    for folder, version in group_folders("memory", root):
        with contextlib.suppress(OSError, ValueError):  # the file is missing, or says "max"
            there = min(there, int((folder / names[version]).read_text()))
    return there
