"""Whatever the program logs can be looked up in docs/troubleshooting.md or docs/log-messages.md.

The format of each line is collected from the source. Formats without own words (``"%s"``) pass on
what something else reports, so there is nothing to look up by; the log of a real subnet is compared
in tests/end_to_end/test_localnet_end_to_end.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.tools.log_reference import DOCS

PACKAGE = DOCS.parent / "distributed_training"
WARNINGS = {"warning", "error", "critical", "exception"}
PAGES = ("troubleshooting.md", "log-messages.md")
#: Functions that get one line for the log each.
SAY = {"say", "_say", "info"}
LOGGERS = {"log", "logger", "logging"}
PLACEHOLDER = re.compile(r"%[-+# 0-9.*]*[a-zA-Z]|%%|\0")
#: The validator's, the local subnet's and the registry's: no line of a miner.
OTHERS = ("validator", "localnet", "registry", "scoring/score_preview.py")


def formats() -> Iterator[tuple[str, str, bool]]:
    """File and line, format, and whether it is a warning or an error."""
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(PACKAGE))
        if place.startswith(OTHERS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            kind = kind_of(node.func) if isinstance(node, ast.Call) and node.args else None
            if isinstance(node, ast.Call) and kind and (text := fixed(node.args[0])):
                yield f"{place}:{node.lineno}", text, kind in WARNINGS


def kind_of(function: ast.expr) -> str | None:
    """The level or the name of what a line is handed to; None for other functions."""
    if isinstance(function, ast.Name):
        return function.id if function.id in SAY else None
    if not isinstance(function, ast.Attribute):
        return None
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if owner in LOGGERS and function.attr in {*WARNINGS, "info"}:
        return function.attr
    return function.attr if function.attr in {"say", "_say"} else None


def fixed(node: ast.expr) -> str:
    """The text of a literal; what is put into an f-string becomes a zero byte."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(fixed(v) if isinstance(v, ast.Constant) else "\0" for v in node.values)
    return ""


def to_search_for(text: str) -> list[str]:
    """The beginnings of what stands between two placeholders, where that is words."""
    parts = [part.strip(" ,;:.()`").split() for part in PLACEHOLDER.split(text)]
    return [" ".join(words[:5]).strip(" ,;:.()`") for words in parts if len(words) > 1]


def promised() -> Iterator[tuple[str, str]]:
    """Texts of protocol/lines.py."""
    tree = ast.parse((PACKAGE / "protocol" / "lines.py").read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") != "judged_upload"]
    for node in ast.walk(tree):  # of which the validator's is left out
        if isinstance(node, ast.Assign | ast.Return) and node.value and (text := fixed(node.value)):
            yield f"protocol/lines.py:{node.lineno}", text


def missing(found: list[tuple[str, str]]) -> list[str]:
    pages = " ".join(" ".join((DOCS / page).read_text().split()) for page in PAGES)
    wanted = {place: to_search_for(words) for place, words in found}
    return [f"{p}: {w}" for p, w in wanted.items() if w and not any(part in pages for part in w)]


@pytest.mark.slow
def test_formats_are_found() -> None:
    assert sum(warns for *_, warns in formats()) > 60 and len(list(formats())) > 110
    assert to_search_for("Block %d is left out: %s") == ["is left out"]


def test_every_line_can_be_looked_up() -> None:
    assert missing([*((place, text) for place, text, _ in formats()), *promised()]) == []
