"""Check the prose of docstrings, log calls and documents. Run by `make lint`.

    python -m tests.tools.prose

It refuses sentences of more than 35 words, and words that make a reader stop: `alone` for *only*,
`goes on` for *continues*. CONTRIBUTING.md has the rules.
test_document_figures.py checks citations of docs/protocol.md.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("distributed_training", "neurons", "scripts", "bench", "testbed", "examples", "tests")
DOCUMENTS = ("*.md", "docs/*.md", "docs/skills/*/*.md", "ops/*.md")
LONGEST = 35  # words of a sentence; a colon or semicolon ends it too
BANNED = re.compile(
    r"\b(anew|besides|cure|held[- ]back|house|junk|mend(s|ed|ing)?|strangers?|whom)\b", re.I
)
CALQUES = re.compile(
    r"\b(alone|belongs? into|beside|go(es)? on|is told|likewise|so (long|many)"
    r"|found (a|the|your|its) (own )?network|founded network)\b",
    re.I,
)
NONE = re.compile(r": none\b", re.I)  # in documents; docstrings say what a None means
CODE_IN_TEXT = re.compile(r"```.*?```|``.*?``|`[^`]*`", re.S)


def findings(text: str) -> Iterator[str]:
    """Yield what is wrong with ``text``, of which each indented line or row is a paragraph."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.M | re.S)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s|[-*#|>] |\d+\. )|(?<=\s)\|(?=\s)", text):
        for sentence in re.split(r"(?<=[.!?:;])[)`*\"]*\s+", " ".join(paragraph.split())):
            if (words := len(sentence.split())) > LONGEST:
                yield f"{words} words: {sentence[:60]}..."
        for word in BANNED.finditer(" ".join(paragraph.split())):
            yield f"the word {word[0]!r}: see CONTRIBUTING.md"


def calques(text: str, *patterns: re.Pattern[str]) -> Iterator[str]:
    """Yield the German turns of ``text``, outside of its code."""
    text = " ".join(CODE_IN_TEXT.sub("", text).split())
    for pattern in patterns:
        for words in pattern.finditer(text):
            yield f"the words {words[0]!r}: see CONTRIBUTING.md"


def of_code(path: Path) -> Iterator[str]:
    """Yield what is wrong with the docstrings and log calls of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            line, text = getattr(node, "lineno", 1), ast.get_docstring(node) or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
            words = [a.value for a in node.args if isinstance(a, ast.Constant)]
            line, text = node.lineno, " ".join(w for w in words if isinstance(w, str))
        else:
            continue
        yield from (f"{line}: {found}" for found in (*findings(text), *calques(text, CALQUES)))


def main() -> int:
    """Print all findings; return 1 if there are any."""
    found = []
    for path in sorted(p for folder in CODE for p in (ROOT / folder).rglob("*.py")):
        found += [f"{path.relative_to(ROOT)}:{problem}" for problem in of_code(path)]
    for path in sorted(p for pattern in DOCUMENTS for p in ROOT.glob(pattern)):
        name = path.relative_to(ROOT)
        text = path.read_text()
        found += [f"{name}: {problem}" for problem in findings(text)]
        found += [f"{name}: {problem}" for problem in calques(text, CALQUES, NONE)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
