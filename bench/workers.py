"""Simulate workers of networks: a byte model, its text, inner steps, rounds of a store network.

All models train at once, stacked along the first dimension: each operation serves all of them. What
is exchanged is the product's own: uploads and updates are its files (``protocol/update_file.py``),
merged as a validator merges them (``validator/merge.py``) by the outer rule that is named.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.common import parser
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)
from distributed_training.training.outer_rule import OUTER_RULES
from distributed_training.validator.merge import OuterState, Rule, merge

WORKERS = 4  # of a store network
UPDATE_BITS = 4
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 64, 8
RATE, WARMUP = 1e-3, 30
HELD_OUT_BYTES, HELD_OUT_BATCHES = 60_000, 16

Weights = dict[str, Tensor]
_CPU = torch.device("cpu")


def text() -> Tensor:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    data = b"".join(file.read_bytes() for file in files[:80])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def initial(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * rows**-0.5

    weights = {"bytes": matrix(256, WIDTH), "places": 0.1 * matrix(CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        weights |= {
            f"{layer}.attention": matrix(WIDTH, 3 * WIDTH),
            f"{layer}.mixed": matrix(WIDTH, WIDTH) / 2,
            f"{layer}.up": matrix(WIDTH, 4 * WIDTH),
            f"{layer}.down": matrix(4 * WIDTH, WIDTH) / 2,
        }
    return weights


def losses(weights: Weights, tokens: Tensor) -> Tensor:
    """Return each model's mean loss; ``tokens`` are (models, batch, context + 1)."""
    models, batch, _ = tokens.shape
    every = torch.arange(models, device=tokens.device).view(-1, 1, 1)
    x = weights["bytes"][every, tokens[..., :-1]] + weights["places"].unsqueeze(1)
    x = x.view(models, -1, WIDTH)
    heads = (models, batch, CONTEXT, HEADS, WIDTH // HEADS)
    for layer in range(LAYERS):
        normed = F.layer_norm(x, (WIDTH,))
        q, k, v = (
            each.reshape(heads).transpose(2, 3)
            for each in (normed @ weights[f"{layer}.attention"]).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(2, 3)
        x = x + mixed.reshape(models, -1, WIDTH) @ weights[f"{layer}.mixed"]
        inner = F.gelu(F.layer_norm(x, (WIDTH,)) @ weights[f"{layer}.up"])
        x = x + inner @ weights[f"{layer}.down"]
    logits = F.layer_norm(x, (WIDTH,)) @ weights["bytes"].transpose(1, 2)
    each = F.cross_entropy(logits.reshape(-1, 256), tokens[..., 1:].reshape(-1), reduction="none")
    return each.view(models, -1).mean(1)


def batches(
    steps: int, workers: int, device: torch.device = _CPU
) -> Iterator[tuple[float, Tensor]]:
    """Yield each step's share of the learning rate, and its tokens (workers, batch, context + 1).

    They are the same each time.
    """
    data, window = text()[HELD_OUT_BYTES:], torch.arange(CONTEXT + 1)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        places = torch.randint(len(data) - CONTEXT, (workers, BATCH, 1), generator=generator)
        yield min(1.0, (step + 1) / WARMUP), data[places + window].to(device)


@torch.no_grad()
def held_out_losses(weights: Weights) -> list[float]:
    """Return each model's loss on the text that none trains on."""
    data, models = text()[:HELD_OUT_BYTES], weights["bytes"]
    places = torch.linspace(0, len(data) - CONTEXT - 1, BATCH * HELD_OUT_BATCHES).long()
    tokens = data[places.view(1, -1, 1) + torch.arange(CONTEXT + 1)].to(models.device)
    return losses(weights, tokens.expand(len(models), -1, -1)).tolist()


def arguments_of(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    arguments = parser(doc)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=rounds)
    arguments.add_argument("--steps", type=int, default=30, help="inner steps of a round")
    torch.set_num_threads(1)
    return arguments


def stack(starts: Sequence[Weights], workers: int, device: torch.device = _CPU) -> Weights:
    """Return the weights of the ``workers`` of each network, which begin at ``starts``."""
    stacked = {n: torch.stack([s[n] for s in starts for _ in range(workers)]) for n in starts[0]}
    return {name: each.to(device).requires_grad_() for name, each in stacked.items()}


def inner_steps(
    weights: Weights, count: int, workers: int, device: torch.device = _CPU
) -> Iterator[tuple[int, Tensor]]:
    """Train all models; yield the number of each inner step, from 1, and the models' losses.

    The first ``workers`` models have batches of their own; the next ones have the same again.
    """
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    times = len(weights["bytes"]) // workers
    for step, (warm, tokens) in enumerate(batches(count, workers, device), 1):
        optimizer.param_groups[0]["lr"] = RATE * warm
        loss = losses(weights, tokens.repeat(times, 1, 1))
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        yield step, loss.detach()


def _unsigned(message: bytes) -> bytes:
    return bytes(64)


@dataclass
class Network:
    """The rounds of one store network: outer states, and what each worker's upload left out.

    There is one state for all; with a rule of groups each worker has one. ``sent`` and
    ``received``: bytes of one worker in all outer steps, by the body of the files. Where a rule
    selects what is sent, an upload counts as long as zlib makes it.
    """

    rule: Rule
    names: Sequence[str]
    states: list[OuterState]
    bits: int = 4
    workers: int = WORKERS
    sent: float = 0.0
    received: float = 0.0
    residuals: list[Sequence[Tensor] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.residuals = [None] * self.workers
        if OUTER_RULES[self.rule.name].groups is not None:
            self.states = self.states * self.workers

    @property
    def state(self) -> OuterState:
        """The state that all have."""
        (state,) = self.states
        return state

    def state_of(self, worker: int) -> OuterState:
        return self.states[worker % len(self.states)]

    def exchange(
        self, weights: Sequence[Tensor], folder: Path, outer_step: int, *, missing: int = 0
    ) -> None:
        """Upload what the workers trained, and take the outer step that follows from it.

        ``weights``: ``(workers, ...)`` of each parameter, on the CPU. The last ``missing`` workers
        upload nothing.
        """
        uploads = [
            self._upload(worker, [each[worker] for each in weights], folder, outer_step)
            for worker in range(self.workers - missing)
        ]
        rule = OUTER_RULES[self.rule.name]
        if rule.groups is not None:
            before = [*self.states]
            for group in rule.groups(self.workers, outer_step):
                self._average(before, group, [uploads[worker] for worker in group])
            return
        update = self.merge(uploads, [1.0] * len(uploads), folder, outer_step)
        self.sent += sum(map(self._bytes_of, uploads)) / self.workers
        self.received += update.layout.body_bytes

    def merge(
        self, uploads: Sequence[UpdateFile], factors: Sequence[float], folder: Path, outer_step: int
    ) -> UpdateFile:
        """Take the outer step of ``uploads``; return its update, a file in ``folder``."""
        path = folder / "update"
        path.unlink(missing_ok=True)
        layout = self._layout("update", UPDATE_BITS, outer_step)
        _, state = merge(
            uploads, factors, self.state, self.rule, path=path, layout=layout, sign=_unsigned
        )
        self.states = [state]
        return UpdateFile.reopen(path, layout.schema)

    def _upload(
        self, worker: int, weights: Sequence[Tensor], folder: Path, outer_step: int
    ) -> UpdateFile:
        """Write one worker's upload as a member does; keep what it left out."""
        rule = OUTER_RULES[self.rule.name]
        moved = [s - w for s, w in zip(self.state_of(worker).weights, weights, strict=True)]
        if (residual := self.residuals[worker]) is not None:
            moved = [m + r * rule.feedback for m, r in zip(moved, residual, strict=True)]
        path = folder / f"upload-{worker}"
        path.unlink(missing_ok=True)
        layout = self._layout("upload", self.bits, outer_step)
        for index, tensor in enumerate(moved):
            rows = tensor.reshape(rows_and_columns(tensor.shape))
            write_rows(path, layout, index, 0, rows if rule.select is None else rule.select(rows))
        finish(path, layout, _unsigned)
        upload = UpdateFile.reopen(path, layout.schema)
        self.residuals[worker] = [
            m - upload.decode(name, m.shape) for name, m in zip(self.names, moved, strict=True)
        ]
        return upload

    def _average(
        self, before: Sequence[OuterState], group: Sequence[int], uploads: Sequence[UpdateFile]
    ) -> None:
        """Take the outer step of each member of one group: they send each other all of it."""
        step = OUTER_RULES[self.rule.name].step
        lr, mu = self.rule.learning_rate, self.rule.mu
        starts, gradients = [], []
        for index, name in enumerate(self.names):
            own = torch.stack([before[worker].weights[index] for worker in group])
            starts.append(own.mean(0))
            sent = [upload.decode(name, starts[-1].shape) for upload in uploads]
            gradients.append(torch.stack(sent).mean(0))
        for worker in group:
            momenta: Sequence[Tensor | None] = before[worker].momentum or [None] * len(starts)
            every = zip(starts, gradients, momenta, strict=True)
            found = [step(*each, lr=lr, mu=mu) for each in every]
            self.states[worker] = OuterState([w for w, _ in found], [m for _, m in found])
        whole = sum(start.numel() * start.itemsize for start in starts)
        each = sum(self._bytes_of(upload) + whole for upload in uploads) / self.workers
        self.sent += each * (len(group) - 1)
        self.received += each * (len(group) - 1)

    def _bytes_of(self, upload: UpdateFile) -> int:
        if OUTER_RULES[self.rule.name].select is None:
            return upload.layout.body_bytes
        return len(zlib.compress(upload.path.read_bytes()[upload.layout.body :]))

    def _layout(
        self, kind: Literal["upload", "update"], bits: int, outer_step: int
    ) -> UpdateLayout:
        header = Header(
            kind=kind, run_id="bench", outer_step=outer_step, serial=0, hotkey="bench",
            start="0" * 64, bits=bits, inner_steps=1, tokens=1,
        )  # fmt: skip
        shapes = [tuple(weight.shape) for weight in self.states[0].weights]
        return UpdateLayout.of(list(zip(self.names, shapes, strict=True)), header)
