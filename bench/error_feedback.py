"""What ``--neuron.error_feedback`` does to what is published: round, upload or off.

    python bench/error_feedback.py --epochs 3 --steps 60 --every 5

The local subnet's model trains alone for some outer steps; every few inner steps its gradient is
published as a miner would. Measured for each publication, the same sequences for all modes: the
cosine of what a validator decodes with outer_lr x the true pseudo-gradient, the ratio of their
norms, and the loss on held-out text with minus without it, applied as validators do. The network's
own way (``upload``) is the baseline.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist

from distributed_training.config.training import TrainingSettings
from distributed_training.data import (
    StdlibSource,
    TextTokenizer,
    build_tokenizer,
    held_out_batches,
)
from distributed_training.protocol import gradients, keys
from distributed_training.protocol.types import Progress
from distributed_training.training.sizes import local_llama_config
from distributed_training.training.trainer import Trainer

SEQUENCE, MICRO, EFFECTIVE = 128, 8, 16
Mode = Literal["upload", "round", "off"]
MODES: tuple[Mode, ...] = ("upload", "round", "off")


def text(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
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
        tokenizer_path=path, eos_id=eos_id, sequences=32, sequence_length=SEQUENCE
    )
    return train, held


def compare(trainer: Trainer, start: list[torch.Tensor], path: Path) -> tuple[float, float]:
    """Cosine and ratio of norms of what is sent and outer_lr x the pseudo-gradient."""
    code = torch.load(path, weights_only=True)
    dot = ours = true = 0.0
    for item, before in zip(trainer.sharded.shards, start, strict=True):
        sent = gradients.decode(code[item.name + "idxs"], code[item.name + "vals"], item.shape)
        gradient = before - item.local
        dot += float((sent.double() * gradient.double()).sum())
        ours += float(sent.double().square().sum())
        true += float(gradient.double().square().sum())
    return dot / (ours * true) ** 0.5, (ours / true) ** 0.5 / 0.8


def run(
    mode: Mode, train: torch.Tensor, held: torch.Tensor, args: argparse.Namespace
) -> list[dict]:
    trainer = Trainer(
        settings=TrainingSettings(
            local_batch_size_train=MICRO,
            local_batch_size_train_effective=EFFECTIVE,
            sequence_length=SEQUENCE,
            learning_rate=1e-3,
            warmup_steps=20,
            total_steps=10_000,
            error_feedback=mode,
            preview_sequences=len(held),
        ),
        model_config=local_llama_config(sequence_length=SEQUENCE),
        device=torch.device("cpu"),
        rank=0,
        world_size=1,
        say=lambda line: None,
    )
    trainer.load_weights(None)
    trainer.begin_epoch(0)
    trainer.hold_back(held)
    generator = torch.Generator().manual_seed(1)
    found = []
    for epoch in range(args.epochs):
        start = [item.local.clone() for item in trainer.sharded.shards]
        for step in range(1, args.steps + 1):
            for _ in range(EFFECTIVE // MICRO):
                picked = torch.randint(len(train), (MICRO,), generator=generator)
                trainer.add_micro_batch(train[picked])
            if step % args.every:
                continue
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name) / "snapshot"
                handle = trainer.snapshot(
                    folder, progress=Progress(epoch, step, step, [1]), block=1, last_loss=1.0
                )
                handle.wait()
                near, norm = compare(trainer, start, folder / keys.GRADIENTS)
                found.append(
                    {
                        "epoch": epoch,
                        "step": step,
                        "cosine": near,
                        "norm": norm,
                        "delta": trainer.preview(handle),
                    }
                )
        buffers = [torch.zeros(shape) for _, shape in trainer.schema]
        trainer.write_pseudo_gradient(buffers)
        trainer.prepare_outer_step(buffers)
        trainer.commit_outer_step()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        train, held = text(Path(name))
    results = {}
    for mode in MODES:
        began = time.monotonic()
        results[mode] = run(mode, train, held, args)
        print(f"{mode}: {time.monotonic() - began:.0f} s", flush=True)
    print("epoch step  " + "  ".join(f"{m:>7} cos  norm   loss" for m in MODES))
    for row in zip(*results.values(), strict=True):
        if row[0]["step"] % (args.every * max(1, args.steps // args.every // 4)) == 0:
            print(
                f"{row[0]['epoch']:5} {row[0]['step']:4}  "
                + "  ".join(f"{r['cosine']:11.3f} {r['norm']:5.2f} {r['delta']:+6.3f}" for r in row)
            )
    last = {m: [r for r in results[m] if r["step"] == args.steps] for m in MODES}
    base = statistics.mean(r["delta"] for r in last["upload"])
    for mode in MODES:
        delta = statistics.mean(r["delta"] for r in last[mode])
        print(
            f"{mode:7} last publication of each outer step, mean: cosine "
            f"{statistics.mean(r['cosine'] for r in last[mode]):.3f}, norm "
            f"{statistics.mean(r['norm'] for r in last[mode]):.2f}, held-out loss {delta:+.3f} "
            f"({delta / base:.2f}x the improvement of upload)"
        )
    print(json.dumps(results), file=sys.stderr)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
