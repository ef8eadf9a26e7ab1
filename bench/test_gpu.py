"""bench/gpu.py without a GPU: its report, its table in the documents, and every part's code."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sysconfig
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench import gpu

ROOT = Path(__file__).parents[1]


def test_a_report_is_the_table_that_the_site_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "FIGURE", tmp_path / "gpu.json")
    report = {
        "started": "2027-01-01", "device": "cuda", "quick": False, "python": "3.12.1",
        "machine": {"device": "NVIDIA H200", "memory_gb": 150, "peak_tflops": 989.4, "torch": "2"},
        "parts": {
            "loss_curve": {"status": "ok", "rows": [{"name": "ours", "text": "31.0x"}]},
            "sweep": {"status": "ended after its 90 s", "rows": [], "log": ["a | b", ""]},
        },
    }  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert gpu.main(["--table", str(tmp_path / "r.json")]) == 0
    figure, text = json.loads(gpu.FIGURE.read_text()), gpu.table(report)
    assert figure["machine"] in text
    assert all(f"| {' | '.join(row)} |\n" in f"{text}\n" for row in figure["rows"])
    assert "| 100 steps: GPU bf16, CPU fp32 | ours: 31.0x |" in text
    assert "peak 989.4 TFLOP/s" in text
    assert "**ended after its 90 s** a / b" in text
    assert text.count("not measured") == len(gpu.PARTS) - 2


@pytest.mark.slow
def test_a_part_that_hangs_or_dies_keeps_its_results_so_far(tmp_path: Path) -> None:
    """It costs no other part its results: the process that runs the parts computes none."""
    part = gpu.Part("checks", "", "", 10.0)
    program = tmp_path / "gpu.py"
    for body, seconds, expected in (
        ("time.sleep(600)", 6.0, "ended after its 6 s"),
        ("os.kill(os.getpid(), 11)", 60.0, "failed with -11"),
        ("sys.exit('no such kernel')", 60.0, "failed with 1"),
    ):
        program.write_text(
            "import os, sys, tempfile, time\n"
            "open(tempfile.mkdtemp() + '/40 GB', 'w').close()\n"
            "at = sys.argv.index('--out') + 1\n"
            'open(sys.argv[at], \'w\').write(\'{"rows": [{"name": "a", "text": "1"}]}\')\n'
            f"{body}\n"
        )
        options = argparse.Namespace(out=tmp_path, device="cpu", quick=True, length=32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu, "__file__", str(program))
            found = gpu.run_part(part, options, seconds=seconds)
        assert found["status"] == expected and not list(tmp_path.glob("**/40 GB"))
        assert found["rows"] == [{"name": "a", "text": "1"}]
    assert found["log"][-1] == "no such kernel"


def test_rows_are_in_the_report_while_their_part_runs(tmp_path: Path) -> None:
    found, report = tmp_path / "a.json", gpu.Report(tmp_path, device="cpu", quick=True)
    told, waits = list[int](), iter(["", "a", "a", "ab", None])  # names of rows, then its end

    def wait(timeout: float) -> int:
        rows = next(waits)
        if rows is None:
            return 0
        content = {"rows": [{"name": name, "text": "1"} for name in rows]}
        found.write_text(json.dumps(content))
        raise subprocess.TimeoutExpired("", timeout)

    def put(result: dict[str, Any]) -> None:
        told.append(len(result["rows"]))
        report.put(gpu.PARTS[0], result)

    process: Any = SimpleNamespace(wait=wait)
    assert gpu._wait(process, 600.0, found, put) == 0
    assert told == [1, 2], "each row once"
    assert "a: 1<br>b: 1<br>**not finished**" in report.text.read_text()


@pytest.mark.parametrize(("seconds", "ran"), [(1e9, 8), (35.0, 3), (25.0, 2), (0.0, 1)])
def test_the_sweep_ends_with_the_row_that_fits_and_names_the_others(
    seconds: float, ran: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row takes 10 s; the first one is measured however little is left."""
    from bench import gpu_parts

    now, rows = [0.0], list[tuple[str, str]]()
    monkeypatch.setattr(gpu_parts.time, "monotonic", lambda: now[0])

    def steps(*_: object) -> list[float]:
        now[0] += 5.0
        return [1.0]

    bench: Any = SimpleNamespace(
        quick=True,
        left=lambda: seconds - now[0],
        forget=lambda: None,
        trainer=lambda *_, **named: None,
        steps=steps,
        report_steps=lambda name, *_: rows.append((name, "measured")),
        row=lambda name, text: rows.append((name, text)),
    )
    gpu_parts.sweep(bench)
    measured = [name for name, text in rows if text == "measured"]
    assert len(measured) == ran and measured[0] == "as the miner does it"
    left = [text for name, text in rows if name == "no time for"]
    assert sum(len(text.split(", ")) for text in left) == 8 - ran


def environment(folder: Path, names: Iterable[str]) -> Path:
    """Return the Python of a new environment with the packages ``names`` and their needs."""
    wanted, found = list(names), dict[str, metadata.Distribution]()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                with contextlib.suppress(metadata.PackageNotFoundError):  # of another platform
                    metadata.distribution(requirement.name)
                    wanted.append(requirement.name)
    venv.create(folder, symlinks=True, with_pip=False)
    there = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for each in found.values():
        for top in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            if not (there / top).exists():
                (there / top).symlink_to(Path(str(each.locate_file(top))))
    return folder / "bin" / "python"


def run_gpu(python: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [str(python), str(ROOT / "bench" / "gpu.py"), "--device", "cpu", "--quick"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [*command, "--out", str(out)],
        env=clean | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("absent", ["base58", "python-dotenv"])
def test_missing_package_is_named_in_one_line_before_the_first_part(
    absent: str, tmp_path: Path
) -> None:
    python = environment(tmp_path / "venv", set(gpu.NEEDS) - {absent})
    done = run_gpu(python, tmp_path / "out")
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"pip install {absent}") and done.returncode == 1
    assert not (tmp_path / "out").exists() and not done.stdout


@pytest.mark.long
@pytest.mark.timeout(560)
def test_every_part_runs_at_toy_size_with_only_the_listed_packages(tmp_path: Path) -> None:
    done = run_gpu(environment(tmp_path / "venv", gpu.NEEDS), tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    statuses = {name: part["status"] for name, part in report["parts"].items()}
    assert statuses == {part.name: "ok" for part in gpu.PARTS}, done.stdout + done.stderr
    assert done.returncode == 0
    rows = [row for part in report["parts"].values() for row in part["rows"]]
    assert [row for row in rows if row["text"].startswith("not possible")] == []
    assert (tmp_path / "out" / "report.txt").read_text().startswith("**Toy sizes")
