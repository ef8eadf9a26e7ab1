"""The examples of the classes on the page of the Python API run."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)
PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_each_example_of_the_page_runs() -> None:
    runner, tried = doctest.DocTestRunner(verbose=False), 0
    for name in re.findall(r"^::: (\S+)$", PAGE.read_text(), re.M):
        for found in doctest.DocTestFinder().find(importlib.import_module(name)):
            tried += bool(found.examples)
            runner.run(found)
    assert tried > 10 and runner.summarize(verbose=False).failed == 0
