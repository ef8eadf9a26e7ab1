"""Run the commands of the tutorial on three machines with empty homes, to the second outer step."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from testbed.namespaces import Machine, machines
from tests.tools.founded import MODULES, ROOT, outer_steps
from tests.tools.tree import Tree
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
LONGEST = 1200.0  # seconds from nothing to the second outer step
TREE = Tree()
_BLOCK = re.compile(r"^```bash\n# (founder|partner)(, keeps running)?\n(.*?)^```$", re.M | re.S)
PAGE = (ROOT / "docs" / "tutorial.md").read_text()


class Place:
    """A machine whose home is empty at first. ``invitation`` is the text that was sent to it."""

    def __init__(self, machine: Machine, home: Path, programs: Path) -> None:
        self.machine, self.home, self.invitation = machine, home, "INVITATION"
        home.mkdir()
        self.environ = {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin:/usr/sbin"}
        self.environ |= {"CLONE": str(ROOT), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        self.environ |= TREE.environment
        self.log = home.with_suffix(".log")
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, lines: str) -> subprocess.Popen[bytes]:
        words = ["bash", "-e", "-c", lines.replace("INVITATION", self.invitation)]
        with self.log.open("ab") as log, self.machine.inside():
            return subprocess.Popen(words, cwd=self.home, env=self.environ, stdout=log, stderr=log)

    def follow(self, who: str, *, after: str = "") -> None:
        """Run the commands for ``who`` in the part of the page under the title ``after``."""
        part = PAGE.partition(f"\n## {after}\n")[2].partition("\n## ")[0]
        for named, keeps_running, lines in _BLOCK.findall(part):
            assert named == who
            process = self.start(lines)
            if keeps_running:
                self.running.append(process)
                continue
            status = process.wait(300)
            # dt-join exits with the doctor's status, and checks fail if the network has not begun.
            assert status == 0 or lines.startswith("dt-join"), self.said

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def is_alive(self) -> bool:
        assert all(process.poll() is None for process in self.running), self.said[-6000:]
        return True


@contextmanager
def places(folder: Path) -> Iterator[list[Place]]:
    programs = folder / "bin"
    programs.mkdir()
    python = f"PYTHONPATH={ROOT} exec {ROOT}/.venv/bin/python"
    commands = {"python": "", **{name: f" -m {module}" for name, module in MODULES.items()}}
    for name, words in commands.items():
        path = programs / name
        path.write_text(f'#!/bin/sh\n{python}{words} "$@"\n')
        path.chmod(0o755)
    with machines(3) as made:
        try:
            yield [
                Place(machine, folder / name, programs)
                for machine, name in zip(made, ("founder", "first", "second"), strict=True)
            ]
        except BaseException:
            for path in sorted(folder.glob("*.log")):
                print(f"===== {path.name}\n{path.read_text(errors='replace')[-5000:]}")
            raise
        finally:
            TREE.end(timedelta(seconds=60))


def test_three_machines_follow_the_tutorial_to_the_second_outer_step(tmp_path: Path) -> None:
    began = time.monotonic()
    with places(tmp_path) as (founder, *partners):
        assert not any(any(place.home.iterdir()) for place in (founder, *partners))
        founder.follow("founder", after="Your model, tokenizer and text")
        founder.follow("founder", after="Create the network")
        letter = founder.home / "lab" / "invitation.txt"
        wait_for(lambda: founder.is_alive() and letter.exists(), "the invitation", 300, every=0.5)
        line = re.search(r"^\s*dt-join (\S+)$", letter.read_text(), re.M)
        assert line is not None
        for partner in partners:
            partner.invitation = line[1].strip("'")
            partner.follow("partner", after="Your partners join")

        def reached(outer_step: int) -> bool:
            folders = [founder.home / "lab" / "validator"]
            for partner in partners:
                folders += sorted(path.parent for path in partner.home.glob("runs/*/events.jsonl"))
            alive = all(place.is_alive() for place in (founder, *partners))
            return (
                alive
                and len(folders) == 3
                and all(outer_step in outer_steps(folder) for folder in folders)
            )

        left = LONGEST - (time.monotonic() - began)
        wait_for(lambda: reached(2), "outer step 2 of all", left, every=1.0)
        print(f"from nothing to the second outer step: {time.monotonic() - began:.0f} s")
        founder.follow("founder", after="Read its text")
        assert re.search(
            r"^held-out loss \d\.\d+, .* on \d+ pages of the data$", founder.said, re.M
        )
        assert "\nThe class" in founder.said
        assert os.path.exists(founder.home / "model" / "config.json")
