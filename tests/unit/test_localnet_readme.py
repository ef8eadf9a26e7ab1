"""Test that commands in documents and workflows exist and that links lead somewhere."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed_training import join_command, network_command, plan_command, status_command
from distributed_training.config.removed import is_removed
from distributed_training.config.schema import schema
from distributed_training.doctor import build_parser as doctor_parser
from distributed_training.localnet.command import build_parser
from distributed_training.scoring import command, export

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS"))]
PAGES += sorted(ROOT.glob("docs/*.md"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
#: This page names flags of benchmarks.
NO_FLAGS = ("performance",)
OF_OTHERS = {"help", "version"} | {  # and of torchrun
    *("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port", "max_restarts"),
    "gpus-per-node",  # of Slurm
    *("num-iterations", "resume-from-step"),  # of nanochat
}
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
pages = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def commands(page: Path) -> list[str]:
    """Return the commands in a page's bash blocks, without comments and pipes."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line.split(" | ")[0] for line in lines if line and not line.startswith("#")]


def inline(page: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))


def test_two_commands_of_the_readme_do_everything() -> None:
    assert {"make run", "make test"} <= {*commands(ROOT / "README.md")}


@lru_cache
def make_targets() -> set[str]:
    rules = re.findall(r"^([a-z][a-z0-9 -]*):", (ROOT / "Makefile").read_text(), re.M)
    return {target for rule in rules for target in rule.split()}


@lru_cache
def help_of(script: str) -> str:
    done = subprocess.run(
        [sys.executable, script, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, f"{script} --help: {done.stderr}"
    return done.stdout


def test_there_are_pages_with_commands() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 15


@pages
def test_make_targets_their_arguments_scripts_and_files_exist(page: Path) -> None:
    for text in [*commands(page), *inline(page)]:
        words = text.split()
        if words[:1] == ["make"] and len(words) > 1:
            assert words[1] in make_targets(), text
        match = re.fullmatch(r'make run ARGS="(.*)"', text)
        if match and match[1] != "--help":
            build_parser().parse_args(shlex.split(match[1]))
        for word in re.findall(r"[\w./-]+\.(?:py|sh|js)\b|\.ci/run", text):
            if word.startswith(("scripts/", "neurons/", "app.", ".ci/", "bench/")):
                # This file is the operator's own; app.config.js reads it if it exists.
                assert word == "app.config.override.js" or (ROOT / word).exists(), text


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the flags of a program and of its commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {flag for command in action.choices.values() for flag in options_of(command)}
    return found


@pages
def test_flags_exist(page: Path) -> None:
    if page.stem in NO_FLAGS:
        return
    known = schema("validator")  # and all of a miner's
    ours = set(build_parser()._option_string_actions)
    doctors = set(doctor_parser()._option_string_actions)
    for program in (
        plan_command.build_parser(),
        *(module.build_parser() for module in (export, join_command, network_command, command)),
    ):
        ours |= options_of(program)
    ours |= set(re.findall(r"--[a-z]+", status_command.__doc__ or ""))
    ours |= set(re.findall(r"--[a-z-]+", help_of("examples/compare.py")))
    for text in [*commands(page), *inline(page)]:
        for flag in re.findall(r"(?<![\w-])--([a-z][\w.-]*)", text):
            if flag in OF_OTHERS or text.startswith(
                (
                    "npm ",
                    "pip install ",
                    "git ",
                    "btcli ",
                    "lm_eval ",
                    "pm2 logs ",
                    "hf ",
                    "bench.",
                    "python -m bench.",
                    ".venv/bin/python -m bench.",
                    "make gpu ",
                    "NCCL_DEBUG=INFO make gpu ",
                    "python bench/",
                    "python3 -m venv ",
                    "uv ",
                    "python examples/",
                )
            ):
                continue
            script = re.search(r"(?:scripts|neurons)/\w+\.(?:py|sh)", text)
            if script and script[0].endswith(".sh"):
                assert f"--{flag}" in (ROOT / script[0]).read_text(), text
            elif script and script[0] not in ("neurons/miner.py", "neurons/validator.py"):
                assert f"--{flag}" in help_of(script[0]), text
            elif re.search(r"\bdoctor\b", text) and f"--{flag}" in doctors:
                continue
            elif known.get(flag) is None and not is_removed(flag):  # these are named as gone
                assert f"--{flag}" in ours, f"{text}: --{flag} is no flag"


@pages
def test_links_resolve(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, target


def runs_of(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_each_command_names_targets_and_files_that_are_there(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    for name, job in jobs.items():
        assert job["timeout-minutes"] <= 180, name
        for line in runs_of(job):
            for words in re.findall(r"\bmake ([\w -]+)", line):
                assert set(words.split()) <= make_targets(), line
            for file in re.findall(r"(?:bash |pytest -n 4 )([\w./ ]+)", line):
                assert all((ROOT / word).exists() for word in file.split()), line


def test_ci_runs_the_landing_script_and_each_python_that_is_allowed() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert any("bash .ci/run" in command for command in runs_of(jobs["landing"]))
    assert jobs["tests"]["strategy"]["matrix"]["python"][0] == "3.11"
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()
