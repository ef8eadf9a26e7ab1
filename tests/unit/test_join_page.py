"""Scripts of others that join a network: few lines of ours, as the page shows them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distributed_training
from distributed_training.common.memory import ModelShape
from tests.tools.network import network_file
from tests.tools.settings import usual_network

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "join-a-script.md"
SCRIPTS = [ROOT / "examples" / name for name in ("join.py", "join_trainer.py")]
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
RULES = {
    "format": 2,
    "exchange": "store",
    "private": True,
    "chain.url": "http://127.0.0.1:8100",
    "model.config": MODEL,
    "model.parameters": ModelShape.from_config(MODEL).parameters,
}


def ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.endswith("# network")]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def test_the_page_shows_lines_of_the_scripts() -> None:
    sources = [
        [line.removesuffix("  # network").strip() for line in script.read_text().splitlines()]
        for script in SCRIPTS
    ]
    shown = blocks("python")
    assert len(shown) >= len(SCRIPTS)
    for block in shown:
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        assert any(_in_order(lines, source) for source in sources), block


def _in_order(lines: list[str], source: list[str]) -> bool:
    rest = iter(source)
    return all(line in rest for line in lines)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The paths of a network's file and of a text, in the working folder."""
    monkeypatch.chdir(tmp_path)
    network_file(tmp_path, RULES)
    Path("text.txt").write_text("one two three four " * 800)
    return "network.toml", "text.txt"


def load(script: Path, *without: str) -> dict[str, Any]:
    """Run a script's definitions; ``without``: beginnings of marked lines that are left out."""
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
    load(SCRIPTS[0], "with", "net.step")["main"](path, [text], 20)
    losses = [float(word) for word in capsys.readouterr().out.split() if word != "loss"]
    assert len(losses) == 20 and losses[-1] < losses[0]


class Recorded:
    """A membership that records its calls and sets the model's first weight at each step."""

    def __init__(self, network: str, model: Any, optimizer: Any) -> None:
        self.first: Any = next(model.parameters()).data.view(-1)
        self.found = self.first[0].item()
        self.calls: list[tuple[float | None, int | None]] = []
        self.closed = False
        self.first[0] = 50.0

    def step(self, loss: float | None, tokens: int | None) -> None:
        self.calls.append((loss, tokens))
        self.first[0] = 50.0 + len(self.calls)

    def close(self) -> None:
        self.closed = True


@pytest.mark.slow
def test_the_trainer_steps_once_an_optimizer_step_and_saves_the_network_step(
    network: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    from safetensors.torch import load_file

    from distributed_training import huggingface

    joined: list[Recorded] = []
    monkeypatch.setattr(
        huggingface, "join", lambda *given: joined.append(Recorded(*given)) or joined[-1]
    )
    path, text = network
    script = load(SCRIPTS[1])
    script["main"](path, [text], 10)
    (first,) = joined
    assert [tokens for _, tokens in first.calls] == [1024] * 10, "of four micro-batches of one"
    assert first.calls[0][0] is None and 4 < first.calls[-1][0] < 6, "as it was logged"
    assert first.closed

    def saved(step: int) -> float:
        file = f"trainer/checkpoint-{step}/model.safetensors"
        return load_file(file)["model.embed_tokens.weight"].view(-1)[0].item()

    assert saved(10) == 60.0, "of this boundary, with what the network's step left"
    script["main"](path, [text], 12)  # continues from the Trainer's checkpoint
    again = joined[-1]
    assert again.found == 60.0 and len(again.calls) == 2 and saved(12) == 52.0
    Path("trainer/checkpoint-12/trainer_state.json").unlink()  # a kill has cut it off
    script["main"](path, [text], 12)
    assert joined[-1].found == 60.0 and len(joined[-1].calls) == 2


def test_a_trainer_that_ends_with_earlier_weights_is_refused() -> None:
    huggingface = pytest.importorskip("distributed_training.huggingface")
    given: Any = SimpleNamespace(load_best_model_at_end=True)
    callback = huggingface.NetworkCallback("network.toml")
    with pytest.raises(ValueError, match="nothing was joined"):
        callback.on_train_begin(given, None, None, model=None, optimizer=None)


def test_a_script_gets_the_networks_model_from_wherever_it_is_named(
    network: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, and what ``dt-join`` wrote."""
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


def test_the_package_stays_light_for_programs_that_join_nothing() -> None:
    code = "import sys, distributed_training; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n"
