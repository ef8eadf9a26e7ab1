"""The files for coding agents name commands, files and pages that there are."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed_training import network_command
from distributed_training.config.schema import schema
from distributed_training.telemetry.metrics import METRICS

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]


class _Config(yaml.SafeLoader):
    """mkdocs.yml, without the functions of Python that it names."""


_Config.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def test_agents_md_names_files_that_there_are() -> None:
    """Its targets and links are checked by test_localnet_readme.py."""
    text = (ROOT / "AGENTS.md").read_text()
    paths = set(re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:txt|yml|lock))`", text))
    below = ("", "distributed_training", "tests")
    missing = [p for p in paths if not any((ROOT / folder / p).exists() for folder in below)]
    assert len(paths) > 10 and not missing


def test_llms_txt_has_each_page_of_the_site_with_its_first_sentence() -> None:
    pytest.importorskip("mkdocs")
    hooks: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), _Config)
    outside = {name: source for source, name in hooks["OUTSIDE"].items()}
    nav = [page for section in site["nav"] for page in hooks["pages"](next(iter(section.values())))]
    made = {name: page() for name, page in hooks["GENERATED"].items()}
    assert made.keys() <= {path for _, path in nav}
    written = {p: ROOT / outside.get(p, f"docs/{p}") for _, p in nav if p not in made}
    texts = made | {path: file.read_text() for path, file in written.items()}
    lines = hooks["llms_txt"](site["site_name"], site["nav"], texts).splitlines()
    assert lines[0] == "# distributed-training-miner" and lines[2].startswith("> Train one ")
    assert [line[3:] for line in lines if line.startswith("## ")] == [
        title for section in site["nav"] for title in section
    ]
    entries = [re.fullmatch(r"- \[(.+?)\]\((\S+)\)(?:: (.+))?", line) for line in lines[3:]]
    listed = [entry[2] for entry in entries if entry is not None]
    assert listed == [hooks["address"](path) for _, path in nav]
    assert len(listed) + len(site["nav"]) == len([line for line in lines[3:] if line])
    described = [(entry[2], entry[3]) for entry in entries if entry is not None and entry[3]]
    assert len(described) > 0.8 * len(listed)
    flat = {hooks["address"](path): " ".join(text.split()) for path, text in texts.items()}
    for place, about in described:
        assert all(word in flat[place] for word in about.split()[:3]) and "](" not in about, about


def test_the_generated_pages_have_each_command_flag_and_metric() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "site" / "generated.py"))["PAGES"]
    commands, flags, metrics = (pages[f"{name}.md"]() for name in ("commands", "flags", "metrics"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    programs = project["scripts"].keys() - {"dt-registry"}
    (choices,) = (a.choices for a in network_command.build_parser()._actions if a.choices)
    assert set(re.findall(r"^## (.+)$", commands, re.M)) == programs
    assert re.findall(r"^### dt-network (.+)$", commands, re.M) == list(choices)
    for name, text in re.findall(r"^##+ ([^\n]+)\n\n```text\n(.*?)^```", commands, re.M | re.S):
        assert name in text, f"the help of {name} does not name it"
    for setting in schema("validator").flags:
        assert f"| `--{setting.name}`" in flags or setting.secret, setting.name
    assert all(f"| `dt_{name}` |" in metrics for name in METRICS)
