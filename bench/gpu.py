"""Measure everything this project claims about a GPU, in nine minutes at most.

    python bench/gpu.py                          all parts; two of them on all GPUs
    python bench/gpu.py --parts inner_1b   some of them
    python bench/gpu.py --minutes 20             more rows of the parts that are cut by time
    python bench/gpu.py --length 4096            tokens of a sequence
    python bench/gpu.py --device cpu --quick     every part's code at toy size; no figure counts
    python bench/gpu.py --table FILE.json        write docs/figures/gpu.json of a report

Needs Python 3.11 or newer and these packages with what they require: torch (2.11 or newer),
transformers, numpy, safetensors, pydantic, pydantic-core, annotated-types, typing-inspection,
typing-extensions, python-dotenv, base58, psutil. No network. What is missing is named before the
first part. Each part runs in a process of its own with a time of its own, the most important first.
``report.json`` and ``report.txt`` (``--out``) are written as rows come, so a part that hangs or
dies costs no other, and a run that is killed keeps what it had. A part gets what the ones before
left over, ends with the row that still fits, and names the rows that did not.

MFU is (6 N + 12 layers heads head_dim length) x tokens per second / peak, N without the input
embedding, recomputed activations not counted (distributed_training/training/throughput.py); the
peak is the card's dense bf16 rate by its data sheet and stands in the report.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FIGURE = ROOT / "docs" / "figures" / "gpu.json"  # docs/performance.md shows it
COLUMNS = ["Part", "Measured", "Goal"]
PLANS = ("plan", "memory plan")  # rows of the report that the document leaves out
_LOOK = 2.0  # seconds
MINUTES = 8.75  # of all parts; nine less the ends of processes
_TOY_MINUTES = 25.0  # a machine that only tries the code may have other work
_LENGTHS = f"of all parts [{MINUTES:g}; with --quick {_TOY_MINUTES:g}]"


#: As pip names them, and the module of each.
NEEDS = {
    "torch": "torch",
    "transformers": "transformers",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "pydantic": "pydantic",
    "pydantic-core": "pydantic_core",
    "annotated-types": "annotated_types",
    "typing-inspection": "typing_inspection",
    "typing-extensions": "typing_extensions",
    "python-dotenv": "dotenv",
    "base58": "base58",
    "psutil": "psutil",
}


@dataclass(frozen=True)
class Part:
    """``seconds``: its own time. ``goal``: what is to be shown."""

    name: str
    title: str
    goal: str
    seconds: float


PARTS = (
    Part("checks", "CUDA paths", "all pass", 80),
    Part("inner_1b", "inner step, 1B", "3x the public way, 55 % MFU", 105),
    Part("inner_4b", "inner step, 4B", "50 % MFU", 90),
    Part("several", "all GPUs against one, 1B", "90 % of as many times the speed", 100),
    Part("sweep", "variations, 1B", "measured", 65),
    Part("overhead", "checkpoints, all GPUs", "at most 1 % of the time", 80),
    Part("out_of_memory", "out of memory on purpose", "half, and training continues", 35),
    Part("loss_curve", "100 steps: GPU bf16, CPU fp32", "the same curve", 40),
    Part("small_memory", "3B with 24 GB", "0.6x the step rate without the limit", 100),
    Part("lost", "a GPU is lost", "training continues with the others", 60),
)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.table is not None:
        print(write_figure(options.table))
        return 0
    if options.child:
        from bench import gpu_parts, gpu_ranks

        home = gpu_ranks if hasattr(gpu_ranks, options.child) else gpu_parts
        return gpu_parts.run(getattr(home, options.child), options)
    wanted = options.parts.split(",") if options.parts else [part.name for part in PARTS]
    unknown = set(wanted) - {part.name for part in PARTS}
    if unknown:
        print(f"no such part: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    # Each part is a process: a package that is missing would fail all of them, one by one.
    absent = [name for name, module in NEEDS.items() if importlib.util.find_spec(module) is None]
    if absent:
        print(
            f"{sys.executable} lacks {', '.join(absent)}, so nothing was measured: "
            f"{sys.executable} -m pip install {' '.join(absent)}",
            file=sys.stderr,
        )
        return 1
    report = Report(options.out, device=options.device, quick=options.quick)
    parts = [part for part in PARTS if part.name in wanted]
    minutes = options.minutes or (_TOY_MINUTES if options.quick else MINUTES)
    deadline = time.monotonic() + 60 * minutes
    longer = max(1.0, minutes / MINUTES)
    for number, part in enumerate(parts):
        later = longer * sum(p.seconds for p in parts[number + 1 :])
        left = deadline - time.monotonic()
        # What earlier ones left over, too.
        seconds = min(left, max(longer * part.seconds, left - later))
        report.add(part, run_part(part, options, seconds=seconds, report=report))
    print(report.text.read_text())
    return 1 if report.failed else 0


# --- running ------------------------------------------------------------------------------------


class Report:
    """``report.json`` and ``report.txt`` in a folder."""

    def __init__(self, folder: Path, *, device: str, quick: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.json, self.text = folder / "report.json", folder / "report.txt"
        self._content: dict[str, Any] = {
            "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "device": device,
            "quick": quick,
            "python": platform.python_version(),
            "machine": {},
            "parts": {},
        }

    def put(self, part: Part, result: dict[str, Any]) -> None:
        """Write what is known of a part, also while it runs."""
        self._content["machine"] |= result.pop("machine", {})
        self._content["parts"][part.name] = result
        write(self.json, json.dumps(self._content, indent=1) + "\n")
        write(self.text, table(self._content) + "\n")

    def add(self, part: Part, result: dict[str, Any]) -> None:
        self.put(part, result)
        print(f"{part.name}: {result['status']} ({result['seconds']:.0f} s)", flush=True)

    @property
    def failed(self) -> bool:
        return any(p["status"] != "ok" for p in self._content["parts"].values())


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def run_part(
    part: Part, options: argparse.Namespace, *, seconds: float, report: Report | None = None
) -> dict[str, Any]:
    """In a process of its own. What it wrote before it failed or was ended is kept.

    ``report``: gets its rows as they come.
    """
    if seconds < 5:
        return {"status": "no time left", "seconds": 0.0, "rows": []}
    found = options.out / f"{part.name}.json"
    found.unlink(missing_ok=True)
    log = options.out / f"{part.name}.log"
    command = [sys.executable, str(Path(__file__).resolve()), "--child", part.name]
    command += ["--out", str(found), "--device", options.device]
    command += ["--length", str(options.length), "--until", str(time.time() + seconds)]
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR": str((options.out / "compiled").absolute()),  # for all parts
    } | os.environ
    # Here and not in /tmp, which may lie in memory: a 1B writes 40 GB, and a part that is ended
    # removes nothing itself.
    scratch = (options.out / "scratch").absolute()
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(["--quick"] if options.quick else [])],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment | {"PYTHONFAULTHANDLER": "1", "TMPDIR": str(scratch)},
            start_new_session=True,
        )
        try:
            put = partial(report.put, part) if report is not None else lambda result: None
            status = _wait(process, seconds, found, put)
            how = "ok" if status == 0 else f"failed with {status}"
        except subprocess.TimeoutExpired:
            how = f"ended after its {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: compilers too
            process.wait()
            shutil.rmtree(scratch, ignore_errors=True)
    content = _read(found) or {"rows": []}
    content |= {"status": how, "seconds": round(time.monotonic() - started, 1)}
    if how != "ok":
        content["log"] = log.read_text(errors="replace").splitlines()[-25:]
    return content


def _wait(
    process: subprocess.Popen[bytes],
    seconds: float,
    found: Path,
    put: Callable[[dict[str, Any]], None],
) -> int:
    """Wait for a part and pass on what it has written. Raises subprocess.TimeoutExpired."""
    end, rows = time.monotonic() + seconds, 0
    while True:
        left = end - time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(max(0.0, min(left, _LOOK)))
        if left <= _LOOK:
            raise subprocess.TimeoutExpired("", seconds)
        content = _read(found)
        if content is not None and len(content["rows"]) != rows:
            rows = len(content["rows"])
            put(content | {"status": "not finished", "seconds": seconds - left})


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(path.read_text())
        return content
    return None


# --- the table ----------------------------------------------------------------------------------


def table(report: Mapping[str, Any]) -> str:
    """Markdown, one row for each part; what did not run is said to be not measured."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *_rows(report)]
    return "\n".join([headline(report), "", *(f"| {' | '.join(row)} |" for row in rows)])


def _rows(report: Mapping[str, Any]) -> list[list[str]]:
    return [[part.title, _cell(report["parts"].get(part.name)), part.goal] for part in PARTS]


def headline(report: Mapping[str, Any]) -> str:
    machine = report.get("machine", {})
    name = machine.get("device", report["device"])
    peak = machine.get("peak_tflops")
    words = [
        f"{name}, {machine.get('memory_gb', '?')} GB",
        f"peak {peak:g} TFLOP/s dense bf16" if peak else "peak not known: no MFU",
        f"torch {machine.get('torch', '?')}, Python {report['python']}",
        report["started"],
    ]
    toy = "**Toy sizes: no figure here counts.** " if report["quick"] else ""
    return toy + "; ".join(words) + "."


def _cell(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "not measured"
    rows = [f"{row['name']}: {row['text']}" for row in result["rows"] if row["name"] not in PLANS]
    if result["status"] != "ok":
        reason = next((line for line in reversed(result.get("log", [])) if line.strip()), "")
        rows.append(f"**{result['status']}** {reason.replace('|', '/')[:160]}".rstrip())
    return "<br>".join(rows) or "nothing"


def write_figure(path: Path) -> str:
    """Write the report at ``path`` as the table that the site shows."""
    report = json.loads(path.read_text())
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    of_run = {"machine": headline(report).rstrip("."), "date": report["started"], "commit": commit}
    figure = {**of_run, "command": "make gpu", "columns": COLUMNS, "rows": _rows(report)}
    FIGURE.write_text(json.dumps(figure, indent=1, ensure_ascii=False) + "\n")
    return table(report)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--parts", default="", help="names, comma between; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="toy sizes")
    parser.add_argument("--minutes", type=float, help=_LENGTHS)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="fill the document with it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
