"""The messages that docs/troubleshooting.md explains, and the words that the code prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "troubleshooting.md"
PACKAGE = DOCS.parent / "distributed_training"
#: The section with the lines that scripts search for.
CONTRACT = "## Lines that scripts search for"
#: Time with its distance to UTC, level, another rank's number, text.
LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d \| "
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \| (?:rank \d+ \| )?(.*)"
)
#: Words by which a warning says itself that the program handles it, or names the remedy: a flag, a
#: setting, a command. Such a line needs no row on the page.
EXPLAINS_ITSELF = re.compile(
    r"\bagain\b|\b(?:continues?|[Gg]oing on|is repeated|left out|kept|is used|not used)\b"
    r"|needs? to be done|not affected|\byet\b|for now|until (?:it|the next)|before the next"
    r"|next try|once (?:more|that)|report it|--\w+[._]\w+|\.env\b|HF_TOKEN|timedatectl|nvidia-smi"
    r"|`python |\bcounts\b|is over\b|keep enough free|leave it out|^Verdict: "
)
_PLACEHOLDER = re.compile(r"%[-+# 0-9.*]*[a-zA-Z]|%%|\0")
_NUMBER = re.compile(r"\d+(\.\d+)*")


def documented(page: str | None = None) -> list[str]:
    """Return what stands in backticks in the first cell of each row of ``page`` (the page)."""
    return [text for row in _rows(page) for text in row]


def _rows(page: str | None) -> Iterator[list[str]]:
    for line in (PAGE.read_text(encoding="utf-8") if page is None else page).splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) > 2:
            yield [text.replace("\\|", "|") for text in re.findall("`([^`]+)`", cells[1])]


@cache
def printed() -> str:
    """Return all texts of the package, one a line, a zero byte where a value is put in."""
    return "\n".join(text for path in sorted(PACKAGE.rglob("*")) for text in _texts(path))


def _texts(path: Path) -> Iterator[str]:
    if path.suffix in {".js", ".html"}:
        yield path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if text := fixed(node):
            yield _PLACEHOLDER.sub("\0", text)


def fixed(node: ast.AST) -> str:
    """Return the text of a literal; a value that an f-string puts in becomes a zero byte."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(fixed(v) if isinstance(v, ast.Constant) else "\0" for v in node.values)
    return ""


def fragments(text: str) -> list[str]:
    """Return the parts of ``text`` of two words and more between ``...``, numbers, placeholders."""
    parts = (part.strip(" ,;:.()`") for part in re.split(r"\.\.\.|\d+(?:\.\d+)*|%\w|\0", text))
    return [part for part in parts if len(part.split()) > 1]


def _pattern(text: str) -> re.Pattern[str]:
    text = _NUMBER.sub("0", text)
    return re.compile(".*".join(map(re.escape, text.split("..."))))


class Reference:
    """Tell lines that a reader can look up from others."""

    def __init__(self) -> None:
        self._rows = [
            _pattern(text) for text in documented() if text.count(" ") > 1 or text.endswith(": ...")
        ]

    def has(self, text: str, level: str) -> bool:
        """Return whether a line of ``level`` with ``text`` is for information or explained."""
        if level in {"DEBUG", "INFO"} or (level != "CRITICAL" and EXPLAINS_ITSELF.search(text)):
            return True
        return any(pattern.search(_NUMBER.sub("0", text)) for pattern in self._rows)
