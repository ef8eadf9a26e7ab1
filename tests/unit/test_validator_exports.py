"""Test the export of every n-th outer step, and the founder's command that evaluates it."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from distributed_training.common.processes import is_running
from distributed_training.config.model import problems
from distributed_training.validator import exports as module
from distributed_training.validator.exports import Exports
from tests.tools.settings import load_config
from tests.tools.store_world import StoreWorld
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(180)


class Lab:
    """Run the exports of a run folder with empty folders in place of models."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.events = folder, list[dict[str, Any]]()
        monkeypatch.chdir(folder)
        make = lambda self, state, target: target.mkdir(parents=True)
        monkeypatch.setattr(Exports, "_make", make)

    def open(self, script: str = "", *, every: int = 1, **changes: Any) -> Exports:
        path = self.folder / "look.py"
        path.write_text(script)
        command = f"{sys.executable} {path}" if script else ""
        wanted = SimpleNamespace(export_every=every, keep_exports=3, export_command=command)
        config: Any = SimpleNamespace(validator=wanted, general=SimpleNamespace(network=None))
        self.exports = Exports(
            config,
            self.folder,
            record=lambda kind, **fields: self.events.append({"kind": kind, **fields}),
            **changes,
        )
        return self.exports

    def look(self, step: int = 1) -> dict[str, Any]:
        self.exports.after(state(step))
        wait_for(lambda: bool(self.events), "the export", 60)
        return self.events.pop()


def state(step: int, numbers: int = 8) -> Any:
    return SimpleNamespace(
        outer_step=step, total_inner_steps=100 * step, weights=[torch.zeros(numbers)]
    )


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = Lab(tmp_path, monkeypatch)
    yield made
    made.exports.close()


@pytest.mark.parametrize(
    ("printed", "results"),
    [
        ("0.25", {"result": 0.25}),
        ('noise\n{"acc": 0.5, "n": 3}\n\n', {"acc": 0.5, "n": 3.0}),
        (
            json.dumps({"lambada": {"acc,none": 0.5, "alias": "lambada", "up": True, "e": None}}),
            {"lambada/acc,none": 0.5},
        ),
        ("[1, 2]", None),
        ("done", None),
        ("", None),
        ("NaN", {}),
        ("[" * 99999, None),
    ],
    ids=["number", "object", "harness", "list", "word", "nothing", "nan", "deep"],
)
def test_the_last_line_is_the_result(
    lab: Lab, printed: str, results: dict[str, float] | None, caplog: pytest.LogCaptureFixture
) -> None:
    lab.open(f"print({printed!r})")
    event = lab.look(4)
    assert event["kind"] == "export" and event["ok"] == (results is not None)
    assert event["results"] == (results or {}) and event["outer_step"] == 4
    if results is None:
        (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert "is not a number" in line and "\n" not in line
    else:
        assert event["total_inner_steps"] == 400, "the axis of the trackers"


def test_the_command_gets_folder_and_step_and_no_secret(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2_WRITE_SECRET_ACCESS_KEY", "hidden")
    lab.open(
        "import sys, os, pathlib\n"
        "assert 'hidden' not in str(os.environ) and pathlib.Path(sys.argv[1]).is_dir()\n"
        "print(os.nice(0), file=sys.stderr)\n"
        "print(sys.argv[2] if sys.argv[1].endswith('exports/outer-step-7') else 'no')"
    )
    assert lab.look(7)["results"] == {"result": 7.0}


def test_only_every_nth_step_is_exported_and_never_two_at_once(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    gate = lab.folder / "gate"
    exports = lab.open(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)\nprint(1)",
        every=3,
    )
    for step in (1, 2, 3, 4, 6):
        began = time.monotonic()
        exports.after(state(step))
        assert time.monotonic() - began < 1.0, "a round waits for it"
    assert "Outer step 6 is not exported: the previous export" in caplog.text
    gate.touch()
    wait_for(lambda: bool(lab.events), "the export", 60)
    assert [event["outer_step"] for event in lab.events] == [3]
    lab.open("", every=0).after(state(3))
    assert len(lab.events) == 1


HANGS = """
import os, subprocess, sys, time
child = "import time; time.sleep(600)"
pids = [os.getpid(), subprocess.Popen([sys.executable, "-c", child]).pid]
pids.append(subprocess.Popen([sys.executable, "-c", child], start_new_session=True).pid)
pids.append(subprocess.Popen([sys.executable, "-c", child], env={}).pid)
with open("pids.part", "w") as file:
    file.write(" ".join(map(str, pids)))
os.rename("pids.part", "pids")
print("0.5", flush=True)
time.sleep(600)
"""


def pids(lab: Lab) -> list[int]:
    path = lab.folder / "pids"
    wait_for(path.exists, "the command's processes", 60)
    return [int(word) for word in path.read_text().split()]


def gone(numbers: list[int]) -> bool:
    return not any(psutil.pid_exists(n) and is_running(psutil.Process(n)) for n in numbers)


def test_an_export_that_hangs_is_killed_with_all_its_children(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.open(HANGS, longest=timedelta(seconds=4))
    event = lab.look()
    assert not event["ok"] and "did not end within 0:00:04" in event["reason"]
    wait_for(lambda: gone(pids(lab)), "their end", 20)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_a_stop_ends_the_export(lab: Lab) -> None:
    exports = lab.open(HANGS)
    exports.after(state(2))
    found = pids(lab)
    exports.close()
    wait_for(lambda: gone(found), "the end at a stop", 20)


def test_a_full_disk_costs_a_line_and_old_exports_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(Exports, "_run", lambda self, command, more: ran.append(command))
    config = SimpleNamespace(
        validator=SimpleNamespace(export_every=1, keep_exports=2, export_command=""),
        general=SimpleNamespace(network="lab/network.toml"),
    )
    exports = Exports(config, tmp_path, record=print)  # type: ignore[arg-type]
    folder = tmp_path / "exports"
    for step in (9, 10, 11):
        (folder / f"outer-step-{step}").mkdir(parents=True)
        os.utime(folder / f"outer-step-{step}", (step, step))
    (folder / ".export-killed" / "model").mkdir(parents=True)
    exports._make(state(12), folder / "outer-step-12")
    assert [path.name for path in folder.iterdir()] == ["outer-step-11"]
    assert ran[0][3:6] == [str(folder / "outer-step-12"), "--outer-step", "12"]
    assert ran[0][-4:-2] == ["--network", "lab/network.toml"]
    monkeypatch.setattr(module, "free_bytes", lambda folder: 10**9)
    with pytest.raises(OSError, match="nothing was exported: free disk space"):
        exports._make(state(13), folder / "outer-step-13")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--validator.export_command", "true"], "--validator.export_every is 0"),
        (["--validator.export_every", "2", "--validator.export_command", "'a"], "quotation"),
        (["--validator.export_every", "2", "--validator.export_command", "/no/such"], "full path"),
        (["--validator.export_every", "2", "--validator.export_command", "true -x"], ""),
    ],
)
def test_a_command_that_cannot_run_is_refused_at_the_start(flags: list[str], words: str) -> None:
    config = load_config("validator", flags, environ={}, dotenv=None, check=False)
    found = [line for line in problems(config) if "--validator.export" in line]
    assert len(found) == bool(words) and all(words in line and "\n" not in line for line in found)


@pytest.mark.timeout(420)
def test_a_validators_own_model_is_exported_and_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real program exports the model from the run folder after a real round."""
    # With a low priority, it would get almost no time while other tests run.
    monkeypatch.setattr(module, "_LOW_PRIORITY", ["nice", "-n", "0"])
    look = tmp_path / "look.py"
    look.write_text(
        "import sys, json\nfrom safetensors import safe_open\n"
        "names = safe_open(sys.argv[1] + '/model.safetensors', 'pt').keys()\n"
        "print(json.dumps({'tensors': len(list(names)), 'step': int(sys.argv[2])}))"
    )
    changes: Any = {"export_every": 1, "export_command": f"{sys.executable} {look}"}
    world = StoreWorld(
        tmp_path,
        change=lambda config: replace(config, validator=replace(config.validator, **changes)),
    )
    assert world.round().outer_step == 1
    wait_for(lambda: bool(world.events.of("export")), "the export", 390, every=0.5)
    (event,) = world.events.of("export")
    assert event["ok"], event
    assert event["results"] == {"tensors": len(world.validator.state.weights), "step": 1}
    assert (tmp_path / "validator" / "exports" / "outer-step-1" / "tokenizer.json").exists()
    world.closing.close()
