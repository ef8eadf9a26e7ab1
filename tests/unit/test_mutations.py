"""The list of ``make mutate``, which runs at night: each edit of the product may outdate it."""

from __future__ import annotations

import pytest

from tests.tools.mutate import ROOT, listed


@pytest.mark.slow
def test_each_mutation_fits_the_source_and_names_tests_that_exist() -> None:
    for mutation in listed([]):
        assert mutation.tests
        for file, _, test in (each.partition("::") for each in mutation.tests):
            assert f"def {test}" in (ROOT / file).read_text(), mutation
