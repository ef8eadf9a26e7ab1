"""An outer rule is one file: miners take their outer step by it, and checkpoints keep its state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed_training.config import ConfigError
from distributed_training.protocol.types import Progress
from distributed_training.training.checkpoint import Checkpointer
from tests.tools.training_world import outer_step, save_checkpoint, train, trainer
from tests.toys.outer_rule import signed

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("process_group")]


def test_an_outer_step_is_taken_by_a_plug_in_s_rule(tmp_path: Path) -> None:
    made = trainer(outer_rule="signed")
    start = [rows.clone() for _, _, rows in made.outer.epoch_start_rows()]
    train(made, 1, 5)
    buffers = [torch.zeros(shape) for _, shape in made.schema]
    outer_step(made, buffers)
    expected = [signed(w, g, None, lr=0.8, mu=0.9) for w, g in zip(start, buffers, strict=True)]
    for item, (weights, _) in zip(made.sharded.shards, expected, strict=True):
        assert torch.equal(item.local, weights)
    save_checkpoint(Checkpointer(trainer=made, folder=tmp_path), Progress(1, 0, 4, []))
    again = trainer(outer_rule="signed")
    assert Checkpointer(trainer=again, folder=tmp_path).restore() is not None
    assert again.outer.momentum is not None
    for found, (_, kept) in zip(again.outer.momentum, expected, strict=True):
        assert torch.equal(found, kept)


def test_a_name_that_nobody_registered_is_told_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no outer rule called 'none'.*nesterov, signed"):
        trainer(outer_rule="none")
