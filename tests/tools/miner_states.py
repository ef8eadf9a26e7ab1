"""Make run folders of miners in the states for which an operator opens the dashboard."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from distributed_training.telemetry.facts import (
    FACTS_FILE,
    Crash,
    Disk,
    Fact,
    Facts,
    KnownUpload,
    Launch,
)
from distributed_training.telemetry.run_state import LAUNCHER_FILE

HOTKEY = "5F3sa2TJAWMqDhXG6jhV4N8ko9SxwGy8TpaNS1repo5EYjQX"
_KEYS = (
    "https://7d9c.r2.cloudflarestorage.com does not accept these keys "
    "(SignatureDoesNotMatch): correct R2_WRITE_SECRET_ACCESS_KEY in .env"
)

#: For each state, the verdict, its colour, and whether the miner's processes run.
STATES: Mapping[str, tuple[str, str, bool]] = {
    "counts": ("counts", "good", True),
    "new": ("waiting", "wait", True),
    "stopped": ("stopped", "idle", False),
    "starting": ("starting", "wait", True),
    "refused": ("cannot start", "bad", True),
    "setting": ("cannot start", "bad", False),
    "disk-full": ("disk full", "bad", True),
    "store-silent": ("no connection", "bad", True),
    "behind": ("behind", "bad", True),
    "stuck": ("stuck", "bad", True),
    "merged": ("counts", "good", True),
    "not-merged": ("refused", "bad", True),
    "missed": ("missed a close", "bad", True),
}
#: For some states, the fate of the last upload but one, and its cause. The last upload waits.
FATES = {
    "merged": ("merged", ""),
    "missed": ("merged", ""),
    "not-merged": ("not merged", "late: by 3 s"),
}


def facts_of(state: str, now: float) -> Facts:
    """Return what the miner in ``state`` knows at ``now``."""
    uploads = tuple(
        KnownUpload(n, now - 700 - 9000 * (9 - n), f"{n}.1", "merged", now - 300) for n in (8, 9)
    )
    facts = Facts(
        round_seconds=9000.0, name="alpha", uid=17, looked=now, started=now - 86400,
        mode="training", outer_step=9, step=Fact(40, now - 8), step_seconds=15.2, uploads=uploads,
        chain_at=now, registered=Fact(True, now), network_step=9, next_round=now + 2000,
        disk=disk_at(now, 1e6),
    )  # fmt: skip
    if state in FATES:
        upload, waiting = KnownUpload(8, now - 1300, "8.0"), KnownUpload(9, now - 60, "9.0")
        word, cause = FATES[state]
        upload = replace(upload, fate=word, fate_at=now - 900, cause=cause)
        facts = replace(facts, uploads=(upload, waiting))
    closed = "read lab/state.json: no answer from https://s3.lab (connection refused)"
    away = now - 190
    changed: dict[str, dict[str, Any]] = {
        "new": {"uploads": (), "started": now - 540},
        "disk-full": {"disk": disk_at(now, 1e15)},
        "store-silent": {
            "store_silent_since": away, "store_trouble": closed, "next_round": now - 100
        },
        "behind": {"behind_since": now - 9060},
        "stuck": {"step": Fact(40, now - 900)},
        "missed": {
            "missed": 2,
            "missed_at": now - 60,
            "missed_cause": "blocked: 3 inner steps when the close was over, and 50 are needed",
        },
    }  # fmt: skip
    if state in ("starting", "refused", "stopped", "setting"):
        ago = now - 300
        return replace(facts, looked=ago, step=Fact(40, ago), chain_at=ago)
    return replace(facts, **changed.get(state, {}))


_SETTING = "--neuron.nproc_per_node: 'many' is not a number, so nothing was started: give 1 to 1024"


def disk_at(now: float, needed: float) -> Fact[Disk]:
    return Fact(Disk(1e12, 2e12, needed), now)


def launcher_of(state: str, now: float) -> Launch:
    running = Launch(state="running", at=now - 86400, pid=os.getpid())
    match state:
        case "stopped":
            return replace(running, state="stopped", at=now - 300, stopped_by="signal SIGINT")
        case "starting":
            stage = "loading global state: 12.4 of 32.0 GB"
            times = {"stage_at": now - 20, "eta_seconds": 1560.0}
            return replace(running, state="starting", at=now - 95, stage=stage, **times)  # type: ignore[arg-type]
        case "refused":
            again = {"attempt": 6, "next_try_at": now + 43}
            return replace(running, state="refused", at=now - 20, text=_KEYS, **again)  # type: ignore[arg-type]
        case "setting":
            ended = {"at": now - 300, "stopped_by": "its settings", "text": _SETTING}
            return replace(running, state="stopped", **ended)  # type: ignore[arg-type]
        case "behind":
            crash = Crash(now - 9100, "rank 1 was killed by SIGKILL")
            return replace(running, restarts=2, last_crash=crash)
    return running


def _weeks(state: str, facts: Facts, uid: int, now: float) -> list[dict[str, Any]]:
    """Return the events of two weeks, with a step every half hour and a round every 2.5 hours."""
    last = facts.step.at if facts.step else now
    events: list[dict[str, Any]] = []

    def add(kind: str, ago: float, **fields: Any) -> None:
        events.append({"time": last - ago, "kind": kind, **fields})

    add("start", 672 * 1800, uid=uid, hotkey=HOTKEY, outer_step=0)
    young = not facts.uploads
    for number in range(670, 0, -1) if not young else ():
        if number % 5 == 0:
            kept = {"base": "merged", "fate": "merged"}
            failed = {"fault": "LOCAL", "detail": "", "seconds": 60.0, "outer_step": 1}
            done = {"ok": True, "fault": "", "seconds": 3.0, "outer_step": 1, **kept}
            add("round", number * 1800, **(done if number % 35 else {"ok": False, **failed}))
            ok = number % 45 > 0
            fields = {"revision": "5.9.40", "seconds": 2.0, "bytes_sent": 5e6}
            add("publication", number * 1800, ok=ok, reason="" if ok else "TIMEOUT", **fields)
            add("verdict", number * 1800, verdict="counts")
        add("step", number * 1800, **step_fields(7, number, 2.0 + number / 335))
    for number in range(1, 41):
        add("step", 15.2 * (40 - number), **step_fields(9, number, 2.0 + (40 - number) / 400))
    if not young:
        add("round", 0, ok=True, fault="", base="merged", fate="merged", seconds=3.0, outer_step=8)
    if state in FATES:
        word, cause = FATES[state]
        base = "kept" if word == "not merged" else word
        events[-1] |= {"base": base, "fate": word, "detail": cause}
    if state == "stopped":
        add("stop", 0, reason="asked to stop", exit_status=0)
    return events


def step_fields(outer_step: int, inner_step: int, loss: float) -> dict[str, Any]:
    return {
        "outer_step": outer_step, "inner_step": inner_step, "loss": loss, "learning_rate": 2.5e-4,
        "seconds": 15.2, "data_wait_seconds": 0.1, "tokens_per_second": 34000.0, "mfu": 0.52,
        "gpu_memory_gb": 68.5, "gpu_utilization": 97.0,
    }  # fmt: skip


def make_miner(place: Path, state: str, uid: int = 17, **gauges: float) -> Path:
    """Return the run folder of a miner in ``state``; its work counts if the state is unknown."""
    folder = place / state
    folder.mkdir()
    now = time.time()
    facts, alive = facts_of(state, now), STATES.get(state, ("", "", True))[2]
    launcher = launcher_of(state, now)
    if not alive:
        with subprocess.Popen(["true"]) as gone:  # afterwards no process has this pid
            launcher = replace(launcher, pid=gone.pid)
    name = f"--neuron.name {state} miner\n"
    (folder / "config.txt").write_text(f"  {name}")
    (folder / FACTS_FILE).write_text(
        json.dumps(asdict(replace(facts, name=f"{state} miner", uid=uid)))
    )
    (folder / LAUNCHER_FILE).write_text(json.dumps(asdict(launcher)))
    figures: dict[str, Any] = {
        "start_timestamp_seconds": facts.started,
        "next_round_timestamp_seconds": facts.next_round,
        "metrics_written_timestamp_seconds": now,
        **gauges,
    }  # fmt: skip
    lines = (f"# TYPE dt_{name} gauge\ndt_{name} {value}\n" for name, value in figures.items())
    (folder / "metrics.prom").write_text("".join(lines))
    lines = (json.dumps(event) + "\n" for event in _weeks(state, facts, uid, now))
    (folder / "events.jsonl").write_text("".join(lines))
    (folder / "instance.json").write_text(json.dumps({"instance": "a", "pid": launcher.pid}))
    if not alive:
        for file in folder.iterdir():
            os.utime(file, (now - 300, now - 300))
    return folder
