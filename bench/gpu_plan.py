"""``python -m bench.gpu --plan``: tables of an inner step on paper, and how far that is off.

The model is the product's (``common/paper_step.py``, where each assumption stands with its source).
``MEASURED`` is what one H200 did (docs/performance.md, *On a GPU*).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distributed_training.common.gpus import CARDS
from distributed_training.common.llama import named_config
from distributed_training.common.memory import Arrangement, ModelShape
from distributed_training.common.paper_step import (
    Machine,
    PaperStep,
    best_step,
    predict,
    publication,
)

#: Model, what differs from keeping every activation, tokens a second; steps of 64 sequences.
MEASURED: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("1b", {"micro_batch": 16}, 78_533),
    ("1b", {"micro_batch": 32}, 78_684),
    ("1b", {"micro_batch": 8}, 74_753),
    ("1b", {"micro_batch": 16, "checkpointing": "budget"}, 73_900),
    ("1b", {"micro_batch": 16, "checkpointing": "selective"}, 70_266),
    ("1b", {"micro_batch": 16, "checkpointing": "full"}, 64_114),
    ("4b", {"micro_batch": 8}, 24_696),
    ("125m", {"micro_batch": 16}, 473_274),
)


def shape_of(model: str) -> ModelShape:
    return ModelShape.from_config(named_config(model))


def compared() -> Iterator[tuple[str, str, PaperStep, int]]:
    """Yield model, arrangement, step on paper and measured tokens a second."""
    for model, changes, measured in MEASURED:
        how = Arrangement(1, sequence_length=1024, keep_unsharded=True, **changes)
        step = predict(shape_of(model), Machine(CARDS["h200"]), how, sequences=64)
        words = f"{how.micro_batch}, {how.checkpointing}"
        yield model, words, step, measured


def tables() -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Yield titles and rows of each table."""
    rows: list[tuple[str, ...]] = []
    for model, words, step, measured in compared():
        off = step.tokens_per_second / measured - 1
        rows.append(
            (model, words, f"{measured:,}", f"{step.tokens_per_second:,.0f}", f"{off:+.1%}")
        )
    head = ("model", "micro-batch, checkpointing", "measured, tokens/s", "on paper", "off")
    yield head, rows
    rows = []
    for card in ("h200", "h100", "b200", "a100", "l40s", "5090", "4090"):
        for gpus in (1, 8):
            for model in ("1b", "4b"):
                machine = Machine(CARDS[card], gpus)
                rows.append((str(machine), model, *_cells(best_step(shape_of(model), machine))))
    parts = "compute, memory, reduction, optimizer, not measured"
    yield ("GPUs", "model", "micro-batch", "GB", "step", parts, "bound by", "MFU"), rows
    titles = ("GPUs", "model", "each", "copied, written", "training loses", "share")
    yield titles, list(_publications())


_PERIOD = 4800.0  # seconds between two closes of a network that dt-network makes


def _publications() -> Iterator[tuple[str, ...]]:
    for gpus in (1, 8):
        machine = Machine(CARDS["h200"], gpus)
        for model in ("125m", "1b", "4b"):
            step = best_step(shape_of(model), machine)
            assert step is not None
            found = publication(shape_of(model), machine, step, period=_PERIOD)
            causes = (f"{name} {each:.2f} s" for name, each in found.parts.items() if each)
            yield (
                str(machine),
                model,
                f"{_PERIOD:.0f} s",
                f"{found.copied / 1e9:.1f}, {found.written / 1e9:.1f} GB a GPU",
                ", ".join(causes),
                f"**{found.share:.1%}**",
            )


def _cells(step: PaperStep | None) -> tuple[str, ...]:
    if step is None:
        return ("does not fit", "", "", "", "", "")
    how = step.how
    words = [str(how.micro_batch)]
    words += [how.checkpointing] if how.checkpointing != "none" else []
    words += ["host"] if how.offload_optimizer else []
    words += [] if how.reduce_at_last else ["each reduced"]
    words += [] if how.keep_unsharded else ["gathered again"]
    shares = [f"{100 * part / step.seconds:.0f}" for part in step.parts.values()]
    shares += ["0"] * (5 - len(shares))
    return (
        ", ".join(words),
        f"{step.device_bytes / 1e9:.0f}",
        f"{step.seconds:.1f} s",
        f"{', '.join(shares)} %",
        step.bound,
        f"**{step.mfu:.0%}**",
    )
