"""The search for the best length of a published step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.training.local_evaluation import LARGEST, SMALLEST, Found, best_factor

pytestmark = pytest.mark.timeout(60)


def valley(best: float, curvature: float) -> object:
    """A loss along a step: quadratic near its best factor, ``-1`` there, 0 at factor 0."""
    return lambda factor: curvature * ((factor / best - 1) ** 2 - 1)


@given(
    best=st.floats(0.25, 30),
    curvature=st.floats(1e-3, 1e3),
    first=st.one_of(st.just(1.0), st.floats(0.25, 30)),
)
def test_nearly_all_of_the_best_step_is_found_with_few_trials(
    best: float, curvature: float, first: float
) -> None:
    found = best_factor(valley(best, curvature), first=first)  # type: ignore[arg-type]
    assert found.loss <= -0.93 * curvature
    assert found.evaluations <= 6 + abs(math.log2(best / first))


@given(
    values=st.lists(
        st.one_of(st.floats(-10, 10), st.sampled_from([math.nan, math.inf])), min_size=20
    ),
    first=st.floats(1e-6, 1e6),
)
def test_any_losses_give_a_bounded_factor_that_was_tried(values: list[float], first: float) -> None:
    tried: dict[float, float] = {}

    def loss(factor: float) -> float:
        tried[factor] = values[len(tried) % len(values)]
        return tried[factor]

    found = best_factor(loss, first=first)
    assert SMALLEST <= found.factor <= LARGEST
    finite = [v for v in tried.values() if math.isfinite(v)]
    if finite:
        assert found.loss == min(finite) == tried[found.factor]
    else:
        assert found == Found(1.0, math.inf, len(tried))
