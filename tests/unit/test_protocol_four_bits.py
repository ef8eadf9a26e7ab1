"""Four bits a value: the error, the bytes, and refused messages."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.protocol import four_bits
from distributed_training.protocol.four_bits import GROUP, bytes_of

pytestmark = pytest.mark.timeout(60)

TINY, MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
#: An odd count, a whole group and a short one; magnitudes of 1e-30 to 1e30.
CASES = [(count, scale) for count in (1, 255, 256, 257, 1000) for scale in (1e-30, 1e-3, 1e30)]
#: SHA-256 of what CASES give, one after the other.
DIGEST = "c5b543c0a12f06a0d71e8847a6cba93d825fc48a05daff77aae075dc8f4c2eb9"


def drawn(count: int, scale: float, seed: int = 0) -> torch.Tensor:
    # Whole numbers: what randn draws depends on the processor.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**20), 2**20, (count,), generator=generator) * (scale / 2**20)


def decoded(data: torch.Tensor, count: int) -> torch.Tensor:
    values = torch.full((count,), -1.0)
    four_bits.decode(data, values)
    return values


def digest_of_cases() -> str:
    found = hashlib.sha256()
    for count, scale in CASES:
        data = four_bits.encode(drawn(count, scale))
        found.update(data.numpy().tobytes() + decoded(data, count).numpy().tobytes())
    return found.hexdigest()


# Values whose magnitudes are far apart within a group, zeros of both signs and subnormals.
numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-45, -TINY, 7 * TINY, 1.0, -7.0, 0.5, 2.9e38, -1e19]),
    st.floats(-(2.0**120), 2.0**120, width=32),
)


@given(st.lists(numbers, min_size=1, max_size=700), st.integers(1, 400))
def test_each_value_is_off_by_at_most_half_a_scale(some: list[float], times: int) -> None:
    values = torch.tensor((some * times)[:3000])
    before, data = values.clone(), four_bits.encode(values)
    assert torch.equal(values, before) and len(data) == bytes_of(len(values))
    assert torch.equal(data, four_bits.encode(values))
    for group, result in zip(
        values.split(GROUP), decoded(data, len(values)).split(GROUP), strict=True
    ):
        scale = float(group.abs().max()) / 7
        if scale < TINY:
            assert not result.any()
        else:
            # A bit more: the quotient is rounded too.
            assert float((result.double() - group.double()).abs().max()) <= 0.500001 * scale
            assert not result[group == 0].any()
        assert result.isfinite().all() and not (result.abs().lt(TINY) & (result != 0)).any()


def test_the_layout_is_that_of_the_protocol_page() -> None:
    """Scales first; a byte holds a value of the first half of its group and one of the second."""
    values = torch.cat([torch.arange(-128, 128) / 128 * 7, torch.tensor([14.0, -14.0, 4.0])])
    data = bytes(four_bits.encode(values))
    assert len(data) == 2 * 4 + 128 + 2
    assert torch.frombuffer(bytearray(data[:8]), dtype=torch.float32).tolist() == [1.0, 2.0]
    assert data[8] == 0x81 and data[8 + 127] == 0xF8  # -7 and 0; 0 and 7
    assert data[-2:] == bytes([0xAF, 0x81])  # 14 and 4; -14 and what is no value


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_bits_are_the_same_on_every_processor(capability: str) -> None:
    program = "from tests.unit import test_protocol_four_bits as t; print(t.digest_of_cases())"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert found.stdout.strip() == digest_of_cases() == DIGEST


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), MAX])
@pytest.mark.parametrize("count", [3, GROUP, GROUP + 9])
def test_non_finite_scale_is_refused_where_it_is_decoded(value: float, count: int) -> None:
    values = drawn(count, 1.0)
    values[count // 2] = value
    with pytest.raises(ValueError, match="scale"):
        decoded(four_bits.encode(values), count)


@pytest.mark.parametrize(
    "scale", [float("nan"), float("inf"), -1.0, -TINY, 1e-45, TINY / 2, -1e-45, MAX, MAX / 7]
)
@pytest.mark.parametrize("at", [0, 1])
def test_a_crafted_scale_is_refused_before_anything_is_written(scale: float, at: int) -> None:
    data = four_bits.encode(drawn(GROUP + 8, 1.0))
    data[4 * at : 4 * at + 4] = torch.tensor([scale]).view(torch.uint8)
    values = torch.full((GROUP + 8,), 5.0)
    with pytest.raises(ValueError, match="scale"):
        four_bits.decode(data, values)
    assert (values == 5.0).all()


@given(st.integers(1, 600), st.integers(-700, 700))
def test_another_length_is_refused(count: int, more: int) -> None:
    length = max(bytes_of(count) + (more or 1), 0)
    with pytest.raises(ValueError, match="bytes instead of"):
        decoded(torch.zeros(length, dtype=torch.uint8), count)


@given(st.data())
def test_decoded_values_of_any_bytes_are_finite(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    raw = data.draw(st.binary(min_size=bytes_of(count), max_size=bytes_of(count)))
    try:
        values = decoded(torch.frombuffer(bytearray(raw), dtype=torch.uint8), count)
    except ValueError:
        return
    assert values.isfinite().all()
