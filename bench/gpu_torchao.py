"""The parts of bench/gpu.py that try torchao: float8, and a 3B with 24 GB next to its optimizers.

torchao is no dependency of the project, so a part ends with one row where it is missing. On a GPU
without a network its wheel (3 MB) travels along: ``pip install --no-index torchao-*.whl``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.gpu_parts import Bench, micro_batch_of
from bench.inner_step import AsAGoodEngineer, allocate, set_weights
from distributed_training.training.model import build_meta_model

_STEPS = 4  # that count, after two which compile
_LEARNING_RATE = 1e-4
_SEQUENCES, _SMALL = 32, 24 * 10**9  # of a step of the 3B; bytes of its card


def missing(bench: Bench) -> bool:
    """Say in a row that torchao is not installed, if so."""
    if importlib.util.find_spec("torchao") is not None:
        return False
    bench.row("torchao", "it is not installed, so nothing was compared: pip install torchao")
    return True


class InFloat8(AsAGoodEngineer):
    """Multiply in float8, except in the layer that gives the logits."""

    def shard(self, model: Any, mesh: Any) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        def wanted(_: object, name: str) -> bool:
            return "lm_head" not in name

        # Without such a card the same rounding, computed in float32.
        config = Float8LinearConfig(emulate=self.device.type != "cuda")
        convert_to_float8_training(model, module_filter_fn=wanted, config=config)
        super().shard(model, mesh)


def float8(bench: Bench) -> None:
    """Train the 1B with torch's own parts in bfloat16, then the same in float8."""
    if missing(bench):
        return
    micro, sequences = micro_batch_of(bench, "1b"), 4 if bench.quick else 64
    config = bench.model("1b")
    medians, losses = list[float](), list[list[float]]()
    for name, kind in (("bfloat16", AsAGoodEngineer), ("float8", InFloat8)):
        bench.forget()
        torch.manual_seed(0)  # both begin with the same weights
        trained = kind(
            config,
            bench.device,
            world_size=1,
            low=torch.bfloat16,
            shards=None,
            rate=lambda step: _LEARNING_RATE,
        )
        batches = _batches(bench, config["vocab_size"], sequences, micro)
        found = [_timed(bench, trained, batches) for _ in range(2 + _STEPS)]
        losses.append([loss for _, loss in found])
        medians.append(statistics.median(seconds for seconds, _ in found[2:]))
        rate = sequences * bench.length / medians[-1]
        bench.row(name, f"{rate:,.0f} tokens/s, {bench.memory_gb():.1f} GB", tokens_per_second=rate)
        del trained
    plain, low = medians
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    bench.row(
        "float8 against bfloat16",
        f"**{plain / low:.2f}x** the speed; losses of {len(losses[0])} steps {apart:.4f} apart",
        ratio=plain / low,
        largest=apart,
    )


def _timed(bench: Bench, trained: AsAGoodEngineer, batches: list[Tensor]) -> tuple[float, float]:
    """Return seconds and loss of an inner step."""
    losses = list[float]()
    return bench.seconds(lambda: losses.append(trained.step(batches))), losses[0]


def _batches(bench: Bench, vocab: int, sequences: int, micro: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (sequences, bench.length), generator=drawn)
    return list(ids.to(bench.device).split(micro))


def small_memory(bench: Bench) -> None:
    """A model of 3.0 billion parameters with 24 GB of the card's memory, then with all of it."""
    medians = []
    for name, size in (("24 GB", _SMALL), ("without the limit", None)):
        with _of_memory(bench, size):
            trainer = bench.trainer(
                "3b",
                local_batch_size_train="auto" if bench.cuda else 2,
                local_batch_size_train_effective=4 if bench.quick else _SEQUENCES,
            )
            bench.row("memory plan", trainer.sharded.plan.note)
            bench.steps(trainer, 0, 1)
            label = f"{name}, micro-batch {trainer.micro_batch_size}"
            medians.append(bench.report_steps(label, trainer, bench.steps(trainer, 1, 4)))
            del trainer
            bench.forget()
    limited, free = medians
    bench.row("with 24 GB", f"**{free / limited:.2f}x** the step rate", ratio=free / limited)
    with _of_memory(bench, _SMALL):
        _compare_small(bench, limited)


@contextlib.contextmanager
def _of_memory(bench: Bench, size: int | None) -> Iterator[None]:
    """Let the card have ``size`` bytes, for whoever asks it too; None: all. On a CPU: nothing."""
    if size is None or not bench.cuda:
        yield
        return
    facts = torch.cuda.get_device_properties(bench.device)
    names = [name for name in dir(facts) if not name.startswith("_")]
    fewer = SimpleNamespace(**{name: getattr(facts, name) for name in names})
    fewer.total_memory = size
    torch.cuda.set_per_process_memory_fraction(size / bench.total, bench.device)
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: fewer),
        mock.patch.object(
            torch.cuda, "mem_get_info", lambda *_: (size - torch.cuda.memory_reserved(), size)
        ),
    ):
        yield
    torch.cuda.set_per_process_memory_fraction(1.0, bench.device)


def _compare_small(bench: Bench, ours: float) -> None:
    """Train the 3B with weights in bfloat16 and an optimizer of torchao, as many do.

    ``ours``: median seconds of the miner's inner step of as many sequences. The caller limits the
    memory.
    """
    if missing(bench):
        return
    from torchao.optim import AdamW8bit, CPUOffloadOptimizer

    rate = _LEARNING_RATE
    ways: dict[str, Callable[..., Any]] = {
        "torchao, 8-bit AdamW": partial(AdamW8bit, lr=rate, bf16_stochastic_round=True)
    }
    if bench.cuda:  # it copies by streams of CUDA
        ways["torchao, AdamW in host memory"] = partial(
            CPUOffloadOptimizer, optimizer_class=torch.optim.AdamW, lr=rate, fused=True
        )
    for name, way in ways.items():
        bench.forget()
        try:
            seconds = _plain_step(bench, way)
        except torch.OutOfMemoryError:
            bench.row(name, "out of memory")
            continue
        text = f"ours takes **{ours / seconds:.2f}x** its seconds, {bench.memory_gb():.1f} GB"
        bench.row(name, text, ratio=ours / seconds)


def _plain_step(bench: Bench, way: Callable[..., Any]) -> float:
    """Return the median seconds of an inner step with one sequence at once."""
    config = bench.model("3b")
    model: Any = build_meta_model(config).to(torch.bfloat16)
    allocate(model, bench.device)
    set_weights([parameter.data for parameter in model.parameters()])
    model.gradient_checkpointing_enable()
    for layer in model.model.layers if bench.cuda else ():
        layer.compile()
    optimizer = way(model.parameters())
    batches = _batches(bench, config["vocab_size"], _SEQUENCES if bench.cuda else 4, 1)

    def step() -> None:
        for ids in batches:
            (model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return statistics.median(bench.seconds(step) for _ in range(3))
