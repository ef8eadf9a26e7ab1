"""Test the inner step on paper against an H200's, and that it never contradicts itself."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gpu_plan import compared, shape_of, tables
from distributed_training.common.gpus import CARDS
from distributed_training.common.llama import named_config
from distributed_training.common.memory import MARGIN
from distributed_training.common.paper_step import (
    GOAL,
    Machine,
    best_step,
    flops_per_token,
    held_seconds,
    product_share,
    publication,
)
from distributed_training.training import throughput
from distributed_training.training.model import build_meta_model

pytestmark = pytest.mark.timeout(60)

machines = st.builds(
    Machine, st.sampled_from(list(CARDS.values())), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4)
)


def test_what_an_h200_did_is_predicted() -> None:
    off = {
        (model, words): step.tokens_per_second / measured - 1
        for model, words, step, measured in compared()
    }
    print(*(f"{model} {words}: {each:+.1%}" for (model, words), each in off.items()), sep="\n")
    assert max(map(abs, off.values())) <= 0.06
    assert statistics.median(map(abs, off.values())) <= 0.03


@pytest.mark.parametrize("model", ["1b", "4b"])
def test_products_reach_60_to_65_percent_and_flops_are_the_trainers(model: str) -> None:
    assert 0.60 <= product_share(shape_of(model)) <= 0.65
    counted = throughput.flops_per_token(build_meta_model(named_config(model)), 1024)
    assert flops_per_token(shape_of(model), 1024) == pytest.approx(counted)


@settings(deadline=None, max_examples=25)
@given(machines, st.sampled_from(["125m", "1b", "4b"]))
def test_a_step_fits_and_unmeasured_times_count_at_most_the_goal(
    machine: Machine, model: str
) -> None:
    step = best_step(shape_of(model), machine)
    if step is None:
        assert machine.gpus * machine.card.memory < 12 * shape_of(model).parameters / 1e9
        return
    assert step.device_bytes <= MARGIN * machine.card.memory * 1e9
    assert 0 < step.mfu <= (0.65 if machine == Machine(CARDS["h200"]) else GOAL + 1e-9)
    assert step.seconds >= max(step.parts.values())
    more = best_step(shape_of(model), Machine(machine.card, machine.gpus, machine.machines + 1))
    assert more is not None and more.tokens_per_second > 0.5 * step.tokens_per_second
    held = held_seconds(shape_of(model), machine, step=step.seconds)
    assert 0 < held < held_seconds(shape_of(model), machine, step=0.0)


def test_copies_hold_training_for_their_time_beyond_a_step() -> None:
    shape, machine = shape_of("1b"), Machine(CARDS["h200"])
    copies = 12 * shape.parameters / 10e9
    none, half, all_of_it = (
        held_seconds(shape, machine, step=step) for step in (copies, copies / 2, 0.0)
    )
    assert held_seconds(shape, machine, step=60.0) == none
    assert (half - none, all_of_it - none) == pytest.approx((copies / 2, copies))
    twice = held_seconds(shape, machine, step=0.0, writes=2)
    assert twice - all_of_it == pytest.approx(copies + 24 * 0.26e-9 * shape.parameters)


@pytest.mark.parametrize("gpus", [1, 8])
def test_uploads_of_a_1b_take_less_than_a_hundredth(gpus: int) -> None:
    shape, machine = shape_of("1b"), Machine(CARDS["h200"], gpus)
    step = best_step(shape, machine)
    assert step is not None
    found = publication(shape, machine, step, period=4800.0)
    assert 0 < found.share <= 0.01
    # With a step in which copies do not fit, each of them holds training.
    short = dataclasses.replace(step, parts={"compute": 0.01, "memory": 0.0}, launches=0.0)
    held = publication(shape, machine, short, period=4800.0)
    assert held.parts["copies"] > found.parts["copies"] == 0


def test_cards_without_peer_access_lose_a_fifth_to_their_bus() -> None:
    """All gathers and reductions of 8 x RTX 4090 pass through host memory."""
    step = best_step(shape_of("1b"), Machine(CARDS["4090"], 8))
    assert step is not None
    assert 0.2 <= step.parts["reduction"] / step.seconds <= 0.3


def test_the_tables_are_printed_without_torch() -> None:
    code = (
        "from bench.gpu import main; main(['--plan']); import sys; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(" ".join(row[:2]) for _, rows in tables() for row in rows)
    assert "8 x H100" in done.stdout and "does not fit" in done.stdout
