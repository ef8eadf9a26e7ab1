"""Test that what the fork server imports leaves it fit to be forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_training.miner.rank_group import PRELOAD, rank_environment_defaults

ROOT = Path(__file__).parents[2]

LOOK = """
import importlib, os, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
tasks = os.listdir("/proc/self/task")
assert len(tasks) == 1, [open(f"/proc/self/task/{t}/comm").read() for t in tasks]
open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
              if os.path.exists(f"/proc/self/fd/{fd}")]
assert not [f for f in open_files if "socket" in f or "nvidia" in f], open_files
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_no_thread_no_socket_no_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *PRELOAD],
        env=os.environ | rank_environment_defaults(ranks=1) | {"OMP_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
