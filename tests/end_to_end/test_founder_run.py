"""A laboratory's network by two commands: found it with its own store, run it; one joins."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from distributed_training.common.ports import free_ports
from distributed_training.telemetry import read_events
from tests.tools.founded import MODULES, ROOT, RULES
from tests.tools.settings import LOCAL
from tests.tools.tree import Tree
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
PATIENCE = 600.0  # seconds, on a busy machine
TREE = Tree()
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


def test_from_nothing_to_a_member_that_uploads(tmp_path: Path) -> None:
    founder, member = tmp_path / "founder", tmp_path / "member"
    founder.mkdir()
    member.mkdir()
    dht, registry, member_dht = map(str, free_ports(3))
    words = ("--host", "127.0.0.1", "--registry", f"http://127.0.0.1:{registry}", "--dht-port", dht)
    more = ("--miners", "1", "--data-source", "stdlib", "--store", "embedded", *RULES)
    more += ("--exchange", "hivemind")
    printed = call(founder, "dt-network", "init", "lab", "--name", "lab", *words, *more)
    (line,) = re.findall(r"^  dt-network (run lab)$", printed, re.M)
    with (founder / "lab" / "run.toml").open("a") as file:
        file.write('"neuron.page_port" = "off"\n')
    running, log = start(founder, "dt-network", *line.split())
    miner = None

    def said(text: str) -> bool:
        assert running.poll() is None, log.read_text()[-3000:]
        return text in log.read_text()

    try:
        invitation = founder / "lab" / "invitation.txt"
        wait_for(invitation.exists, "an invitation", PATIENCE, every=0.2)
        token = re.search(r"^dt-join (\S+)$", invitation.read_text(), re.M)
        assert token is not None and token[1] not in log.read_text(), "a secret is in no log"
        wait_for(lambda: said("Outer step 0, held-out loss"), "a model", PATIENCE)
        ours = (*LOCAL, "--dht.port", member_dht)
        call(member, "dt-join", token[1], *ours, status=(0, 1, 2))
        assert "R2_" not in (member / ".env").read_text()
        miner, miners_log = start(member, "dt-miner")

        def judged() -> bool:
            said("")
            assert miner.poll() is None, miners_log.read_text()[-3000:]
            events = founder / "lab" / "validator" / "events.jsonl"
            return any(
                e.get("uid") == 1 and e["kind"] == "upload_scored" for e in read_events(events)
            )

        wait_for(judged, "an upload of the member that the validator has seen", PATIENCE, every=1.0)
        # A killed one comes back, and is the same network.
        (validator,) = [
            p
            for p in psutil.Process(running.pid).children()
            if "validator" in " ".join(p.cmdline())
        ]
        validator.kill()
        wait_for(lambda: said("The validator ended (it was killed by SIGKILL)"), "its end", 60)
        miner.send_signal(signal.SIGTERM)
        assert miner.wait(120) == 0
        running.send_signal(signal.SIGTERM)
        assert running.wait(120) == 0, log.read_text()[-3000:]
        assert not TREE.processes()
        # Nothing is in the way of a second start, which invites nobody again.
        running, log = start(founder, "dt-network", *line.split())
        before = invitation.read_bytes()
        count = log.read_text().count("READY")
        wait_for(lambda: log.read_text().count("READY") > count, "the registry", PATIENCE)
        running.kill()  # and whoever is killed leaves nobody
        running.wait()
        TREE.wait_for_end()
        assert invitation.read_bytes() == before
    except BaseException:
        for path in tmp_path.glob("*/*.log"):
            print(f"===== {path}\n{path.read_text()[-4000:]}")
        raise
    finally:
        TREE.end()
