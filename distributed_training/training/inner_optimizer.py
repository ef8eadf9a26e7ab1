"""Step the inner optimizer over this rank's rows, and schedule its learning rate.

Any ``torch.optim.Optimizer`` will do. The network's file names one, and the factory registered for
it in :data:`OPTIMIZERS` creates it. A step on a small parameter shows what state it keeps
(:func:`find_state`): counts, and tensors of the parameter's shape, which are sharded, copied and
offloaded as row blocks. Copies, checkpoints and the memory plan need to know nothing else about it.
A factory gets the matrices of decoder layers as :class:`~.muon.MatrixRows`, and may treat them in a
special way.

The learning rate rises linearly during the warm-up and then follows a cosine, with the public
network's shape and constants (protocol page, section 3). Alternatively it stays constant until the
founder lets it decay.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from distributed_training.common.kinds import Kinds
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError, choose_kind

from .collectives import ParameterShard
from .muon import MatrixRows, Muon

LOWEST = 0.1  # the lowest rate after the warm-up, as a fraction of the peak rate
_NEAR_THE_END = 0.9  # fraction of the total steps after which the rate surely is at its lowest


@dataclass
class Schedule:
    """Maps the number of finished inner steps, never reset, to a learning rate.

    The first step uses ``peak / warmup_steps``, unlike the common form, whose first step has a
    learning rate of zero. With ``constant`` the rate stays at its peak until ``decay_from``, and
    then falls to zero over ``decay_steps``.
    """

    peak: float
    warmup_steps: int
    total_steps: int  # where the cosine ends
    constant: bool = False
    decay_from: int | None = None
    decay_steps: int | None = None
    factor: float = 1.0  # multiplies the rate; lowered for some steps after a roll-back
    slow_until: int = 0  # total inner steps at which ``factor`` returns to 1

    @classmethod
    def of(cls, settings: TrainingSettings) -> Schedule:
        """Return a network's schedule, already checked by ``config.model.check_schedule``."""
        return cls(
            settings.learning_rate,
            settings.warmup_steps,
            settings.total_steps,
            settings.schedule == "constant",
            settings.decay_from,
            settings.decay_steps,
        )

    def rate(self, finished_steps: int) -> float:
        """Return the learning rate of the step after ``finished_steps`` steps."""
        step, shape = finished_steps + 1, 1.0
        if step <= self.warmup_steps:
            shape = step / self.warmup_steps
        elif not self.constant:
            progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
            shape = max(LOWEST, 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))
        elif self.decay_from is not None and self.decay_steps is not None:
            # This beat a straight line wherever the two were compared (Haegele et al. 2024, arXiv
            # 2405.18392, section 3).
            progress = (step - self.decay_from) / self.decay_steps
            shape = 1.0 - math.sqrt(min(1.0, max(0.0, progress)))
        slow = self.factor if finished_steps < self.slow_until else 1.0
        return self.peak * shape * slow

    @property
    def lowest_from(self) -> float | None:
        """Inner steps after which the rate no longer falls; None if it never falls."""
        if not self.constant:
            return _NEAR_THE_END * self.total_steps
        return None if self.decay_steps is None else (self.decay_from or 0) + self.decay_steps

    def slow_down(self, finished_steps: int, *, steps: int) -> None:
        """Halve the rate for the next ``steps`` steps. Overlapping calls compound."""
        still_slow = finished_steps < self.slow_until
        self.factor = 0.5 * (self.factor if still_slow else 1.0)
        self.slow_until = finished_steps + steps

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "slow_until": self.slow_until}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.factor = float(state["factor"])
        self.slow_until = int(state["slow_until"])


#: Creates an optimizer for some parameters by a network's rules. Each step sets its learning rate.
Factory = Callable[[list[nn.Parameter], TrainingSettings], torch.optim.Optimizer]
OPTIMIZERS: Kinds[Factory] = Kinds("inner optimizer")


def adamw(parameters: list[nn.Parameter], settings: TrainingSettings) -> torch.optim.Optimizer:
    """Create AdamW with a network's rules."""
    return torch.optim.AdamW(
        parameters,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=1e-8,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def muon(parameters: list[nn.Parameter], settings: TrainingSettings) -> torch.optim.Optimizer:
    """Create Muon for matrices of decoder layers, and AdamW for all other parameters."""
    matrices = [each for each in parameters if isinstance(each, MatrixRows)]
    return Muon(matrices, settings.weight_decay) if matrices else adamw(parameters, settings)


OPTIMIZERS.register("adamw", adamw)
OPTIMIZERS.register("muon", muon)


@dataclass(frozen=True)
class StateNames:
    """The state that an optimizer keeps for a parameter: tensors of its shape, and ``step``.

    ``rows``: the names of these tensors. ``step``: the zero from which its steps are counted, which
    is a tensor or a number; None if it keeps no count.
    """

    rows: tuple[str, ...]
    step: Any


def find_state(settings: TrainingSettings, *, matrix: bool = False) -> StateNames:
    """Find the state that the network's optimizer keeps for a parameter, by stepping a small one.

    ``matrix``: whether the parameter is a matrix of a decoder layer. Raises ConfigError for a name
    that is not registered, and for an optimizer whose steps would depend on the number of ranks or
    whose state could not be restored from a checkpoint.
    """
    factory = choose_kind(OPTIMIZERS, settings.optimizer, key="training.optimizer")
    gradient = torch.arange(6.0).view(2, 3) - 2

    def step(begun: Mapping[str, Any], rows: slice) -> tuple[Tensor, dict[str, Any], bool]:
        """Return the ``rows`` after a step, their state, and whether the group has changed."""
        values = torch.ones(2, 3)[rows]
        parameter = MatrixRows.of(values, values.shape) if matrix else nn.Parameter(values)
        optimizer = factory([parameter], settings)
        optimizer.state[parameter] = copy.deepcopy(dict(begun))  # the step changes it in place
        parameter.grad = gradient[rows].clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.1  # training sets the rate; at 0 this step would move nothing
        before = repr(optimizer.param_groups[0] | {"params": ()})
        optimizer.step()
        changed = before != repr(optimizer.param_groups[0] | {"params": ()})
        kept = {name: v for name, v in optimizer.state[parameter].items() if v is not None}
        return parameter.detach(), kept, changed

    after, found, changed = step({}, slice(None))
    rows = tuple(n for n, v in found.items() if isinstance(v, Tensor) and v.shape == after.shape)
    of_wrong_type = [name for name in rows if found[name].dtype != torch.float32]
    others = sorted(found.keys() - {*rows, "step"})
    problem = ""
    if changed:
        problem = "changes its parameter group in a step"
    elif of_wrong_type:
        problem = f"keeps {of_wrong_type[0]} in {found[of_wrong_type[0]].dtype}, not float32"
    elif others:
        problem = f"keeps {others[0]}, which is neither of its parameter's shape nor its step"
    else:
        zeros = {
            n: torch.zeros_like(v) if isinstance(v, Tensor) else type(v)() for n, v in found.items()
        }
        same, again, _ = step(zeros, slice(None))
        if not torch.equal(after, same) or repr(found) != repr(again):
            problem = "keeps state that does not start at zero"
        # Do not check this for matrices: an optimizer that treats MatrixRows specially must handle
        # the rows on other ranks itself.
        elif not matrix and not torch.allclose(
            after, torch.cat([step({}, slice(i, i + 1))[0] for i in (0, 1)])
        ):
            problem = "steps a row depending on other rows, which other ranks may have"
    if problem:
        raise ConfigError(
            f"the inner optimizer {settings.optimizer!r} {problem}, so it cannot be kept in rows: "
            "use another optimizer, or change the state that it keeps"
        )
    return StateNames(rows, zeros.get("step"))


def moments_of(settings: TrainingSettings) -> tuple[int, int]:
    """Count the tensors kept for a parameter, and those for a matrix of a decoder layer."""
    plain, matrix = (len(find_state(settings, matrix=matrix).rows) for matrix in (False, True))
    return plain, matrix


def checkpoint_key(name: str) -> str:
    """Return the checkpoint key for the rows that the optimizer calls ``name``."""
    # AdamW's rows keep the names that version 0.2.0 gave them. The names of other optimizers get a
    # prefix, since they may clash with those of the outer step, such as "momentum".
    return name if name in ("exp_avg", "exp_avg_sq") else f"inner_{name}"


def may_lack_rows(key: str) -> bool:
    """Return whether some parameters may have no rows under ``key``; see :func:`checkpoint_key`."""
    return key.startswith(("exp_avg", "inner_"))


OFFLOAD_BUCKET = 1 << 26  # elements per bucket whose offloaded state visits the device together


class _Lane:
    """A stream whose work is divided into numbered pieces that other lanes can wait for.

    Without a GPU (``device`` None) everything runs in order anyway.
    """

    def __init__(
        self, device: torch.device | None, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.stream = stream
        if device is not None and stream is None:
            self.stream = torch.cuda.Stream(device)
        self._done: dict[int, torch.cuda.Event] = {}

    @classmethod
    def current(cls, device: torch.device | None) -> _Lane:
        return cls(device, None if device is None else torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def after(self, other: _Lane, its: int, piece: int) -> Iterator[None]:
        """Queue the work inside the block as ``piece``, to run after piece ``its`` of ``other``."""
        if self.stream is None:
            yield
            return
        if its in other._done:
            self.stream.wait_event(other._done[its])
        with torch.cuda.stream(self.stream):
            yield
        self._done[piece] = self.stream.record_event()

    def wait_for(self, other: _Lane) -> None:
        if self.stream is not None and other.stream is not None:
            self.stream.wait_stream(other.stream)

    def finish(self) -> None:
        """Make the host wait for everything that is queued."""
        self._done.clear()
        if self.stream is not None:
            self.stream.synchronize()


class InnerOptimizer:
    """Updates the shards in place; the result is bit-identical with and without ``offload``.

    ``embeddings``: names of the model's embeddings; ``matrices``: names of its decoder layers'
    matrices. ``state``: by name, this rank's rows for every parameter, with zero rows where nothing
    is kept. With ``offload`` the state lives in (pinned) host memory and visits the device bucket
    by bucket, alternating between two places. While one bucket is being computed, the next one
    arrives and the previous one leaves, each on its own stream.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        settings: TrainingSettings,
        *,
        offload: bool,
        embeddings: Collection[str] = (),
        matrices: Collection[str] = (),
    ) -> None:
        self.offload = offload
        #: Names of the parameters that ``weight_decay_on`` excludes from weight decay. A row of an
        #: embedding rarely gets a gradient, but decay would shrink it at each step (OLMo 2, arXiv
        #: 2501.00656).
        self.undecayed = frozenset(
            shard.name
            for shard in shards
            if settings.weight_decay_on == "matrices"
            and (len(shard.shape) < 2 or shard.name in embeddings)
        )
        device = shards[0].local.device
        self._device = device
        # Use plain tensors that share the shards' memory: with DTensors each step would dispatch
        # them one by one.
        self._params = [
            MatrixRows.of(shard.local, shard.shape, shard.mesh)
            if shard.name in matrices
            else nn.Parameter(shard.local)
            for shard in shards
        ]
        plain, of_matrix = (find_state(settings, matrix=matrix) for matrix in (False, True))
        #: The state that is kept for each parameter.
        self.keeps = [
            of_matrix if isinstance(param, MatrixRows) else plain for param in self._params
        ]
        # Whether matrices have their own optimizer.
        self._apart = any(isinstance(p, MatrixRows) for p in self._params) and (
            plain.rows != of_matrix.rows
        )
        # The host can continue during a copy only if the host memory is pinned.
        pinned = offload and device.type == "cuda"
        home = torch.device("cpu") if offload else device
        # Count here, since reading the optimizer's own ``step`` would wait for the device.
        self.step_count = 0
        self.state = {
            name: [
                torch.zeros(
                    p.shape if name in keeps.rows else (0, *p.shape[1:]),
                    device=home,
                    pin_memory=pinned,
                )
                for p, keeps in zip(self._params, self.keeps, strict=True)
            ]
            for name in dict.fromkeys((*plain.rows, *(of_matrix.rows if self._apart else ())))
        }
        self._buckets = self._make_buckets(shards)
        self._coming = _Lane(device if pinned else None)
        self._leaving = _Lane(device if pinned else None)
        factory, rest = OPTIMIZERS[settings.optimizer], replace(settings, weight_decay=0.0)
        self._optimizers = [
            factory(
                [self._params[i] for i in bucket],
                rest if shards[bucket[0]].name in self.undecayed else settings,
            )
            for bucket in self._buckets
        ]
        self._place_state(device)

    def _place_state(self, device: torch.device) -> None:
        """Let the optimizers work on :attr:`state`, or on its temporary places on the device."""
        # If the state is offloaded, allocate two places of the largest bucket's size, which the
        # buckets use in turn.
        sizes = [
            sum(self._params[i].numel() * len(self.keeps[i].rows) for i in bucket)
            for bucket in self._buckets
        ]
        count = min(2, len(sizes)) if self.offload else 0
        places = [torch.empty(max(sizes), device=device) for _ in range(count)]
        for number, (bucket, optimizer) in enumerate(
            zip(self._buckets, self._optimizers, strict=True)
        ):
            group = optimizer.param_groups[0]
            # A fused kernel reads the step count on the device, others read it on the host.
            where = device if group.get("fused") or group.get("capturable") else "cpu"
            start = 0
            for i in bucket:
                rows = {name: self.state[name][i] for name in self.keeps[i].rows}
                if self.offload:
                    for name, kept in rows.items():
                        room = places[number % 2][start : start + kept.numel()]
                        rows[name], start = room.view(kept.shape), start + kept.numel()
                state: dict[str, Any] = dict(rows)
                if (zero := self.keeps[i].step) is not None:
                    tensor = isinstance(zero, Tensor)
                    state["step"] = zero.to(where, copy=True) if tensor else zero
                optimizer.state[self._params[i]] = state

    def _make_buckets(self, shards: Sequence[ParameterShard]) -> list[list[int]]:
        """Divide the parameters into groups, each of which has one optimizer.

        A group has all parameters with the same decay. If the state is offloaded, its size is
        limited as well.
        """
        buckets: list[list[int]] = []
        for decayed, matrix in itertools.product((True, False), (False, True)):
            buckets.append([])
            size = 0
            for i, (shard, param) in enumerate(zip(shards, self._params, strict=True)):
                of_matrix = self._apart and isinstance(param, MatrixRows)
                if (shard.name not in self.undecayed) is not decayed or of_matrix is not matrix:
                    continue
                values = param.numel()
                if of_matrix:
                    # The size must be the same on all ranks: they step this parameter together,
                    # even those that have no rows of it.
                    values = math.prod(shard.shape) // (shard.mesh.size() if shard.mesh else 1)
                elif values == 0:
                    continue  # there are fewer rows than ranks, and this rank has none
                if self.offload and buckets[-1] and size + values > OFFLOAD_BUCKET:
                    buckets.append([])
                    size = 0
                buckets[-1].append(i)
                size += values
        return [bucket for bucket in buckets if bucket]

    @property
    def line(self) -> str:
        """The log line that names this rank's optimizers and says where their state is."""
        where = "host memory, copied during the arithmetic" if self.offload else "device memory"
        names = dict.fromkeys(
            ("fused " if each.param_groups[0].get("fused") else "") + type(each).__name__
            for each in self._optimizers
        )
        return f"✓ Using {' and '.join(names)}, with the state in {where}"

    def state_dict(self) -> dict[str, Any]:
        rows = {checkpoint_key(name): rows for name, rows in self.state.items()}
        return {"steps": self.step_count, **rows}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Copy into the existing tensors, which the optimizers refer to and which may be pinned. If
        # state is missing for any parameter, the checkpoint is from another optimizer, and this one
        # starts without state.
        new = any(
            state[key] is None or [len(mine) for mine in kept] != [len(rows) for rows in state[key]]
            for name, kept in self.state.items()
            for key in (checkpoint_key(name),)
        )
        self.reset()
        if new:
            return
        for name, kept in self.state.items():
            for mine, theirs in zip(kept, state[checkpoint_key(name)], strict=True):
                mine.copy_(theirs)
        self._count_from(int(state["steps"]))

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all steps."""
        for kept in self.state.values():
            for rows in kept:
                rows.zero_()
        self._count_from(0)

    def _count_from(self, steps: int) -> None:
        self.step_count = steps
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                if isinstance(state.get("step"), Tensor):
                    state["step"].fill_(steps)
                elif "step" in state:
                    state["step"] = type(state["step"])(steps)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], learning_rate: float) -> None:
        """Take one step; ``gradients`` are row blocks, like the shards."""
        for param, gradient in zip(self._params, gradients, strict=True):
            param.grad = gradient
        # Set the rate each time, since torch's schedulers do not know which steps were skipped.
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        if not self.offload:
            for optimizer in self._optimizers:
                optimizer.step()
        else:
            last = len(self._buckets) - 1
            computing = _Lane.current(self._device if self._coming.stream is not None else None)
            # The transfer must not overwrite data that the previous step is still reading.
            self._coming.wait_for(computing)
            if self._buckets:
                self._fetch(0)
            for bucket in range(last + 1):
                if bucket < last:
                    self._fetch(bucket + 1)
                # Step on the training stream, so that the next forward sees the new weights without
                # an event.
                with computing.after(self._coming, bucket, bucket):
                    self._optimizers[bucket].step()
                with self._leaving.after(computing, bucket, bucket):
                    for host, place in self._moments(bucket):
                        host.copy_(place, non_blocking=True)
            # The host's state must be complete before a boundary copy or the next step reads it.
            self._leaving.finish()
        self.step_count += 1
        # Keeping a reference here would hold the gradients' memory through the next forward.
        for param in self._params:
            param.grad = None

    def _moments(self, bucket: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of a bucket's rows in host memory and their place on the device."""
        for i in self._buckets[bucket]:
            state = self._optimizers[bucket].state[self._params[i]]
            for name in self.keeps[i].rows:
                yield self.state[name][i], state[name]

    def _fetch(self, bucket: int) -> None:
        # The buckets take turns in two places, so this place is free once the bucket that used it
        # before has left.
        with self._coming.after(self._leaving, bucket - 2, bucket):
            for host, place in self._moments(bucket):
                place.copy_(host, non_blocking=True)
