"""Simulate workers of networks: a byte model, its text, inner steps, rounds of a store network.

All models train at once, stacked along the first dimension: each operation serves all of them. What
is exchanged is the product's own: uploads and updates are its files (``protocol/update_file.py``),
merged as a validator merges them (``validator/merge.py``) by the outer rule that is named.
"""

from __future__ import annotations

import argparse
import lzma
import os
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.common import parser
from distributed_training.protocol.types import UPDATE_CODEC
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)
from distributed_training.training.outer_rule import OUTER_RULES, UploadFacts
from distributed_training.validator.merge import (
    HISTORY,
    Measured,
    OuterState,
    Rule,
    Values,
    clip_factor,
    longest_norm,
    merge,
    norm_of,
    whole_uploads,
)

WORKERS = 4  # of a store network
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 64, 8
RATE, WARMUP = 1e-3, 30
HELD_OUT_BYTES, HELD_OUT_BATCHES = 60_000, 16

Weights = dict[str, Tensor]
_CPU = torch.device("cpu")


def text(place: Path | None = None) -> Tensor:
    """Return the bytes of a file, or of all files below a folder; None: Python's own library.

    Files whose names end in ``.xz`` are unpacked.
    """
    if place is not None:
        files = [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.is_file())
    else:
        files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    read = [(file, file.read_bytes()) for file in files]
    data = b"".join(lzma.decompress(of) if file.suffix == ".xz" else of for file, of in read)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def initial(seed: int, width: int = WIDTH, layers: int = LAYERS, context: int = CONTEXT) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * rows**-0.5

    weights = {"bytes": matrix(256, width), "places": 0.1 * matrix(context, width)}
    for layer in range(layers):
        weights |= {
            f"{layer}.attention": matrix(width, 3 * width),
            f"{layer}.mixed": matrix(width, width) / 2,
            f"{layer}.up": matrix(width, 4 * width),
            f"{layer}.down": matrix(4 * width, width) / 2,
        }
    return weights


def losses(weights: Weights, tokens: Tensor) -> Tensor:
    """Return each model's mean loss; ``tokens`` are (models, batch, context + 1)."""
    models, batch, _ = tokens.shape
    context, width = weights["places"].shape[-2:]
    every = torch.arange(models, device=tokens.device).view(-1, 1, 1)
    x = weights["bytes"][every, tokens[..., :-1]] + weights["places"].unsqueeze(1)
    x = x.view(models, -1, width)
    size = 64 if width % 512 == 0 else WIDTH // HEADS
    # Without a dimension for the models: fused attention takes four of them.
    heads = (models * batch, context, width // size, size)
    for layer in range(sum(name.endswith(".mixed") for name in weights)):
        normed = F.layer_norm(x, (width,))
        q, k, v = (
            each.reshape(heads).transpose(1, 2)
            for each in (normed @ weights[f"{layer}.attention"]).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + mixed.reshape(models, -1, width) @ weights[f"{layer}.mixed"]
        inner = F.gelu(F.layer_norm(x, (width,)) @ weights[f"{layer}.up"])
        x = x + inner @ weights[f"{layer}.down"]
    logits = F.layer_norm(x, (width,)) @ weights["bytes"].transpose(1, 2)
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
def held_out_losses(weights: Weights, data: Tensor | None = None) -> list[float]:
    """Return each model's loss on ``data``; None: on the text that none trains on."""
    models, context = weights["bytes"], weights["places"].shape[-2]
    data = text()[:HELD_OUT_BYTES] if data is None else data
    places = torch.linspace(0, len(data) - context - 1, BATCH * HELD_OUT_BATCHES).long()
    tokens = data[places.view(1, -1, 1) + torch.arange(context + 1)].to(models.device)
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


class Inner:
    """AdamW over all models at once. A slow worker takes a share of the steps and rests between.

    ``speeds``: that share, of the models in turn.
    """

    def __init__(self, weights: Weights, speeds: Sequence[float] = (1.0,)) -> None:
        self._weights, self._speeds = weights, speeds
        betas = (0.9, 0.95)
        self._adam = torch.optim.AdamW(weights.values(), lr=RATE, betas=betas, weight_decay=0.1)

    def step(self, number: int, tokens: Tensor) -> None:
        """Take inner step ``number``, from 1, of each model."""
        models = len(tokens)
        self._adam.param_groups[0]["lr"] = RATE * min(1.0, number / WARMUP)
        speeds = [self._speeds[model % len(self._speeds)] for model in range(models)]
        rests = [m for m, s in enumerate(speeds) if int(number * s) == int((number - 1) * s)]
        self._adam.zero_grad()
        losses(self._weights, tokens).sum().backward()
        kept = [(each, each[rests].clone()) for each in self._tensors()] if rests else []
        self._adam.step()
        with torch.no_grad():
            for each, before in kept:
                each[rests] = before

    def _tensors(self) -> Iterator[Tensor]:
        """Yield weights and averages, whose first dimension is the models'."""
        for weight in self._weights.values():
            state = self._adam.state[weight]
            yield from (weight.data, *(state[n] for n in ("exp_avg", "exp_avg_sq") if n in state))


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
    codec: str = UPDATE_CODEC
    workers: int = WORKERS
    clips: bool = False  # uploads, as a validator does
    judged: Tensor | None = None  # text on which uploads are judged, for a rule that merges them
    sent: float = 0.0
    received: float = 0.0
    residuals: list[Sequence[Tensor] | None] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)  # of an outer step, as merged

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
        self,
        weights: Sequence[Tensor],
        folder: Path,
        outer_step: int,
        *,
        missing: int = 0,
        lost: Collection[int] = (),
    ) -> None:
        """Upload what the workers trained, and take the outer step that follows from it.

        ``weights``: ``(workers, ...)`` of each parameter, on the CPU. The last ``missing`` workers
        and those of ``lost`` upload nothing.
        """
        uploads = {
            worker: self._upload(worker, [each[worker] for each in weights], folder, outer_step)
            for worker in range(self.workers - missing)
            if worker not in lost
        }
        rule = OUTER_RULES[self.rule.name]
        if rule.groups is not None:
            before = [*self.states]
            for group in rule.groups(self.workers, outer_step):
                if there := [worker for worker in group if worker in uploads]:
                    self._average(before, there, [uploads[worker] for worker in there])
            return
        self._merge_all([*uploads.values()], folder, outer_step)

    def exchange_and_carry(
        self, own: Sequence[Tensor], folder: Path, outer_step: int, lost: Collection[int]
    ) -> list[Tensor]:
        """Take an outer step; return the workers' weights: what was lost is on top of the new."""
        before = [self.state_of(worker).weights for worker in range(self.workers)]
        self.exchange(own, folder, outer_step, lost=lost)
        found = []
        for index, each in enumerate(own):
            new = torch.stack([self.state_of(w).weights[index] for w in range(self.workers)])
            for worker in lost:
                new[worker] += each[worker] - before[worker][index]
            found.append(new)
        return found

    def _merge_all(self, uploads: Sequence[UpdateFile], folder: Path, outer_step: int) -> None:
        factors, facts = [1.0] * len(uploads), list[UploadFacts]()
        norms = [norm_of(upload) for upload in uploads]
        found = [Measured(norm, 1.0, 0.0) for norm in norms]  # all gain the same
        if self.clips:
            past = [Measured(norm, 1.0, 0.0) for some in self.norms[-HISTORY:] for norm in some]
            longest = longest_norm([*past, *found], [])
            factors = [clip_factor(norm, longest) for norm in norms]
            self.norms.append([n * f for n, f in zip(norms, factors, strict=True)])
        if OUTER_RULES[self.rule.name].merge is not None:
            assert self.judged is not None
            gains = self._gains(uploads, self.judged)
            tokens = [upload.header.tokens for upload in uploads]
            facts = [UploadFacts(*each) for each in zip(tokens, norms, gains, strict=True)]
        update = self.merge(uploads, factors, whole_uploads(found), folder, outer_step, facts)
        self.sent += sum(map(self._bytes_of, uploads)) / self.workers
        self.received += update.layout.body_bytes

    def _gains(self, uploads: Sequence[UpdateFile], data: Tensor) -> list[float]:
        """Return by how much each upload lowers the loss on ``data``, in nats per byte."""
        stacked = {
            name: torch.stack(
                [weight, *(weight - upload.decode(name, weight.shape) for upload in uploads)]
            )
            for name, weight in zip(self.names, self.state.weights, strict=True)
        }
        before, *after = held_out_losses(stacked, data)
        return [before - each for each in after]

    def merge(
        self,
        uploads: Sequence[Values],
        factors: Sequence[float],
        divisor: float,
        folder: Path,
        outer_step: int,
        facts: Sequence[UploadFacts] = (),
    ) -> UpdateFile:
        """Take the outer step of ``uploads``; return its update, a file in ``folder``."""
        path = folder / "update"
        path.unlink(missing_ok=True)
        layout = self._layout("update", UPDATE_CODEC, outer_step)
        _, state = merge(
            uploads, factors, self.state, self.rule,
            path=path, layout=layout, sign=_unsigned, divisor=divisor, facts=facts,
        )  # fmt: skip
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
        layout = self._layout("upload", self.codec, outer_step)
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
        self, kind: Literal["upload", "update"], codec: str, outer_step: int
    ) -> UpdateLayout:
        header = Header(
            kind=kind, run_id="bench", outer_step=outer_step, serial=0, hotkey="bench",
            start="0" * 64, codec=codec, inner_steps=1, tokens=1,
        )  # fmt: skip
        shapes = [tuple(weight.shape) for weight in self.states[0].weights]
        return UpdateLayout.of(list(zip(self.names, shapes, strict=True)), header)
