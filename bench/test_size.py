"""The ratchet of ``make size``: no tree lands above the figures of the last one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import size

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("grown", [None, "product", "tests", "settings"])
def test_a_tree_above_a_landed_figure_fails_and_names_it(grown: str | None, tmp_path: Path) -> None:
    for folder in (*size.PRODUCT, *size.OTHERS):
        (tmp_path / folder).mkdir()
    for name in ("size.py", "common.py"):
        shutil.copy(ROOT / "bench" / name, tmp_path / "bench")
    (tmp_path / "scripts" / "one.py").write_text(
        "class A:\n    def __init__(self):\n        flag(1)\n"
    )
    (tmp_path / "tests" / "one.py").write_text('"""Not code."""\n\n# nor this\nA = 1\n')
    figures = {"product": 3, "tests": 1, "settings": 1}
    if grown is not None:
        figures[grown] -= 1
    lines = [f"{what} = {figure}" for what, figure in figures.items()]
    (tmp_path / "bench" / "size.toml").write_text("\n".join(lines))
    ran = subprocess.run(
        [sys.executable, "-m", "bench.size"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr.count("error:")) == ((1, 1) if grown else (0, 0)), ran
    if grown is not None:
        assert f"{grown} has grown from {figures[grown]} to {figures[grown] + 1}" in ran.stderr


def test_a_landing_runs_the_ratchet() -> None:
    assert "\nmake size\n" in (ROOT / ".ci" / "run").read_text()
