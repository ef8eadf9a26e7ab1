"""What ``--neuron.error_feedback`` and ``--neuron.step_length`` do to what a publication is worth.

    python bench/error_feedback.py                              three outer steps of 60 inner steps
    python bench/error_feedback.py --epochs 1 --steps 20 --show 5 20       a quick look

The local subnet's model trains alone; every few inner steps its gradient is published. Training
does not depend on what is published, so all variants encode the same weights in the same run. The
public miner's way (``upload``, decay 0.999, as it is) is the baseline. A factor is chosen on one
part of the held-out text; the improvement, (loss before - loss after) / loss before as validators
count it, is judged on another. ``full`` is what the miner's own weights would bring.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distributed_training.config.training import TrainingSettings
from distributed_training.data import (
    StdlibSource,
    TextTokenizer,
    build_tokenizer,
    held_out_batches,
)
from distributed_training.training.feedback import Code, Codec, ErrorFeedback
from distributed_training.training.preview import APPLIED_FRACTION, Preview, TrialStep
from distributed_training.training.sizes import local_llama_config
from distributed_training.training.trainer import Trainer

SEQUENCE, MICRO, EFFECTIVE = 128, 8, 16
PUBLIC, DEFAULT = "upload 0.999", "best 0.999"
VARIANTS = ("upload 0.999", "upload 0.95", "upload 0.9", "upload 0", "round 0.999", "round 0.9",
            "off 0", "best 0.999")  # fmt: skip

Codes = Mapping[str, Sequence[Code | None]]


@dataclass
class Variant:
    """One way to publish, over the whole run."""

    name: str
    feedback: ErrorFeedback
    preview: Preview
    rows: list[dict] = field(default_factory=list)


class Bench:
    """A trainer, and the variants that publish what it trained."""

    def __init__(self, folder: Path) -> None:
        self.train_text, held = text(folder)
        self.searched, self.judged = held[: len(held) // 3], held[len(held) // 3 :]
        settings = TrainingSettings(
            local_batch_size_train=MICRO,
            local_batch_size_train_effective=EFFECTIVE,
            sequence_length=SEQUENCE,
            learning_rate=1e-3,
            warmup_steps=20,
            total_steps=10_000,
        )
        self.trainer = Trainer(
            settings=settings,
            model_config=local_llama_config(sequence_length=SEQUENCE),
            device=torch.device("cpu"),
            rank=0,
            world_size=1,
            say=lambda line: None,
        )
        self.trainer.load_weights(None)
        self.trainer.begin_epoch(0)
        self.variants = [self._variant(name) for name in VARIANTS]
        self.generator = torch.Generator().manual_seed(1)

    def _variant(self, name: str) -> Variant:
        mode, decay = name.split()
        sharded, stream = self.trainer.sharded, self.trainer.stream
        feedback = ErrorFeedback(
            mode=mode, decay=float(decay), codec=Codec(), shards=sharded.shards, stream=stream
        )
        preview = Preview(sharded=sharded, stream=stream, feedback=feedback, search=True)
        return Variant(name, feedback, preview)

    def inner_step(self) -> None:
        for _ in range(EFFECTIVE // MICRO):
            picked = torch.randint(len(self.train_text), (MICRO,), generator=self.generator)
            self.trainer.add_micro_batch(self.train_text[picked])

    def publish(self, epoch: int, step: int, *, judge: bool) -> None:
        outer = self.trainer.outer
        start, current = outer.epoch_start, outer.current()
        assert start is not None
        if judge:
            before = self._judged_loss(start)
            full = 100 * (1 - self._judged_loss(current) / before)
        for variant in self.variants:
            directions = variant.feedback.directions(start, current, outer.learning_rate)
            codes = {each.name: each.encode() for each in directions}
            if not judge:
                continue
            choice = variant.preview.choose(
                epoch_id=outer.epoch_id,
                start=start,
                codes=codes,
                learning_rate=outer.learning_rate,
                held=self.searched.split(MICRO),
                count=1.0,
            )
            plain = self._improvement(variant, codes, next(iter(codes)), 1.0, start, before)
            best = self._improvement(variant, codes, choice.direction, choice.factor, start, before)
            variant.rows.append(
                {
                    "epoch": epoch,
                    "step": step,
                    "full": full,
                    "plain": plain,
                    "searched": best,
                    "direction": choice.direction,
                    "factor": choice.factor,
                    "trials": choice.evaluations,
                }
            )
        self._set(current)

    def outer_step(self) -> None:
        trainer = self.trainer
        start = trainer.outer.epoch_start
        assert start is not None
        for variant in self.variants:
            if variant.feedback.mode == "round":
                rate = trainer.outer.learning_rate
                variant.feedback.residual = variant.feedback.after_round(start, rate)
        buffers = [torch.zeros(shape) for _, shape in trainer.schema]
        trainer.write_pseudo_gradient(buffers)
        trainer.prepare_outer_step(buffers)
        trainer.commit_outer_step()

    def _improvement(
        self,
        variant: Variant,
        codes: Codes,
        direction: str,
        factor: float,
        start: Sequence[Tensor],
        before: float,
    ) -> float:
        """In percent, as validators measure it."""
        self._set(start)
        trainer = self.trainer
        trial = TrialStep(
            trainer.sharded, trainer.stream, variant.feedback, start, codes[direction]
        )
        trial.apply(factor * trainer.outer.learning_rate * APPLIED_FRACTION)
        return 100 * (1 - self._loss() / before)

    def _judged_loss(self, weights: Sequence[Tensor]) -> float:
        self._set(weights)
        return self._loss()

    def _loss(self) -> float:
        self.trainer.drop_step()
        losses = (self.trainer.sharded.loss_of(b) for b in self.judged.split(MICRO))
        return float(sum(losses)) / (len(self.judged) * (SEQUENCE - 1))

    @torch.no_grad()
    def _set(self, weights: Sequence[Tensor]) -> None:
        for shard, rows in zip(self.trainer.sharded.shards, weights, strict=True):
            shard.local.copy_(rows)
        self.trainer.drop_step()


def text(folder: Path) -> tuple[Tensor, Tensor]:
    """Training and held-out sequences."""
    path, eos_id = build_tokenizer("bytes", folder)
    source = StdlibSource()
    rows = [
        row
        for config, count in sorted(source.num_rows().items())
        for row in source.rows(config, 0, split="train", limit=min(count, 300))
    ]
    tokens = TextTokenizer(path, eos_id=eos_id).encode_rows(rows, max_length=10_000)
    count = len(tokens) // SEQUENCE
    train = torch.from_numpy(tokens[: count * SEQUENCE].reshape(-1, SEQUENCE).astype(np.int64))
    held = held_out_batches(
        tokenizer_path=path, eos_id=eos_id, sequences=96, sequence_length=SEQUENCE
    )
    return train, held


def show(variants: Sequence[Variant]) -> None:
    """Improvement in percent, as it is -> with the best factor, and both as ratios to the public
    way as it is."""
    base = next(v.rows for v in variants if v.name == PUBLIC)
    print("\nheld-out improvement in %: as it is -> with the best factor (ratio to the public way)")
    for i, public in enumerate(base):
        print(
            f"outer step {public['epoch']}, inner step {public['step']}: public way "
            f"{public['plain']:.2f}, full weights {public['full']:.2f}"
        )
        for variant in variants:
            row = variant.rows[i]
            print(
                f"   {variant.name:13} {row['plain']:6.2f} -> {row['searched']:6.2f}  "
                f"({_ratio(row['plain'], public['plain'])} -> "
                f"{_ratio(row['searched'], public['plain'])})  {row['direction']} "
                f"x{row['factor']:.2f}, {row['trials']} trials"
            )
    ours = next(v.rows for v in variants if v.name == DEFAULT)
    pairs = list(zip(ours, base, strict=True))
    print(f"\ndefault ({DEFAULT}, searched) against the public way, ratio of improvements:")
    print("   " + "  ".join(
        f"{o['epoch']}.{o['step']}: {_ratio(o['searched'], p['plain'])}" for o, p in pairs
    ))  # fmt: skip
    worse = [f"{o['epoch']}.{o['step']}" for o, p in pairs if o["searched"] < p["plain"]]
    print(f"   worse than the public way at: {', '.join(worse) or 'no point'}")


def _ratio(ours: float, public: float) -> str:
    return f"{ours / public:.2f}x" if public > 0 else "n/a"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="inner steps between publications")
    parser.add_argument("--show", type=int, nargs="+", default=[5, 20, 40, 60])
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
    for epoch in range(args.epochs):
        for step in range(1, args.steps + 1):
            bench.inner_step()
            if step % args.every == 0:
                bench.publish(epoch, step, judge=step in args.show)
        bench.outer_step()
        print(f"outer step {epoch} done", file=sys.stderr, flush=True)
    show(bench.variants)
    if args.json:
        args.json.write_text(json.dumps({v.name: v.rows for v in bench.variants}, indent=2))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
