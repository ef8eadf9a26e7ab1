"""Nobody calls twice: the replay memory and the file that survives a server."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.chain import auth
from distributed_training.chain.auth import MOST_VALIDATORS, Kept, KeptFile, NonceMemory
from distributed_training.chain.http_server import TrustedAddresses, normalize

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

    def memory(self, file: Path | None = None) -> NonceMemory:
        return NonceMemory(
            window=timedelta(seconds=AGE + SKEW),
            skew=timedelta(seconds=SKEW),
            kept=KeptFile(file).load(),
            clock=lambda: self.wall,
            monotonic=lambda: self.monotonic,
        )

    def fresh(self, nonce: int) -> bool:
        """Return whether a call is fresh, as the server decides it."""
        return -SKEW * NS <= self.wall - nonce <= AGE * NS


def save(memory: NonceMemory, file: Path, *, clean: bool) -> None:
    """Save the calls as the server does."""
    KeptFile(file).save(Kept(memory.highest, clean))


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
    assert memory.used("stranger 0", clocks.wall - 30 * NS)


def test_a_clock_that_was_ahead_at_the_start_shuts_nobody_out_for_long(tmp_path: Path) -> None:
    clocks, file = Clocks(), tmp_path / "callers.json"
    save(clocks.memory(file), file, clean=False)
    clocks.wall += 3600 * NS  # as after a boot, before the time is known
    memory = clocks.memory(file)
    clocks.wall -= 3600 * NS
    assert not memory.use("a", clocks.wall)
    clocks.pass_(AGE + SKEW)
    assert memory.use("a", clocks.wall)
    save(memory, file, clean=True)
    # Written while the clock was ahead: no floor for an hour.
    file.write_text(
        json.dumps({"highest": clocks.wall + 3600 * NS, "clean": True, "validators": []})
    )
    later = clocks.memory(file)
    clocks.pass_(AGE + SKEW)
    assert later.use("a", clocks.wall)


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
        assert all(memory.used("a", nonce) for nonce in accepted)


def test_the_file_is_written_when_it_changes(tmp_path: Path) -> None:
    kept = KeptFile(tmp_path / "callers.json")
    kept.save(Kept(5, clean=True))
    (tmp_path / "callers.json").unlink()
    kept.save(Kept(5, clean=True))
    assert not (tmp_path / "callers.json").exists()
    kept.save(Kept(6, clean=True))
    assert KeptFile(tmp_path / "callers.json").load() == Kept(6, clean=True)


def test_trusted_addresses_survive_and_the_latest_are_kept(tmp_path: Path) -> None:
    first = TrustedAddresses()
    keys = [normalize(f"10.0.{i // 250}.{i % 250}") for i in range(MOST_VALIDATORS + 10)]
    for key in [*keys, normalize("2001:db8::1"), normalize("::ffff:1.2.3.4")]:
        first.add(key)
    KeptFile(tmp_path / "callers.json").save(Kept(-1, True, first.callers()))
    second = TrustedAddresses(KeptFile(tmp_path / "callers.json").load().validators)
    assert len(second.callers()) == MOST_VALIDATORS
    assert keys[0] not in second and keys[-1] in second
    assert "2001:db8::/64" in second and "1.2.3.4" in second
    assert normalize("2001:db8:1:2::4") == "2001:db8:1:2::/64" != normalize("2001:db8:1:3::4")
    second.set_endpoints(["5.6.7.8"])
    assert "5.6.7.8" in second
    second.set_endpoints([])
    assert "5.6.7.8" not in second


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"clean": true, "validators": ["1.2.3.4"]}',
        b'{"highest": -5, "clean": true}',
        b'{"highest": 5, "clean": true, "validators": "1.2.3.4"}',
    ],
)
def test_a_damaged_file_is_logged_once_and_refuses_calls_for_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    clocks, file = Clocks(), tmp_path / "callers.json"
    file.write_bytes(content)
    memory = clocks.memory(file)
    (line,) = caplog.messages
    assert str(file) in line and "\n" not in line
    assert KeptFile(file).load() == Kept(-1, clean=False)
    assert memory.used("a", START - 1)  # it may have been accepted before
    clocks.pass_(AGE + SKEW)
    assert memory.use("a", clocks.wall)
    save(memory, file, clean=True)
    assert not clocks.memory(file).use("a", clocks.wall)
    assert caplog.messages == [line]
