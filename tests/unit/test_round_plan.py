"""Test the rounds of ``dt-plan`` against real miners' (bench.exchange_grid)."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.exchange_grid import TITLES, computed
from distributed_training.protocol.growth import file_bytes
from distributed_training.protocol.round_plan import PlannedMember, over_hivemind, through_store
from distributed_training.protocol.types import OWN_CODECS

pytestmark = pytest.mark.timeout(60)
FIGURE = Path(__file__).parents[1] / "vectors" / "exchange-grid.json"


def test_rounds_are_as_real_miners_had_them() -> None:
    """Utilization by its points of a hundred, bytes by their share; goals 5 % and 15 %."""
    figure = json.loads(FIGURE.read_text())
    assert tuple(figure["columns"]) == TITLES
    off: dict[str, list[float]] = {"utilization": [], "sent": [], "received": []}
    for _, period, up, step, _, trained, *cells in figure["rows"]:
        plan = computed(float(period[:-2]), float(up), float(step[:-2]))
        assert cells[0] == f"{plan.utilization:.1%}", "compute the table again"
        off["utilization"].append(abs(plan.utilization - float(trained[:-1]) / 100))
        off["sent"].append(abs(plan.sent / 1e6 / float(cells[1]) - 1))
        off["received"].append(abs(plan.received / 1e6 / float(cells[3]) - 1))
    assert len(figure["rows"]) >= 12
    for name, each in off.items():
        print(f"{name}: median {statistics.median(each):.1%}, worst {max(each):.1%}")
        assert statistics.median(each) <= 0.05 and max(each) <= 0.15


def test_the_network_of_bench_exchange_moves_the_computed_bytes() -> None:
    """docs/figures/exchange.json has 158 s from close to close, where the network had 100 s."""
    parameters = 10_253_440
    member = PlannedMember(2.5, up=2.461, down=12.304)
    found = through_store(parameters, member, period=158, grace=33)
    sent, received = found.sent / parameters, found.received / parameters
    print(f"{sent:.3f} sent, {received:.3f} received")
    assert sent == pytest.approx(0.552, rel=0.03) and received == pytest.approx(0.551, rel=0.03)


members = st.builds(
    PlannedMember, st.floats(0.1, 100), st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.floats(0, 30)
)


@given(members, st.integers(10**6, 10**11), st.floats(100, 1e5), st.sampled_from([*OWN_CODECS]))
def test_an_upload_counts_if_it_ends_in_the_grace(
    member: PlannedMember, parameters: int, period: float, codec: str
) -> None:
    found = through_store(parameters, member, period=period, grace=period / 3, codec=codec)
    assert found.in_time == (found.utilization > 0) or member.held >= period
    assert 0 <= found.utilization <= 1 and found.inner_steps >= 0
    if found.in_time:
        assert member.sending(file_bytes(parameters, codec)) <= period / 3
        assert found.sent >= file_bytes(parameters, codec)
    faster = PlannedMember(member.step, 10 * member.up, member.down, member.held)
    better = through_store(parameters, faster, period=period, grace=period / 3, codec=codec)
    assert better.utilization >= found.utilization and better.late <= found.late


@settings(max_examples=50)
@given(members, st.integers(10**6, 10**11), st.floats(100, 1e5), st.integers(1, 500))
def test_an_all_reduce_costs_no_utilization_and_moves_at_most_twice_all_values(
    member: PlannedMember, parameters: int, period: float, peers: int
) -> None:
    grace, after = period / 3, period / 12
    alone = through_store(parameters, member, period=period, grace=grace)
    found = over_hivemind(
        parameters, member, period=period, grace=grace, average_after=after, peers=peers
    )
    assert (found.utilization, found.in_time) == (alone.utilization, alone.in_time)
    assert found.averages == (after + found.transfer <= grace) and found.late >= alone.late
    reduced = 2 * 2 * parameters  # float16: what it sends away and gets back, the validator's too
    for more in (found.sent - alone.sent, found.received - alone.received):
        assert 0 <= more <= 1.07 * reduced
