"""AdamW over this rank's row blocks, with its state on the device or in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .shards import ParameterShard

OFFLOAD_BUCKET = 1 << 26  # elements whose state is on the device at once when offloaded (512 MiB)


class InnerOptimizer:
    """Updates the shards in place; bits do not depend on ``offload``.

    It sees plain tensors instead of DTensors: no dispatch per parameter and step, and its state can
    be copied, offloaded and checkpointed as row blocks. With ``offload`` the moments live in
    (pinned) host memory and visit the device bucket by bucket; the next bucket's copy runs beside
    the present one's arithmetic.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        offload: bool,
        eps: float = 1e-8,
    ) -> None:
        self.betas, self.weight_decay, self.eps, self.offload = betas, weight_decay, eps, offload
        self._shards = list(shards)
        device = self._shards[0].local.device
        self._device = device
        self._params = [nn.Parameter(s.local) for s in self._shards]
        pinned = offload and device.type == "cuda"
        home = torch.device("cpu") if offload else device
        self._step = torch.zeros((), dtype=torch.float32)
        self.exp_avg = [torch.zeros(p.shape, device=home, pin_memory=pinned) for p in self._params]
        self.exp_avg_sq = [torch.zeros_like(t, pin_memory=pinned) for t in self.exp_avg]
        self._buckets = self._make_buckets()
        self._copies = torch.cuda.Stream(device) if pinned else None
        self._adamw = [
            torch.optim.AdamW(
                [self._params[i] for i in bucket],
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                fused=True,
            )
            for bucket in self._buckets
        ]
        self._steps = [torch.zeros((), device=device) for _ in self._params]
        if not offload:
            for i in (i for bucket in self._buckets for i in bucket):
                self._attach(0, i, self.exp_avg[i], self.exp_avg_sq[i])

    @property
    def line(self) -> str:
        """What it is, for the log."""
        where = "host memory, copied beside the arithmetic" if self.offload else "device memory"
        return f"✓ Using fused AdamW, its state in {where}"

    @property
    def step_count(self) -> int:
        return int(self._step.item())

    def load(self, exp_avg: Sequence[Tensor], exp_avg_sq: Sequence[Tensor], steps: int) -> None:
        for mine, theirs in zip(self.exp_avg, exp_avg, strict=True):
            mine.copy_(theirs)
        for mine, theirs in zip(self.exp_avg_sq, exp_avg_sq, strict=True):
            mine.copy_(theirs)
        self._step.fill_(steps)
        for step in self._steps:
            step.fill_(steps)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], learning_rate: float) -> None:
        """One AdamW step; ``gradients`` are row blocks like the shards."""
        for param, gradient in zip(self._params, gradients, strict=True):
            param.grad = gradient
        for adamw in self._adamw:
            for group in adamw.param_groups:
                group["lr"] = learning_rate
        if self.offload:
            self._step_offloaded()
        else:
            for adamw in self._adamw:
                adamw.step()
        self._step += 1
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

    def _fetch(self, bucket: int) -> list[tuple[Tensor, Tensor]]:
        with torch.cuda.stream(self._copies):  # a no-op when there is no such stream
            return [
                (
                    self.exp_avg[i].to(self._device, non_blocking=True, copy=True),
                    self.exp_avg_sq[i].to(self._device, non_blocking=True, copy=True),
                )
                for i in self._buckets[bucket]
            ]

    def _step_offloaded(self) -> None:
        compute = torch.cuda.current_stream(self._device) if self._copies is not None else None
        if self._copies is not None and compute is not None:
            self._copies.wait_stream(compute)
        moments = self._fetch(0) if self._buckets else []
        for bucket, indices in enumerate(self._buckets):
            if compute is not None:
                assert self._copies is not None
                compute.wait_stream(self._copies)
            following = self._fetch(bucket + 1) if bucket + 1 < len(self._buckets) else []
            for i, (exp_avg, exp_avg_sq) in zip(indices, moments, strict=True):
                if compute is not None:
                    exp_avg.record_stream(compute)
                    exp_avg_sq.record_stream(compute)
                self._attach(bucket, i, exp_avg, exp_avg_sq)
            self._adamw[bucket].step()
            if self._copies is not None and compute is not None:
                self._copies.wait_stream(compute)
            with torch.cuda.stream(self._copies):
                for i, (exp_avg, exp_avg_sq) in zip(indices, moments, strict=True):
                    self.exp_avg[i].copy_(exp_avg, non_blocking=True)
                    self.exp_avg_sq[i].copy_(exp_avg_sq, non_blocking=True)
            self._adamw[bucket].state.clear()
            moments = following
        if self._copies is not None:
            # The host copies must be whole before a snapshot or the next step reads them.
            self._copies.synchronize()

    def published_group(self, names: Sequence[str], learning_rate: float, peak: float) -> dict:
        """``param_groups[0]`` as the public network's files have it (protocol page, section 3)."""
        return {
            "lr": learning_rate,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
            "initial_lr": peak,
            "params": list(names),
        }
