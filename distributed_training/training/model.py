"""Build the Hugging Face model as a rank computes it: names and shapes, attention, loss.

It is built from a ``config.json`` without allocating memory for weights; its parameters keep the
names that transformers gives them.

*Attention* is SDPA, registered under our own name, ``sdpa_causal``, for which transformers makes no
mask. The only mask that is made here is for a window that is shorter than the sequence.

*The loss* is cross-entropy without storing all logits: loss and gradients are computed for one
chunk of tokens at a time. The float32 logits of a micro-batch would be its largest tensor by far (2
x 1024 tokens x 128,000 words: 1 GiB, and as much again for their gradient). Here at most one chunk
of them exists. The gradients with respect to the hidden states and the head are computed together
with the loss, so backward only scales them and nothing is computed twice. Apart from its three
matrix products, each chunk reads and writes its logits. On a GPU that part is compiled into two
kernels (:func:`fused_logit_gradient`); run eagerly it takes a dozen.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributed_training.common.files import write_json
from distributed_training.common.kinds import Kinds
from distributed_training.common.memory import LOSS_CHUNK, loss_chunk
from distributed_training.config.types import ConfigError
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import MODEL_RULES
from distributed_training.protocol.types import Schema

from .copies import write_safetensors
from .weights import load_weights

_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


class UnfitModelError(ConfigError):
    """A ``config.json`` from which no model can be built, or none that can be trained here.

    A miner gets that file from the global state, which no operator can fix, so the miner treats it
    as a fault and tries again.
    """


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of checkpointing, torch.compile and FSDP."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put the parameters, but not the buffers, of modules built inside on the meta device.

    Buffers such as rotary frequencies are computed at construction, and no checkpoint has them. So
    they would be lost on the meta device.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        # A parameter that is already on the meta device is being tied, so keep its identity.
        if param is not None and not param.is_meta:
            module._parameters[name] = nn.Parameter(
                param.detach().to("meta"), requires_grad=param.requires_grad
            )

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def of_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a published ``config.json`` that belong to transformers."""
    return {k: v for k, v in config.items() if k != MODEL_RULES}


_MOST_PARTS = 1000  # limit on layers, heads, experts and labels; the largest models have 500


def hf_config(model_config: Mapping[str, Any]) -> Any:
    """Return the transformers config object for the content of a ``config.json``.

    Raises UnfitModelError.
    """
    from transformers import AutoConfig

    content = of_transformers(model_config)
    kind = content.pop("model_type", None)
    if not kind:
        raise UnfitModelError(
            "config.json has no model_type, so no model can be built: fetch the global "
            "state again or check store.global_bucket"
        )
    for name, value in content.items():
        # Layers are created one by one, and a file of a hundred bytes could ask for billions.
        if name.startswith(("num_", "n_layer")) and isinstance(value, int) and value > _MOST_PARTS:
            raise UnfitModelError(
                f"config.json asks for {reprlib.repr(value)} as {name:.40}, but only {_MOST_PARTS} "
                "are allowed, so no model was built: fetch the global state again or check "
                "store.global_bucket"
            )
    try:
        return AutoConfig.for_model(kind, **content)
    except ValueError as error:
        raise UnfitModelError(
            f"transformers does not know model_type {kind!r}, so no model can be built: "
            "upgrade transformers or check store.global_bucket"
        ) from error


def build_meta_model(model_config: Mapping[str, Any]) -> nn.Module:
    """Build a model with parameters on the meta device (no memory) and real buffers.

    Raises UnfitModelError for a model that would be computed differently here.
    """
    with _parameters_on_meta():
        return kind_of(model_config).build(model_config)


def build_causal_lm(
    model_config: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build a Hugging Face causal model. Raises UnfitModelError like :func:`build_meta_model`."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    try:
        config = hf_config(model_config)
        # Refuse these before building, so that their message is ours and not that of transformers.
        for name in _NO_ATTENTION:
            if getattr(config, name, None):
                raise _unfit_attention(name)
        # With its own "sdpa", transformers reads a value back at each forward to see whether
        # sequences are packed, which waits for everything that is queued. For a name without a mask
        # function it makes no mask, and SDPA is then called as causal.
        AttentionInterface.register(CAUSAL, sdpa_causal)
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=CAUSAL
        )
    except ConfigError:
        raise
    # Transformers checks only some values; the others may raise any error.
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        if "scaled_dot_product_attention" in why:
            kind = f"a part that SDPA lacks ({config.model_type!r}: sinks, soft caps or the like)"
            raise _unfit_attention(kind) from error
        raise UnfitModelError(
            f"no model can be built from config.json ({why:.200}): correct its values, fetch the "
            "global state again or check store.global_bucket"
        ) from error
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    scaled = [
        key
        for key in ("final_logit_softcapping", "logits_scaling", "logit_scale")
        if getattr(config, key, None) not in (None, 1.0)
    ]
    if head is None or getattr(head, "bias", None) is not None or scaled:
        raise UnfitModelError(
            f"model_type {config.model_type!r} does not end in a plain linear head "
            f"({', '.join(scaled) or 'a bias or no head'}), which the chunked loss needs, so it "
            "cannot be trained here: use a Llama-like model"
        )
    return model


def parameter_schema(model_config: Mapping[str, Any]) -> Schema:
    """Return the names and shapes of the trainable parameters, as members exchange them.

    They are in state-dict order. Tied weights appear once, under the first of their names. This
    needs no memory for weights.
    """
    return schema_of(build_meta_model(model_config))


def schema_of(model: nn.Module, *, frozen: bool = False) -> Schema:
    """Return the names and shapes of a model's trainable parameters, or of its frozen ones."""
    return [
        (plain_name(name), tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad != frozen
    ]


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count a model's parameters: all of them, and the trained ones."""
    each = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(count for count, _ in each), sum(count for count, trained in each if trained)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters, each mapped to the parameter's first name."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    pairs = [(plain_name(name), first.setdefault(p, plain_name(name))) for name, p in named]
    return {name: other for name, other in pairs if name != other}


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all parameters except those whose names match one of ``patterns`` (see fnmatch).

    Raises UnfitModelError for a pattern that matches no name, and if only one of two tied names is
    matched.
    """
    tied, unused = tied_names(model), {*patterns}
    matched = dict[str, bool]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = plain_name(name)
        hits = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
        unused -= hits
        matched[name] = bool(hits)
        if matched[name] != matched.get(other := tied.get(name, name), matched[name]):
            raise UnfitModelError(
                f"{name} and {other} are one tensor in this model and model.trainable names only "
                "one of them, so it is unclear whether to train it: name both or neither"
            )
        parameter.requires_grad_(matched[name])
    if unused:
        raise UnfitModelError(
            f"model.trainable has {min(unused)!r:.100}, which no parameter's name matches, so it "
            "is unclear what to train: correct that pattern"
        )


def initial_weights(
    model_config: Mapping[str, Any], *, seed: int, frozen: bool = False
) -> list[Tensor]:
    """Draw float32 weights from ``seed``, in schema order; ``frozen``: for frozen parameters."""
    # Without the empty list torch would also save each GPU's generator, and start CUDA for that.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind_of(model_config).build(model_config)
    drawn = dict(model.named_parameters())
    return [drawn[name].detach().clone() for name, _ in schema_of(model, frozen=frozen)]


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers.

    Raises UnfitModelError if they are not where a Llama has them.
    """
    layers = getattr(model.get_decoder(), "layers", None)  # type: ignore[operator]
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        lists = (name for name, found in model.named_modules() if isinstance(found, nn.ModuleList))
        place = f"has its decoder layers in {found}" if (found := next(lists, "")) else "has none"
        raise UnfitModelError(
            f"model {type(model).__name__} {place} and has no list 'layers' of decoder layers "
            "like a Llama's, so it cannot be sharded: use a Llama-like model"
        )
    return layers


# --- attention -----------------------------------------------------------------------------------

CAUSAL = "sdpa_causal"  # the name of our attention function in transformers
#: Arguments of an attention function that do not change the result for packed sequences.
_HARMLESS = {"position_ids", "cache_position", "use_cache", "output_attentions", "return_dict"}
_NO_ATTENTION = ("attn_logit_softcapping", "attention_chunk_size", "use_bidirectional_attention")


def sdpa_causal(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention like transformers' "sdpa" without a mask, which means causal attention.

    Raises UnfitModelError for an option that would change the computation.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    length = query.shape[2]
    for name, option in options.items():
        if option is None or option is False or name in _HARMLESS or name == "is_causal":
            continue
        if name != "sliding_window":
            raise _unfit_attention(name)
        if option < length:
            # Each position attends to itself and to the positions before it, as many as the window
            # has.
            seen = torch.ones(length, length, dtype=torch.bool, device=query.device)
            attention_mask = seen.tril().triu(1 - option)
    mixed: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling
    )
    return mixed


def _unfit_attention(name: str) -> UnfitModelError:
    return UnfitModelError(
        f"the model's attention has {name}, which is not computed here, so it would not be the "
        "model that its config.json describes: use a Llama-like model without it"
    )


def attention_line(config: Any, device: torch.device, dtype: torch.dtype, length: int) -> str:
    """Return a log line that names the attention kernel that PyTorch will run."""
    from torch.nn.attention import SDPBackend

    if device.type != "cuda":
        return "Attention: SDPA on the CPU"
    window = getattr(config, "sliding_window", None)
    if window and window < length:
        return (
            f"Attention: SDPA, with a mask in layers that have the window of {window} tokens, for "
            "which there is no flash kernel"
        )
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    q, k = (
        torch.empty(1, count, 128, width, device=device, dtype=dtype) for count in (heads, groups)
    )
    choice = torch._fused_sdp_choice(
        q.requires_grad_(), k, k, is_causal=True, enable_gqa=groups != heads
    )
    name = SDPBackend(choice).name.removesuffix("_ATTENTION").lower()
    return f"Attention: SDPA, {name} kernel"


# --- loss ----------------------------------------------------------------------------------------

#: (rows, words) logits, (rows, 1) labels -> summed float32 loss, gradient in the logits' dtype.
LogitGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _summed_loss(wide: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of float32 logits, and the logarithm of each row's normalizer."""
    # The logits are float32, since a bf16 sum over 128,000 words would lose all small terms.
    log_norm = torch.logsumexp(wide, dim=1, keepdim=True)
    return (log_norm - wide.gather(1, target)).sum(), log_norm


def logit_gradient(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient, computed eagerly with few temporaries."""
    wide = logits.float()
    loss, log_norm = _summed_loss(wide, target)
    # d loss / d logits = softmax - one-hot
    gradient = wide.sub_(log_norm).exp_()
    gradient.scatter_add_(1, target, torch.full_like(log_norm, -1.0))
    return loss, gradient.to(logits.dtype)


def fused_logit_gradient(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient, without in-place operations so that torch can fuse them."""
    wide = logits.float()
    loss, log_norm = _summed_loss(wide, target)
    words = torch.arange(logits.shape[1], device=logits.device)
    gradient = torch.exp(wide - log_norm) - (words == target).float()
    return loss, gradient.to(logits.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        with_grad: bool,
        of_logits: LogitGradient,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if with_grad else None
        # Keep the sums over chunks in float32, since bf16 would round late chunks away.
        grad_weight: Tensor | None = None
        for start in range(0, hidden.shape[0], rows):
            part = hidden[start : start + rows]
            target = labels[start : start + rows].unsqueeze(1)
            logits = part @ weight.t()
            if grad_hidden is None:
                total += _summed_loss(logits.float(), target)[0]
                continue
            loss, low = of_logits(logits, target)
            # Drop the logits before the two products below, which take the most memory in this
            # loop.
            del logits
            total += loss
            grad_hidden[start : start + rows] = low @ weight
            if not ctx.needs_input_grad[1]:
                continue  # the head is frozen
            piece = low.t() @ part
            if hidden.shape[0] <= rows:
                grad_weight = piece
            elif grad_weight is None:
                grad_weight = piece.float()
            else:
                grad_weight += piece
        if with_grad:
            of_head = None if grad_weight is None else grad_weight.to(weight.dtype)
            ctx.save_for_backward(grad_hidden, of_head)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (scale,) = grads
        # Forward has computed both gradients with the loss, because the logits are gone by now.
        made = (None if each is None else each * scale for each in ctx.saved_tensors)
        return (*made, None, None, None, None)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int = LOSS_CHUNK,
    of_logits: LogitGradient = logit_gradient,
) -> Tensor:
    """Sum the cross-entropy of ``hidden @ weight.T`` against ``labels`` over all tokens, in nats.

    ``hidden`` (tokens, width), ``weight`` (words, width) of the same dtype, ``labels`` (tokens,)
    int64. Returns a float32 scalar. Softmax and sums are float32 whatever the dtype. No label is
    ignored: sequences are packed, so every token counts. ``chunk``: how many float32 logits may
    exist at once.
    """
    tokens = hidden.shape[0]
    most = max(1, chunk // weight.shape[0])
    rows = max(1, math.ceil(tokens / max(1, math.ceil(tokens / most))))  # chunks of equal length
    # A Function's forward also runs under no_grad, where computing gradients would be wasted.
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden, weight, labels, rows, with_grad, of_logits)


class ModelWithLoss(nn.Module):
    """A model and its loss as one module, so that FSDP's root covers both.

    ``forward(batch)``: a batch of ``kind`` -> the summed loss, a float32 scalar, and the number of
    predictions in it.
    """

    def __init__(self, kind: ModelKind, model: nn.Module) -> None:
        super().__init__()
        self.kind, self.model = kind, model

    def forward(self, batch: Any) -> tuple[Tensor, int]:
        return self.kind.loss(self.model, batch)


# --- kinds of model ------------------------------------------------------------------------------


class ModelKind:
    """A model, its batches and its loss, for the trainer, the judge, the export and the plan.

    To add a kind, write one class with the three methods ``build``, ``batch`` and ``loss``, and one
    line, ``MODELS.register(name, Class)``.
    """

    #: Packages that the model is computed with; manifests record their versions.
    libraries: tuple[str, ...] = ()

    def build(self, config: Mapping[str, Any]) -> nn.Module:
        """Return the model that a ``config.json`` describes, with trained parameters in float32.

        The parameters with ``requires_grad`` are exchanged, in the order of
        ``named_parameters()``. To get a model without values, call :func:`build_meta_model`.
        Raises UnfitModelError.
        """
        raise NotImplementedError

    def batch(self, rows: Tensor) -> Any:
        """Return the loss's input for ``rows``, int64 ``(sequences, length)`` on the device."""
        return rows

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Return the summed loss, a float32 scalar, and the number of predictions in it."""
        raise NotImplementedError

    def compile(self, on: bool) -> None:
        """Compile parts of the loss from now on, or stop doing so. A kind may ignore this."""

    def saved_name(self, name: str) -> str:
        """Return a parameter's name in the files that the model's library writes."""
        return name

    def differs(
        self, network: nn.Module, model: nn.Module, named: Mapping[str, nn.Parameter]
    ) -> str:
        """Return how a script's ``model`` with the same tensors computes differently, or "".

        Args:
            network: The network's model, on the meta device.
            model: The script's model.
            named: The script's parameters, keyed by the network's names.
        """
        del network, model, named
        return ""

    def save(
        self,
        folder: Path,
        config: Mapping[str, Any],
        files: Sequence[tuple[Path, Schema]],
        *,
        merge: bool,
    ) -> None:
        """Write the model's tensors, read from ``files``, and its configuration to ``folder``.

        ``merge``: write the whole model, even if a part is enough. Raises OSError, ValueError.
        """
        del merge
        each = [(source, entry) for source, schema in files for entry in schema]
        # Load one tensor at a time, since all together may not fit into memory.
        tensors = (load_weights(source, [entry])[0] for source, entry in each)
        entries = [(name, torch.float32, shape) for _, (name, shape) in each]
        path, metadata = folder / keys.MODEL, keys.SAFETENSORS_METADATA
        write_safetensors(path, entries, tensors, metadata=metadata)
        write_config(folder, config)


#: Model kinds, keyed by their names in a network's file.
MODELS: Kinds[Callable[[], ModelKind]] = Kinds("kind of model")
CAUSAL_LM = "causal-lm"


def kind_of(model_config: Mapping[str, Any]) -> ModelKind:
    """Return the kind of model that a ``config.json`` describes. Raises UnknownKindError."""
    # The module ``lora`` registers itself and derives from a class in this module, so it cannot be
    # imported above.
    importlib.import_module(f"{__package__}.lora")
    return MODELS[(model_config.get(MODEL_RULES) or {}).get("kind", CAUSAL_LM)]()


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the ``config.json`` for a model whose weights are in float32. Raises OSError."""
    content = of_transformers(config)
    # Set the dtype of these weights: the model that the network began with may have had another.
    content |= dict.fromkeys({"dtype", "torch_dtype"} & content.keys(), "float32")
    write_json(folder / keys.CONFIG, content)


class CausalLM(ModelKind):
    """A causal language model of transformers, which predicts every token after the first."""

    def __init__(self) -> None:
        self.of_logits: LogitGradient = logit_gradient

    def build(self, config: Mapping[str, Any]) -> nn.Module:
        model = build_causal_lm(config)
        if (patterns := (config.get(MODEL_RULES) or {}).get("trainable")) is not None:
            train_only(model, patterns)
        return model

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        decoder: Any = model.get_decoder()  # type: ignore[operator]
        # Call only the decoder, since the model's own forward would compute all logits. Do not use
        # the cache: it is meant for generation, and would hold every block's keys and values.
        hidden = decoder(input_ids=batch, use_cache=False).last_hidden_state
        labels = batch[:, 1:].reshape(-1)
        total = linear_cross_entropy(
            hidden[:, :-1].reshape(-1, hidden.shape[-1]),
            model.get_output_embeddings().weight,  # type: ignore[operator]
            labels,
            chunk=_chunk_of(hidden.device),
            of_logits=self.of_logits,
        )
        return total, labels.numel()

    def compile(self, on: bool) -> None:
        """Compile the part of the loss between its matrix products, or run that part eagerly."""
        self.of_logits = logit_gradient
        if on:
            self.of_logits = torch.compile(fused_logit_gradient, dynamic=False)


@functools.cache
def _chunk_of(device: torch.device) -> int:
    """Return how many float32 logits may exist at once on a device."""
    cuda = device.type == "cuda"
    return loss_chunk(torch.cuda.get_device_properties(device).total_memory if cuda else None)


MODELS.register(CAUSAL_LM, CausalLM)
