"""W&B's library in a process of its own, which knows nothing that W&B does not need.

    python -m distributed_training.telemetry.wandb_process     started by rank 0, never by hand

The library starts a helper with its whole environment, replaces hooks of the interpreter and may
wait for its server: none of that belongs into rank 0. Standard input: a line of JSON with what the
run is, then one for each step; its end ends the run. Standard output: one line, whether there is a
run, and what the operator should know.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

from distributed_training.common.files import write_bytes

STEP = "inner_step_total"  # the axis of every figure


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)  # training goes first
    run, problem = _begin(json.loads(sys.stdin.readline()))
    print(json.dumps({"open": run is not None, "problem": problem}), flush=True)
    if run is None:
        return 1
    run.define_metric("*", step_metric=STEP)
    for line in sys.stdin:
        run.log(json.loads(line))
    run.finish()
    return 0


def _begin(asked: dict[str, Any]) -> tuple[Any, str]:
    """The run, or None; what to tell the operator, or ""."""
    folder = Path(asked["folder"])
    try:
        import wandb
    except ImportError as error:
        return None, f"{error.name} is missing: `.venv/bin/pip install -c constraints.txt wandb`"
    logging.getLogger("wandb").setLevel(logging.CRITICAL)  # what it has to say, we say
    wanted: dict[str, Any] = {
        **{key: asked[key] for key in ("project", "entity", "name")},
        "id": _run_id(folder / "wandb.id"),
        "resume": "allow",
        "dir": str(folder),
        "settings": wandb.Settings(
            api_key=asked["key"], init_timeout=asked["patience"], silent=True, console="off",
            save_code=False, disable_code=True, disable_git=True, disable_job_creation=True,
            x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True,
            x_save_requirements=False,
        ),
    }  # fmt: skip
    try:
        try:
            return wandb.init(mode=asked["mode"], **wanted), ""
        except wandb.Error as error:
            wandb.teardown()  # its helper still holds the run that failed
            return wandb.init(mode="offline", **wanted), (
                f"{_first_line(error)}. The figures are kept in {folder / 'wandb'}, `wandb sync` "
                "sends them: check WANDB_API_KEY in .env and the network"
            )
    except (wandb.Error, OSError, ValueError) as error:
        return None, _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def _run_id(path: Path) -> str:
    """The same for the life of a run folder."""
    with contextlib.suppress(OSError):
        if known := path.read_text().strip():
            return known
    made = secrets.token_hex(8)
    write_bytes(path, made.encode())
    return made


if __name__ == "__main__":
    sys.exit(main())
