"""Counts what a reader of this repository has to hold in mind. Run by `make house`.

    python -m bench.house              # the working tree
    python -m bench.house OTHER_TREE   # another checkout beside it, for before and after

Lines of code leave out blanks, comments and docstrings. The goals are those the project set itself.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

PRODUCT = ("distributed_training", "neurons", "scripts")
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
class House:
    """What was counted in one tree."""

    code: Counter[str] = field(default_factory=Counter)  # lines of code by room
    files: dict[str, int] = field(default_factory=dict)  # lines of code by file
    prose: int = 0  # lines of comments and docstrings
    functions: dict[str, int] = field(default_factory=dict)  # all lines, by place
    classes: dict[str, int] = field(default_factory=dict)
    constructors: dict[str, int] = field(default_factory=dict)  # parameters
    protocols: list[str] = field(default_factory=list)
    broad: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.code.values())


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


def lines_of(source: str, tree: ast.AST) -> tuple[int, int]:
    """(lines of code, lines of comments and docstrings) of one file."""
    docstrings = docstring_lines(tree)
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings), len((comments - code) | docstrings)


def _span(node: ast.AST) -> int:
    return int(node.end_lineno) - int(node.lineno) + 1  # type: ignore[attr-defined]


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))
        for kind in kinds
    )


def _parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1  # without self


def _scan(house: House, place: str, tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            house.functions[f"{place}:{node.name}"] = _span(node)
        elif isinstance(node, ast.ClassDef):
            name = f"{place}:{node.name}"
            house.classes[name] = _span(node)
            if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
                house.protocols.append(name)
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    house.constructors[name] = _parameters(item)
        elif isinstance(node, ast.ExceptHandler) and _is_broad(node):
            house.broad.append(f"{place}:{node.lineno}")


def _room(path: Path) -> str:
    if path.parts[0] != "distributed_training":
        return path.parts[0]
    return path.parts[1] if len(path.parts) > 2 else "distributed_training"


def measure(tree: Path) -> House:
    """Read every product file below ``tree``. Raises SyntaxError, OSError."""
    house = House()
    for top in PRODUCT:
        for path in sorted((tree / top).rglob("*.py")):
            place = path.relative_to(tree)
            source = path.read_text()
            parsed = ast.parse(source)
            code, prose = lines_of(source, parsed)
            house.code[_room(place)] += code
            house.files[str(place)] = code
            house.prose += prose
            _scan(house, str(place), parsed)
    return house


@dataclass(frozen=True)
class Row:
    """One figure beside its goal; ``worst`` names the place."""

    what: str
    value: int
    goal: int | None
    worst: str = ""


def _most(counts: dict[str, int]) -> tuple[int, str]:
    name = max(counts, key=lambda k: counts[k])
    return counts[name], name


def rows(house: House) -> Iterator[Row]:
    yield Row("lines of code", house.total, 17_000)
    yield Row("lines of comments and docstrings", house.prose, None)
    for what, counts, goal in (
        ("longest file, lines of code", house.files, 400),
        ("longest function, all lines", house.functions, 70),
        ("longest class, all lines", house.classes, 350),
        ("parameters of a constructor", house.constructors, 8),
    ):
        value, worst = _most(counts)
        yield Row(what, value, goal, worst)
    over = sum(count > 60 for count in house.functions.values())
    yield Row("functions over 60 lines", over, None)
    yield Row("broad excepts", len(house.broad), 12)
    yield Row("Protocol classes", len(house.protocols), None)


def show(now: House, before: House | None) -> None:
    table = Table("", "now", "goal", "where", title="The house")
    if before is not None:
        table.add_column("before")
    old = {row.what: row for row in rows(before)} if before is not None else {}
    for row in rows(now):
        kept = row.goal is None or row.value <= row.goal
        cells = [row.what, f"[{'green' if kept else 'red'}]{row.value}", f"<= {row.goal}"]
        cells[2] = "" if row.goal is None else cells[2]
        cells.append(row.worst)
        table.add_row(*cells, *([str(old[row.what].value)] if old else []))
    rooms = Table("room", "lines of code", *(["before"] if before is not None else []))
    for room in sorted({*now.code, *(before.code if before else ())}):
        rooms.add_row(room, str(now.code[room]), *([str(before.code[room])] if before else []))
    console = Console(width=140 if not sys.stdout.isatty() else None)
    console.print(table)
    console.print(rooms)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before", nargs="?", type=Path, help="another checkout to compare with")
    given = parser.parse_args(argv)
    here = Path(__file__).resolve().parent.parent
    if given.before is not None and not (given.before / PRODUCT[0]).is_dir():
        print(
            f"error: {given.before} is not a checkout of this project, so there is nothing to "
            "compare with: name a folder that holds distributed_training/",
            file=sys.stderr,
        )
        return 2
    show(measure(here), measure(given.before) if given.before is not None else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
