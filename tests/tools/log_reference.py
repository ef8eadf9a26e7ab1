"""The lines that docs/log-messages.md and docs/troubleshooting.md describe, as patterns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
#: Time with its distance to UTC, level, another rank's number, text.
LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d \| "
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \| (?:rank \d+ \| )?(.*)"
)
_NUMBER = re.compile(r"\d+(\.\d+)*")


def _text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def _documented(text: str) -> Iterator[str]:
    """Yield what stands in backticks in the first cell of each row."""
    for row in text.splitlines():
        cells = re.split(r"(?<!\\)\|", row)
        if len(cells) > 2:
            yield from (text.replace("\\|", "|") for text in re.findall("`([^`]+)`", cells[1]))


def _pattern(text: str) -> re.Pattern[str]:
    text = _NUMBER.sub("0", text)
    return re.compile(".*".join(map(re.escape, text.split("..."))))


class Reference:
    """Tell lines that a reader can look up from others.

    A line of information is described whole; a warning by a part of it, often with the figures of
    an example.
    """

    def __init__(self) -> None:
        whole, _, parts = _text("log-messages.md").partition("## Warnings")
        self._whole = [_pattern(text) for text in _documented(whole)]
        parts += _text("troubleshooting.md")
        self._parts = [_pattern(text) for text in _documented(parts) if text.count(" ") > 1]

    def has(self, text: str, level: str) -> bool:
        """Return whether a line of ``level`` with ``text`` is described."""
        text = _NUMBER.sub("0", text)
        if any(pattern.fullmatch(text) for pattern in self._whole):
            return True
        return level != "INFO" and any(pattern.search(text) for pattern in self._parts)
