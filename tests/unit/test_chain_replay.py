"""Nobody calls twice: the replay memory and the files that survive a server."""

from __future__ import annotations

import json
import logging
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed_training.chain import replay
from distributed_training.chain.replay import NonceMemory
from distributed_training.chain.trust import MOST, TrustedAddresses, normalize

pytestmark = pytest.mark.timeout(60)
NS = 10**9
AGE, SKEW = 16, 4  # seconds
START = 1_790_000_000 * NS
PROPERTY = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


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
            file=file,
            clock=lambda: self.wall,
            monotonic=lambda: self.monotonic,
        )

    def fresh(self, nonce: int) -> bool:
        """As the server decides it."""
        return -SKEW * NS <= self.wall - nonce <= AGE * NS


def test_a_call_is_accepted_once() -> None:
    memory = Clocks().memory()
    assert memory.use("a", START) and not memory.use("a", START) and memory.used("a", START)
    assert memory.use("a", START, "another uuid")
    assert memory.use("b", START)
    assert memory.use("a", START - 5 * NS)  # late


@PROPERTY
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
def test_no_call_is_accepted_twice_whatever_the_clock_does(events: list[tuple[str, Any]]) -> None:
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


def test_a_clock_that_goes_an_hour_back_and_forth_shuts_nobody_out() -> None:
    clocks = Clocks()
    memory = clocks.memory()
    for step in (0, -3600, 3600, 3600, -3600):
        clocks.wall += step * NS
        for _ in range(100):
            clocks.pass_(10)
            assert memory.use("a", clocks.wall)


def test_the_memory_is_bounded_by_time_and_by_number(monkeypatch) -> None:
    clocks = Clocks()
    memory = clocks.memory()
    for _ in range(8000):
        clocks.pass_(1)
        assert memory.use("a", clocks.wall)
    assert len(memory) <= 7201
    monkeypatch.setattr(replay, "MOST", 1000)
    for i in range(3000):  # strangers, each with a hotkey of its own
        assert memory.use(f"stranger {i}", clocks.wall)
        assert len(memory) <= 1000
        clocks.pass_(0.01)
    assert memory.used("stranger 0", clocks.wall - 30 * NS)


def test_after_a_clean_end_only_what_was_accepted_is_refused(tmp_path: Path) -> None:
    clocks, file = Clocks(), tmp_path / "nonces.json"
    first = clocks.memory(file)
    first.use("a", clocks.wall)
    first.save(clean=True)
    second = clocks.memory(file)
    assert second.used("a", START) and second.used("b", START)
    assert second.use("a", START + 1)


def test_after_a_kill_what_could_have_been_signed_before_is_refused(tmp_path: Path) -> None:
    clocks, file = Clocks(), tmp_path / "nonces.json"
    first = clocks.memory(file)
    first.save()  # as the server does before it answers
    accepted = clocks.wall + SKEW * NS  # a caller whose clock is ahead
    assert first.use("a", accepted)  # and killed: it never reached the file
    clocks.pass_(1.2)
    second = clocks.memory(file)
    assert second.used("a", accepted)
    clocks.pass_(SKEW + 0.1)
    assert second.use("a", clocks.wall) and second.used("a", accepted)


def test_a_clock_that_was_ahead_at_the_start_shuts_nobody_out_for_long(tmp_path: Path) -> None:
    clocks, file = Clocks(), tmp_path / "nonces.json"
    clocks.memory(file).save()
    clocks.wall += 3600 * NS  # as after a boot, before the time is known
    memory = clocks.memory(file)
    clocks.wall -= 3600 * NS
    assert not memory.use("a", clocks.wall)
    clocks.pass_(AGE + SKEW)
    assert memory.use("a", clocks.wall)
    memory.save(clean=True)
    # Written while the clock was ahead: no floor for an hour.
    file.write_text(json.dumps({"highest": clocks.wall + 3600 * NS, "clean": True}))
    later = clocks.memory(file)
    clocks.pass_(AGE + SKEW)
    assert later.use("a", clocks.wall)


def test_a_disk_that_is_full_stops_nothing(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    memory = Clocks().memory(tmp_path / "file" / "nonces.json")
    memory.use("a", START)
    memory.save()
    assert "replayed after a restart" in caplog.text
    trusted = TrustedAddresses(tmp_path / "file" / "addresses.json")
    trusted.add("1.2.3.4")
    trusted.save()
    assert "could be kept out" in caplog.text and "1.2.3.4" in trusted


def test_a_slow_disk_does_not_hold_up_the_calls(tmp_path: Path, monkeypatch) -> None:
    memory = Clocks().memory(tmp_path / "nonces.json")
    memory.use("a", START)
    syncing, done = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        syncing.set()
        assert done.wait(10)

    monkeypatch.setattr(os, "fsync", slow)
    saver = threading.Thread(target=memory.save)
    saver.start()
    try:
        assert syncing.wait(10)
        found: list[bool] = []
        caller = threading.Thread(target=lambda: found.append(memory.use("b", START)))
        caller.start()
        caller.join(5)
        assert found == [True]
    finally:
        done.set()
        saver.join(10)


def test_trusted_addresses_survive_and_the_latest_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    first = TrustedAddresses(file)
    keys = [normalize(f"10.0.{i // 250}.{i % 250}") for i in range(MOST + 10)]
    for key in [*keys, normalize("2001:db8::1"), normalize("::ffff:1.2.3.4")]:
        first.add(key)
    first.save()
    written = file.stat().st_mtime_ns
    first.add(keys[-1])  # known
    first.save()
    assert file.stat().st_mtime_ns == written
    second = TrustedAddresses(file)
    assert len(second) == MOST and keys[0] not in second and keys[-1] in second
    assert "2001:db8::/64" in second and "1.2.3.4" in second
    second.set_endpoints(["5.6.7.8"])
    assert "5.6.7.8" in second
    second.set_endpoints([])
    assert "5.6.7.8" not in second


# What a crash, a disk or a hand may have left in either file.
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "highest": _JSON | st.just(START),
        "clean": _JSON,
        "addresses": _JSON | st.lists(st.ip_addresses().map(str)),
    },
)
_CONTENT = st.one_of(
    st.binary(max_size=300),
    _JSON.map(lambda v: json.dumps(v).encode()),
    _FIELDS.map(lambda v: json.dumps(v).encode()),
    _FIELDS.map(lambda v: json.dumps(v).encode("utf-16")),
    _FIELDS.flatmap(lambda v: st.integers(0, 60).map(lambda n: json.dumps(v).encode()[:n])),
    st.sampled_from(
        [
            b"[" * 200_000,
            b'{"highest": ' * 100_000,
            b'{"highest": ' + b"9" * 10_000 + b', "clean": true}',
            b'{"highest": 1e999, "clean": true}',
            b'{"addresses": [' + b'"1.2.3.4",' * 50_000 + b'"1.2.3.4"]}',
            b"\0" * 10_000_000,
        ]
    ),
)


@PROPERTY
@given(content=_CONTENT)
def test_a_damaged_nonce_file_refuses_for_seconds_and_heals(
    tmp_path: Path, caplog, content: bytes
) -> None:
    clocks, file = Clocks(), tmp_path / "nonces.json"
    file.write_bytes(content)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        memory = clocks.memory(file)
    assert len(caplog.messages) <= 1 and all(str(file) in m for m in caplog.messages)
    if caplog.messages:
        assert "\n" not in caplog.messages[0]
        assert memory.used("a", START - 1)  # it may have been accepted before
    clocks.pass_(AGE + SKEW)
    assert memory.use("a", clocks.wall)
    memory.save(clean=True)
    caplog.clear()
    assert not clocks.memory(file).use("a", clocks.wall)
    assert not caplog.messages


@PROPERTY
@given(content=_CONTENT)
def test_a_damaged_address_file_trusts_nobody_and_heals(
    tmp_path: Path, caplog, content: bytes
) -> None:
    file = tmp_path / "addresses.json"
    file.write_bytes(content)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        trusted = TrustedAddresses(file)
    assert len(caplog.messages) <= 1 and all(str(file) in m for m in caplog.messages)
    if caplog.messages:
        assert len(trusted) == 0
    assert all(normalize(key.removesuffix("/64")) == key for key in trusted._callers)
    trusted.add("9.9.9.9")
    trusted.save()
    caplog.clear()
    assert "9.9.9.9" in TrustedAddresses(file) and not caplog.messages


@pytest.mark.parametrize("make", ["folder", "dangling link"])
def test_what_is_no_file_is_no_crash(tmp_path: Path, make: str) -> None:
    path = tmp_path / "state.json"
    path.mkdir() if make == "folder" else path.symlink_to(tmp_path / "nowhere" / "file")
    memory, trusted = Clocks().memory(path), TrustedAddresses(path)
    trusted.add("1.2.3.4")
    memory.save()
    trusted.save()
    assert memory.use("a", START + 60 * NS)
