"""The list of ``make mutate``, which runs at night: each edit of the product may outdate it."""

from __future__ import annotations

from tests.tools.mutate import ROOT, listed


def test_each_mutation_fits_the_source_and_names_tests_that_exist() -> None:
    for mutation in listed([]):
        assert mutation.tests and all((ROOT / test).is_file() for test in mutation.tests), mutation
