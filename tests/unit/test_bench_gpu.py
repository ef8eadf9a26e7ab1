"""bench/gpu.py without a GPU: its report, its table in the documents, and every part's code."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu

ROOT = Path(__file__).parents[2]

#: What a machine with a GPU need not have.
BLOCKED = """
import sys
from importlib.machinery import PathFinder
ABSENT = {
    "hivemind", "bittensor", "boto3", "botocore", "rich", "psutil", "prometheus_client", "pytest",
    "hypothesis", "starlette", "uvicorn", "pyarrow", "openskill", "pynvml", "matplotlib", "swift",
    "eventlet", "tensorboard", "wandb",
}
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in ABSENT:
            return super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def test_the_document_shows_the_recorded_report_or_that_there_is_none() -> None:
    assert gpu.section(gpu.DOCUMENT.read_text()) == gpu.table(gpu.recorded())
    nothing = gpu.table(None)
    assert nothing.count("not measured") == len(gpu.PARTS)
    for part in gpu.PARTS:
        assert part.goal in nothing


def test_a_report_fills_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document, recorded = tmp_path / "performance.md", tmp_path / "gpu.json"
    document.write_text(f"before\n{gpu.BEGIN}\nold\n{gpu.END}\nafter\n")
    monkeypatch.setattr(gpu, "DOCUMENT", document)
    monkeypatch.setattr(gpu, "RECORDED", recorded)
    report = {
        "started": "2027-01-01", "device": "cuda", "quick": False, "python": "3.12.1",
        "machine": {"device": "NVIDIA H200", "memory_gb": 150, "peak_tflops": 989.4, "torch": "2"},
        "parts": {
            "codec": {"status": "ok", "rows": [{"name": "ours", "text": "31.0x"}]},
            "sweep": {"status": "ended after its 90 s", "rows": [], "log": ["a | b", ""]},
        },
    }  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert gpu.main(["--table", str(tmp_path / "r.json")]) == 0
    text = document.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert gpu.section(text) == gpu.table(gpu.recorded())
    assert "| gradient codec | ours: 31.0x |" in text and "peak 989.4 TFLOP/s" in text
    assert "**ended after its 90 s** a / b" in text
    assert text.count("not measured") == len(gpu.PARTS) - 2


def test_the_parts_fit_into_nine_minutes() -> None:
    assert sum(part.seconds for part in gpu.PARTS) <= gpu.TOTAL_SECONDS < 540


def test_a_part_that_hangs_or_dies_keeps_what_it_had(tmp_path: Path) -> None:
    """And costs no other: the process that runs them takes no part in them."""
    part = gpu.Part("checks", "", "", 10.0)
    program = tmp_path / "gpu.py"
    for body, expected in (
        ("time.sleep(600)", "ended after its 6 s"),
        ("os.kill(os.getpid(), 11)", "failed with -11"),
        ("sys.exit('no such kernel')", "failed with 1"),
    ):
        program.write_text(
            "import os, sys, time\n"
            "at = sys.argv.index('--out') + 1\n"
            'open(sys.argv[at], \'w\').write(\'{"rows": [{"name": "a", "text": "1"}]}\')\n'
            f"{body}\n"
        )
        options = argparse.Namespace(out=tmp_path, device="cpu", quick=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu, "__file__", str(program))
            found = gpu.run_part(part, options, seconds=6.0)
        assert found["status"] == expected
        assert found["rows"] == [{"name": "a", "text": "1"}]
    assert found["log"][-1] == "no such kernel"


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_every_part_runs_at_toy_size_with_torch_and_little_else(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "bench" / "gpu.py"),
            *("--device", "cpu", "--quick", "--out", str(tmp_path / "out")),
        ],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    statuses = {name: part["status"] for name, part in report["parts"].items()}
    assert statuses == {part.name: "ok" for part in gpu.PARTS}, done.stdout + done.stderr
    assert done.returncode == 0
    figures = {
        row["name"]: row
        for part in report["parts"].values()
        for row in part["rows"]
        if row["text"].startswith("not possible")
    }
    # Only what needs a GPU or a package that is not there may be impossible on a CPU.
    assert set(figures) <= {"loss: liger", "float8 (torchao)", "cuDNN attention", "flash attention"}
    assert (tmp_path / "out" / "report.txt").read_text().startswith("**Toy sizes")
