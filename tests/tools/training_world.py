"""Make small trainers for tests, in this process or on several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from distributed_training.common.llama import llama_config
from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol import keys
from distributed_training.protocol.types import Progress
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.collectives import Layout, open_stream
from distributed_training.training.copies import BackgroundWrite
from distributed_training.training.pretrained import write_frozen
from distributed_training.training.script_weights import ScriptWeights
from distributed_training.training.trainer import Trainer
from testbed.first_weights import begin

SEQUENCE = 32
EFFECTIVE = 8

SETTINGS = TrainingSettings(
    local_batch_size_train=2,
    local_batch_size_train_effective=EFFECTIVE,
    sequence_length=SEQUENCE,
    learning_rate=2e-3,
    warmup_steps=3,
    total_steps=100,
    precision="fp32",
)


def tiny(**changes: Any) -> dict[str, Any]:
    """Return the config of a model with about 30,000 parameters and uneven shards."""
    shape: dict[str, Any] = {
        "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 48, "vocab": 67,
        "max_positions": 64,
    }  # fmt: skip
    return llama_config(**(shape | changes))


def trainer(
    *,
    rank: int = 0,
    world_size: int = 1,
    model: dict[str, Any] | None = None,
    device: torch.device | str = "cpu",
    run_folder: Path | None = None,
    local_ranks: int = 0,
    frozen: Path | None = None,
    **changes: Any,
) -> Trainer:
    """Return a trainer with initial weights, at outer step 0."""
    made = Trainer(
        settings=dataclasses.replace(SETTINGS, **changes),
        model_config=model or tiny(),
        device=torch.device(device),
        layout=Layout(rank, world_size, local_ranks),
        frozen=frozen,
        run_folder=run_folder,
    )
    begin(made, frozen=made.stream.from_rank_0(frozen) is None)  # only rank 0 names the file
    return made


def sequences(step: int, *, count: int = EFFECTIVE, vocab: int = 67) -> torch.Tensor:
    """Return a step's whole batch of sequences that count upwards, equal for any world size."""
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, vocab, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    return (start + stride * torch.arange(SEQUENCE)) % vocab


def train(made: Trainer, first: int, last: int) -> list[Any]:
    """Take the inner steps from ``first`` to before ``last``; return their reports."""
    reports = []
    for step in range(first, last):
        whole = sequences(step, count=made.settings.local_batch_size_train_effective)
        for part in whole[made.rank :: made.world_size].split(made.micro_batch_size):
            report = made.add_micro_batch(part)
        reports.append(report)
    return reports


def finished(handle: BackgroundWrite) -> BackgroundWrite:
    """Wait until the job has ended and return it. Raises the job's error."""
    handle.join()
    if handle.error is not None:
        raise handle.error
    return handle


def memory_ends(owner: Any, name: str, *, when: bool) -> AbstractContextManager[Any]:
    """Let the method ``name`` of ``owner`` run out of memory, if ``when`` is true on this rank.

    Calls with a vector still succeed.
    """

    def no_room(*given: Any, **_: Any) -> Any:
        if given and isinstance(given[0], torch.Tensor) and given[0].dim() == 1:
            return mock.DEFAULT
        raise MemoryError("no memory is left")

    if not when:
        return nullcontext()
    return mock.patch.object(owner, name, side_effect=no_room, wraps=getattr(owner, name))


def save_checkpoint(
    keeper: Checkpointer, progress: Progress, position: dict[str, Any] | None = None
) -> None:
    """Save a checkpoint; return once it is written or writing has failed."""
    keeper.save(position or {}, progress)
    keeper.wait()


def same(one: Sequence[torch.Tensor] | None, two: Sequence[torch.Tensor] | None) -> bool:
    """Return whether two lists of tensors have equal bits."""
    assert one is not None and two is not None
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def whole_weights(made: Trainer) -> list[torch.Tensor]:
    """Return all parameters. Collective."""
    return made.stream.whole([item.local for item in made.sharded.shards])


def evaluate(made: Trainer, batches: torch.Tensor) -> float:
    """Return the mean loss of ``batches`` in nats per predicted token. Collective.

    All ranks pass the same (sequences, length) token ids, and each evaluates its share of them.
    """
    total = 0.0
    for i in range(0, len(batches), made.world_size):
        # Gathers are collective, so a rank without a sequence runs one that does not count.
        index = i + made.rank if i + made.rank < len(batches) else i
        with torch.no_grad():
            value = float(made.sharded.root(batches[index : index + 1].to(made.device))[0])
        total += value if index == i + made.rank else 0.0
    return made.stream.sum([total])[0] / (len(batches) * (batches.shape[1] - 1))


def frozen_file(folder: Path, model: Mapping[str, Any]) -> Path:
    """Write the frozen tensors that a network of ``model`` publishes; return the file."""
    write_frozen(folder / keys.FROZEN, model, None)
    return folder / keys.FROZEN


def joined(
    model: nn.Module,
    folder: Path,
    config: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
) -> ScriptWeights:
    """Return the weights of a script's ``model`` that joined a network with frozen tensors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return ScriptWeights(
        model,
        [optimizer or torch.optim.AdamW(trained, lr=3e-3)],
        settings=SETTINGS,
        model_config=config,
        stream=open_stream(Layout()),
        frozen=frozen_file(folder, config),
    )
