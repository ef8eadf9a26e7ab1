"""Settings of the training room: batch arithmetic, optimizers, memory, speed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .flags import SETTINGS, flag

MicroBatch = Annotated[int, Field(ge=1, le=65536)]


@dataclass(frozen=True, config=SETTINGS)
class TrainingSettings:
    """One inner step is ``local_batch_size_train_effective`` sequences over all ranks."""

    local_batch_size_train: MicroBatch | Literal["auto"] = flag("neuron.local_batch_size_train", 2)
    """sequences per micro-batch and rank; 'auto' measures the largest that fits and takes the
    fastest. Lower it when the GPU runs out of memory"""
    local_batch_size_train_effective: int = flag(
        "neuron.local_batch_size_train_effective", 512, ge=1, le=1_000_000
    )
    """sequences per inner step over all ranks; rounded up to a multiple of micro-batch x ranks"""
    sequence_length: int = flag("neuron.sequence_length", 1024, ge=2, le=1_000_000)
    """tokens per sequence, as the validators evaluate"""
    learning_rate: float = flag("neuron.learning_rate", 2.5e-4, ge=0, le=10)
    """highest learning rate of AdamW, reached after the warm-up"""
    warmup_steps: int = flag("neuron.warmup_steps", 1000, ge=0, le=10**9)
    """inner steps of linear warm-up of the learning rate"""
    total_steps: int = flag("neuron.total_steps", 88000, ge=1, le=10**9)
    """inner steps at which the cosine schedule reaches zero"""
    weight_decay: float = flag("neuron.weight_decay", 0.1, ge=0, le=10)
    """weight decay of AdamW"""
    adam_beta1: float = flag("neuron.adam_beta1", 0.9, ge=0, le=0.9999)
    """first moment decay of AdamW"""
    adam_beta2: float = flag("neuron.adam_beta2", 0.95, ge=0, le=0.9999)
    """second moment decay of AdamW"""
    gradient_clip: float = flag("neuron.gradient_clip", 1.0, ge=0, le=1e9)
    """largest norm of the gradient of an inner step; 0 is off"""
    outer_learning_rate: float = flag("neuron.outer_learning_rate", 0.8, ge=0, le=10)
    """learning rate of the outer step; the one in outer_optimizer.pt of the global bucket wins"""
    outer_momentum: float = flag("neuron.outer_momentum", 0.9, ge=0, le=1)
    """Nesterov momentum of the outer step; all peers must agree"""
    topk_compression: int = flag("neuron.topk_compression", 32, ge=1, le=4096)
    """values kept per row of the published pseudo-gradient"""
    target_chunk: int = flag("neuron.target_chunk", 64, ge=1, le=4096)
    """largest chunk side of the published pseudo-gradient's format"""
    use_dct: bool = flag("neuron.use_dct", False)
    """publish DCT coefficients; the validators of the public network cannot read them"""
    momentum_decay: float = flag("neuron.momentum_decay", 0.999, ge=0, le=1)
    """decay of the error feedback of the published gradient"""
    error_feedback: Literal["best", "upload", "round", "off"] = flag(
        "neuron.error_feedback", "best"
    )
    """what is published of the pseudo-gradient, and what is remembered of the rest: 'upload' adds
    what earlier uploads left out, as the public miner does; 'off' publishes the largest entries
    and forgets the rest; 'best' tries both at each upload and publishes the one that lowers the
    loss more; 'round' is an older name and does the same as 'best'. Never part of the all-reduce"""
    step_length: Literal["search", "plain"] = flag("neuron.step_length", "search")
    """'search': multiply the published values by the factor that lowers the loss on held-back
    sequences most, as validators apply them; 'plain': publish them as they are, as the public
    miner does. Needs --neuron.preview_sequences"""
    preview_sequences: int = flag("neuron.preview_sequences", 4, ge=0, le=10_000)
    """sequences of each rank that are never trained on: each gradient to be published is tried on
    them as validators do; 0: no preview"""
    pcgrad: bool = flag("train.pcgrad", False)
    """of several --data.source, project each source's gradient off those it conflicts with
    (gradient surgery); reduces at every micro-batch, one more gradient in memory per source"""
    precision: Literal["auto", "bf16", "fp32"] = flag("neuron.precision", "auto")
    """of the computation; weights and optimizer are always float32. 'auto': bf16 where the hardware
    has it, else float32"""
    activation_checkpointing: Literal["none", "selective", "full"] = flag(
        "neuron.activation_checkpointing", "none"
    )
    """recompute activations instead of keeping them: 'selective' every second block, 'full' every
    block. Saves memory, costs up to a third of the speed"""
    compile: Literal["auto", "on", "off"] = flag("neuron.compile", "auto")
    """torch.compile of each block; 'auto': on with a GPU, off without"""
    compile_mode: Literal["default", "max-autotune"] = flag("neuron.compile_mode", "default")
    """'max-autotune' tries more kernels: minutes at the first start, perhaps a few percent after"""
    gradient_sync: Literal["auto", "last", "every"] = flag("neuron.gradient_sync", "auto")
    """when ranks reduce their gradients: 'last' micro-batch of a step (fastest; holds the whole
    gradient on each GPU) or 'every' micro-batch. 'auto': by memory"""
    keep_unsharded: Literal["auto", "on", "off"] = flag("neuron.keep_unsharded", "auto")
    """keep the gathered weights on each GPU through a step: 'on', 'off' or 'auto' by memory"""
    shard_across_nodes: bool = flag("neuron.shard_across_nodes", False)
    """with --nnodes: one copy of the model over all nodes, for models that one node cannot hold;
    otherwise each node has a copy, and only gradients travel between nodes"""
    wrap: Literal["auto", "block", "root"] = flag("neuron.fsdp_wrap", "auto")
    """what FSDP gathers at once: each 'block', the whole model at its 'root', or 'auto' by size"""
    offload_optimizer: Literal["auto", "on", "off"] = flag("neuron.offload_optimizer", "auto")
    """keep AdamW's state in host memory: 'on', 'off', or 'auto': where it would not fit the GPU"""
    loss_kernel: Literal["auto", "chunked", "liger"] = flag("neuron.loss_kernel", "auto")
    """cross-entropy: 'chunked' (built in), which is what 'auto' takes, or 'liger' (needs
    liger-kernel and CUDA)"""
    nan_limit: int = flag("neuron.nan_limit", 3, ge=1, le=1_000_000)
    """inner steps in a row with NaN or Inf after which the last good checkpoint is loaded"""
    nan_slow_steps: int = flag("neuron.nan_slow_steps", 50, ge=0, le=1_000_000)
    """inner steps at half the learning rate after such a roll-back"""
    seed: int = flag("neuron.seed", 42, ge=0, le=2**63 - 1)
    """seed of initial weights where none are loaded"""
    profile_steps: int = flag("profile.steps", 0, ge=0, le=10_000)
    """write a torch profiler trace of this many inner steps, without stopping the miner"""
    profile_start: int = flag("profile.start", 3, ge=0, le=1_000_000)
    """inner steps after the start to pass before the profile begins"""
