"""Test the waits between attempts, and throttled log lines."""

from __future__ import annotations

from datetime import timedelta

from distributed_training.common.backoff import Backoff, Repeats, Throttle, doubling


def test_a_throttle_lets_each_key_through_once_an_interval() -> None:
    now = 0.0
    throttle = Throttle(60, clock=lambda: now)
    assert throttle("a") and throttle("b") and not throttle("a")
    now = 59.9
    assert not throttle("a")
    now = 60.0
    assert throttle("a") and not throttle("a")


def test_a_throttle_bounds_all_keys_together() -> None:
    now = 0.0
    throttle = Throttle(60, most=2, clock=lambda: now)
    assert [throttle(key) for key in "abc"] == [True, True, False]
    now = 60.0
    assert throttle("c"), "its time did not begin while there was no room"


def test_a_throttle_remembers_a_bounded_number_of_keys() -> None:
    throttle = Throttle(60, most_keys=2, clock=lambda: 0.0)
    assert [throttle(key) for key in (1, 2, 3)] == [True, True, True]
    assert throttle(1), "the oldest key is forgotten, so memory stays bounded"
    assert not throttle(3)


def test_waits_double_up_to_the_longest_and_start_again_after_a_success() -> None:
    first, longest = timedelta(seconds=1), timedelta(seconds=10)
    waits = [doubling(n, first=first, longest=longest).total_seconds() for n in range(1, 7)]
    assert waits == [1, 2, 4, 8, 10, 10]
    backoff = Backoff(first=first, longest=longest)
    for most in waits:
        assert most / 2 <= backoff.failed().total_seconds() <= most
    backoff.succeeded()
    assert backoff.failed() <= first


def test_repeated_message_is_counted_for_the_next_line() -> None:
    now = 0.0
    repeats = Repeats(600, clock=lambda: now)
    assert repeats("a") == "" and [repeats("a") for _ in range(3)] == [None] * 3
    assert repeats("b") == ""
    now = 600.0
    assert repeats("a") == " (3 more times since the last such line)" and repeats("a") is None
    now = 1200.0
    assert repeats("a") == " (1 more time since the last such line)" and repeats("b") == ""
