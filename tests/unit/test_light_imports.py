"""Check that processes which must stay small or start quickly import nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "hivemind", "bittensor", "botocore", "numpy", "pyarrow"}
HEAVY |= {"cryptography", "openskill", "wandb"}  # of extras


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "may"),
    [
        ("distributed_training", set()),
        ("distributed_training.data.block_builder", {"numpy"}),
        ("distributed_training.miner.launcher", set()),
        ("distributed_training.miner.rank_group", set()),
        ("distributed_training.miner.start", {"torch", "numpy"}),
        ("distributed_training.telemetry.page.__main__", set()),
        ("distributed_training.doctor", set()),
        ("distributed_training.localnet.command", set()),
        ("distributed_training.scoring.command", set()),
        ("distributed_training.status_command", set()),
        ("distributed_training.plan_command", set()),
        ("distributed_training.scoring.export", set()),
        ("distributed_training.config", set()),
        ("distributed_training.registry.service", {"botocore", "numpy"}),
    ],
)
def test_a_light_process_imports_nothing_heavy(module: str, may: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert not (HEAVY - may) & set(done.stdout.split())
