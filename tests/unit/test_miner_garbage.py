"""Test that all ranks collect Python's garbage at the same boundaries, and that little piles up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distributed_training.miner import loop
from tests.tools.training_world import train, trainer

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Turn the collector on again afterwards, because other tests share this process."""
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which each collection appends its generation."""
    found: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: found.append(generation))
    return found


def test_garbage_is_collected_after_an_outer_step_some_inner_ones_or_many_new_objects(
    collected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage = loop.Garbage()
    assert not gc.isenabled() and collected == [2]
    for step in range(loop.GARBAGE_STEPS):
        garbage.follow(0, step)
        garbage.follow(0, step)  # a boundary in the middle of a step
    assert len(collected) == 1
    garbage.follow(1, step)
    assert len(collected) == 2
    for later in range(step + 1, step + 2 * loop.GARBAGE_STEPS + 1):
        garbage.follow(1, later)
    assert len(collected) == 4
    # After a roll-back or whole weights, the total of inner steps may be smaller.
    garbage.follow(2, 3)
    garbage.follow(2, 4)
    assert len(collected) == 5
    for objects in (loop.GARBAGE_OBJECTS, loop.GARBAGE_OBJECTS + 1):  # as in a long pause
        monkeypatch.setattr(gc, "get_count", lambda objects=objects: (objects, 9, 9))
        garbage.follow(2, 4)
    assert len(collected) == 6


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("how", [{}, {"wrap": "block"}, {"activation_checkpointing": "full"}])
def test_steps_leave_no_tensor_to_the_collector(how: dict[str, Any]) -> None:
    """Otherwise a GPU would fill up until the next collection."""
    made = trainer(**how)
    train(made, 0, 1)
    loop.Garbage()
    train(made, 1, 4)
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    assert not [x for x in gc.garbage if isinstance(x, torch.Tensor)]
    assert len(gc.garbage) < 3 * 4 * 100  # three steps of four micro-batches each
