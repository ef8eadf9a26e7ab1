"""docs/troubleshooting.md explains each error and warning, in words that the program prints.

The format of each line is collected from the source. A line that names its own remedy, or says that
the program continues, needs no row. A format without own words (``"%s"``) passes on what
something else reports, so there is nothing to look up by; the log of a real subnet is compared in
tests/promises/test_networks.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.tools.log_reference import (
    CONTRACT,
    EXPLAINS_ITSELF,
    PACKAGE,
    PAGE,
    documented,
    fixed,
    fragments,
    printed,
)

ERRORS = {"error", "critical", "exception"}
#: Functions that get one line for the log each.
SAY = {"say", "_say", "info"}
LOGGERS = {"log", "logger", "logging"}
PLACEHOLDER = re.compile(r"%[-+# 0-9.*]*[a-zA-Z]|%%|\0")
#: The validator's, the local subnet's and the registry's: only their errors are collected.
OTHERS = ("validator", "localnet", "registry")


def formats() -> Iterator[tuple[str, str, str]]:
    """File and line, format, and level (or function) of each line that is logged."""
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            kind = kind_of(node.func) if isinstance(node, ast.Call) and node.args else None
            if place.startswith(OTHERS) and kind not in ERRORS:
                continue
            if isinstance(node, ast.Call) and kind and (text := fixed(node.args[0])):
                yield f"{place}:{node.lineno}", text, kind


def kind_of(function: ast.expr) -> str | None:
    """The level or the name of what a line is handed to; None for other functions."""
    if isinstance(function, ast.Name):
        return function.id if function.id in SAY else None
    if not isinstance(function, ast.Attribute):
        return None
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if owner in LOGGERS and function.attr in {*ERRORS, "warning", "info"}:
        return function.attr
    return function.attr if function.attr in {"say", "_say"} else None


def to_search_for(text: str) -> list[str]:
    """The beginnings of what stands between two placeholders, where that is words."""
    parts = [part.strip(" ,;:.()`").split() for part in PLACEHOLDER.split(text)]
    return [" ".join(words[:4]).strip(" ,;:.()`") for words in parts if len(words) > 1]


def promised() -> Iterator[tuple[str, str]]:
    """Texts of protocol/lines.py that scripts search for."""
    tree = ast.parse((PACKAGE / "protocol" / "lines.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Return) and node.value and (text := fixed(node.value)):
            yield f"protocol/lines.py:{node.lineno}", text


def missing(found: list[tuple[str, str]], page: str) -> list[str]:
    """Formats that no row of ``page`` names: by their first words, or by the row's own words."""
    rows = [" ".join(row.split()) for row in documented(page)]

    def named(text: str, words: list[str]) -> bool:
        begins = any(part in row for part in words for row in rows)
        return begins or any(
            (parts := fragments(row)) and all(part in text for part in parts) for row in rows
        )

    wanted = {place: (text, to_search_for(text)) for place, text in found}
    return [f"{p}: {w}" for p, (text, w) in wanted.items() if w and not named(text, w)]


def contract() -> str:
    _, heading, rows = PAGE.read_text(encoding="utf-8").partition(CONTRACT)
    assert heading
    return rows


@pytest.mark.slow
def test_formats_are_found() -> None:
    levels = [level for *_, level in formats()]
    assert len(levels) > 110 and len([one for one in levels if one in {*ERRORS, "warning"}]) > 60
    assert to_search_for("Block %d is left out: %s") == ["is left out"]
    assert fragments("Nothing was heard of node 1 (rank 4) for 60 s") == [
        "Nothing was heard of node"
    ]


def test_each_error_and_warning_without_a_remedy_of_its_own_has_a_row() -> None:
    found = [
        (place, text)
        for place, text, level in formats()
        if level in {*ERRORS, "warning"} and not EXPLAINS_ITSELF.search(text)
    ]
    assert missing(found, PAGE.read_text(encoding="utf-8")) == []


def test_each_promised_line_is_in_the_contract() -> None:
    assert missing([*promised()], contract()) == []


def test_each_row_is_printed_by_the_program() -> None:
    texts = printed()
    strange = {
        row: absent
        for row in documented()
        if (absent := [part for part in fragments(row) if part not in texts])
    }
    assert strange == {}
