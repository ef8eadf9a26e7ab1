"""Start the programs of a network in an empty home, and read the outer steps of a run folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from distributed_training.network import built_in_rules, flatten, of_exchange, toml_value
from distributed_training.telemetry import read_events
from tests.tools.tree import Tree

PATIENCE = 600.0  # seconds, on a busy machine
TREE = Tree()
ROOT = Path(__file__).parents[2]
MODULES = {
    "dt-network": "distributed_training.network_command",
    "dt-join": "distributed_training.join_command",
    "dt-registry": "distributed_training.network_command",
    "dt-validator": "distributed_training.validator",
    "dt-miner": "distributed_training.miner",
    "dt-export": "distributed_training.scoring.export",
    "dt-score": "scripts.score",
    "dt-status": "distributed_training.status_command",
}
#: The rules of a store network whose rounds take only minutes on this machine.
RULES = [
    word
    for key, value in flatten(of_exchange(built_in_rules("local"), "store")).items()
    if key.partition(".")[0] in ("training", "round") or "per_" in key
    for word in ("--set", f"{key}={toml_value(value)}")
]
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
QUIET |= TREE.environment


def environ(home: Path) -> dict[str, str]:
    home.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("R2_", "DT_", "BT_"))}
    return {**kept, **QUIET, "HOME": str(home)}


def command(program: str, *words: str) -> list[str]:
    return [sys.executable, "-m", MODULES[program], *words]


def call(home: Path, program: str, *words: str, status: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(
        command(program, *words),
        cwd=home,
        env=environ(home),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode in status, done.stdout + done.stderr
    return done.stdout


def start(home: Path, program: str, *words: str) -> tuple[subprocess.Popen[bytes], Path]:
    path = home / f"{program}.log"
    with path.open("ab") as log:
        process = subprocess.Popen(
            command(program, *words), cwd=home, env=environ(home), stdout=log, stderr=log
        )
    return process, path


def outer_steps(run_folder: Path) -> dict[int, dict[str, object]]:
    """Return the events of outer steps, by number."""
    path = run_folder / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return {e["outer_step"]: e for e in events if e["kind"] == "outer_step"}
