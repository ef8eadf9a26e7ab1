"""AdamW over this rank's row blocks, its state on the device or in host memory, and its schedule.

The learning rate rises linearly during the warm-up and then follows a cosine; shape and constants
are the public network's (protocol page, section 5).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .collectives import ParameterShard

LOWEST = 0.1  # of the peak, after the warm-up
#: Of the total steps; from here on the operator is warned.
NEAR_THE_END = 0.9


@dataclass
class CosineSchedule:
    """Maps the number of finished inner steps, never reset, to a learning rate.

    The first step trains at ``peak / warmup_steps``: unlike the common form, which spends its
    first step at a learning rate of zero.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    factor: float = 1.0  # of the peak; lowered for ``slow_steps`` after a roll-back
    slow_until: int = 0  # inner steps in total at which ``factor`` returns to 1

    def __post_init__(self) -> None:
        if self.peak <= 0:
            raise ValueError(
                f"training.learning_rate {self.peak} is not above 0, so nothing would be learned: "
                "give a positive rate such as 2.5e-4"
            )
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(
                f"training.warmup_steps {self.warmup_steps} is not below training.total_steps "
                f"{self.total_steps}, so the learning rate would never fall: correct one of them"
            )

    def rate(self, finished_steps: int) -> float:
        """Return the learning rate of the step after ``finished_steps`` steps."""
        step = finished_steps + 1
        if step <= self.warmup_steps:
            shape = step / self.warmup_steps
        else:
            progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
            shape = max(LOWEST, 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))
        slow = self.factor if finished_steps < self.slow_until else 1.0
        return self.peak * shape * slow

    def nears_its_end(self, finished_steps: int) -> bool:
        """Return True from ``NEAR_THE_END`` of the total steps on, where the rate is the lowest."""
        return finished_steps >= NEAR_THE_END * self.total_steps

    def slow_down(self, finished_steps: int, *, steps: int) -> None:
        """Halve the rate for the next ``steps`` steps. A second call compounds."""
        still_slow = finished_steps < self.slow_until
        self.factor = 0.5 * (self.factor if still_slow else 1.0)
        self.slow_until = finished_steps + steps

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "slow_until": self.slow_until}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.factor = float(state["factor"])
        self.slow_until = int(state["slow_until"])

    def published_state(self, finished_steps: int) -> dict[str, Any]:
        """Return the content of ``LambdaLR.state_dict()`` (protocol page, section 3)."""
        return {
            "base_lrs": [self.peak],
            "last_epoch": finished_steps,
            "_step_count": finished_steps + 1,
            "_get_lr_called_within_step": False,
            "_last_lr": [self.rate(finished_steps)],
            "lr_lambdas": [None],
        }


EPS = 1e-8  # of AdamW
OFFLOAD_BUCKET = 1 << 26  # elements whose state is on the device at once when offloaded (512 MiB)


class _Lane:
    """A stream whose work is in numbered pieces, for which other lanes may wait.

    Without a GPU (``device`` None) everything is done in order anyway.
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
        """Queue what runs inside as ``piece``, to begin after piece ``its`` of ``other``."""
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
        """Make the host wait for everything queued."""
        self._done.clear()
        if self.stream is not None:
            self.stream.synchronize()


class InnerOptimizer:
    """Updates the shards in place; bits do not depend on ``offload``.

    Its state can be copied, offloaded and checkpointed as row blocks. With ``offload`` the moments
    live in (pinned) host memory and visit the device bucket by bucket, in two places that are used
    in turn: while one bucket is computed the next one comes and the one before leaves, on streams
    of their own.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        offload: bool,
    ) -> None:
        self.betas, self.weight_decay, self.offload = betas, weight_decay, offload
        device = shards[0].local.device
        self._device = device
        # Plain tensors over the shards' memory, not DTensors: those would be dispatched one by one
        # in each step.
        self._params = [nn.Parameter(shard.local) for shard in shards]
        # Only a copy from or to pinned memory lets the host go on.
        pinned = offload and device.type == "cuda"
        home = torch.device("cpu") if offload else device
        # Of its own: to read AdamW's count for a report would wait for the device.
        self.step_count = 0
        self.exp_avg = [torch.zeros(p.shape, device=home, pin_memory=pinned) for p in self._params]
        self.exp_avg_sq = [torch.zeros_like(t, pin_memory=pinned) for t in self.exp_avg]
        self._buckets = self._make_buckets()
        self._coming = _Lane(device if pinned else None)
        self._leaving = _Lane(device if pinned else None)
        self._adamw = [
            torch.optim.AdamW(
                [self._params[i] for i in bucket],
                betas=betas,
                eps=EPS,
                weight_decay=weight_decay,
                fused=True,
            )
            for bucket in self._buckets
        ]
        # One for each parameter and on its device, as fused AdamW wants them.
        self._steps = [torch.zeros((), device=device) for _ in self._params]
        self._places: list[Tensor] = []
        if offload:
            self._make_places()
        else:
            for i in (i for bucket in self._buckets for i in bucket):
                self._attach(0, i, self.exp_avg[i], self.exp_avg_sq[i])

    def _make_places(self) -> None:
        """Allocate both moments of the largest bucket, twice; buckets take turns."""
        sizes = [2 * sum(self._params[i].numel() for i in bucket) for bucket in self._buckets]
        count = min(2, len(sizes))
        self._places = [torch.empty(max(sizes), device=self._device) for _ in range(count)]
        for number, bucket in enumerate(self._buckets):
            start = 0
            for i in bucket:
                size, shape = self._params[i].numel(), self._params[i].shape
                place = self._places[number % 2][start : start + 2 * size]
                self._attach(number, i, place[:size].view(shape), place[size:].view(shape))
                start += 2 * size

    @property
    def line(self) -> str:
        """The optimizer and the place of its state, for the log."""
        where = "host memory, copied beside the arithmetic" if self.offload else "device memory"
        return f"✓ Using fused AdamW, its state in {where}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.step_count,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Into the tensors that there are: AdamW's own state and pinned memory refer to them.
        for kind, moments in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            for mine, theirs in zip(moments, state[kind], strict=True):
                mine.copy_(theirs)
        self.step_count = int(state["steps"])
        for step in self._steps:
            step.fill_(self.step_count)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all steps."""
        self.step_count = 0
        for moment in (*self.exp_avg, *self.exp_avg_sq, *self._steps):
            moment.zero_()

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], learning_rate: float) -> None:
        """Take one AdamW step; ``gradients`` are row blocks like the shards."""
        for param, gradient in zip(self._params, gradients, strict=True):
            param.grad = gradient
        # Set each time: torch's own schedulers know nothing of steps that were skipped.
        for adamw in self._adamw:
            for group in adamw.param_groups:
                group["lr"] = learning_rate
        if self.offload:
            self._step_offloaded()
        else:
            for adamw in self._adamw:
                adamw.step()
        self.step_count += 1
        # A reference kept here would hold the gradients' memory through the next forward.
        for param in self._params:
            param.grad = None

    def _make_buckets(self) -> list[list[int]]:
        buckets: list[list[int]] = [[]]
        size = 0
        for i, param in enumerate(self._params):
            if param.numel() == 0:
                continue  # fewer rows than ranks: this rank has none of it
            if self.offload and buckets[-1] and size + param.numel() > OFFLOAD_BUCKET:
                buckets.append([])
                size = 0
            buckets[-1].append(i)
            size += param.numel()
        return [b for b in buckets if b]

    def _attach(self, bucket: int, i: int, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        self._adamw[bucket].state[self._params[i]] = {
            "step": self._steps[i],
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
        }

    def _moments(self, bucket: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each moment of a bucket: (in host memory, in the bucket's place on the device)."""
        for i in self._buckets[bucket]:
            state = self._adamw[bucket].state[self._params[i]]
            yield self.exp_avg[i], state["exp_avg"]
            yield self.exp_avg_sq[i], state["exp_avg_sq"]

    def _fetch(self, bucket: int) -> None:
        # There are two places: this one is free once the bucket before the last has left it.
        with self._coming.after(self._leaving, bucket - 2, bucket):
            for host, place in self._moments(bucket):
                place.copy_(host, non_blocking=True)

    def _step_offloaded(self) -> None:
        last = len(self._buckets) - 1
        computing = _Lane.current(self._device if self._coming.stream is not None else None)
        self._coming.wait_for(computing)  # what it did with the places' memory before
        if self._buckets:
            self._fetch(0)
        for bucket in range(last + 1):
            if bucket < last:
                self._fetch(bucket + 1)
            # On the stream of training: the next forward then needs no event to see the new
            # weights.
            with computing.after(self._coming, bucket, bucket):
                self._adamw[bucket].step()
            with self._leaving.after(computing, bucket, bucket):
                for host, place in self._moments(bucket):
                    host.copy_(place, non_blocking=True)
        # The host copies must be whole before a snapshot or the next step reads them.
        self._leaving.finish()
