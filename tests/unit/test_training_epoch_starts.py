"""The sketch by which a miner knows its own weights again."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from distributed_training.training.collectives import row_range
from distributed_training.training.epoch_starts import REMEMBERED, EpochStarts

SHAPES = [(67, 32), (32, 32), (32,), (3, 5)]


def starts(world: int = 1, rank: int = 0, seed: int = 7) -> EpochStarts:
    shards: Any = [
        types.SimpleNamespace(shape=shape, start=first, stop=last)
        for shape in SHAPES
        for first, last in (row_range(shape[0], world, rank),)
    ]
    stream: Any = types.SimpleNamespace(
        from_rank_0=lambda value: seed,
        run_on_all=lambda work: work(),
        sum=list,
        layout=types.SimpleNamespace(replicas=1),
    )
    return EpochStarts(shards=shards, stream=stream)


def weights(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [0.02 * torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_add_up_to_the_sketch_of_one(world: int) -> None:
    """So a checkpoint fits another number of ranks, also if some ranks hold no row."""
    parts = []
    for rank in range(world):
        made = starts(world, rank)
        rows = [whole[s.start : s.stop] for whole, s in zip(weights(), made._shards, strict=True)]
        parts.append(made.sketch(rows))
    assert torch.allclose(sum(parts), starts().sketch(weights()), atol=1e-6)  # type: ignore[arg-type]


def test_the_same_weights_in_other_last_bits_are_ours_and_nothing_else_is() -> None:
    made, ours = starts(), weights()
    made.leave(4, made.sketch(ours))
    other = starts(seed=8)
    other.load_state_dict(made.state_dict())  # a restart

    def known(changed: list[torch.Tensor]) -> bool:
        return other.are_ours(4, changed)

    assert known(ours) and known([t * (1 + 1e-7 * torch.randn_like(t)) for t in ours])
    assert not known(weights(1))
    for index, whole in enumerate(ours):
        for value in (float("nan"), float("inf"), 1.0):
            changed = [t.clone() for t in ours]
            changed[index].view(-1)[whole.numel() // 2] = value
            assert not known(changed), (SHAPES[index], value)
        moved = [t.clone() for t in ours]
        moved[index] = whole.flip(0)
        assert not known(moved), SHAPES[index]
    assert 4 in other and 3 not in other


def test_the_last_outer_steps_are_remembered_with_their_losses() -> None:
    made = starts()
    for outer_step in range(12):
        made.loss = 8.0 - outer_step / 2 if outer_step != 9 else None
        made.leave(outer_step, made.sketch(weights()))
    assert [step for step in range(12) if step in made] == [*range(12 - REMEMBERED, 12)]
    assert made.loss_before(12, ours=12) == 2.5, "another average of our own outer step"
    assert made.loss_before(13, ours=12) == 2.5, "what others made without us"
    assert made.loss_before(11, ours=12) == 3.0
    assert made.loss_before(10, ours=12) == float("inf"), "nothing was trained there"
    assert starts().loss_before(3, ours=3) is None
    made.leave(2, made.sketch(weights()))  # the network went back
    assert [step for step in range(12) if step in made] == [2]
