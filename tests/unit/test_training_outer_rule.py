"""Test which outer rules are refused, and how a rule is found in a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed_training.common import kinds
from distributed_training.config import ConfigError
from distributed_training.config.settings import TrainingSettings
from distributed_training.training.outer_rule import (
    OUTER_RULES,
    OuterRule,
    find_rule,
    nesterov_sgd,
    outer_rule_of,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("process_group")]


def halves(rows: Tensor) -> Tensor:
    return torch.where(rows.abs() < rows.abs().median(1, keepdim=True).values, 0, rows)


def breaks(*given: Any, **rates: Any) -> Any:
    raise RuntimeError("Could not infer dtype of NoneType\nand a second line")


def moves(returned: Callable[..., Any]) -> dict[str, Any]:
    """Return the parts of a rule whose step returns what ``returned`` returns."""
    return {"step": lambda w, g, s, lr, mu: returned(w, g, s)}


@pytest.mark.parametrize(
    ("parts", "part"),
    [
        (moves(lambda w, g, s: (w - g, g.sum())), "does not return float32 tensors"),
        (moves(lambda w, g, s: (w.sub_(g), torch.zeros_like(g))), "changes its inputs in place"),
        (moves(lambda w, g, s: (w - g, g)), "returns the average itself"),
        (moves(lambda w, g, s: (w - g / g.norm(), torch.zeros_like(g))), "depending on other rows"),
        ({"select": lambda rows: rows[:, :1]}, "does not send float32 tensors of the rows"),
        ({"select": lambda rows: rows.mul_(0)}, "changes its inputs in place"),
        ({"select": lambda rows: rows * (rows > rows.mean())}, "depending on other rows"),
        ({"feedback": 1.5}, "keeps 1.5 of the residual"),
        ({"feedback": float("nan")}, "keeps nan of the residual"),
        ({"step": breaks}, "step (RuntimeError: Could not infer dtype of NoneType)"),
        ({"step": lambda param, grad, state, losses, lr, mu: (param, grad)}, "step (TypeError: "),
        ({"step": lambda *_, **__: None}, "does not return a pair of tensors"),
        ({"select": breaks}, "select (RuntimeError: "),
        ({"select": lambda rows: None}, "does not send float32"),
        ({"feedback": "half"}, "keeps half of the residual"),
        ({"merge": breaks}, "merge (RuntimeError: "),
        ({"merge": lambda rows, facts: rows}, "merge (it does not return finite"),
        ({"merge": lambda rows, facts: rows[0] / 0}, "merge (it does not return finite"),
        ({"merge": lambda rows, facts: None}, "merge (it does not return finite"),
        ({"merge": lambda rows, facts: rows[0] * rows.sum()}, "merges a row depending on"),
    ],
)
@pytest.mark.parametrize("exchange", ["store", None])
def test_a_rule_that_fails_or_cannot_be_kept_in_rows_is_refused_in_one_line(
    parts: dict[str, Any], part: str, exchange: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OUTER_RULES, "_made", {"odd": OuterRule(**{"step": nesterov_sgd, **parts})})
    with pytest.raises(ConfigError, match=re.escape(part)) as caught:
        outer_rule_of(TrainingSettings(outer_rule="odd"), exchange)
    assert re.fullmatch(
        "the outer rule 'odd' .*, so nothing .*: correct .*, or choose another training.outer_rule",
        str(caught.value),
    )


@pytest.mark.parametrize("part", ["step", "select", "groups", "merge"])
def test_an_error_of_a_later_call_is_one_line_too(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = OuterRule(**{"step": nesterov_sgd, part: breaks})
    monkeypatch.setattr(OUTER_RULES, "_made", {"odd": rule})
    with pytest.raises(ConfigError) as caught:
        getattr(rule, part)(torch.ones(2, 3), torch.ones(2, 3))
    assert str(caught.value).startswith(f"the outer rule 'odd' fails in its {part} (RuntimeError")
    assert "\n" not in str(caught.value) and "correct that function" in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "network", "refused"),
    [
        ({"merge": lambda rows, facts: rows[0]}, {"exchange": "hivemind"}, "among themselves"),
        ({"groups": lambda members, step: [range(members)]}, {}, "all members of a network have"),
        ({"select": halves}, {"codec": "2-bit"}, "the uploads' codec '2-bit' lacks"),
    ],
)
def test_a_rule_that_such_a_network_cannot_have_is_refused(
    parts: dict[str, Any], network: dict[str, Any], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OUTER_RULES, "_made", {"odd": OuterRule(nesterov_sgd, **parts)})
    settings = TrainingSettings(outer_rule="odd")
    with pytest.raises(ConfigError, match=f"{refused}.*, so nothing was started: correct the rule"):
        outer_rule_of(settings, **network)
    assert outer_rule_of(settings, None)  # without a network there is nothing to refuse


def test_a_codec_that_nobody_registered_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"round\.codec: there is no codec of .* '5-bit'"):
        outer_rule_of(TrainingSettings(), codec="5-bit")


@pytest.mark.parametrize(
    ("name", "content", "refused"),
    [
        ("no_file.py", None, "there is no file"),
        ("registers_none.py", "", "registers 0 new outer rules"),
        (
            "this.py",
            "",
            "registers 0 new outer rules",
        ),  # the standard library has a module of that name
        ("raises_at_once.py", "1 / 0", "raises_at_once cannot be imported"),
        ("other-rule", None, "there is no outer rule called 'other-rule'"),
    ],
)
def test_a_file_without_a_rule_is_refused_in_one_line(
    name: str, content: str | None, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=refused) as caught:
        find_rule(str(path) if path.suffix else name)
    assert "\n" not in str(caught.value)


def test_a_file_s_rule_is_found_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(kinds, "_imported", [])
    monkeypatch.setattr(OUTER_RULES, "_made", {**OUTER_RULES._made})
    (tmp_path / "a_rule_of_mine.py").write_text(
        "from distributed_training.training.outer_rule import *\n"
        "OUTER_RULES.register('mine', OuterRule(nesterov_sgd))\n"
    )
    assert find_rule(str(tmp_path / "a_rule_of_mine.py")) == "mine"
    # Child processes import the plug-in too.
    assert kinds.plugin_environment()[kinds.PLUGINS] == "a_rule_of_mine"
