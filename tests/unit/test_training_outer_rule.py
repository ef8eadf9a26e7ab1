"""An outer rule is one file: miners take their outer step by it, and checkpoints keep its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.config import ConfigError
from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol.types import Progress
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.outer_rule import OUTER_RULES, outer_rule_of
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


@pytest.mark.parametrize(
    ("returned", "refused"),
    [
        (lambda w, g, s: (w - g, g.sum()), "other tensors than float32"),
        (lambda w, g, s: (w - g, w.double()), "other tensors than float32"),
        (lambda w, g, s: (w.sub_(g), torch.zeros_like(g)), "changes what it is given"),
        (lambda w, g, s: (w - g, g), "returns the average itself"),
        (lambda w, g, s: (w - g / g.norm(), torch.zeros_like(g)), "what is in other rows"),
        (lambda w, g, s: (w - g, g * 0 if s is None else s[0]), "other tensors than float32"),
    ],
)
def test_a_rule_whose_state_could_not_be_kept_is_refused(
    returned: Any, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OUTER_RULES, "_made", {"odd": lambda w, g, s, lr, mu: returned(w, g, s)})
    with pytest.raises(ConfigError, match=refused):
        outer_rule_of(TrainingSettings(outer_rule="odd"))
