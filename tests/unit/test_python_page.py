"""Test that each member on the page of the Python API says how it is called."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "python.md"
#: A Hugging Face ``Trainer`` calls these; its documents describe their arguments.
HOOKS = re.compile(r"NetworkCallback\.on_")
_FENCED = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Member:
    """A class, function or method that the page shows."""

    module: str
    name: str  # ``Class.method``
    node: ast.ClassDef | ast.FunctionDef
    constructor: bool  # of a class: the page shows its parameters

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def arguments(self) -> set[str]:
        """The parameters that a caller gives."""
        node: ast.stmt = self.node
        if isinstance(node, ast.ClassDef):
            if not self.constructor or "Protocol" in map(ast.unparse, node.bases):
                return set()
            if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
                fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                return {ast.unparse(each.target) for each in fields}
            made = [each for each in node.body if getattr(each, "name", "") == "__init__"]
            if not made:
                return set()
            node = made[0]
        assert isinstance(node, ast.FunctionDef)
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        return {each.arg for each in every if each is not None} - {"self", "cls", "_"}


def members() -> Iterator[Member]:
    for found in re.finditer(r"^::: (\S+)\n((?: {4}.*\n)*)", PAGE.read_text(), re.M):
        options = yaml.safe_load(found[2])["options"] if found[2] else {}
        path, wanted = ROOT / f"{found[1].replace('.', '/')}.py", options.get("members")
        tree = ast.parse(path.read_text())
        constructor = options.get("merge_init_into_class", True)
        for node in public(tree):
            if wanted is None or node.name in wanted:
                yield Member(found[1], node.name, node, constructor)
                if isinstance(node, ast.ClassDef):
                    for each in public(node):
                        yield Member(found[1], f"{node.name}.{each.name}", each, constructor)
        targets = [n.target for n in tree.body if isinstance(n, ast.AnnAssign)]
        known = {node.name for node in public(tree)} | set(map(ast.unparse, targets))
        assert set(wanted or ()) <= known, f"{found[1]} has lost a member of the page"


def public(tree: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name[0] == "_":
            continue
        if "property" not in map(ast.unparse, node.decorator_list):
            yield node


SHOWN = list(members())


def test_public_member_names_each_argument_in_its_docstring() -> None:
    lacking = []
    for member in SHOWN:
        section = re.search(r"^Args:\n((?: {4}.*\n?)+)", member.docstring, re.M)
        named = set(re.findall(r"^ {4}\**(\w+): \S", section[1], re.M)) if section else set()
        if named != member.arguments and not HOOKS.match(member.name):
            lacking.append(f"{member.name}: {sorted(named ^ member.arguments)}")
    assert len(SHOWN) > 100 and lacking == []


def test_public_member_has_a_summary_of_one_sentence() -> None:
    without = [member.name for member in SHOWN if not member.docstring]
    assert [name for name in without if not HOOKS.match(name)] == []
    texts = {member.name: member.docstring for member in SHOWN if member.docstring}
    assert [name for name, text in texts.items() if not re.match(r".+\.(\n\n|$)", text)] == []


def test_public_class_has_an_example_that_runs_or_at_least_parses() -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    tried = 0
    for member in SHOWN:
        if isinstance(member.node, ast.ClassDef):
            assert "\nExamples:\n" in member.docstring, f"{member.name} has no example"
        for fenced in _FENCED.findall(re.sub(r"(?m)^ {4}", "", member.docstring)):
            ast.parse(fenced)
        if ">>>" in member.docstring:
            names = dict(vars(importlib.import_module(member.module)))
            runner.run(parser.get_doctest(member.docstring, names, member.name, None, None))
            tried += 1
    assert tried > 10 and runner.summarize(verbose=False).failed == 0
