"""Provide the small model, the text and the configuration of the validator's tests."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed_training.config import Config
from distributed_training.config.settings import RoundSettings, ValidatorSettings
from distributed_training.protocol.pages import place_of
from distributed_training.telemetry import read_events
from tests.tools.network import ALICE, network_file
from tests.tools.settings import load_config

VOCABULARY, LENGTH = 64, 24
RULES = {"exchange": "store", "training.sequence_length": LENGTH, "model.parameters": 24_736}
MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Use one thread, because on a busy machine the threads of so small a model only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sequences(seed: int, count: int = 8) -> Tensor:
    """Return text in which the next word follows from the last one, with noise from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    noise = torch.rand(count, LENGTH, generator=generator) < 0.1
    for t in range(1, LENGTH):
        ruled = (words[:, t - 1] * 5 + 3) % VOCABULARY
        words[:, t] = torch.where(noise[:, t], words[:, t], ruled)
    return words


def seed_of(uid: int, block: int) -> int:
    """Return another seed for each text; torch counts only its last 32 bits."""
    outer_step, page = place_of(block)
    return uid * 1_000_003 + 123_456 + outer_step + 7 * page


def pages(uid: int, block: int) -> Tensor:
    return sequences(seed_of(uid, block))


class Events:
    """Hold what the validator wrote to its events file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def all(self) -> list[dict[str, Any]]:
        return list(read_events(self.path)) if self.path.exists() else []

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.all if e["kind"] == kind]


def config_of(folder: Path, *flags: str, signer: Any = ALICE, **model: Any) -> Config:
    """Return a validator's configuration for the small model, with the changes in ``model``."""
    rules = RULES | {"model.config": MODEL_CONFIG | model}
    words = {
        "neuron.run_folder": str(folder),
        "network": network_file(folder, rules, signer=signer),
        "wallet.name": "w",
    }
    argv = [word for name, value in words.items() for word in (f"--{name}", value)]
    config = load_config("validator", [*argv, *flags], environ={}, dotenv=None, check=False)
    quick = ValidatorSettings(tick=timedelta(milliseconds=10), seed=1)
    return replace(config, validator=quick, rounds=RoundSettings(period=timedelta(minutes=1)))
