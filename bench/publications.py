"""A thread that queues kernels while a snapshot is written: writers that give way, and that do not.

    python -m bench.publications              two minutes on two busy cores

What a GPU's training thread does is stood in for by small operations of torch on the CPU, one after
the other. The writing is the product's, of a snapshot of the whole model. Baseline: its thread has
the priority of others, as before. Both alternate, and the median of the pairs' ratios is printed.
Where cores are idle, both take the same time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch

from bench import common
from distributed_training.common.llama import named_config
from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol.types import Progress
from distributed_training.training import collectives, snapshot
from distributed_training.training.trainer import Trainer

_AT_ONCE = 200  # operations between two looks at the clock


def small_trainer() -> Trainer:
    """Return a trainer of 16 million parameters that has taken a step."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 64}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 8192}
    settings = TrainingSettings(
        sequence_length=32,
        compile="off",
        local_batch_size_train=1,
        local_batch_size_train_effective=1,
    )
    trainer = Trainer(
        settings=settings,
        model_config=named_config("tiny") | sizes | heads,
        device=torch.device("cpu"),
        say=lambda line: None,
    )
    trainer.load_weights(None)
    trainer.begin_epoch(0)
    trainer.add_micro_batch(torch.randint(0, 8192, (1, 32)))
    return trainer


def operation_seconds(done: Callable[[], bool], most: float) -> float:
    """Return the seconds of an operation, on average until ``done``, or for ``most`` seconds."""
    total, one, count, began = torch.zeros(64), torch.ones(64), 0, time.perf_counter()
    while not done() and time.perf_counter() - began < most:
        for _ in range(_AT_ONCE):
            total.add_(one)
        count += _AT_ONCE
    return (time.perf_counter() - began) / max(1, count)


def during_a_snapshot(trainer: Trainer, *, gives_way: bool, most: float) -> float:
    """Return :func:`operation_seconds` while this process writes a snapshot."""

    def enter(device: torch.device, *, background: bool = False) -> None:
        del device  # the CPU's, on which the product leaves the priority as it is
        if background and gives_way:
            collectives.lower_priority()

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(snapshot, "enter_thread", enter),
    ):
        progress = Progress(0, 1, 1, [1])
        handle = trainer.snapshot(
            Path(folder) / "snapshot", progress=progress, block=1, last_loss=1.0
        )
        trainer.copier.finish()
        found = operation_seconds(handle.done, most)
        handle.join()
        if handle.error is not None:
            raise handle.error
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement, at most")
    options = parser.parse_args(argv)
    with common.alone():
        trainer = small_trainer()
        pairs = []
        for _ in range(options.pairs):
            bare = operation_seconds(lambda: False, options.seconds / 2)
            same, way = (
                during_a_snapshot(trainer, gives_way=gives_way, most=options.seconds)
                for gives_way in (False, True)
            )
            pairs.append((bare, same, way))
    rows = [
        [f"{1e6 * each:.1f} us" for each in pair] + [f"{pair[1] / pair[2]:.2f}x"] for pair in pairs
    ]
    common.table(("nothing written", "same priority", "gives way", "ratio"), rows)
    print(f"median ratio {statistics.median(same / way for _, same, way in pairs):.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
