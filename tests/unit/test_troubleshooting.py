"""Whatever the program warns of is in docs/troubleshooting.md or docs/log-messages.md.

The format of each WARNING and ERROR is collected from the source. Formats without own words
(``"%s"``) pass on what somebody else says, so there is nothing to look up by.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = " ".join(
    word
    for name in ("troubleshooting", "log-messages")
    for word in (ROOT / "docs" / f"{name}.md").read_text().split()
)
LEVELS = {"warning", "error", "critical", "exception"}
LOGGERS = {"log", "logger", "logging"}
PLACEHOLDER = re.compile(r"%[-+# 0-9.]*[a-zA-Z]|%%|\0")
#: The reference validator's and the local subnet's: no line of a miner.
OTHERS = ("validator", "localnet", "scoring/score_preview.py")


def formats() -> list[tuple[str, str]]:
    """(file and line, format) of every warning and error."""
    found = []
    package = ROOT / "distributed_training"
    for path in sorted(package.rglob("*.py")):
        place = str(path.relative_to(package))
        if place.startswith(OTHERS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LEVELS
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in LOGGERS
                and (text := fixed(node.args[0]))
            ):
                found.append((f"{place}:{node.lineno}", text))
    return found


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


def test_formats_are_found() -> None:
    assert to_search_for("Block %d is left out: %s") == ["is left out"]


def test_every_warning_can_be_looked_up() -> None:
    wanted = {place: to_search_for(text) for place, text in formats()}
    assert len(wanted) > 60
    missing = {at: w for at, w in wanted.items() if w and not any(part in PAGES for part in w)}
    assert not missing, "docs/troubleshooting.md and docs/log-messages.md have none of these words"
