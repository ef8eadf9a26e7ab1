"""Nobody calls twice: the replay memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.chain import auth
from distributed_training.chain.auth import NonceMemory

pytestmark = pytest.mark.timeout(60)
NS = 10**9
AGE, SKEW = 16, 4  # seconds
START = 1_790_000_000 * NS


class Clocks:
    """A machine: time passes for both clocks, only the wall clock can be set."""

    def __init__(self) -> None:
        self.wall, self.monotonic = START, 100.0

    def pass_(self, seconds: float) -> None:
        self.wall += round(seconds * NS)
        self.monotonic += seconds

    def memory(self) -> NonceMemory:
        return NonceMemory(
            window=timedelta(seconds=AGE + SKEW),
            clock=lambda: self.wall,
            monotonic=lambda: self.monotonic,
        )

    def fresh(self, nonce: int) -> bool:
        """Return whether a call is fresh, as the server decides it."""
        return -SKEW * NS <= self.wall - nonce <= AGE * NS


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("pass"), st.floats(0, 4000)),
            st.tuples(st.just("set"), st.sampled_from([-3600, 3600, -30, 30])),
            st.tuples(st.just("call"), st.floats(-AGE, SKEW)),
            st.tuples(st.just("replay"), st.integers(0, 50)),
        ),
        max_size=40,
    )
)
def test_no_call_is_accepted_twice_with_any_clock(events: list[tuple[str, Any]]) -> None:
    clocks = Clocks()
    memory = clocks.memory()
    accepted: list[int] = []
    for kind, value in events:
        if kind == "pass":
            clocks.pass_(value)
        elif kind == "set":
            clocks.wall += value * NS
        elif kind == "call":
            nonce = clocks.wall + round(value * NS)
            if memory.use("a", nonce):
                accepted.append(nonce)
        elif accepted:
            nonce = accepted[value % len(accepted)]
            assert not (clocks.fresh(nonce) and memory.use("a", nonce))


def test_the_memory_is_bounded_by_time_and_by_number(monkeypatch) -> None:
    clocks = Clocks()
    memory = clocks.memory()
    for _ in range(8000):
        clocks.pass_(1)
        assert memory.use("a", clocks.wall)
    assert len(memory._accepted) <= 7201
    monkeypatch.setattr(auth, "MOST_CALLS", 1000)
    for i in range(3000):  # strangers, each with a hotkey of its own
        assert memory.use(f"stranger {i}", clocks.wall)
        assert len(memory._accepted) <= 1000
        clocks.pass_(0.01)
    assert not memory.use("stranger 0", clocks.wall - 30 * NS)


@pytest.mark.parametrize("ahead", [60, 3600, 86400])
def test_a_clock_that_was_ahead_while_running_shuts_nobody_out_later(ahead: int) -> None:
    clocks = Clocks()
    memory = clocks.memory()
    clocks.wall += ahead * NS  # of this machine and of the caller
    accepted = [clocks.wall + i for i in range(3)]
    assert all(memory.use("a", nonce) for nonce in accepted)
    clocks.wall -= ahead * NS
    for _ in range(100):
        clocks.pass_(901)
        assert memory.use("a", clocks.wall)
        assert not any(memory.use("a", nonce) for nonce in accepted)
