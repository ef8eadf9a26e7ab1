"""Compute the device memory, host memory and disk that a miner takes, before it is tried.

The one model of it: the trainer's plan, the doctor, the operator guide and the gate before a
upload all read these functions. Pure arithmetic, but for :func:`host_bytes`; a test compares the
disk figures with the files that are really written.

In bytes; with N parameters, of which T are trained and the others have F bytes each, W ranks,
micro-batch b, sequence length s, L decoder layers; hidden size h, query width q, key and value
width k, MLP width i, vocabulary V:

*Device*, each rank:

    weights        (4 T + F (N - T)) / W    shards, those that are trained in float32
                 + 2 N               if the gathered bf16 weights are kept through a step, else
                 + 2 (2 (N - embeddings) / L + embeddings)    two layers and the root
    gradients      4 T + 4 T / W     if reduced at the last micro-batch only: accumulated whole, and
                                     reduced into memory of another stream's (one rank: 4 T), or
                   4 T / W + 8 T / N (N - embeddings) / L    if reduced at every micro-batch
    optimizer      4 M T / W         M float32 tensors, AdamW's two moments (Muon: one of a matrix
                                     of a layer, else two); 0 on the device if offloaded
    activations    b s L (2 (6 h + 2 k + 4 i) + 8 h)    what a layer keeps for its backward, bf16,
                                     and the two float32 inputs of its norms; compiled layers keep
                                     half of it (0.45 measured). With checkpointing of every layer:
                                     b s (2 h L + one layer), of every second: half; of a budget,
                                     b s L 2 (h + q + 2 k + 2 i)
    loss           10 min(b s V, CHUNK)    one chunk of logits: float32, its gradient, bf16 copies
                 + 6 V h + 2 b s h   gradients of the head (float32 and bf16) and of its input
    overhead       8 % of the sum + 0.8e9 on CUDA (context, NCCL buffers, fragmentation)

*Host*, all ranks of the machine together, see :func:`host_memory`. *Disk*, see :func:`disk_space`.

Device figures are estimates that tell "fits", "tight" and "does not fit" apart;
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

DISK_RESERVE = 1_000_000_000  # bytes that stay free whatever a miner writes

Checkpointing = Literal["none", "budget", "selective", "full"]
#: Part of what a compiled block would keep for its backward. At half the partitioner keeps the
#: results of its products, except the last one's input and the attention's queries.
ACTIVATION_BUDGET = 0.5
#: The same part for all other compiled blocks: the outputs of the norms and the MLP's pointwise
#: product are computed again, which costs no product of matrices.
LIGHT_BUDGET = 0.8
#: Part of the formula's bytes that a layer keeps with that. Measured on an H200: 0.45.
_COMPILED = 0.5

LOSS_CHUNK = 1 << 24  # float32 logits alive at once (training.model), at least
LONGEST_LOSS_CHUNK = 1 << 27
_FILE = 0.52  # bytes per value in an upload or an update: 4 bits, and its part of a scale
MOST_WORKERS = 4  # data workers of a rank that --data.workers auto starts
#: Host memory of a data worker. Measured: 0.13 GB with a tokenizer of 50,000 words.
WORKER_BYTES = 200_000_000


# Configurations come from others too, and 10**18 layers would make a list that fills memory.
_LARGEST = 1 << 20  # the largest number in a config.json


# Kinds whose configuration ties embeddings and head by default.
_TIED = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "cohere", "cohere2", "smollm3",
    "starcoder2", "ernie4_5",
}  # fmt: skip
# Kinds with the parameters of a Llama, except for biases and norms.
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

    ``part``: how many parameters are trained, if that is not all of them. Checkpoints, copies
    and the optimizer hold nothing of the others, which have ``itemsize`` bytes each.
    """

    hidden: int
    layers: int
    query_width: int
    kv_width: int
    # Width that a token passes; in a mixture of experts that of all its experts together.
    intermediate: int
    vocab: int
    tied: bool
    mlp: int  # width of a Llama's MLP with as many parameters
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

        ``parameters``: their true count; needed if a Llama's formula does not give it, as with
        a mixture of experts. Raises ValueError.
        """
        if parameters is None and (kind := config.get("model_type")) not in _COUNTED:
            raise ValueError(f"the number of a {kind!r:.40}'s parameters does not follow from it")
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
        one = replace(self, layers=1)  # a list of all tensors of a deep model would take long
        total = sum(map(math.prod, one.tensors))
        return total + (self.layers - 1) * (total - self.embedding_parameters - self.hidden)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def trained(self) -> int:
        """How many parameters are trained."""
        return self.parameters if self.part is None else self.part

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the parameters that are not trained."""
        return self.itemsize * max(0, self.parameters - self.trained)

    def moments(self, plain: int, of_matrices: int) -> float:
        """Return the tensors that an optimizer keeps of a parameter on average.

        ``plain`` and ``of_matrices``: tensors per parameter, the second in the matrices of decoder
        layers. Nearly all parameters outside of the embeddings are in such matrices; if only a part
        is trained, all of it counts as such.
        """
        if plain == of_matrices:
            return plain
        share = 1 - self.embedding_parameters / self.parameters if self.part is None else 1.0
        return plain + (of_matrices - plain) * share


def loss_chunk(device_bytes: int | None) -> int:
    """Return the float32 logits alive at once on a device with so much memory (None: no GPU).

    The gradient of the head is read and written once for each chunk. So on a GPU a chunk is as long
    as fits into 1/64 of the memory at 10 bytes per logit, between LOSS_CHUNK and
    LONGEST_LOSS_CHUNK.
    """
    return min(max(LOSS_CHUNK, (device_bytes or 0) // 640), LONGEST_LOSS_CHUNK)


@dataclass(frozen=True)
class Arrangement:
    """The arrangement of an inner step; see the flags of the training package."""

    world_size: int
    micro_batch: int
    sequence_length: int
    checkpointing: Checkpointing = "none"
    keep_unsharded: bool = False
    reduce_at_last: bool = True
    offload_optimizer: bool = False
    cuda: bool = True
    compiled: bool = True  # counts only on a GPU
    loss_chunk: int = LOSS_CHUNK
    moments: float = 2  # tensors that the inner optimizer keeps per parameter, on average
    workers: int = 0  # data workers of all ranks together


# Part of the device's memory to use; the rest is for the allocator and other libraries.
MARGIN = 0.90


def list_ways(
    how: Arrangement,
    *,
    keep: Sequence[bool] = (True, False),
    every: Sequence[bool] = (False, True),
    offload: Sequence[bool] = (False, True),
) -> list[Arrangement]:
    """List the ways to arrange a step, the fastest first.

    ``keep``: gathered weights through a step. ``every``: reduce gradients at each micro-batch.
    ``offload``: keep the optimizer's state in host memory. The last changes first. Offloading
    AdamW moves 16 bytes per parameter over the bus in each step. Reducing each time costs more than
    that in each of a step's hundred micro-batches, and gathering each time more than reducing.
    """
    return [
        replace(how, keep_unsharded=keeps, reduce_at_last=not reduces, offload_optimizer=offloads)
        for keeps, reduces, offloads in itertools.product(keep, every, offload)
    ]


def device_memory(shape: ModelShape, how: Arrangement) -> int:
    """Estimate the bytes on one rank's device by the module's formula."""
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
    """Return the most bytes of host memory at once, all ranks of the machine together.

    In bytes per parameter that is trained:

    *Always* 12: the outer step's start, residual and what the upload was written from. With AdamW
    offloaded 8 more, 10.6 on a GPU with public shapes: there torch pins each tensor in memory of a
    power of two. Another inner optimizer has 4 for each tensor that it keeps, here and below, in
    place of AdamW's 8.
    *Averaging* 4: one tensor for each parameter in the peer process of a network over hivemind.
    *Passing* 16: a checkpoint's copies of the weights, of AdamW's two moments and of the residual
    while they are written. Applying an update takes 12 (the next outer step's start, the next
    residual and the new weights), and 4 more if a roll-back has lost what the upload was written
    from (training/outer_step.py).

    *Model*: what would be on the devices, if there are none. *Data*: the workers that fetch and
    tokenize take WORKER_BYTES each.
    """
    n = shape.trained
    on_device = 0 if how.cuda else device_memory(shape, how) * how.world_size
    moments = 0.0
    if how.offload_optimizer:
        tensors = shape.tensors if shape.part is None else [(n,)]
        # torch pins the rows of each rank, float32, in memory of a power of two.
        sizes = (math.ceil(s[0] / how.world_size) * math.prod(s[1:]) for s in tensors)
        pinned = sum(how.world_size * 4 * 2 ** (size - 1).bit_length() for size in sizes)
        moments = how.moments * (pinned if how.cuda else 4 * n)
    passing = (8 + 4 * how.moments) * n
    return round(16 * n + moments + passing + on_device) + how.workers * WORKER_BYTES


def disk_space(shape: ModelShape, *, keep_checkpoints: int, moments: float = 2) -> int:
    """Return the most that a miner has on disk at once; ``moments``: as in :class:`Arrangement`.

    In bytes per parameter that is trained:

    *Checkpoints* 24 each: weights, AdamW's two moments, the residual of uploads; 8 of them
    epoch-start weights and outer momentum, written once per outer step and referred to, at most
    once for each checkpoint. Those kept and the one being written. *Uploads and updates* 0.52
    each: the upload of the last close, a newer one, the update in use and the one being fetched.
    *Global states* 8 each: weights and outer momentum; the one in use, the one before, and the one
    being fetched.

    The file of the parameters that are not trained comes once. Kept data and events come on top;
    they have bounds of their own (2 GB, 2 GiB).
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

    That is the machine's memory, or less: in Slurm, Docker and systemd the limit of a control group
    counts, at which the kernel kills. ``root``: the folder of /proc and /sys.
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
