"""The codec against the golden vectors, and its properties on shapes of every kind."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from distributed_training.protocol import gradients as codec

pytestmark = pytest.mark.timeout(60)
VECTORS = Path(__file__).parents[1] / "vectors" / "gradient_codec.safetensors"


def _cases() -> list[dict]:
    with safe_open(VECTORS, "pt") as file:
        return json.loads(file.metadata()["cases"])


def _by_index(idxs: torch.Tensor, vals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = idxs.long().argsort(-1)
    return idxs.gather(-1, order), vals.gather(-1, order)


@pytest.mark.parametrize("case", _cases(), ids=lambda c: f"{c['case']}-{c['shape']}")
def test_golden_vectors(case: dict) -> None:
    """Bit for bit, but for the DCT: its matrix products round as the processor sums."""
    exact = not case["use_dct"]
    with safe_open(VECTORS, "pt") as file:
        tensor, idxs, vals, decoded = (
            file.get_tensor(f"{case['case']}.{name}")
            for name in ("input", "idxs", "vals", "decoded")
        )
    options = {"target_chunk": case["target_chunk"], "use_dct": case["use_dct"]}
    got_idxs, got_vals = codec.encode(tensor, topk=case["topk"], **options)
    assert got_idxs.dtype == torch.int16 and got_vals.dtype == torch.float32
    assert list(got_idxs.shape) == case["idxs_shape"]
    (got_order, got_values), (order, values) = _by_index(got_idxs, got_vals), _by_index(idxs, vals)
    assert torch.equal(got_order, order)
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(got_values, values, **tolerance)
    for i, v in ((idxs, vals), (got_idxs, got_vals)):
        torch.testing.assert_close(
            codec.decode(i, v, tensor.shape, **options), decoded, **tolerance
        )
    found = codec.layout(tensor.shape, **options)
    if case["use_dct"] and tensor.dim() == 2:  # the vectors' xshape is that of the tiles
        across, h, along, w = found.view
        assert [across, along, h, w] == case["xshape"]
    else:
        assert list(found.view) == case["xshape"] and found.candidates == case["totalk"]


def test_worked_example_of_the_protocol_page() -> None:
    matrix = torch.tensor([[0.0, 5, -3, 1], [2, -1, 0, 4]])
    idxs, vals = codec.encode(matrix, topk=2, target_chunk=2)
    assert idxs.tolist() == [[[1, 2], [0, 3]]]
    assert vals.tolist() == [[[5, -3], [2, 4]]]
    decoded = codec.decode(idxs, vals, (2, 4), target_chunk=2)
    assert decoded.tolist() == [[0, 5, -3, 0], [2, 0, 0, 4]]


@pytest.mark.parametrize("n, chunk", [(2048, 64), (96, 48), (1000, 50), (32003, 1), (17, 17)])
def test_chunks_are_the_largest_divisor(n: int, chunk: int) -> None:
    assert codec.largest_divisor(n, 64) == chunk


shapes = st.one_of(
    st.tuples(st.integers(1, 200)), st.tuples(st.integers(1, 70), st.integers(1, 150))
)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, topk=st.integers(1, 40), seed=st.integers(0, 2**31), ties=st.booleans())
def test_keeps_exactly_the_largest_of_each_row(
    shape: tuple[int, ...], topk: int, seed: int, ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if ties:
        x = (x * 2).round()  # many equal magnitudes and zeros
    idxs, vals = codec.encode(x, topk=topk)
    assert tuple(idxs.shape) == codec.encoded_shape(shape, topk=topk)
    found = codec.layout(shape, use_dct=False)
    rows = x.view(-1, found.candidates)
    k = idxs.shape[-1]
    flat = idxs.reshape(-1, k).long()
    assert torch.equal(rows.gather(-1, flat), vals.reshape(-1, k))
    assert bool((flat[:, 1:] > flat[:, :-1]).all())
    expected = rows.abs().topk(k, dim=-1).values
    assert torch.equal(vals.reshape(-1, k).abs().sort(-1, descending=True).values, expected)
    decoded = codec.decode(idxs, vals, shape)
    kept = decoded != 0
    assert torch.equal(decoded[kept], x[kept])
    rest = x.clone()
    codec.subtract_sent_(rest, idxs, vals)
    assert torch.equal(rest, x - decoded)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 90),
    columns=st.integers(1, 90),
    cuts=st.lists(st.integers(0, 90), max_size=4),
    seed=st.integers(0, 2**31),
)
def test_codes_of_row_ranges_concatenate_to_the_whole(
    rows: int, columns: int, cuts: list[int], seed: int
) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    edges = sorted({0, rows, *(min(c, rows) for c in cuts)})
    edges.append(rows)  # an empty shard at the end, as FSDP makes them
    parts = [codec.encode_rows(x[a:b].contiguous()) for a, b in itertools.pairwise(edges)]
    whole = codec.encode(x)
    for part, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(part).reshape(expected.shape), expected)
    shard_idxs, _ = codec.encode(x[: edges[1]])
    assert torch.equal(shard_idxs.reshape(-1, shard_idxs.shape[-1]), parts[0][0])


def test_selection_on_a_device_agrees_with_the_one_on_the_cpu() -> None:
    x = torch.randn(64, 200)
    assert all(
        torch.equal(a, b)
        for a, b in zip(codec._select_on_device(x, 32), codec.encode_rows(x), strict=True)
    )


def test_dct_round_trip_is_lossless_when_nothing_is_dropped() -> None:
    x = torch.randn(24, 40)
    idxs, vals = codec.encode(x, topk=24 * 40, use_dct=True)
    torch.testing.assert_close(
        codec.decode(idxs, vals, x.shape, use_dct=True), x, atol=1e-5, rtol=1e-4
    )
    rest = x.clone()
    codec.subtract_sent_(rest, idxs, vals, use_dct=True)
    assert float(rest.abs().max()) < 1e-5


def test_nan_is_sent_and_not_hidden() -> None:
    x = torch.randn(8, 100)
    x[3, 50] = float("nan")
    idxs, vals = codec.encode(x)
    assert bool(vals.isnan().any()) and 50 in idxs.view(8, -1)[3].tolist()


def test_entries_sent_twice_are_averaged_and_short_codes_are_accepted() -> None:
    idxs = torch.tensor([[[3, 3, 1]]], dtype=torch.int64)
    vals = torch.tensor([[[1.0, 2.0, 7.0]]])
    decoded = codec.decode(idxs, vals, (2, 4), target_chunk=2)
    assert decoded.tolist() == [[0, 7, 0, 1.5], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    "idxs, vals, reason",
    [
        (torch.zeros(1, 2, 2, dtype=torch.int16), torch.zeros(1, 2, 2).half(), "float32"),
        (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), "int16"),
        (torch.zeros(1, 2, 2, dtype=torch.int16), torch.zeros(1, 2, 1), "shape"),
        (torch.zeros(2, 2, 2, dtype=torch.int16), torch.zeros(2, 2, 2), "fit"),
        (torch.full((1, 2, 2), 4, dtype=torch.int16), torch.zeros(1, 2, 2), "outside"),
        (torch.full((1, 2, 2), -1, dtype=torch.int16), torch.zeros(1, 2, 2), "outside"),
    ],
)
def test_bad_codes_are_refused(idxs: torch.Tensor, vals: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        codec.decode(idxs, vals, (2, 4), target_chunk=2)


@pytest.mark.parametrize("shape", [(), (2, 3, 4), (2, 40000)])
def test_shapes_without_a_code_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        codec.encode(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(300, 700), (1024, 1024), (5000,)])
def test_the_dct_does_not_depend_on_the_number_of_threads(shape: tuple[int, ...]) -> None:
    """Or two miners with the same weights would publish different indices."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    codes = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            codec._dct_basis.cache_clear()
            codes.append(codec.encode(tensor, use_dct=True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, four) for one, four in zip(*codes, strict=True))
