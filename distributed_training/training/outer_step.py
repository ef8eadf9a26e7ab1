"""Take DiLoCo's outer step over FSDP shards, as a transaction; its arithmetic and its files.

In DiLoCo (Douillard et al. 2023, arXiv 2311.08105) each miner trains without the others for
many *inner steps*. The movement of its weights, epoch start - current, is then taken as a gradient:
the *pseudo-gradient*. In a round the miners average their pseudo-gradients. One step of SGD with
Nesterov momentum along that average, from the epoch-start weights, is the *outer step*; all miners
continue from its result (protocol page, sections 4 to 6).

Miners and the validator use the same rule of ``outer_rule.py``, so all of them compute the same
float32 bits from the same average.

Every rank keeps, in host memory, its rows of the epoch-start weights, the outer momentum and the
error feedback. A round streams the pseudo-gradient to rank 0, returns an average, and computes the
new tensors while the old ones stay in use. Then all of them are replaced at once, or none is. A
tensor that is kept never changes in place.

The *global state* is the network's model between two rounds: ``config.json``, weights, and the
outer optimizer. ``store.bucket_reader`` fetches its files and checks each by itself: whole, finite,
of one revision. :class:`GlobalState` compares them with the model that ``config.json`` describes.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from distributed_training.common.files import atomic_file
from distributed_training.protocol import keys
from distributed_training.protocol.gradients import Schema
from distributed_training.protocol.metadata import parse_config
from distributed_training.protocol.pt_file import read_pt, refuse_calls
from distributed_training.protocol.types import AllReduceError, AllReduceFault, RankFailedError

from .collectives import ParameterShard, RowStream, on_host, to_host
from .model import parameter_schema, without_extras
from .outer_rule import NESTEROV, OUTER_MOMENTUM, OuterRule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OuterOptimizerState:
    """The content of ``outer_optimizer.pt``. ``momentum`` is None before the first outer step."""

    momentum: list[Tensor] | None
    learning_rate: float
    mu: float
    outer_step: int


def save_outer_optimizer(path: Path, state: OuterOptimizerState, *, parameters: int = 0) -> None:
    """Write ``outer_optimizer.pt`` in the public network's form (protocol page, section 3).

    ``state.momentum`` are whole float32 tensors in state-dict order. ``parameters``: of the model,
    needed before the first outer step, when there is no momentum: torch's SGD refuses a parameter
    group that does not list them all. Written to a temporary name, synced, renamed.
    """
    count = parameters if state.momentum is None else len(state.momentum)
    content = {
        "optimizer_state_dict": {
            "state": {i: {"momentum_buffer": t} for i, t in enumerate(state.momentum or ())},
            "param_groups": [
                {
                    "lr": state.learning_rate,
                    "momentum": state.mu,
                    "dampening": 0,
                    "weight_decay": 0,
                    "nesterov": True,
                    "maximize": False,
                    "foreach": None,
                    "differentiable": False,
                    "fused": None,
                    "params": list(range(count)),
                }
            ],
        },
        "learning_rate": state.learning_rate,
        "epoch": state.outer_step,
    }
    with atomic_file(path) as handle:
        torch.save(content, handle)


def load_outer_optimizer(path: Path, schema: Schema) -> OuterOptimizerState:
    """Read ``outer_optimizer.pt``; tensors are memory-mapped, in the order of ``schema``.

    Raises ValueError, in one line, when the file is not a SGD state for this model.
    """
    try:
        # Downloaded: looked through before torch reads it, and no class but torch's own is made of
        # it.
        refuse_calls(read_pt(path))
        # Mapped: 4 bytes a parameter, of which one tensor at a time is needed.
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        groups = content["optimizer_state_dict"]["param_groups"]
        entries = content["optimizer_state_dict"]["state"]
        learning_rate = float(groups[0]["lr"])
        mu = float(groups[0].get("momentum", OUTER_MOMENTUM))
        outer_step = int(content.get("epoch", 0))
        buffers = [entries[key].get("momentum_buffer") for key in sorted(entries)]
        if not (math.isfinite(learning_rate) and learning_rate > 0 and 0 <= mu < 1):
            raise ValueError(f"learning rate {learning_rate}, momentum {mu}")
    except Exception as error:  # foreign bytes: whatever they made torch raise
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{path} is not an outer optimizer's state ({why:.200}), so it was not loaded: fetch "
            "it again"
        ) from error
    if not buffers or all(b is None for b in buffers):
        return OuterOptimizerState(None, learning_rate, mu, outer_step)
    if len(buffers) != len(schema):
        raise ValueError(
            f"{path} holds {len(buffers)} momentum tensors, the model has {len(schema)}, so it was "
            "not loaded: it belongs to another model"
        )
    for (name, shape), buffer in zip(schema, buffers, strict=True):
        numbers = isinstance(buffer, Tensor) and buffer.is_floating_point()
        if not numbers or tuple(buffer.shape) != shape:
            found = tuple(buffer.shape) if numbers else getattr(buffer, "dtype", type(buffer))
            raise ValueError(
                f"{path}: momentum of {name} is {found}, the model has {shape}, so it was not "
                "loaded: it belongs to another model"
            )
    return OuterOptimizerState([b.float() for b in buffers], learning_rate, mu, outer_step)


#: This miner could not build or apply its pseudo-gradient: the text says why.
_local = partial(AllReduceError, AllReduceFault.LOCAL)


@dataclass(frozen=True)
class Prepared:
    """This rank's rows of what a commit swaps in."""

    weights: list[Tensor]
    momentum: list[Tensor] | None
    present: list[Tensor]  # the weights, and what was trained while the swarm averaged
    epoch_id: str


class Rows(NamedTuple):
    """Rows of a parameter, as this rank holds them: float32, ``first`` is the first one's index."""

    name: str
    first: int
    values: Tensor


class OuterStep:
    """Owns the epoch-start weights and the outer momentum of one rank, in host memory.

    Args:
        shards: This rank's rows of every parameter.
        stream: Sends rows between the ranks.
        learning_rate: Of the outer step.
        momentum: Of the outer step, below 1.
        rule: Computes new weights and momentum from an average.

    Examples:
        ```python
        outer = trainer.outer  # on every rank, in the same order
        buffers = [torch.empty(shape) for _, shape in trainer.schema] if trainer.rank == 0 else None
        norm = outer.write_pseudo_gradient(buffers)
        averaged = buffers  # here the swarm averages them with those of peers
        outer.prepare(averaged)
        outer.commit()  # or outer.roll_back()
        ```
    """

    #: Lists of tensors in the state that change only with ``epoch_id``.
    of_epoch: ClassVar = ("epoch_start", "momentum")

    def __init__(
        self,
        *,
        shards: Sequence[ParameterShard],
        stream: RowStream,
        learning_rate: float,
        momentum: float,
        rule: OuterRule = NESTEROV,
    ) -> None:
        self.rule = rule
        self.learning_rate = learning_rate
        self.mu = momentum
        self.epoch_start: list[Tensor] | None = None
        self.momentum: list[Tensor] | None = None
        self.epoch_id = ""  # names the epoch-start weights and momentum in checkpoints
        self._shards = shards
        self._stream = stream
        self._prepared: Prepared | None = None
        self._window: list[Tensor] | None = None
        self._written: list[Tensor] | None = None  # what the pseudo-gradient was written from

    def state_dict(self) -> dict[str, Any]:
        """Return the state; ``epoch_id`` names its rows, which change in outer steps only."""
        return {
            "outer_learning_rate": self.learning_rate,
            "outer_momentum": self.mu,
            "epoch_id": self.epoch_id,
            "epoch_start": self.epoch_start,
            "momentum": self.momentum,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`, with this rank's rows.

        Args:
            state: The state.
        """
        self.learning_rate = float(state["outer_learning_rate"])
        self.mu = float(state["outer_momentum"])
        self.epoch_id = str(state["epoch_id"])
        self.epoch_start, self.momentum = state["epoch_start"], state["momentum"]
        self._written = None

    def open_window(self, buffers: Sequence[Tensor] | None, path: str | None) -> None:
        """Let every rank read and write its rows of rank 0's ``buffers`` itself from now on.

        Without a window the rows go through rank 0, one rank after the other, while training
        stands. Collective.

        Args:
            buffers: Rank 0's, float32 on the CPU, one of each parameter's shape; None on other
                ranks.
            path: Rank 0's file in which ``buffers`` lie one after the other, for the others to map;
                None elsewhere, or if they cannot be mapped.
        """
        if self._stream.world_size == 1:
            return
        shared = self._stream.from_rank_0(path)
        problem, window = None, None
        try:
            if shared is None:
                problem = "the swarm's memory has no path"
            elif self._stream.rank == 0:
                window = list(buffers or ())
            elif not self._stream.layout.on_node_0:
                window = []  # its rows come from its peer on node 0
            else:
                # The file's float32 tensors lie one after the other; no copy.
                sizes = [math.prod(shard.shape) for shard in self._shards]
                flat = torch.from_file(shared, shared=True, size=sum(sizes), dtype=torch.float32)
                parts = zip(flat.split(sizes), self._shards, strict=True)
                window = [part.view(shard.shape) for part, shard in parts]
        except (OSError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
        # All or none: a rank without a window would send rows that rank 0 does not receive.
        problem = self._stream.vote_error(problem)
        if problem is None:
            self._window = window
        elif self._stream.rank == 0:
            log.info("Pseudo-gradients go through rank 0: %s", problem)

    def _own_rows(self, buffers: Sequence[Tensor] | None) -> list[Tensor] | None:
        """Return this rank's rows of rank 0's ``buffers``, in place; None if no window shows them.

        Ranks on other machines than rank 0's get an empty list.
        """
        window = self._window
        if window is None:
            return None
        # Only rank 0 knows whether the swarm came back with other buffers than those mapped.
        seen = self._stream.rank != 0 or all(
            a.data_ptr() == b.data_ptr() for a, b in zip(buffers or (), window, strict=True)
        )
        if self._stream.sum([float(seen)])[0] < self._stream.world_size:
            return None
        if not window:
            return []
        return [whole[s.start : s.stop] for whole, s in zip(window, self._shards, strict=True)]

    def current(self) -> list[Tensor]:
        """Copy the rows of the present weights to host memory."""
        return to_host([s.local for s in self._shards])

    def begin_epoch(self) -> None:
        """Make the present weights the epoch start. All ranks."""
        self.epoch_start = self.current()
        self._prepared = self._written = None
        self.epoch_id = self._new_epoch_id()

    def epoch_start_rows(self) -> list[Rows]:
        """Return this rank's rows of the weights the epoch began with.

        Host memory, never changed in place.
        """
        start = self.epoch_start or []
        return [Rows(s.name, s.start, rows) for s, rows in zip(self._shards, start, strict=False)]

    def trained(self) -> list[Tensor]:
        """Return this rank's rows of current - epoch start, in host memory."""
        assert self.epoch_start is not None
        return [
            now.sub_(start) for now, start in zip(self.current(), self.epoch_start, strict=True)
        ]

    def load_with_weights(self, path: Path | None, *, load_weights: Callable[[], None]) -> None:
        """Load momentum and learning rate from rank 0's file together with the weights. Collective.

        Args:
            path: Rank 0's ``outer_optimizer.pt``; None: start without momentum.
            load_weights: Loads the weights that belong to it, on all ranks.

        Raises:
            ValueError: On all ranks, when rank 0 cannot read the file. Nothing has changed then,
                nor after an error of ``load_weights``.
        """
        before = self.momentum, self.learning_rate, self.mu
        schema = [(shard.name, shard.shape) for shard in self._shards]
        source, facts, problem = None, None, None
        if self._stream.rank == 0 and path is not None:
            try:
                state = load_outer_optimizer(path, schema)
                source = state.momentum
                facts = (state.learning_rate, state.mu, source is not None)
            except Exception as error:  # noqa: BLE001 - foreign bytes; the others wait for this
                expected = isinstance(error, (ValueError, OSError))
                problem = str(error) if expected else f"{type(error).__name__}: {error}"
        # Before any tensor is sent: the others would wait for one that never comes.
        self._stream.raise_if_any(problem, ValueError)
        facts = self._stream.from_rank_0(facts)
        self.momentum = self._scatter(source) if facts and facts[2] else None
        if facts is not None:
            self.learning_rate, self.mu, _ = facts
        # Momentum of one state and weights of another would make a step that no other miner makes.
        try:
            load_weights()
        except (ValueError, RankFailedError):
            self.momentum, self.learning_rate, self.mu = before
            raise

    @torch.no_grad()
    def write_pseudo_gradient(
        self, buffers: Sequence[Tensor] | None, *, trains_on: bool = False
    ) -> float:
        """Write epoch start - current into rank 0's buffers, one parameter after the other.

        Collective. Apart from ``buffers``, at most one parameter's rows are in memory.

        Args:
            buffers: Rank 0's, float32 on the CPU, one of each parameter's shape; None on other
                ranks.
            trains_on: Whether inner steps follow before the average is there: then a copy of the
                weights is kept, and :meth:`prepare` adds the training since.

        Returns:
            The norm over all parameters, on every rank.

        Raises:
            AllReduceError: LOCAL, on all ranks, when buffers do not match the model or the
                pseudo-gradient holds NaN or Inf.
        """
        problem = self._buffer_problem(buffers)
        if self.epoch_start is None:
            problem = "no epoch-start weights are kept: begin_epoch was not called"
        self._stream.raise_if_any(problem, _local)
        assert self.epoch_start is not None
        # Memory may run out on a single rank.
        self._written = self._stream.run_on_all(self.current, _local) if trains_on else None
        square, own = 0.0, self._own_rows(buffers)
        # One parameter at a time: in a round there is no room for the whole model once more.
        for i, (shard, start) in enumerate(zip(self._shards, self.epoch_start, strict=True)):
            rows = start - on_host(shard.local)
            square += float(torch.linalg.vector_norm(rows)) ** 2
            if own:
                own[i].copy_(rows)
            elif own is None:
                self._stream.gather(shard.shape, rows, None if buffers is None else buffers[i])
        # Also: no rank returns before all have written.
        total = self._stream.sum([square])[0] / self._stream.layout.replicas  # each row once
        if not math.isfinite(total):
            raise _local("the pseudo-gradient holds NaN or Inf")
        return math.sqrt(total)

    @torch.no_grad()
    def prepare(self, averaged: Sequence[Tensor] | None) -> None:
        """Compute new weights and momentum from rank 0's average, without using them yet.

        Collective. Nothing that training uses has changed until :meth:`commit`, also after an
        error.

        Args:
            averaged: Rank 0's, float32 on the CPU, one of each parameter's shape; None on other
                ranks.

        Raises:
            AllReduceError: On all ranks: SCHEMA when the tensors do not match, NOT_FINITE, LOCAL
                for anything else.
        """
        self._prepared = None
        problem = self._buffer_problem(averaged)
        self._stream.raise_if_any(problem, partial(AllReduceError, AllReduceFault.SCHEMA))
        if self.epoch_start is None:
            raise _local("begin_epoch was not called")
        average = self._own_rows(averaged)
        if average is None:
            average = self._scatter(averaged, borrow=True)
        elif self._stream.layout.replicas > 1:
            average = average or [shard.empty_rows() for shard in self._shards]
            for rows in average:
                self._stream.replicate(rows)
        # One NaN or Inf anywhere makes their sum NaN or Inf, on every rank.
        norms = [float(torch.linalg.vector_norm(a)) for a in average]
        if not math.isfinite(self._stream.sum([sum(norms)])[0]):
            raise AllReduceError(AllReduceFault.NOT_FINITE)
        before: Sequence[Tensor | None] = self.momentum or [None] * len(average)
        inputs = list(zip(self.epoch_start, average, before, strict=True))
        step = self.rule.step
        # It takes two new tensors for each parameter, so memory may run out on a single rank.
        new = self._stream.run_on_all(
            lambda: [step(*each, lr=self.learning_rate, mu=self.mu) for each in inputs], _local
        )
        weights, momentum = [each for each, _ in new], [each for _, each in new]
        present, written = weights, self._written
        self._written = None
        if written is not None:
            # What was trained since, in the memory of what was written: whatever the vote, it is
            # of no further use.
            now = list(zip(written, self._shards, weights, strict=True))
            present = self._stream.run_on_all(
                lambda: [w.neg_().add_(on_host(s.local)).add_(outer) for w, s, outer in now], _local
            )
        self._prepared = Prepared(weights, momentum, present, self._new_epoch_id())

    @torch.no_grad()
    def commit(self) -> None:
        """Replace weights and momentum by those that :meth:`prepare` computed.

        Local to the rank; it cannot fail half-way. The caller drops gathered weights and gradients
        and saves a checkpoint: across a SIGKILL the checkpoint decides.
        """
        prepared = self._prepared
        if prepared is None:
            raise RuntimeError("commit_outer_step without a prepared outer step")
        # No collective from here on: the vote is over, and a rank that failed now could not be
        # called back.
        for shard, new in zip(self._shards, prepared.present, strict=True):
            shard.local.copy_(new)
        self.epoch_start = prepared.weights
        self.momentum = prepared.momentum
        self.epoch_id = prepared.epoch_id
        self._prepared = None

    def roll_back(self) -> None:
        """Discard the weights and the momentum that :meth:`prepare` computed."""
        self._prepared = self._written = None

    def _new_epoch_id(self) -> str:
        # Random, not the step's number: after a roll-back the same number has other weights, and a
        # checkpoint must not refer to the wrong ones.
        return self._stream.from_rank_0(secrets.token_hex(8))

    def _scatter(self, source: Sequence[Tensor] | None, *, borrow: bool = False) -> list[Tensor]:
        """Scatter rank 0's ``source``; with ``borrow`` rank 0's rows are views of it."""
        result = []
        for i, shard in enumerate(self._shards):
            whole = None if source is None else source[i]
            if whole is not None and borrow:
                self._stream.scatter(shard.shape, whole, None)
                rows = whole[shard.start : shard.stop]
            else:
                rows = shard.empty_rows()
                self._stream.scatter(shard.shape, whole, rows)
            result.append(rows)
        return result

    def _buffer_problem(self, tensors: Sequence[Tensor] | None) -> str | None:
        if self._stream.rank != 0:
            return None
        if tensors is None or len(tensors) != len(self._shards):
            count = "no" if tensors is None else str(len(tensors))
            return f"{count} tensors were given, the model has {len(self._shards)}"
        for shard, tensor in zip(self._shards, tensors, strict=True):
            if tuple(tensor.shape) != shard.shape or tensor.dtype != torch.float32:
                return (
                    f"{shard.name} is {shard.shape} float32, the tensor given is "
                    f"{tuple(tensor.shape)} {tensor.dtype}"
                )
        return None


# --- the global state -----------------------------------------------------------------------------


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a fetched state, with its extras. Raises ValueError."""
    return parse_config((folder / keys.CONFIG).read_bytes())[0]


def model_bytes(schema: Schema) -> int:
    """Return the most bytes of a float32 ``model.safetensors`` (it may hold tied weights twice)."""
    tensors = sum(4 * math.prod(shape) + 256 + len(name) for name, shape in schema)
    return 2 * tensors + 1024 * 1024


def load_weights(path: Path, schema: Schema) -> list[Tensor]:
    """Load float32 tensors in the order of ``schema``; names outside it are left out.

    Raises ValueError for a missing name, another shape, NaN or Inf, or an unreadable file.
    """
    try:
        with safe_open(path, "pt") as file:  # memory-mapped, one tensor after another
            missing = sorted({name for name, _ in schema} - set(file.keys()))
            if missing:
                raise ValueError(f"{path.name} lacks {missing[0]} and {len(missing) - 1} more")
            return [
                checked_tensor(path, name, file.get_tensor(name), shape) for name, shape in schema
            ]
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001 - foreign bytes: of a type torch lacks, for one
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path.name} cannot be read: {why:.200}") from None


def checked_tensor(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a file as float32. Raises ValueError where it is not as it should be."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{path.name}: {name} has shape {tuple(tensor.shape)}, not {shape}")
    floats = tensor.to(torch.float32)  # a finite float64 may be Inf then
    if not tensor.is_floating_point() or not bool(torch.isfinite(floats).all()):
        raise ValueError(f"{path.name}: {name} is not finite floating-point numbers")
    return floats


@dataclass(frozen=True)
class GlobalState:
    """The network's model between two rounds.

    Tensors are float32 on the CPU, in schema order, and never changed in place.
    ``total_inner_steps``: of a miner that trained from the beginning; ``total_tokens``: of all
    miners. 0 too where they are unknown.
    """

    model_config: Mapping[str, Any]
    schema: Schema
    outer_step: int
    weights: list[Tensor]
    momentum: list[Tensor] | None
    learning_rate: float
    mu: float
    last_allreduce_block: int
    total_inner_steps: int = 0
    total_tokens: int = 0

    @classmethod
    def read(cls, folder: Path, outer_step: int) -> GlobalState:
        """Read the global state from a folder that ``BucketReader.fetch`` returned.

        Raises ValueError for files that do not fit the model of their ``config.json``.
        """
        config = read_model_config(folder)
        schema = parameter_schema(config)
        outer = load_outer_optimizer(folder / keys.OUTER_OPTIMIZER, schema)
        return cls(
            model_config=without_extras(config),
            schema=schema,
            outer_step=outer_step,
            weights=load_weights(folder / keys.MODEL, schema),
            # Copies: the tensors read are a file's, which may be written again.
            momentum=None if outer.momentum is None else [t.clone() for t in outer.momentum],
            learning_rate=outer.learning_rate,
            mu=outer.mu,
            last_allreduce_block=config.get("last_allreduce_block") or 0,
            total_inner_steps=config.get("total_inner_steps") or 0,
            total_tokens=config.get("total_tokens") or 0,
        )

    def after(
        self,
        weights: list[Tensor],
        momentum: list[Tensor],
        *,
        block: int,
        inner_steps: int = 0,
        tokens: int = 0,
    ) -> GlobalState:
        """Return the state that follows by one outer step, of this many inner steps and tokens."""
        return replace(
            self,
            outer_step=self.outer_step + 1,
            weights=weights,
            momentum=momentum,
            last_allreduce_block=block,
            total_inner_steps=self.total_inner_steps + inner_steps,
            total_tokens=self.total_tokens + tokens,
        )
