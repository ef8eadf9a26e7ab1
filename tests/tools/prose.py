"""Check the prose of docstrings, comments, other strings and documents. Run by `make lint`.

    python -m tests.tools.prose

It refuses sentences of more than 35 words, and words that make a reader stop (`alone` for *only*,
`goes on` for *continues*). It refuses `bytes a parameter` for *per parameter*, `Raises X where` for
*if*, and comments that begin with *else*. In the product it also refuses comments that begin with
*of*, which lack their noun.
CONTRIBUTING.md has the rules. test_document_figures.py checks citations of docs/protocol.md.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
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
    r"|found(ed)? ((a|the|your|its) (own )?)?network|raises? ((?-i:[A-Z]\w+)\W+|and )+where)\b",
    re.I,
)
PER = re.compile(
    r"\b(bytes?|seconds?|tokens?|values?|[MG]B|s|nats) an? (parameter|token|value|row|block|page"
    r"|(inner |outer )?step|request|round|line|rank|sequence|shard)\b"
)
PROSE = re.compile(r" (a|and|are|at|be|for|from|has|in|is|it|not|of|on|the|to|with) ")  # no names
HEADLESS, ELSE = re.compile(r"^of\b", re.I), re.compile(r"^else\b", re.I)  # of a comment
HEADED = "distributed_training"
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
    """Yield what is wrong with the docstrings and other strings of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            line, text = getattr(node, "lineno", 1), ast.get_docstring(node) or ""
        elif isinstance(node, ast.Constant) and PROSE.search(str(node.value)):
            line, text = node.lineno, str(node.value)
        else:
            continue
        yield from (f"{line}: {found}" for found in (*findings(text), *calques(text, CALQUES, PER)))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment; lines below each other are one."""
    line, column, text = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        (at, start), words = token.start, token.string.lstrip("#: ")
        whole = not token.line[:start].strip()
        if whole and text and (at, start) == (line + text.count("\n") + 1, column):
            text += f"\n{words}"
            continue
        yield line, text
        line, column, text = at, start if whole else -1, words
    yield line, text


def of_comments(path: Path) -> Iterator[str]:
    """Yield what is wrong with the comments of a module."""
    patterns = [CALQUES, PER, ELSE, *([HEADLESS] if HEADED in path.parts else [])]
    for line, text in comments(path.read_text()):
        if not re.match(r"type:|noqa|fmt:|---", text):
            found = (*findings(" ".join(text.split())), *calques(text, *patterns))
            yield from (f"{line}: {problem}" for problem in found)


def main() -> int:
    """Print all findings; return 1 if there are any."""
    found = []
    for path in sorted(p for folder in CODE for p in (ROOT / folder).rglob("*.py")):
        problems = (*of_code(path), *of_comments(path))
        found += [f"{path.relative_to(ROOT)}:{problem}" for problem in problems]
    for path in sorted(p for pattern in DOCUMENTS for p in ROOT.glob(pattern)):
        name = path.relative_to(ROOT)
        text = path.read_text()
        found += [f"{name}: {problem}" for problem in findings(text)]
        found += [f"{name}: {problem}" for problem in calques(text, CALQUES, PER, NONE)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
