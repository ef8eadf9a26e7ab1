"""Test that what comments and documents cite exists: pages, figures, tests, examples."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.tools import pictures

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]


#: "protocol page, sections 2, 3 and 5", with any white space and the # of a comment in between.
CITED = re.compile(
    r"protocol\s+page,?[\s#]*\(?sections?[\s#]+(\d+(?:(?:,|\s+and|\s+to)[\s#]+\d+)*)"
)


def test_every_section_and_document_that_is_cited_is_there() -> None:
    sections = set(re.findall(r"^## (\d+)\. ", (ROOT / "docs" / "protocol.md").read_text(), re.M))
    folders = [ROOT / name for name in ("distributed_training", "bench", "tests", "examples")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    cited = {
        number: path
        for path in paths
        for found in CITED.findall(path.read_text())
        for number in re.findall(r"\d+", found)
    }
    assert len(cited) >= 5
    assert set(cited) <= sections, {n: p for n, p in cited.items() if n not in sections}
    code = [path for path in paths if "tests" not in path.parts]
    named = {name for path in code for name in re.findall(r"\bdocs/[\w-]+\.md", path.read_text())}
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_code_block_of_a_numbered_step_is_indented_by_four() -> None:
    """Else the site ends the list there, and its next step is "1." again."""
    documents = [
        path for folder in (ROOT, ROOT / "docs", ROOT / "ops") for path in folder.glob("*.md")
    ]
    wrong = [
        f"{path.name}:{number}"
        for path in documents
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r" {1,3}```", line)
    ]
    assert wrong == []


def test_each_picture_is_shown_with_its_command_date_and_commit() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    paragraphs = [part for page in pages for part in page.read_text().split("\n\n")]
    for picture in (ROOT / "docs" / "images").glob("*.png"):
        places = [i for i, text in enumerate(paragraphs) if f"images/{picture.name})" in text]
        assert places, f"no page shows {picture.name}"
        for place in places:
            captions = map(pictures.CAPTION.search, paragraphs[place : place + 2])
            assert any(captions), f"{picture.name} is shown without its command, date and commit"


def test_a_drawn_picture_gets_the_date_and_commit_of_its_own_command_only() -> None:
    drawn, other = f"`{pictures.COMMAND}`, 2026-01-02, at commit 01234567", "`make run`"
    page = f"*{drawn}.* *{other}, 2026-01-02, at commit 01234567.*"
    assert pictures.dated(page, "2026-03-04", "89abcdef") == (
        f"*`{pictures.COMMAND}`, 2026-03-04, at commit 89abcdef.* "
        f"*{other}, 2026-01-02, at commit 01234567.*"
    )


def test_each_table_of_figures_is_as_it_was_measured() -> None:
    with_tables = runpy.run_path(str(ROOT / "docs" / "site" / "figures.py"))["with_tables"]
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    assert [with_tables(page) for page in pages] == pages, "python docs/site/figures.py"
    shown = re.findall(r"^<!-- figure: (?!end)([\w-]+) -->$", "".join(pages), re.M)
    files = {path.stem: path for path in (ROOT / "docs" / "figures").glob("*.json")}
    assert sorted(shown) == sorted(files)
    for name, path in files.items():
        figure = json.loads(path.read_text())
        assert all(figure[key] for key in ("machine", "command", "date", "commit")), name
        assert {len(row) for row in figure["rows"]} == {len(figure["columns"])}, name


def test_each_commit_that_a_page_cites_is_in_the_history() -> None:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("not a whole clone")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]
    cited = {
        (commit, page.name)
        for page in pages
        for commit in re.findall(r"\bcommit ([0-9a-f]{8,40})\b", page.read_text())
    }
    assert len(cited) > 5
    lost = [one for one in cited if git("merge-base", "--is-ancestor", one[0], "HEAD").returncode]
    assert lost == []


def test_each_event_of_a_miner_is_in_the_reference() -> None:
    sources = (ROOT / "distributed_training" / "miner").glob("*.py")
    text = "".join(path.read_text() for path in sources)
    kinds = set(re.findall(r"\brecord\(\s*\"(\w+)\"|_record\(\s*\"(\w+)\"", text))
    kinds = {kind for pair in kinds for kind in pair if kind}
    assert len(kinds) > 10
    page = (ROOT / "docs" / "reference.md").read_text()
    assert [kind for kind in kinds if f"`{kind}`" not in page] == []


@pytest.mark.parametrize("page", ["registry", "operator-guide"])
def test_each_verdict_and_fate_of_a_page_is_one_of_the_code(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    tables = re.findall(r"^\| (?:Verdict|The line says) \|.*\n((?:\|.*\n)+)", text, re.M)
    words = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\|.*?\|", "".join(tables), re.M)))
    folders = [ROOT / "distributed_training" / name for name in ("protocol", "telemetry")]
    code = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    assert len(words) > 8
    assert [word for word in words if f'"{word}"' not in code] == []


#: Keys of a file of format 1.2.0 (its schema.json), of which four must be there.
CITATION = {
    *("abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi"),
    *("identifiers", "keywords", "license", "license-url", "message", "preferred-citation"),
    *("references", "repository", "repository-artifact", "repository-code", "title", "type"),
    *("url", "version"),
}


def test_the_citation_file_has_the_keys_of_its_format() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"authors", "cff-version", "message", "title"} <= cited.keys() <= CITATION
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["authors"] and all(set(author) == {"name"} for author in cited["authors"])
    assert all(isinstance(cited[key], str) for key in ("title", "message", "license", "abstract"))
    assert f"{cited['license']} License" in (ROOT / "LICENSE").read_text()


def test_works_are_cited_by_a_link_to_the_number_that_is_shown() -> None:
    page = (ROOT / "docs" / "research.md").read_text()
    cited = re.findall(r"\[([^\]]+)\]\(https://arxiv.org/abs/([^)]+)\)", page)
    assert len(cited) > 15
    assert [(shown, number) for shown, number in cited if shown != number] == []


def test_a_long_path_may_break_in_a_table_and_a_flag_nowhere() -> None:
    content = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))["on_page_content"]
    path, broken = "<code>validator/outer_steps.py</code>", "validator/<wbr>outer_<wbr>steps.py"
    assert content(f"<p>{path}</p><td>{path}</td><td><code>a_b</code></td>") == (
        f"<p>{path}</p><td><code>{broken}</code></td><td><code>a_b</code></td>"
    )
    assert content("<code>x-y --neuron.name a</code>") == (
        '<code>x-y <span class="flag">--neuron</span>.name a</code>'
    )
    assert content(r"<td><code>dmesg \| grep Xid</code></td>") == (
        "<td><code>dmesg | grep Xid</code></td>"
    )


THREATS = (ROOT / "docs" / "threats.toml").read_text()
ROWS = tomllib.loads(THREATS)["threat"]
DEFINED = set(
    re.findall(
        r"^\s*(?:async )?def (test_\w+)\(",
        "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py")),
        re.MULTILINE,
    )
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["threat"])
def test_each_threat_names_tests_that_are_there(row: dict[str, list[str]]) -> None:
    assert row["tests"] and set(row["tests"]) <= DEFINED, set(row["tests"]) - DEFINED


def test_the_sites_page_has_each_threat() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))["threats"](THREATS)
    rows = re.findall(r"^\| (?!Threat).+ \| .+ \| `test_.+` \|$", page, re.M)
    assert len(rows) == len(ROWS) >= 25


def test_each_example_of_the_page_runs() -> None:
    runner, tried = doctest.DocTestRunner(verbose=False), 0
    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs" / "python.md").read_text(), re.M):
        for found in doctest.DocTestFinder().find(importlib.import_module(name)):
            tried += bool(found.examples)
            runner.run(found)
    assert tried > 10 and runner.summarize(verbose=False).failed == 0
