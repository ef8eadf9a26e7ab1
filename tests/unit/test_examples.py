"""Test that each example runs as its docstring says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from distributed_training.common import kinds
from distributed_training.protocol.codecs import CODECS, Codec
from tests.tools import forked

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("nesterov", "signed", "sparse-uploads", "pairs", "by-gain")
TOY = EXAMPLES.parent / "tests" / "toys" / "outer_rule.py"


@pytest.mark.slow
def test_outer_rules_of_files_are_compared_with_the_network_s_own(tmp_path: Path) -> None:
    """The rules are a toy and the examples, and the printed bytes are those that a rule sends."""
    rules = [EXAMPLES / "rules" / f"{name}.py" for name in ("sparse_uploads", "pairs", "by_gain")]
    picture = tmp_path / "compare.png"
    words = ["nesterov", TOY, *rules, "--seeds", "1", "--rounds", "1", "--steps", "1"]
    words += ["--context", "16", "--batch", "2"]
    done = forked.run(
        EXAMPLES / "compare.py", *map(str, words), "--picture", str(picture),
        environ={}, folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row[0]: row[1:] for row in map(str.split, done.stdout.splitlines()) if row}
    sent, received = ({name: float(rows[name][i]) for name in NAMES} for i in (0, 1))
    assert 0.5 < sent["nesterov"] == sent["signed"] < 0.6
    assert sent["sparse-uploads"] < sent["nesterov"] / 4
    assert received["sparse-uploads"] == received["nesterov"] == sent["nesterov"]
    assert 4.5 < sent["pairs"] == received["pairs"] < 4.6, "the upload and a member's weights"
    assert rows["one"][1:3] == ["0.000", "0.000"], "the baseline, one worker, exchanges nothing"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_comparison_is_fair_and_written_as_it_goes(tmp_path: Path) -> None:
    """It has rates per rule, a sweep, seeds, own text and model, and slow and lost workers."""
    text = tmp_path / "text"
    text.write_bytes(b"".join(b"%d words, " % number for number in range(20_000)))
    options = {
        "--seeds": 2, "--rounds": 2, "--steps": 4, "--sweep": "0.4,0.8", "--vary": "weights",
        "--speeds": "1,0.5", "--lost": 0.5, "--text": text, "--width": 16, "--layers": 1,
        "--context": 16, "--batch": 2, "--workers": 3, "--out": tmp_path / "found.json",
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    done = forked.run(
        EXAMPLES / "compare.py", "nesterov", "nesterov:lr=1.6,mu=0", *words,
        environ={}, folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "best rates of nesterov: " in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    labels = ["nesterov lr=0.4 mu=0.9", "nesterov lr=0.8 mu=0.9", "nesterov lr=1.6 mu=0"]
    assert [curve["label"] for curve in found["curves"]] == [*labels, "one worker"]
    assert found["options"]["speeds"] == [1.0, 0.5] and found["commit"] and found["text_sha256"]
    for curve in found["curves"]:
        assert [len(losses) for losses in curve["losses"]] == [2, 2]
        assert curve["losses"][-1] < curve["losses"][0]
    # Some uploads of the three workers are lost, but never all.
    assert 0 < found["curves"][0]["sent"][-1] < 2 * found["curves"][0]["received"][0]


@pytest.mark.parametrize("rates", ["lr", "lr=", "rate=1", "lr=1;mu=0", "lr=nan"])
def test_rates_that_are_none_end_the_comparison_with_one_line(rates: str, tmp_path: Path) -> None:
    done = forked.run(EXAMPLES / "compare.py", f"nesterov:{rates}", environ={}, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "write rates as in NAME:lr=0.8" in done.stderr


def test_a_rule_that_is_none_ends_the_comparison_with_one_line(tmp_path: Path) -> None:
    done = forked.run(EXAMPLES / "compare.py", "nestrov", environ={}, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "there is no outer rule called 'nestrov'" in done.stderr


@pytest.mark.parametrize("name", ["sparse_uploads.py", "pairs.py", "by_gain.py"])
def test_a_rule_is_a_file_of_at_most_80_lines_and_the_page_shows_one_whole(name: str) -> None:
    text = (EXAMPLES / "rules" / name).read_text()
    assert len(text.splitlines()) <= 80
    page = (EXAMPLES.parent / "docs" / "research.md").read_text()
    assert name in page
    code = text.partition("annotations\n\n")[2]
    assert name != "sparse_uploads.py" or (code and f"```python\n{code}```" in page)


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> Codec:
    """Import the codec as a plug-in for this test only, and not for its child processes."""
    monkeypatch.setattr(kinds, "_imported", [])
    monkeypatch.setattr(CODECS, "_made", dict(CODECS._made))
    monkeypatch.delitem(sys.modules, "examples.sparse_codec", raising=False)
    kinds.import_plugins(["examples.sparse_codec"])
    return CODECS["sparse"]


def test_a_sparse_upload_keeps_the_largest_of_each_chunk_and_feedback_sends_the_rest(
    sparse: Codec,
) -> None:
    assert sparse.bits == (64 * 14 + 32) / 4096 and sparse.has_zero
    rows = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    sent, residual, out = torch.zeros_like(rows), torch.zeros_like(rows), torch.empty_like(rows)
    for number in range(300):
        sparse.decode_rows(*sparse.encode_rows(rows + residual), out)
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
def test_foreign_codes_of_a_sparse_upload_become_finite_values(sparse: Codec, columns: int) -> None:
    scales, codes = sparse.encode_rows(torch.randn(2, columns))
    assert sparse.row(columns) == (scales.shape[1], codes.shape[1])
    out = torch.full((2, columns), float("nan"))
    sparse.decode_rows(scales.fill_(4.2e37), torch.randint(256, codes.shape).byte(), out)
    assert out.isfinite().all()
    for bad in (float("nan"), float("inf")):
        rows = torch.ones(1, columns)
        rows[0, -1] = bad
        assert not sparse.encode_rows(rows)[0].isfinite().all()
