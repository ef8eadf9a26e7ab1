"""The workflows run commands that this checkout has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_each_command_names_targets_and_files_that_are_there(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = yaml.safe_load(path.read_text())["jobs"]
    for name, job in jobs.items():
        assert job["timeout-minutes"] <= 180, name
        for command in commands(job):
            for words in re.findall(r"\bmake ([\w -]+)", command):
                assert set(words.split()) <= targets, command
            for file in re.findall(r"(?:bash |pytest -n 4 )([\w./ ]+)", command):
                assert all((ROOT / word).exists() for word in file.split()), command


def test_ci_runs_the_landing_script_and_each_python_that_is_allowed() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert any("bash .ci/run" in command for command in commands(jobs["landing"]))
    assert jobs["tests"]["strategy"]["matrix"]["python"][0] == "3.11"
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()
