"""Test that the scripts of the page join a network with few additional lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import distributed_training
from distributed_training.common.llama import llama_config
from distributed_training.common.memory import ModelShape
from distributed_training.training.model import hf_config
from tests.tools.network import network_file
from tests.tools.settings import usual_network

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "join-a-script.md"
LOOP = ROOT / "examples" / "join.py"
SCRIPTS = sorted((ROOT / "examples").glob("join*"))
MOST = 10  # our lines in a script of somebody else
LONGEST = 80  # lines in an example
SHAPE = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate": 32, "vocab": 264}
MODEL = {k: v for k, v in llama_config(**SHAPE, max_positions=256).items() if v is not None}
RULES = {
    "format": 2,
    "exchange": "store",
    "private": True,
    "chain.url": "http://127.0.0.1:8100",
    "model.config": MODEL,
    "model.parameters": ModelShape.from_config(MODEL).parameters,
}


def source(script: Path) -> str:
    """Return the text of a script, or of the code cells of a notebook."""
    text = script.read_text()
    if script.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return text


def ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.endswith("# network")]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_needs_few_lines_and_the_page_says_how_many(script: Path) -> None:
    text = source(script)
    count = len(ours(text))
    assert 2 <= count <= MOST and len(text.splitlines()) <= LONGEST
    assert re.search(rf"^\| .* \| `examples/{script.name}` \| {count} \|$", PAGE.read_text(), re.M)


def test_the_page_shows_lines_of_the_scripts() -> None:
    sources = [
        [line.removesuffix("  # network").strip() for line in source(script).splitlines()]
        for script in SCRIPTS
    ]
    shown = blocks("python")
    assert len(shown) >= len(SCRIPTS)
    for block in shown:
        shown_lines = (line.removesuffix("  # network").strip() for line in block.splitlines())
        lines = [line for line in shown_lines if line]
        assert any(_in_order(lines, each) for each in sources), block


def _in_order(lines: list[str], source: list[str]) -> bool:
    rest = iter(source)
    return all(line in rest for line in lines)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return the paths of a network's file and of a text in the working folder."""
    monkeypatch.chdir(tmp_path)
    network_file(tmp_path, RULES)
    Path("text.txt").write_text("one two three four " * 800)
    return "network.toml", "text.txt"


def load(script: Path, *without: str) -> dict[str, Any]:
    """Run a script's definitions, leaving out marked lines that begin with ``without``."""
    text = script.read_text()
    for line in ours(text):
        if line.strip().startswith(without):
            kept = re.sub(r"\S.*", "if True:" if line.strip().startswith("with") else "pass", line)
            text = text.replace(line, kept)
    names: dict[str, Any] = {"__name__": script.stem}
    exec(compile(text, str(script), "exec"), names)
    return names


@pytest.mark.slow
def test_the_loop_without_the_lines_is_a_plain_one(
    network: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    path, text = network
    load(LOOP, "with", "net.step")["main"](path, [text], 20)
    losses = [float(word) for word in capsys.readouterr().out.split() if word != "loss"]
    assert len(losses) == 20 and losses[-1] < losses[0]


class Recorded:
    """Records the calls of a membership, and sets the first trained weight at each step."""

    def __init__(self, network: str, model: Any, optimizer: Any) -> None:
        trained = (each for each in model.parameters() if each.requires_grad)
        self.first: Any = next(trained).data.view(-1)
        self.found = self.first[0].item()
        self.calls: list[tuple[float | None, int | None]] = []
        self.closed = False
        self.first[0] = 50.0

    def step(self, loss: Any, tokens: int | None) -> None:
        self.calls.append((None if loss is None else float(loss), tokens))
        self.first[0] = 50.0 + len(self.calls)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def adapted(network: tuple[str, str]) -> tuple[str, str, list[str]]:
    """Return the arguments of a script that adapts a base."""
    path, text = network
    settings = {"r": 2, "alpha": 4, "targets": ["q_proj"]}
    more = {"model.kind": "lora", "model.settings": settings, "model.trainable_parameters": 64}
    network_file(Path(), {**RULES, "format": 3, **more, "model.frozen": "0" * 64})
    AutoModelForCausalLM.from_config(hf_config(MODEL)).save_pretrained("base")
    return path, "base", [text]


def saved_by_transformers(step: int) -> float:
    from safetensors.torch import load_file

    tensors = load_file(f"trainer/checkpoint-{step}/adapter_model.safetensors")
    return next(each for name, each in tensors.items() if "lora_A" in name).view(-1)[0].item()


def saved_by_lightning(step: int) -> float:
    tensors = torch.load("lightning/last.ckpt", weights_only=False)["state_dict"]
    return next(each for name, each in tensors.items() if "lora_A" in name).view(-1)[0].item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "saved"),
    [("huggingface", saved_by_transformers), ("lightning", saved_by_lightning)],
    ids=["transformers", "lightning"],
)
def test_a_trainer_steps_once_an_optimizer_step_and_saves_the_network_step(
    adapted: tuple[str, str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    saved: Callable[[int], float],
) -> None:
    pytest.importorskip("accelerate" if host == "huggingface" else host)
    joined: list[Recorded] = []
    monkeypatch.setattr(
        f"distributed_training.{host}.join",
        lambda *given: joined.append(Recorded(*given)) or joined[-1],
    )
    name = {"huggingface": "join_trainer.py"}.get(host, f"join_{host}.py")
    script = load(LOOP.with_name(name))
    script["main"](*adapted, 10)
    (first,) = joined
    assert [tokens for _, tokens in first.calls] == [1024] * 10, "of four micro-batches of one"
    reported = first.calls[-1][0]
    assert reported is not None and 4 < reported < 6, "of a micro-batch, or as it was logged"
    assert first.closed
    assert saved(10) == 60.0, "of this boundary, with what the network's step left"
    script["main"](*adapted, 20)  # the script continues from the Trainer's checkpoint
    again = joined[-1]
    assert again.found == 60.0 and len(again.calls) == 10 and saved(20) == 60.0
    if host == "huggingface":
        Path("trainer/checkpoint-20/trainer_state.json").unlink()  # a kill has left it incomplete
        script["main"](*adapted, 20)
        assert joined[-1].found == 60.0 and len(joined[-1].calls) == 10


def test_a_trainer_that_ends_with_earlier_weights_is_refused() -> None:
    huggingface = pytest.importorskip("distributed_training.huggingface")
    given: Any = SimpleNamespace(load_best_model_at_end=True)
    callback = huggingface.NetworkCallback("network.toml")
    with pytest.raises(ValueError, match="no network was joined"):
        callback.on_train_begin(given, None, None, model=None, optimizer=None)


def test_a_script_gets_the_networks_model_from_wherever_it_is_named(
    network: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may name it, or the settings that ``dt-join`` wrote."""
    assert distributed_training.model_config("network.toml") == MODEL
    assert distributed_training.model_config(Path("network.toml")) == MODEL
    assert distributed_training.tokenizer("network.toml").encode("abc").ids
    Path("miner.toml").write_text('network = "network.toml"\n')
    found = distributed_training.model_config()
    found["vocab_size"] = 1
    assert distributed_training.model_config() == MODEL, "a copy, which may be changed"
    with pytest.raises(ValueError, match=r"no \[model.config\]") as refused:
        distributed_training.model_config(usual_network())
    assert "\n" not in str(refused.value)
    monkeypatch.chdir("/")
    with pytest.raises(ValueError, match="no network is named"):
        distributed_training.model_config()
