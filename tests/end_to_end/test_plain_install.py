"""Test the wheel without its extras: a member follows the skill for agents to the letter.

This checkout creates the network, on loopback; pip installs the wheel from the index. The
messages of other programs there are in tests/unit/test_config_installed.py.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from distributed_training.common.ports import free_ports
from distributed_training.config.installed import EXTRAS
from tests.tools.founded import PATIENCE, RULES, TREE, call, start
from tests.tools.tree import Tree
from tests.tools.waiting import wait_for
from tests.tools.wheel import ROOT, build_wheel

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
SKILL = (ROOT / "docs" / "skills" / "join-a-network" / "SKILL.md").read_text()
_STEP = re.compile(r"^## \d\. (.+?)\n.*?^```bash\n(.*?)^```\n\n```\n(.*?)^```$", re.M | re.S)
_TORCH_INDEX = "download.pytorch.org"
OF_EXTRAS = {module for modules in EXTRAS.values() for module in modules}


class Home:
    """An empty home with a folder, on a machine that has Python but no checkout."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "here"
        self.place.mkdir(parents=True)
        kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "LANG"))}
        # The versions of requirements/, and the torch of this environment, which may have no CUDA.
        pins = (ROOT / "constraints.txt").read_text()
        pins = re.sub(r"^torch==.*$", f"torch=={torch.__version__}", pins, flags=re.M)
        (folder / "constraints.txt").write_text(pins)
        self.environ = {
            **kept,
            "HOME": str(folder),
            "PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin",
            "PIP_CONSTRAINT": str(folder / "constraints.txt"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DT_SKILL": str(folder),
        }
        with suppress(OSError):
            socket.getaddrinfo(_TORCH_INDEX, 443)
            self.environ["PIP_EXTRA_INDEX_URL"] = f"https://{_TORCH_INDEX}/whl/cpu"
        self.tree = Tree()

    def run(self, lines: str, *, limit: float = PATIENCE) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", lines],
            cwd=self.place,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
        return done.returncode, done.stdout

    def follow(self, title: str, **given: str) -> None:
        """Carry out a step exactly as the skill gives it, and compare what it prints."""
        ((lines, expected),) = [step[1:] for step in _STEP.findall(SKILL) if step[0] == title]
        for word, value in given.items():
            assert word in lines
            lines = lines.replace(word, value)
        _, printed = self.run(lines)
        left = iter(printed.splitlines())
        for line in expected.splitlines():
            wanted = re.compile(".*".join(map(re.escape, line.split("..."))))
            assert any(wanted.fullmatch(each) for each in left), f"{line!r} is not in:\n{printed}"


@contextmanager
def founded(folder: Path) -> Iterator[str]:
    """Run a store network whose only member has not joined yet. Yields the invitation."""
    folder.mkdir()
    (registry,) = free_ports(1)
    words = ("--name", "lab", "--exchange", "store", "--registry", f"http://127.0.0.1:{registry}")
    more = ("--miners", "1", "--data-source", "stdlib", "--store", "embedded", *RULES)
    call(folder, "dt-network", "init", "lab", *words, *more)
    with (folder / "lab" / "run.toml").open("a") as file:
        file.write('"neuron.page_port" = "off"\n')
    running, log = start(folder, "dt-network", "run", "lab")
    try:
        wait_for(
            lambda: "Outer step 0, held-out loss" in log.read_text(), "a model", PATIENCE, every=0.5
        )
        text = (folder / "lab" / "invitation.txt").read_text()
        line = re.search(r"^dt-join (\S+)$", text, re.M)
        assert line is not None
        yield line[1]
        running.terminate()
        assert running.wait(120) == 0
    except BaseException:
        print(log.read_text()[-4000:])
        raise
    finally:
        TREE.end(timedelta(seconds=5))


def test_an_agent_joins_with_only_the_wheel(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel, home = build_wheel(wheels), Home(tmp_path / "agent")
    began = time.monotonic()
    home.follow("Install", WHEEL=str(wheel))
    seconds = time.monotonic() - began
    _, size = home.run("du -sm .venv")
    print(f"pip install of the wheel: {seconds:.0f} s, {size.split()[0]} MB")
    code = f"import importlib.util as u; print([m for m in {sorted(OF_EXTRAS)} if u.find_spec(m)])"
    _, printed = home.run(f'.venv/bin/pip check && .venv/bin/python -c "{code}"')
    assert printed.splitlines() == ["No broken requirements found.", "[]"]
    try:
        with founded(tmp_path / "founder") as invitation:
            home.follow("Join", INVITATION=invitation)
            home.follow("Start")
            home.follow("See that it is merged")
            home.follow("Stop, and continue later")
    except BaseException:
        for path in home.place.glob("*.log"):
            print(f"===== {path}\n{path.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        home.tree.end(timedelta(seconds=30))
