"""Each example runs as its docstring says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools import forked

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_a_model_trains_with_the_trainer_alone() -> None:
    done = forked.run(EXAMPLES / "train_alone.py", "2", "3", environ={}, folder=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"outer step \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 5.6, "log(264) = 5.58 is the loss of a guess"
