"""Each example runs as its docstring says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import forked

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("nesterov", "signed", "sparse-uploads", "pairs")
TOY = EXAMPLES.parent / "tests" / "toys" / "outer_rule.py"


@pytest.mark.slow
def test_outer_rules_of_files_are_compared_with_the_network_s_own(tmp_path: Path) -> None:
    """A toy and both examples; the counted bytes are the ones that the rule sends."""
    rules = [EXAMPLES / "rules" / name for name in ("sparse_uploads.py", "pairs.py")]
    picture = tmp_path / "compare.png"
    words = ["nesterov", TOY, *rules, "--seeds", "1", "--rounds", "1", "--steps", "1"]
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
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_rule_that_is_none_ends_the_comparison_with_one_line(tmp_path: Path) -> None:
    done = forked.run(EXAMPLES / "compare.py", "nestrov", environ={}, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "there is no outer rule called 'nestrov'" in done.stderr


@pytest.mark.parametrize("name", ["sparse_uploads.py", "pairs.py"])
def test_a_rule_is_a_file_of_at_most_80_lines_and_the_page_shows_one_whole(name: str) -> None:
    text = (EXAMPLES / "rules" / name).read_text()
    assert len(text.splitlines()) <= 80
    page = (EXAMPLES.parent / "docs" / "research.md").read_text()
    assert name in page
    code = text.partition("annotations\n\n")[2]
    assert name != "sparse_uploads.py" or (code and f"```python\n{code}```" in page)
