"""The preview beside a miner: one look at a time, at no cost to the miner."""

from __future__ import annotations

import errno
import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_training.scoring.background import BackgroundPreview, too_large
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(60)

LOOK = """
import json, os, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--folder") + 1])
with (folder / "looks").open("a") as file:
    file.write(json.dumps([sys.argv[1:], sorted(os.environ)]) + "\\n")
while not (folder / "go").exists():
    time.sleep(0.01)
print((folder / "go").read_text())
print("error: the chain did not answer", file=sys.stderr)
"""


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "look.py").write_text(LOOK)
        self.told: queue.Queue[Any] = queue.Queue()
        self.preview = BackgroundPreview(
            flags=["--folder", str(folder)],
            uid=7,
            mode="own",
            told=self.told.put,
            script=folder / "look.py",
        )

    def looks(self) -> list[Any]:
        path = self.folder / "looks"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def answer(self, text: str) -> None:
        (self.folder / "go.new").write_text(text)
        (self.folder / "go.new").replace(self.folder / "go")


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("R2_WRITE_SECRET_ACCESS_KEY", "never")
    monkeypatch.setenv("R2_ENDPOINT_URL", "http://127.0.0.1:1")
    rig = Rig(tmp_path)
    yield rig
    rig.preview.close()


def test_its_own_row_is_told_and_no_secret_is_given(rig: Rig) -> None:
    rig.preview.look()
    rig.answer(json.dumps({"seconds": 2.5, "miners": [{"uid": 8}, {"uid": 7, "rank": 1}]}))
    assert rig.told.get(timeout=30) == {"uid": 7, "rank": 1, "seconds": 2.5}
    ((arguments, environment),) = rig.looks()
    assert arguments[:6] == ["--uid", "7", "--others", "0", "--json", "--background"]
    assert "R2_ENDPOINT_URL" in environment and "R2_WRITE_SECRET_ACCESS_KEY" not in environment


def test_publications_during_a_look_lead_to_one_more(rig: Rig) -> None:
    rig.preview.look()
    wait_for(rig.looks, "the first look runs")
    for _ in range(3):
        rig.preview.look()
    assert len(rig.looks()) == 1
    rig.answer(json.dumps({"miners": [{"uid": 7}]}))
    for _ in range(2):
        rig.told.get(timeout=30)
    wait_for(lambda: rig.preview._process is None, "the second look ended")
    assert len(rig.looks()) == 2 and rig.told.empty()


@pytest.mark.parametrize("said", ["", "no JSON", "[]", '{"miners": []}', '{"miners": 3}'])
def test_what_fails_is_one_line(rig: Rig, said: str, caplog: pytest.LogCaptureFixture) -> None:
    rig.answer(said)
    rig.preview.look()
    wait_for(lambda: "No score preview" in caplog.text, "the line")
    (record,) = [r for r in caplog.records if "No score preview" in r.message]
    assert "the chain did not answer" in record.message and rig.told.empty()


def test_a_stop_ends_a_look_at_once(rig: Rig) -> None:
    rig.preview.look()
    wait_for(rig.looks, "the look runs")
    process = rig.preview._process
    assert process is not None
    rig.preview.close()
    process.wait(40)  # it waits for an answer, for ever
    assert rig.told.empty()
    rig.preview.look()
    assert not os.path.exists(f"/proc/{process.pid}/exe") and len(rig.looks()) == 1


def test_a_machine_without_room_for_a_look_costs_that_look_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked for on the thread that trains."""

    def no_memory(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def no_thread(*arguments: Any) -> None:
        raise RuntimeError("can't start new thread")

    rig.answer(json.dumps({"miners": [{"uid": 7}]}))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_memory)
        rig.preview.look()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        rig.preview.look()
    assert caplog.text.count("No score preview of this publication: it cannot start") == 2
    rig.preview.look()
    assert rig.told.get(timeout=30)["uid"] == 7


def test_a_model_that_no_look_would_end_for_has_none() -> None:
    assert too_large(1_000_000_000) is None
    line = too_large(4_000_000_000)
    assert line is not None and "4.0B" in line and "scripts/score.py" in line
