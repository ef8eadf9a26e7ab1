"""The programs of a network, its rules, and the outer steps of a run folder."""

from __future__ import annotations

from pathlib import Path

from distributed_training.network import built_in_rules, flatten, toml_value
from distributed_training.telemetry import read_events

ROOT = Path(__file__).parents[2]
MODULES = {
    "dt-network": "distributed_training.network_command",
    "dt-join": "distributed_training.join_command",
    "dt-registry": "distributed_training.network_command",
    "dt-validator": "distributed_training.validator",
    "dt-miner": "distributed_training.miner",
    "dt-export": "distributed_training.scoring.export",
    "dt-status": "distributed_training.status_command",
}
#: The rules of a network that this machine runs in minutes.
RULES = [
    word
    for key, value in flatten(built_in_rules("local")).items()
    if key.partition(".")[0] in ("training", "round") or "per_" in key
    for word in ("--set", f"{key}={toml_value(value)}")
]


def outer_steps(run_folder: Path) -> dict[int, dict[str, object]]:
    """The events of outer steps, by number."""
    path = run_folder / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return {e["outer_step"]: e for e in events if e["kind"] == "outer_step"}
