"""Test the figures that ``bench.exchange`` computes from its measurements."""

from __future__ import annotations

import pytest

from bench.exchange import _BIG, PARAMETERS, Found, Member, link, rows
from distributed_training.protocol.growth import Growth, file_bytes, grace_seconds

pytestmark = pytest.mark.timeout(60)


def test_a_transfer_takes_its_share_of_a_period() -> None:
    period = 100
    up, down = link(period, (20.0, 100.0))
    seconds = 8 * file_bytes(PARAMETERS) / (up * 1e6)
    of_big = 8 * file_bytes(int(_BIG[0])) / 20e6
    assert seconds / period == pytest.approx(of_big / 4800, rel=0.01)
    assert down == pytest.approx(5 * up)
    assert grace_seconds(PARAMETERS, "4-bit", up, period=float(period)) <= period / 3


def test_the_table_has_a_ratio_to_hivemind_and_computed_rows() -> None:
    growth = Growth(4, PARAMETERS)
    store = Found([Member([0.5, 0.6], [0.5, 0.5], 0.52, 0.97, 0.99)], 100.0)
    hivemind = Found([Member([5.5], [1.0], 4.4, 0.8, 0.9)], 110.0)
    cells = {row[0]: row[1:] for row in rows({"hivemind": hivemind, "store": store})}
    assert cells["sent"][:3] == ("5.500", "0.550", "0.10")
    assert cells["its uploads"][-1] == f"{growth.upload / PARAMETERS:.3f} computed"
    assert cells["utilization, inner steps"][:2] == ("80.0%", "97.0%")
