"""The model that comes out: a folder that transformers loads, all or nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distributed_training.config import load_config
from distributed_training.data.tokenizer import build_tokenizer
from distributed_training.protocol.metadata import ConfigExtras
from distributed_training.scoring import export
from distributed_training.training.model import parameter_schema
from distributed_training.validator.global_state import initial_weights, small_llama

pytestmark = pytest.mark.timeout(120)
CONFIG = load_config("validator", ["--preset", "local"], environ={}, dotenv=None, check=False)
NAME = "model.norm.weight"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A validator's run folder after outer step 3."""
    _, eos = build_tokenizer("bytes", tmp_path / "tokenizer")
    content = small_llama(vocabulary=264, sequence_length=128, eos_token=eos)
    for step in (2, 3):
        folder = tmp_path / "validator" / "global" / f"epoch-{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes(ConfigExtras((1,), 5).merge_into(content))
        weights = initial_weights(content, seed=step)
        named = {n: w for (n, _), w in zip(parameter_schema(content), weights, strict=True)}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    return tmp_path / "validator"


def test_transformers_loads_the_newest_state(state: Path, tmp_path: Path, capsys) -> None:
    made = tmp_path / "model"
    words = [str(made), "--from", str(state), "--preset", "local"]
    assert export.main([*words, "--sample", "def ", "--tokens", "4", "--eval", "2"]) == 0
    out = capsys.readouterr().out
    assert "of outer step 3" in out and "\ndef " in out
    assert float(out.partition("held-out loss ")[2].split(",")[0]) == pytest.approx(
        math.log(264), abs=0.4
    )
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(made).state_dict()
    content = json.loads((made / "config.json").read_text())
    assert "block_list" not in content
    wanted = initial_weights(content, seed=3)
    for (name, _), weight in zip(parameter_schema(content), wanted, strict=True):
        assert torch.equal(loaded[name], weight)
    assert export.main(words) == 2  # the folder is there already
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("nan", "not finite"),
        ("beyond float32", "not finite"),
        ("shape", "has shape"),
        ("missing", "lacks"),
        ("config", "cannot be exported"),
        ("none", "epoch-9/config.json is missing, so nothing was exported: leave"),
    ],
)
def test_a_damaged_state_leaves_no_folder(
    state: Path, tmp_path: Path, damage: str, words: str
) -> None:
    from safetensors.torch import load_file

    folder = state / "global" / "epoch-3"
    tensors = load_file(folder / "model.safetensors")
    if damage == "nan":
        tensors[NAME][0] = float("nan")
    elif damage == "beyond float32":
        tensors[NAME] = tensors[NAME].double().fill_(1e300)
    elif damage == "shape":
        tensors[NAME] = tensors[NAME][1:].clone()
    elif damage == "missing":
        del tensors[NAME]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if damage == "config":
        (folder / "config.json").write_text("{}")
    before = set(tmp_path.iterdir())
    reader, newest = export.open_folder(state)
    assert newest == 3
    step = 9 if damage == "none" else newest
    with pytest.raises(export.ExportError, match=words):
        export.export_model(CONFIG, reader, tmp_path / "model", outer_step=step)
    assert set(tmp_path.iterdir()) == before
