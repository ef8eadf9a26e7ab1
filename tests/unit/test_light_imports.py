"""Imports: nothing heavy in processes that must stay small, no thread or socket before a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_training.miner.rank_group import PRELOAD, rank_environment_defaults

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "hivemind", "bittensor", "botocore", "numpy", "pyarrow"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "may"),
    [
        ("distributed_training", set()),
        ("distributed_training.data.block_builder", {"numpy"}),
        ("distributed_training.miner.launcher", set()),
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


#: A miner of a store network imports nothing of the wheel's extras.
OF_EXTRAS = {"hivemind", "bittensor", "cryptography", "openskill", "wandb"}
LOOK = f"""
import importlib, os, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(name)
found = {OF_EXTRAS} & set(sys.modules)
assert not found, found
import torch
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
tasks = os.listdir("/proc/self/task")
assert len(tasks) == 1, [open("/proc/self/task/" + t + "/comm").read() for t in tasks]
open_files = [os.readlink("/proc/self/fd/" + fd) for fd in os.listdir("/proc/self/fd")
              if os.path.exists("/proc/self/fd/" + fd)]
assert not [f for f in open_files if "socket" in f or "nvidia" in f], open_files
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.slow
def test_fork_server_after_its_imports_is_fit_to_fork() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *PRELOAD, "distributed_training.miner.build"],
        env=os.environ | rank_environment_defaults(ranks=1) | {"OMP_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
