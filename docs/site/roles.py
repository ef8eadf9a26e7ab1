"""Let mkdocstrings show docstrings, which it reads as Markdown: roles become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|data|func|meth|mod):`~?\.*([^`]+)`")


class Roles(griffe.Extension):
    """Rewrites the docstrings of everything that a page shows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = text.replace("::\n\n", ":\n\n")  # before indented code
