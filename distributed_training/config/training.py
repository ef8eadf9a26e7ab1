"""Settings of the training room: batch arithmetic, optimizers, memory, speed."""

from __future__ import annotations

from dataclasses import dataclass

from .flags import flag


def _parse_batch(text: str) -> int | str:
    if text.strip().lower() == "auto":
        return "auto"
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError("a whole number of at least 1, or auto")
    return value


@dataclass(frozen=True)
class TrainingSettings:
    """One inner step is ``local_batch_size_train_effective`` sequences over all ranks."""

    local_batch_size_train: int | str = flag(
        "neuron.local_batch_size_train",
        2,
        "sequences per micro-batch and rank; 'auto' measures the largest that fits and takes the "
        "fastest. Lower it when the GPU runs out of memory",
        parse=_parse_batch,
    )
    local_batch_size_train_effective: int = flag(
        "neuron.local_batch_size_train_effective",
        512,
        "sequences per inner step over all ranks; rounded up to a multiple of micro-batch x ranks",
    )
    sequence_length: int = flag(
        "neuron.sequence_length", 1024, "tokens per sequence, as the validators evaluate"
    )
    learning_rate: float = flag(
        "neuron.learning_rate", 2.5e-4, "highest learning rate of AdamW, reached after the warm-up"
    )
    warmup_steps: int = flag(
        "neuron.warmup_steps", 1000, "inner steps of linear warm-up of the learning rate"
    )
    total_steps: int = flag(
        "neuron.total_steps", 88000, "inner steps at which the cosine schedule reaches zero"
    )
    weight_decay: float = flag("neuron.weight_decay", 0.1, "weight decay of AdamW")
    adam_beta1: float = flag("neuron.adam_beta1", 0.9, "first moment decay of AdamW")
    adam_beta2: float = flag("neuron.adam_beta2", 0.95, "second moment decay of AdamW")
    gradient_clip: float = flag(
        "neuron.gradient_clip", 1.0, "largest norm of the gradient of an inner step; 0 is off"
    )
    outer_learning_rate: float = flag(
        "neuron.outer_learning_rate",
        0.8,
        "learning rate of the outer step; the one in outer_optimizer.pt of the global bucket wins",
    )
    outer_momentum: float = flag(
        "neuron.outer_momentum", 0.9, "Nesterov momentum of the outer step; all peers must agree"
    )
    topk_compression: int = flag(
        "neuron.topk_compression", 32, "values kept per row of the published pseudo-gradient"
    )
    target_chunk: int = flag(
        "neuron.target_chunk", 64, "largest chunk side of the published pseudo-gradient's format"
    )
    use_dct: bool = flag(
        "neuron.use_dct",
        False,
        "publish DCT coefficients; the validators of the public network cannot read them",
    )
    momentum_decay: float = flag(
        "neuron.momentum_decay", 0.999, "decay of the error feedback of the published gradient"
    )
    error_feedback: str = flag(
        "neuron.error_feedback",
        "round",
        "what was not published is remembered: 'round' commits once per outer step, uploads are "
        "previews; 'upload' commits at each upload as the public miner does; 'off' forgets",
        choices=("round", "upload", "off"),
    )
    preview_sequences: int = flag(
        "neuron.preview_sequences",
        4,
        "sequences of each rank that are never trained on: each gradient to be published is tried "
        "on them as validators do; 0: no preview",
    )
    pcgrad: bool = flag(
        "train.pcgrad",
        False,
        "of several --data.source, project each source's gradient off those it conflicts with "
        "(gradient surgery); reduces at every micro-batch, one more gradient in memory per source",
    )
    precision: str = flag(
        "neuron.precision",
        "auto",
        "of the computation; weights and optimizer are always float32. 'auto': bf16 where the "
        "hardware has it, else float32",
        choices=("auto", "bf16", "fp32"),
    )
    activation_checkpointing: str = flag(
        "neuron.activation_checkpointing",
        "none",
        "recompute activations instead of keeping them: 'selective' every second block, 'full' "
        "every block. Saves memory, costs up to a third of the speed",
        choices=("none", "selective", "full"),
    )
    compile: str = flag(
        "neuron.compile",
        "auto",
        "torch.compile of each block; 'auto': on with a GPU, off without",
        choices=("auto", "on", "off"),
    )
    gradient_sync: str = flag(
        "neuron.gradient_sync",
        "auto",
        "when ranks reduce their gradients: 'last' micro-batch of a step (fastest; holds the whole "
        "gradient on each GPU) or 'every' micro-batch. 'auto': by memory",
        choices=("auto", "last", "every"),
    )
    keep_unsharded: str = flag(
        "neuron.keep_unsharded",
        "auto",
        "keep the gathered weights on each GPU through a step: 'on', 'off' or 'auto' by memory",
        choices=("auto", "on", "off"),
    )
    wrap: str = flag(
        "neuron.fsdp_wrap",
        "auto",
        "what FSDP gathers at once: each 'block', the whole model at its 'root', or 'auto' by size",
        choices=("auto", "block", "root"),
    )
    offload_optimizer: str = flag(
        "neuron.offload_optimizer",
        "auto",
        "keep AdamW's state in host memory: 'on', 'off', or 'auto': where it would not fit the GPU",
        choices=("auto", "on", "off"),
    )
    loss_kernel: str = flag(
        "neuron.loss_kernel",
        "auto",
        "cross-entropy: 'liger' (needs liger-kernel and CUDA), 'chunked' (built in), or 'auto'",
        choices=("auto", "chunked", "liger"),
    )
    nan_limit: int = flag(
        "neuron.nan_limit",
        3,
        "inner steps in a row with NaN or Inf after which the last good checkpoint is loaded",
    )
    nan_slow_steps: int = flag(
        "neuron.nan_slow_steps", 50, "inner steps at half the learning rate after such a roll-back"
    )
    seed: int = flag("neuron.seed", 42, "seed of initial weights where none are loaded")
    profile_steps: int = flag(
        "profile.steps",
        0,
        "write a torch profiler trace of this many inner steps, without stopping the miner",
    )
    profile_start: int = flag(
        "profile.start", 3, "inner steps after the start to pass before the profile begins"
    )
