"""Hold the weights of a model that somebody else's script trains: plain, under DDP, or FSDP2.

Each rank owns its rows of every parameter, split the way FSDP2 shards them. In a plain model, or
with DDP, each rank has all rows. Even then it owns only a part of them here, and sends that part to
the other ranks after a change of weights. So the ranks share the work of encoding and checkpoints,
and the host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distributed_training.config.settings import TrainingSettings

from .collectives import ParameterShard, RowStream, row_range
from .copies import BoundaryCopies
from .frozen import FrozenTensors, kept_buffers
from .held_weights import HeldWeights
from .model import build_meta_model, kind_of, plain_name, schema_of, tied_names
from .sharding import load_file

log = logging.getLogger(__name__)

_NOTHING = "so nothing was joined"
_WATCHED_PARAMETERS, _WATCHED_VALUES, _WATCHED_STEPS = 16, 4096, 12
_UNDONE, _FAR = 0.2, 10.0  # fraction of an update that counts as undone; factor on the median step


class Steps:
    """Count the steps of a script's optimizers, whose state the script itself keeps."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.state: Mapping[str, list[Tensor]] = {}
        self._ended = [0] * len(optimizers)
        self._under_way = set[int]()
        self._hooks = []
        for index, optimizer in enumerate(optimizers):
            begin, end = partial(self._begin, index), partial(self._end, index)
            self._hooks.append(optimizer.register_step_pre_hook(begin))
            self._hooks.append(optimizer.register_step_post_hook(end))

    @property
    def step_count(self) -> int:
        """The number of finished steps; with several optimizers, the largest of their numbers."""
        return max(self._ended)

    @property
    def under_way(self) -> bool:
        """Whether an optimizer is changing weights, or was doing so when it raised an error."""
        return bool(self._under_way)

    def _begin(self, index: int, *_: object) -> None:
        self._under_way.add(index)

    def _end(self, index: int, *_: object) -> None:
        # If step() of a class calls step() of its base class, torch calls the hooks for both.
        if index in self._under_way:
            self._under_way.discard(index)
            self._ended[index] += 1

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class UndoneUpdates:
    """Notices an optimizer that undoes updates because it keeps its own copy of the weights.

    Lookahead's slow weights and the master weights of mixed precision are such copies. A step that
    undoes an update moves the weights back along it, many times as far as other steps do. Watching
    some values of the largest parameters is enough. On a GPU, recording them does not wait for the
    device.
    """

    def __init__(self, shards: Sequence[ParameterShard]) -> None:
        largest = sorted(shards, key=lambda shard: -shard.local.numel())[:_WATCHED_PARAMETERS]
        self._shards = largest
        self._update: Tensor | None = None
        self._moves: list[Tensor] = []

    @torch.no_grad()
    def look(self) -> Tensor:
        """Return a copy of the watched values."""
        return torch.cat([s.local.reshape(-1)[:_WATCHED_VALUES].float() for s in self._shards])

    def updated(self, before: Tensor) -> None:
        """Start watching after an update; ``before``: the result of :meth:`look` before it."""
        self._last = self.look()
        self._update, self._moves = before - self._last, []

    def stepped(self) -> bool:
        """Return whether one of the steps since the update has undone it."""
        if self._update is None:
            return False
        before, self._last = self._last, self.look()
        self._moves.append(self._last - before)
        if len(self._moves) < _WATCHED_STEPS:
            return False
        moves, update, self._update = torch.stack(self._moves), self._update, None
        far, back = moves.norm(dim=1), moves @ update
        undone = (back > _UNDONE * update.square().sum()) & (far > _FAR * far.median())
        return bool(undone.any())


def optimizers_of(given: Any) -> list[Optimizer]:
    """Return the optimizers that take the steps, without the wrappers of Accelerate and others.

    Raises ValueError.
    """
    found = list(given) if isinstance(given, list | tuple) else [given]
    for index, each in enumerate(found):
        while (inner := getattr(each, "optimizer", None)) is not None:
            each = found[index] = inner
        if not isinstance(each, Optimizer):
            raise ValueError(
                f"the optimizer is a {type(each).__name__}, not a torch.optim.Optimizer, "
                f"{_NOTHING}: pass the optimizer whose step() changes the weights"
            )
    if not found:
        raise ValueError(f"there is no optimizer, {_NOTHING}: pass the one that trains the model")
    return found


class ScriptWeights(HeldWeights):
    """The weights of ``model``, which the script's ``optimizers`` train. Collective.

    ``tokens_per_step``: the tokens of all ranks per step, as last stated by the script.
    ``in_step``: whether the script has already received micro-batches of an unfinished inner step,
    which no checkpoint contains. ``frozen``: rank 0's safetensors file with the network's frozen
    parameters, which are loaded into the model. Raises ValueError on all ranks alike, with one
    line, if the model does not match ``model_config`` or is not trained by ``optimizers``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        settings: TrainingSettings,
        model_config: Mapping[str, Any],
        stream: RowStream,
        frozen: Path | None = None,
    ) -> None:
        self.tokens_per_step, self.in_step = 0, False
        size = settings.local_batch_size_train
        self.micro_batch_size = size if isinstance(size, int) else 1
        self.sequence_length = settings.sequence_length
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reshard()  # otherwise the names would refer to gathered weights
        meta = build_meta_model(model_config)
        named, tied = _named(model, meta), tied_names(meta)
        trained = {id(p) for each in optimizers for g in each.param_groups for p in g["params"]}
        found = next(_problems(meta, tied, named, trained, stream.world_size), None)
        if found is None and (differs := kind_of(model_config).differs(meta, model, named)):
            found = differs, "build the model as the network's file says"
        problem = None if found is None else f"{found[0]}, {_NOTHING}: {found[1]}"
        stream.raise_if_any(problem, ValueError)
        shards = [_shard(name, named[name], stream) for name, _ in schema_of(meta)]
        held = {name: named[name] for name, _ in schema_of(meta, frozen=True)}
        if held:
            path = stream.from_rank_0(frozen)
            assert path is not None  # a network with frozen tensors always has this file
            _load_frozen(held, path, stream)
        # Install the hooks only once all ranks are sure to continue, since nothing removes them.
        self.steps = Steps(optimizers)
        super().__init__(
            shards=shards,
            stream=stream,
            settings=settings,
            steps=self.steps,
        )
        fixed = {name: _local(each) for name, each in held.items()}
        self.frozen = FrozenTensors(fixed | kept_buffers(model))

    @property
    def tokens(self) -> int:
        return self.inner_step * self.tokens_per_step

    @torch.no_grad()
    def drop_step(self) -> None:
        """Send this rank's rows of whole parameters to the other ranks; drop gathered weights."""
        world = self.stream.world_size
        for shard in self.shards if world > 1 else ():
            if isinstance(shard.dtensor, DTensor):
                continue
            whole = shard.dtensor.detach().view(shard.shape)
            for rank in range(world):
                start, stop = row_range(shard.shape[0], world, rank)
                if stop > start:
                    # Use the default group, like DDP: it has a backend for this device.
                    dist.broadcast(whole[start:stop], src=rank)
        self._reshard()

    def boundary_copies(self, names: Collection[str] | None = None) -> BoundaryCopies:
        """Copy this boundary's weights right away (see :meth:`.HeldWeights.boundary_copies`)."""
        copies = super().boundary_copies(names)
        self.copier.finish()  # a script may change its weights without our noticing
        return copies

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"in_step": self.in_step}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        return super().load_state_dict(state) and not state["in_step"]

    def _reshard(self) -> None:
        for module in self._sharded:
            module.reshard()


def _shard(
    name: str, parameter: nn.Parameter, stream: RowStream, *, whole: bool = False
) -> ParameterShard:
    """Return the rows that this rank owns; ``whole``: all rows of a plain tensor."""
    shape = tuple(parameter.shape) or (1,)
    rows = row_range(shape[0], stream.world_size, stream.rank)
    if whole and not isinstance(parameter.data, DTensor):
        rows = (0, shape[0])
    return ParameterShard(name, shape, *rows, parameter)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _named(model: nn.Module, network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters under all their names, without the prefixes of wrappers.

    A wrapper is a module, such as PEFT's, that holds the network's model and no other parameter.
    """
    for module in model.modules():  # torch.compile may wrap the DDP module
        if isinstance(module, DistributedDataParallel):
            model = module.module
            break
    found = model.named_parameters(remove_duplicate=False)
    named = {plain_name(name): parameter for name, parameter in found}
    first = plain_name(next(iter(network.named_parameters()))[0])
    prefix = next((n.removesuffix(first) for n in named if n.endswith(f".{first}")), "")
    if all(name.startswith(prefix) for name in named):
        named = {name.removeprefix(prefix): parameter for name, parameter in named.items()}
    return named


def _is_quantized(parameter: nn.Parameter) -> bool:
    """Return whether a parameter holds bitsandbytes' 4-bit codes instead of its values."""
    return getattr(parameter, "quant_state", None) is not None


def _load_frozen(held: Mapping[str, nn.Parameter], path: Path, stream: RowStream) -> None:
    """Load the network's frozen values into the model, rounded to 4 bits where it is quantized.

    Collective. Raises ValueError on all ranks alike.
    """
    before = FrozenTensors({name: _local(each) for name, each in held.items()})
    coded: dict[str, Any] = {name: each for name, each in held.items() if _is_quantized(each)}
    whole = [_shard(n, each, stream, whole=True) for n, each in held.items() if n not in coded]
    load_file(whole, path, stream, more=coded)
    with safe_open(path, "pt") if stream.layout.on_node_0 else nullcontext() as file:
        for name, each in coded.items():
            values = torch.empty(each.quant_state.shape) if file is None else file.get_tensor(name)
            stream.replicate(values := values.float())
            how = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
            given = {key: getattr(each, key) for key in how}
            made = type(each)(values, requires_grad=False, **given).to(each.device)
            each.data, each.quant_state = made.data, made.quant_state
    if changed := before.find_changed():
        log.info(
            "%s differed from the network's: it and the other frozen tensors now have the "
            "network's values",
            changed,
        )


def _problems(
    network: nn.Module,
    tied: Mapping[str, str],
    named: Mapping[str, nn.Parameter],
    trained: set[int],
    world_size: int,
) -> Iterator[tuple[str, str]]:
    """Yield why these parameters do not match the network's or cannot be trained, and a remedy.

    ``network``: the network's model, on the meta device.
    """
    other = "build the model from the network's config.json (distributed_training.model_config())"
    wanted = {plain_name(name): each for name, each in network.named_parameters()}
    adapters = any("lora_" in name for name in wanted)
    if adapters:
        other = (
            "make adapters with get_peft_model(model, distributed_training.lora_config()) on the "
            "network's base"
        )
    if missing := next((name for name in wanted if name not in named), ""):
        endings = (name.removesuffix(missing) for name in named if name.endswith(f".{missing}"))
        if inner := next((p for p in endings if all(p + name in named for name in wanted)), ""):
            inner = inner.removesuffix(".")
            other = f"pass model.{inner}, which is the network's model, instead of its wrapper"
        elif not adapters and any("lora_" in n or n.startswith("base_model.") for n in named):
            other = "join with the model without adapters (LoRA, PEFT)"
        yield f"the model has no parameter {missing}, which the network's has", other
        return
    for name, theirs in wanted.items():
        parameter = named[name]
        shape = parameter.shape
        if _is_quantized(parameter):
            shape = parameter.quant_state.shape  # type: ignore[attr-defined]
        elif not parameter.is_floating_point():
            sharded = " and is sharded by FSDP" if isinstance(parameter.data, DTensor) else ""
            remedy = "load the base in the dtype of the network's file, or in 4 bits with "
            yield f"{name} is quantized{sharded}", f"{remedy}bitsandbytes, without FSDP"
        if shape != theirs.shape:
            yield (
                f"{name} has the shape {tuple(shape)}, not the network's {tuple(theirs.shape)}",
                other,
            )
        if theirs.requires_grad:
            yield from _of_trained(name, parameter, trained)
        elif parameter.requires_grad:  # otherwise it gets no gradient, and optimizers skip it
            what = f"{name} is trained here, but in this network it is frozen"
            yield what, "call requires_grad_(False) on it"
        if parameter.is_meta:
            yield f"{name} has no memory yet (device meta)", "call to_empty() first"
        if isinstance(parameter.data, DTensor):
            mesh, placements = parameter.data.device_mesh, parameter.data.placements
            if (mesh.ndim, mesh.size(), *placements) != (1, world_size, Shard(0)):
                yield (
                    f"{name} is sharded as {placements} over a mesh of {tuple(mesh.shape)}, but "
                    f"rows are needed over all {world_size} ranks",
                    "call fully_shard(module) without a mesh of your own",
                )
    ours = {id(named[name]): name for name in reversed(wanted)}
    for name, parameter in named.items():
        first = ours.get(id(parameter))
        if first is None:
            why = f" ({tied[name]}, to which it is tied, is one)" if name in tied else ""
            yield f"{name} is not a parameter of the network's model{why}", other
        elif name in wanted and first != name:
            what = f"{name} is tied to {first}, but in the network's model it is not"
            yield what, "set tie_word_embeddings as in the network's config.json"


def _of_trained(name: str, parameter: nn.Parameter, trained: set[int]) -> Iterator[tuple[str, str]]:
    """Yield why a parameter that the network trains cannot be trained as it is, and a remedy."""
    if parameter.dtype != torch.float32:
        dtype = str(parameter.dtype).removeprefix("torch.")
        yield (
            f"{name} is {dtype}, but the network's weights are float32, which updates need",
            "keep parameters in float32, and compute in bfloat16 with torch.autocast or FSDP's "
            "MixedPrecisionPolicy",
        )
    if not parameter.requires_grad:
        what = f"{name} is frozen, but this network trains it"
        yield what, "call requires_grad_(True) on it before you create the optimizer"
    elif id(parameter) not in trained:
        yield (
            f"{name} is in no group of the optimizer, which would never train it",
            "create the optimizer from model.parameters() after fully_shard(), or pass all of them",
        )
