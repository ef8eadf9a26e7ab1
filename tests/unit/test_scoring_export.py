"""Test dt-export: it writes a folder that transformers loads, or nothing at all."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from distributed_training.common.llama import local_llama_config
from distributed_training.config import load_config
from distributed_training.data.tokenizer import build_tokenizer
from distributed_training.node.published import list_files
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import with_rules
from distributed_training.scoring import export
from distributed_training.training.lora import begin, read_rules
from distributed_training.training.model import (
    build_meta_model,
    hf_config,
    initial_weights,
    parameter_schema,
)
from distributed_training.training.pretrained import read_weights, write_frozen
from distributed_training.training.weights import load_weights
from tests.tools.network import network_file

pytestmark = pytest.mark.timeout(120)
CONFIG = load_config("validator", ["--network", "local"], environ={}, dotenv=None, check=False)
NAME = "model.norm.weight"


def content_with_tokenizer(folder: Path) -> dict[str, Any]:
    """Write a tokenizer of bytes into ``folder``, and return a ``config.json`` that suits it."""
    _, eos = build_tokenizer("bytes", folder)
    return local_llama_config(sequence_length=128) | {"eos_token_id": eos, "pad_token_id": eos}


def place_of(model: dict[str, Any], tmp_path: Path, weights: list[torch.Tensor]) -> Path:
    """Write these weights of ``model`` as outer step 3 of a run folder; return their folder."""
    place = tmp_path / "validator" / "global" / "epoch-3"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(model))
    named = {name: w for (name, _), w in zip(parameter_schema(model), weights, strict=True)}
    save_file(named, place / keys.MODEL)
    return place


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Return a validator's run folder after outer step 3."""
    content = content_with_tokenizer(tmp_path / "tokenizer")
    for step in (2, 3):
        folder = tmp_path / "validator" / "global" / f"epoch-{step}"
        folder.mkdir(parents=True)
        extras = {"total_inner_steps": 5}  # an earlier edition wrote this too
        (folder / "config.json").write_text(json.dumps(content | extras))
        weights = initial_weights(content, seed=step)
        named = {n: w for (n, _), w in zip(parameter_schema(content), weights, strict=True)}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    return tmp_path / "validator"


def test_transformers_loads_the_newest_state(state: Path, tmp_path: Path, capsys) -> None:
    made = tmp_path / "model"
    words = [str(made), "--from", str(state), "--network", "local"]
    assert export.main([*words, "--sample", "def ", "--tokens", "4", "--eval", "2"]) == 0
    out = capsys.readouterr().out
    assert "of outer step 3" in out and "\ndef " in out and ", on " in out
    card = (made / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "| Outer step | 3 |" in card
    assert re.search(r"\| Measured \| held-out loss \d\.\d{4}, perplexity .*, on .* \|", card)
    assert float(out.partition("held-out loss ")[2].split(",")[0]) == pytest.approx(
        math.log(264), abs=0.4
    )
    loaded = AutoModelForCausalLM.from_pretrained(made).state_dict()
    content = json.loads((made / "config.json").read_text())
    assert "block_list" not in content
    wanted = initial_weights(content, seed=3)
    for (name, _), weight in zip(parameter_schema(content), wanted, strict=True):
        assert torch.equal(loaded[name], weight)
    assert export.main(words) == 2  # because the folder exists
    assert "already exists" in capsys.readouterr().err


def test_a_model_is_measured_on_the_networks_own_text(state: Path, tmp_path: Path, capsys) -> None:
    text = tmp_path / "held.txt"
    text.write_text("ACGT" * 400)
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    rules: dict[str, object] = {"exchange": "store", "data.held_out": f"{text}#{digest}"}
    file = network_file(tmp_path, rules)
    words = ["--from", str(state), "--network", file, "--eval", "4"]
    assert export.main([str(tmp_path / "model"), *words]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith(", on held.txt")
    assert float(out.partition("held-out loss ")[2].split(",")[0]) == pytest.approx(
        math.log(264), abs=0.4
    )
    again = f"code*3={text}#{digest}"
    rules |= {"data.held_out": [again, again.replace("code*3", "prose")], "data.own": True}
    of_two = ["--network", network_file(tmp_path / "two", rules)]
    assert export.main([str(tmp_path / "of-two"), *words[:2], *of_two, *words[4:]]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    loss = out.partition("held-out loss ")[2].split(",")[0]
    assert last.startswith(f"held-out loss {loss}, ")
    card = (tmp_path / "of-two" / "README.md").read_text()
    assert "| Data | each member's own text |" in card
    assert last.endswith(f", on code 0.75, prose 0.25 (code {loss}, prose {loss})")


def test_an_export_holds_the_frozen_tensors_too(tmp_path: Path, capsys) -> None:
    content = content_with_tokenizer(tmp_path / "tokenizer")
    trainable = ["model.layers.*", "model.norm.weight", "lm_head.weight"]
    model = with_rules(content, None, trainable)
    state, weights = tmp_path / "validator", initial_weights(model, seed=0)
    place_of(model, tmp_path, weights)
    (base := tmp_path / "base").mkdir()
    write_frozen(base / keys.FROZEN, model, None)
    (published := state / "published").mkdir()
    rules: dict[str, object] = {"model.trainable": trainable}
    rules |= {"model.frozen": list_files(base, published)}
    rules |= {"exchange": "store", "model.trainable_parameters": sum(w.numel() for w in weights)}
    words = [str(tmp_path / "model"), "--from", str(state), "--network", "local"]
    assert export.main(words) == 1  # the built-in file freezes no tensor
    assert "only the network's file names that part" in capsys.readouterr().err
    assert export.main([*words, "--network", network_file(tmp_path, rules)]) == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == content
    exported = load_weights(tmp_path / "model" / keys.MODEL, parameter_schema(content))
    assert all(map(torch.equal, exported, initial_weights(content, seed=0)))


@pytest.mark.parametrize("named", [False, True])
def test_adapters_are_loaded_as_their_card_says(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    content = content_with_tokenizer(tmp_path / "base")
    base: Any = AutoModelForCausalLM.from_config(hf_config(content))
    base.save_pretrained(tmp_path / "base")
    found = read_rules("r=4,train=B", content, f"lab/base@{'0' * 40}" if named else "")
    model = with_rules(content, "lora", None, found)
    begin(tmp_path / "adapters", model)
    state, schema = tmp_path / "validator", parameter_schema(model)
    place = place_of(model, tmp_path, [torch.randn(shape) * 0.1 for _, shape in schema])
    (fixed := tmp_path / "fixed").mkdir()
    write_frozen(fixed / keys.FROZEN, model, tmp_path / "base", tmp_path / "adapters")
    (published := state / "published").mkdir()
    trained = sum(math.prod(shape) for _, shape in schema)
    built = build_meta_model(model)
    rules: dict[str, object] = {
        "exchange": "store",
        "model.kind": "lora",
        "model.settings": found,
        "model.config": {key: each for key, each in content.items() if each is not None},
        "model.parameters": sum(each.numel() for each in built.parameters()),
        "model.trainable_parameters": trained,
        "model.frozen": list_files(fixed, published),
    }
    words = ["--from", str(state), "--network", network_file(tmp_path, rules)]
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert export.main([str(part), *words, "--eval", "2"]) == 2
    assert "add --merge" in capsys.readouterr().err
    assert export.main([str(whole), *words, "--merge", "--eval", "2"]) == 0
    assert export.main([str(part), *words]) == 0
    # Another network may begin with the adapters that were exported.
    trained_as = load_weights(place / keys.MODEL, schema)
    assert all(map(torch.equal, read_weights(part, model), trained_as))
    monkeypatch.chdir(tmp_path)
    if named:
        asked: list[Any] = []
        load = AutoModelForCausalLM.from_pretrained

        def of_hub(name: str, **given: Any) -> Any:
            asked.append((name, given))
            return load(tmp_path / "base")

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", of_hub)
    else:
        (tmp_path / "FOLDER-OF-THE-BASE").symlink_to(tmp_path / "base")
    ids, logits = torch.arange(40).view(2, 20), []
    for folder in (part, whole):
        card = (folder / "README.md").read_text()
        assert ("library_name: peft" in card) == (folder == part)
        (lines,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        if named and folder == whole:
            assert asked == [("lab/base", {"revision": "0" * 40})]
            monkeypatch.undo()
            monkeypatch.chdir(tmp_path)
        exec(lines, names := dict[str, Any]())
        logits.append(names["model"].eval()(input_ids=ids).logits)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(logits[0], base.eval()(input_ids=ids).logits, atol=1e-2)


def rewritten(folder: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Save the weights in a folder again, with one tensor changed or left out."""
    tensors = load_file(folder / keys.MODEL)
    changed = change(tensors.pop(NAME))
    more = {} if changed is None else {NAME: changed}
    save_file(tensors | more, folder / keys.MODEL, {"format": "pt"})


#: By name: how the folder of outer step 3 is damaged, and a part of the resulting error.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nan": (lambda at: rewritten(at, lambda t: t.fill_(math.nan)), "not finite"),
    "beyond float32": (lambda at: rewritten(at, lambda t: t.double().fill_(1e300)), "not finite"),
    "shape": (lambda at: rewritten(at, lambda t: t[1:].clone()), "has shape"),
    "missing": (lambda at: rewritten(at, lambda t: None), "lacks"),
    "config": (lambda at: (at / "config.json").write_text("{}"), "cannot be exported"),
    "no model": (
        lambda at: (at / keys.MODEL).unlink(),
        r"has no weights of outer step 3 \(those of outer steps 2 are there\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_leaves_no_folder(state: Path, tmp_path: Path, damage: str) -> None:
    newest, folder = export.find_weights(state, None)
    assert newest == 3
    with pytest.raises(export.ExportError, match=r"step 9 \(.* steps 2, 3 are there\), so nothing"):
        export.find_weights(state, 9)
    make, words = DAMAGES[damage]
    make(folder)
    before = set(tmp_path.iterdir())
    with pytest.raises(export.ExportError, match=words):
        export.export_model(CONFIG, export.find_weights(state, 3)[1], tmp_path / "model")
    assert set(tmp_path.iterdir()) == before
