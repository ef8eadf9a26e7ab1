"""Count what a reader of this repository has to hold in mind. Run by `make size`.

    python -m bench.size              # the working tree
    python -m bench.size --once PART  # functions of one caller, in files whose path has PART

Lines of code leave out blanks, comments and docstrings. A goal is what the design wants at its end,
not today's value; the row shows how far away it is. No denser code: the medians show it.

Three figures have a ratchet too: ``bench/size.toml`` holds what landed last; a tree above it ends
with exit status 1. Whoever lands less code writes the lower figures there. To raise one takes a
commit of its own that names what came in.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import parser

PRODUCT = ("distributed_training", "neurons", "scripts")
OTHERS = {"tests": "<= 30000", "testbed": "", "bench": "<= 3000", "examples": ""}  # goals
DOCUMENTS = ("*.md", "docs/**/*.md", "bench/*.md", "ops/*.md")
LANDED = Path(__file__).with_suffix(".toml")
_GENERATED = re.compile(r"<!-- figure: [\w-]+ -->.*?<!-- figure: end -->", re.S)
_ANY_LINE = 3  # characters of a line that is code; a single bracket says nothing of density
_SILENT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)


@dataclass
class Tree:
    """Hold what was counted in one tree."""

    code: Counter[str] = field(default_factory=Counter)  # lines of code by package
    files: dict[str, int] = field(default_factory=dict)  # lines of code by file
    comments: int = 0  # lines that hold nothing else
    widths: list[int] = field(default_factory=list)  # characters of each line of code
    others: dict[str, tuple[int, int]] = field(default_factory=dict)  # folder: lines, files
    functions: dict[str, int] = field(default_factory=dict)  # all lines, by place
    defined: Counter[str] = field(default_factory=Counter)  # functions, by their bare name
    named: Counter[str] = field(default_factory=Counter)  # uses of a name, imports left out
    constructors: dict[str, int] = field(default_factory=dict)  # parameters
    flags: set[str] = field(default_factory=set)  # declared by the settings, all programs
    broad: list[str] = field(default_factory=list)
    words: int = 0  # written in the documents; a bar or a ruler of a table is no word

    @property
    def total(self) -> int:
        return sum(self.code.values())

    def called_once(self) -> dict[str, int]:
        """Lines of each function whose name is defined once and used once, by place."""
        once = {}
        for place, lines in self.functions.items():
            name = place.rpartition(":")[2]
            if self.defined[name] == self.named[name] == 1 and not name.startswith("__"):
                once[place] = lines
        return once


def docstring_lines(tree: ast.AST) -> set[int]:
    """Line numbers of every docstring below ``tree``."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def lines_of(source: str, tree: ast.AST) -> tuple[set[int], int]:
    """Return the line numbers of code and the count of comment lines of one file."""
    docstrings = docstring_lines(tree)
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - docstrings, len(comments - code)


def _span(node: ast.AST) -> int:
    return int(node.end_lineno) - int(node.lineno) + 1  # type: ignore[attr-defined]


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """As ruff's BLE001 counts them: what is raised again is not swallowed."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))
        for kind in kinds
    )


def _parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1  # without self


def _scan(found: Tree, place: str, tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.functions[f"{place}:{node.name}"] = _span(node)
            found.defined[node.name] += 1
        elif isinstance(node, ast.Name):
            found.named[node.id] += 1
        elif isinstance(node, ast.Attribute):
            found.named[node.attr] += 1
        elif isinstance(node, ast.ClassDef):
            name = f"{place}:{node.name}"
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    found.constructors[name] = _parameters(item)
        elif isinstance(node, ast.ExceptHandler) and _is_broad(node):
            found.broad.append(f"{place}:{node.lineno}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "flag" and node.args:
            found.flags.add(ast.unparse(node.args[0]))


def _package(path: Path) -> str:
    if path.parts[0] != "distributed_training":
        return path.parts[0]
    return path.parts[1] if len(path.parts) > 2 else "distributed_training"


def measure(tree: Path) -> Tree:
    """Read every Python file of ``tree`` that is the project's. Raises SyntaxError, OSError."""
    found = Tree()
    for top in PRODUCT:
        for path in sorted((tree / top).rglob("*.py")):
            place = path.relative_to(tree)
            source = path.read_text()
            parsed = ast.parse(source)
            code, comments = lines_of(source, parsed)
            found.code[_package(place)] += len(code)
            found.files[str(place)] = len(code)
            found.comments += comments
            lines = [line.strip() for line in source.splitlines()]
            found.widths += [n for c in code if (n := len(lines[c - 1])) > _ANY_LINE]
            _scan(found, str(place), parsed)
    for top in OTHERS:
        counts = [
            len(lines_of(source, ast.parse(source))[0])
            for path in sorted((tree / top).rglob("*.py"))
            if (source := path.read_text())
        ]
        found.others[top] = (sum(counts), len(counts))
    for path in {path for pattern in DOCUMENTS for path in tree.glob(pattern)}:
        text = _GENERATED.sub("", path.read_text())
        found.words += sum(any(map(str.isalnum, word)) for word in text.split())
    return found


@dataclass(frozen=True)
class Row:
    """Return the row of a figure and its goal, which begins with ``<=`` or ``>=``."""

    what: str
    value: float
    goal: str = ""
    worst: str = ""

    @property
    def distance(self) -> float:
        """The value's distance beyond its goal; negative while it is kept."""
        sign, _, number = self.goal.partition(" ")
        if not sign:
            return 0.0
        return self.value - float(number) if sign == "<=" else float(number) - self.value


def rows(found: Tree) -> Iterator[Row]:
    yield Row("lines of code", found.total, "<= 26000")
    yield Row("files with code", sum(count > 0 for count in found.files.values()))
    yield Row("settings", len(found.flags), "<= 45")
    for top, goal in OTHERS.items():
        lines, files = found.others.get(top, (0, 0))
        yield Row(f"lines of {top}", lines, goal, f"{files} files")
    yield Row("words of documents", found.words, "<= 22000")
    yield Row("comments per 100 lines", round(100 * found.comments / found.total, 1), ">= 5")
    longest = max(found.functions, key=lambda name: found.functions[name])
    yield Row("longest function, all lines", found.functions[longest], "<= 100", longest)
    yield Row("functions named once, called once", len(found.called_once()), "<= 350")
    yield Row("median function, all lines", statistics.median(found.functions.values()))
    yield Row("median line of code, characters", statistics.median(found.widths))
    most = max(found.constructors, key=lambda name: found.constructors[name])
    yield Row("parameters of a constructor", found.constructors[most], "<= 8", most)
    yield Row("broad excepts", len(found.broad))


def ratchet(found: Tree, landed: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each figure of ``found`` that is not the one of the ``landed`` ones."""
    now = {
        "product": found.total,
        "tests": found.others.get("tests", (0, 0))[0],
        "settings": len(found.flags),
    }
    for what, figure in now.items():
        if figure > landed[what]:
            yield (
                f"error: {what} has grown from {landed[what]} to {figure}, so this cannot land: "
                f"remove {figure - landed[what]}, or raise the figure in bench/{LANDED.name} in a "
                "commit of its own that names what came in"
            )
        elif figure < landed[what]:
            yield f"{what}: {figure} of {landed[what]}; write it into bench/{LANDED.name}"


def show(found: Tree) -> None:
    """Print figures and packages; ``!``: a goal is not reached."""
    for row in rows(found):
        mark = "!" if row.distance > 0 else " "
        away = f"{row.distance:+g}" if row.goal else ""
        what = f"{mark} {row.what:34} {row.value:>8g}  {row.goal:9} {away:>7}"
        print(f"{what}           {row.worst}".rstrip())
    print("\nlines of code by package")
    for name in sorted(found.code):
        print(f"  {name:34} {found.code[name]:>8}")


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--once", metavar="PART", help="list functions of one caller")
    given = arguments.parse_args(argv)
    here = Path(__file__).resolve().parent.parent
    if given.once is not None:
        once = measure(here).called_once()
        for place in (place for place in once if given.once in place):
            print(f"{once[place]:>4}  {place}")
        return 0
    found = measure(here)
    show(found)
    lines = list(ratchet(found, tomllib.loads(LANDED.read_text())))
    grown = [line for line in lines if line.startswith("error:")]
    print("", *(line for line in lines if line not in grown), sep="\n")
    print(*grown, sep="\n", file=sys.stderr)
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
