"""Gradient surgery (``--train.pcgrad``) against adding gradients up, on a mixture of two domains.

    python bench/pcgrad.py --steps 150 --seeds 3

Domains: Python sources of the standard library, and the prose of installed packages' descriptions
and licences. The same model, sequences and order in both arms; baseline ``sum``. Prints the
held-out loss of each domain after training (nats per byte), how many steps had a conflict, and the
ratio of step times (arms alternate by seed).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist

from distributed_training.config.training import TrainingSettings
from distributed_training.data.corpus import StdlibSource
from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer
from distributed_training.training.sizes import local_llama_config
from distributed_training.training.trainer import Trainer

SEQUENCE, MICRO, EFFECTIVE, HELD = 128, 4, 16, 64


def prose() -> list[str]:
    folder = Path(sysconfig.get_paths()["purelib"])
    texts = [
        path.read_text(encoding="utf-8", errors="ignore")
        for pattern in ("*.dist-info/METADATA", "*.dist-info/**/LICENSE*")
        for path in sorted(folder.glob(pattern))
    ]
    return sorted(set(texts))


def code() -> list[str]:
    source = StdlibSource()
    return [
        row
        for config, rows in sorted(source.num_rows().items())
        for row in source.rows(config, 0, split="train", limit=min(rows, 400))
    ]


def sequences(tokenizer: TextTokenizer, texts: list[str]) -> torch.Tensor:
    tokens = tokenizer.encode_rows(texts, max_length=100_000)
    count = len(tokens) // SEQUENCE
    return torch.from_numpy(tokens[: count * SEQUENCE].reshape(count, SEQUENCE).astype(np.int64))


def run(
    domains: list[torch.Tensor], *, surgery: bool, seed: int, steps: int
) -> tuple[list[float], float, int]:
    """Held-out losses, seconds per step, steps with a conflict."""
    trainer = Trainer(
        settings=TrainingSettings(
            local_batch_size_train=MICRO,
            local_batch_size_train_effective=EFFECTIVE,
            sequence_length=SEQUENCE,
            learning_rate=1e-3,
            warmup_steps=20,
            total_steps=10 * steps,
            pcgrad=surgery,
            seed=seed,
        ),
        model_config=local_llama_config(sequence_length=SEQUENCE),
        device=torch.device("cpu"),
        say=lambda line: None,
    )
    trainer.load_weights(None)
    trainer.begin_epoch(0)
    generator = torch.Generator().manual_seed(seed)
    seconds, conflicts = [], 0
    for _ in range(steps):
        began = time.perf_counter()
        for i in range(EFFECTIVE // MICRO):
            domain = i % 2
            usable = len(domains[domain]) - HELD
            picked = torch.randint(usable, (MICRO,), generator=generator)
            report = trainer.add_micro_batch(domains[domain][picked], domain=domain)
        seconds.append(time.perf_counter() - began)
        conflicts += report is not None and "PCGrad" in report.note
    tokens = HELD * (SEQUENCE - 1)
    losses = [float(trainer.sharded.loss_of(d[-HELD:])) / tokens for d in domains]
    return losses, statistics.median(seconds), conflicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        path, eos_id = build_tokenizer("bytes", Path(name))
        tokenizer = TextTokenizer(path, eos_id=eos_id)
    domains = [sequences(tokenizer, texts) for texts in (code(), prose())]
    print(f"code {len(domains[0])}, prose {len(domains[1])} sequences of {SEQUENCE}")
    differences: list[list[float]] = [[], []]
    ratios = []
    for seed in range(args.seeds):
        plain, plain_seconds, _ = run(domains, surgery=False, seed=seed, steps=args.steps)
        ours, ours_seconds, conflicts = run(domains, surgery=True, seed=seed, steps=args.steps)
        ratios.append(ours_seconds / plain_seconds)
        for i in range(2):
            differences[i].append(ours[i] - plain[i])
        print(
            f"seed {seed}: sum code {plain[0]:.4f} prose {plain[1]:.4f}, pcgrad code {ours[0]:.4f} "
            f"prose {ours[1]:.4f}; conflicts in {conflicts} of {args.steps} steps",
            flush=True,
        )
    print(
        f"pcgrad minus sum, median: code {statistics.median(differences[0]):+.4f}, prose "
        f"{statistics.median(differences[1]):+.4f} nats per byte; a step takes "
        f"{statistics.median(ratios):.2f}x the time of sum"
    )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
