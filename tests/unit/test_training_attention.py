"""Test that many kinds of model are computed as transformers computes them, or refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.common.memory import ModelShape
from distributed_training.training import model as computed
from distributed_training.training.model import UnfitModelError, build_meta_model, sdpa_causal
from tests.tools.model_families import (
    FAMILIES,
    LENGTHS,
    TOLERANCE,
    difference,
    differences,
    init,
    small_copy,
)

pytestmark = pytest.mark.timeout(120)

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_follows_its_config_or_is_refused_by_name(family: str, tmp_path: Path) -> None:
    refused, config = FAMILIES[family]
    status, told = init(tmp_path, config)
    document = (DOCS / "model.md").read_text(encoding="utf-8")
    assert f"| {family} | {f'refused: `{refused}`' if refused else 'trained'} |" in document
    if refused:
        (line,) = told.splitlines()
        assert status == 2 and refused in line and "so nothing was signed" in line
        assert not (tmp_path / "lab").exists()
        return
    assert status == 0
    found = differences(config)
    print(f"{family}: the CPU's and a GPU's path at {LENGTHS} tokens: {found}")
    assert all(value <= TOLERANCE for path in found for value in path)


def test_attention_computed_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the window or the scale in our attention, so that it computes another model."""
    for change, family in (
        ({"sliding_window": None}, "mistral, window of 64"),
        ({"sliding_window": None}, "gemma 3, window of 64"),
        ({"scaling": 0.2}, "granite, plain logits"),
        ({"sliding_window": 31}, "phi3, window of 64"),
    ):
        copy = small_copy(FAMILIES[family][1])
        with monkeypatch.context() as patch:
            patch.setattr(computed, "sdpa_causal", partial(_changed, change))
            below, above = (difference(copy, length) for length in LENGTHS)
        assert above > TOLERANCE
        assert (below <= TOLERANCE) == ("sliding_window" in change)


def _changed(change: dict[str, Any], *tensors: Any, **options: Any) -> Any:
    return sdpa_causal(*tensors, **options | change)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3, wider keys than values"])
def test_memory_and_disk_go_by_all_of_a_mixtures_experts(family: str) -> None:
    config = FAMILIES[family][1]
    count = sum(p.numel() for p in build_meta_model(config).parameters())
    shape = ModelShape.from_config(config, count)
    assert shape.parameters == pytest.approx(count, rel=2e-3)
    with pytest.raises(ValueError, match="cannot be counted from it"):
        ModelShape.from_config(config)


@pytest.mark.parametrize("kind", ["llama", "gemma", "qwen3", "smollm3", "mistral"])
def test_tied_weights_count_once_where_the_config_does_not_say_it(kind: str) -> None:
    config = FAMILIES["olmo2"][1] | {"model_type": kind}
    model: Any = build_meta_model(config)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert ModelShape.from_config(config).tied == tied


def test_an_option_that_is_not_known_is_refused() -> None:
    """Future models may pass any option, so only options at a harmless value are accepted."""
    values = torch.randn(1, 4, 8, 16)
    plain, _ = sdpa_causal(torch.nn.Identity(), values, values, values, None)
    same = {
        "sliding_window": 8,
        "softcap": None,
        "is_causal": True,
        "position_ids": values,
        "x": None,
    }
    assert torch.equal(
        sdpa_causal(torch.nn.Identity(), values, values, values, None, **same)[0], plain
    )
    for name in ("softcap", "s_aux", "position_bias", "indices", "anything_new"):
        with pytest.raises(UnfitModelError, match=f"has {name},"):
            sdpa_causal(torch.nn.Identity(), values, values, values, None, **{name: 3.0})
    seen, _ = sdpa_causal(torch.nn.Identity(), values, values, values, None, sliding_window=1)
    assert torch.allclose(seen, values.transpose(1, 2))  # each position sees only itself
