"""Test that the doctor and failing rounds say by how much a clock is wrong."""

from __future__ import annotations

import time
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.config import load_config
from distributed_training.health import outside
from distributed_training.health.machine import Examination
from distributed_training.health.outside import LIMIT, WARN
from distributed_training.protocol.types import Check

pytestmark = pytest.mark.timeout(60)
CONFIG = load_config(
    "miner", ["--r2.endpoint_url", "http://127.0.0.1:9", "--network", "local"], check=False
)


def check_clock() -> Check:
    (check,) = outside.check_clock(Examination(CONFIG, ranks=1))
    return check


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.floats(-100, 100) | st.sampled_from([0.0, 1.4, -2.1, 3.6, -3.6]),
    st.floats(0, 5),
)
def test_the_doctor_names_a_wrong_clocks_offset_and_its_reference(
    ahead: float, slow: float
) -> None:
    now = 1_790_000_000.0

    def head(client: httpx.Client, url: str) -> SimpleNamespace:
        """Answer in the middle of ``slow`` seconds, with a clock that is behind ours."""
        nonlocal now
        date = formatdate(int(now + slow / 2 - ahead), usegmt=True)
        now += slow
        return SimpleNamespace(headers={"date": date})

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(httpx.Client, "head", head)
        clock = SimpleNamespace(**{**vars(time), "time": lambda: now})
        monkeypatch.setattr(outside, "time", clock)
        check = check_clock()
    # The error of a store's time is half a second, plus half of the request's time.
    sure = abs(ahead) - slow / 2
    if sure >= LIMIT + 0.5:
        assert check.status == "fail" and "no DHT peer can meet it" in check.finding
    elif WARN + 0.5 <= sure < LIMIT - 0.5:
        assert check.status == "warn"
    elif sure < WARN - 0.5:
        assert check.status == "ok"
    if check.status != "ok" and sure >= WARN + 0.5:
        assert "timedatectl" in check.remedy
    side = "ahead of" if ahead > 0 else "behind"
    if abs(ahead) > 0.6:
        assert f"{side} the store's" in check.finding
        assert abs(float(check.finding.split()[0]) - abs(ahead)) <= 0.56


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"date": "yesterday"}, "does not tell its time"),
        ({"date": f"Mon, 01 Jan {9**40} 00:00:00 GMT"}, "does not tell its time"),
    ],
    ids=["yesterday", "far away"],
)
def test_a_store_that_tells_no_time_is_no_fault_of_the_clock(
    answer: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def head(client: httpx.Client, url: str) -> SimpleNamespace:
        return SimpleNamespace(headers=answer)

    monkeypatch.setattr(httpx.Client, "head", head)
    check = check_clock()
    assert check.status == "skip" and words in check.finding


def test_certificates_that_cannot_be_read_are_no_fault_of_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    words = ["--r2.endpoint_url", "https://127.0.0.1:9", "--network", "local"]
    config = load_config("miner", words, check=False)
    (check,) = outside.check_clock(Examination(config, ranks=1))
    assert check.status == "skip" and "SSL_CERT_FILE" in check.finding
