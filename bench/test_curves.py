"""Test ``bench.curves`` at toy size, and the sparse codec of ``examples`` that it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bench import curves
from distributed_training.common import kinds
from distributed_training.protocol.codecs import CODECS

pytestmark = pytest.mark.timeout(120)
ARMS = ["one", "float32", "2-bit-muon", "late", "diloco", "sparse"]
_SMALL = ["--width=64", "--layers=1", "--context=16", "--batch=2", "--steps=4", "--tokens=1536"]


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests import as a plug-in is none of the tests after them, nor of children."""
    monkeypatch.setattr(kinds, "_imported", [])
    monkeypatch.setattr(CODECS, "_made", dict(CODECS._made))
    monkeypatch.delitem(sys.modules, "examples.sparse_codec", raising=False)
    kinds.import_plugins(["examples.sparse_codec"])


def test_each_run_adds_a_seed_and_an_arm_that_was_cut_begins_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "curves.csv"
    words = [*_SMALL, "--csv", str(path), "--arms", ",".join(ARMS)]
    assert curves.main(words) == 0
    first = path.read_text()
    header, _, *rows = first.splitlines()
    assert [row.split(",")[:3] for row in rows] == [
        [arm, "0", str(tokens)] for arm in ARMS for tokens in (512, 1024, 1536)
    ]
    assert path.with_suffix(".svg").read_text().count("<path") > len(ARMS)
    # The last arm lost a row, as by a kill.
    path.write_text("".join(first.splitlines(keepends=True)[:-1]))
    assert curves.main(words) == 0
    assert path.read_text() == first
    assert curves.main(words) == 0
    assert path.read_text().startswith(first)
    parameters = int(header.split("parameters=")[1].split()[0])
    found = curves.Curves(path, header, 3)
    sent = {arm: found.last(arm, "sent")[1] / parameters / 3 for arm in ARMS}
    assert (sent["one"], sent["float32"], sent["diloco"]) == (0.0, 4.0, 3.0)
    assert sent["sparse"] < sent["2-bit-muon"] < sent["late"] < 1.0
    assert found.last("late", "held") == {0: 0.0, 1: 0.0}
    capsys.readouterr()
    with pytest.raises(SystemExit, match="the curves of another setting"):
        curves.main([*words, "--rate", "0.1"])


def test_members_that_exchange_all_move_as_diloco_at_its_rates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The formula of the paper and the product's outer rule are one at equal rates."""
    monkeypatch.setattr(curves, "DILOCO_RATE", curves.RULE.learning_rate)
    monkeypatch.setattr(curves, "DILOCO_MOMENTUM", curves.RULE.mu)
    options = curves.read_options([*_SMALL])
    data = curves.text()
    ours, theirs = (
        [row[1] for row in curves.train(curves.ARMS[arm], 0, data, options, tmp_path)]
        for arm in ("float32", "diloco")
    )
    assert ours == pytest.approx(theirs, abs=1e-3) and len(ours) == 3


def test_a_sparse_upload_keeps_the_largest_of_each_chunk_and_feedback_sends_the_rest() -> None:
    codec = CODECS["sparse"]
    assert codec.bits == (64 * 14 + 32) / 4096 and codec.has_zero
    rows = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    sent, residual, out = torch.zeros_like(rows), torch.zeros_like(rows), torch.empty_like(rows)
    for number in range(300):
        codec.decode_rows(*codec.encode_rows(rows + residual), out)
        if not number:
            whole = rows[:, :4096].abs()
            assert (out[:, :4096] != 0).sum(1).tolist() == [64] * 3
            assert torch.equal(
                whole.topk(64).indices.sort().values, out[:, :4096].nonzero()[:, 1].view(3, 64)
            )
        residual += rows - out
        sent += out
    assert (sent / 300 - rows).norm() < 0.2 * rows.norm()


@pytest.mark.parametrize("columns", [1, 100, 4096, 5000])
def test_foreign_codes_of_a_sparse_upload_become_finite_values(columns: int) -> None:
    codec = CODECS["sparse"]
    scales, codes = codec.encode_rows(torch.randn(2, columns))
    assert codec.row(columns) == (scales.shape[1], codes.shape[1])
    out = torch.full((2, columns), float("nan"))
    codec.decode_rows(scales.fill_(4.2e37), torch.randint(256, codes.shape).byte(), out)
    assert out.isfinite().all()
    for bad in (float("nan"), float("inf")):
        rows = torch.ones(1, columns)
        rows[0, -1] = bad
        assert not codec.encode_rows(rows)[0].isfinite().all()
