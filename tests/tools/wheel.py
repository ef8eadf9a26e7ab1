"""Build the wheel, and environments that contain it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIT_FILES = ("git", "ls-files", "-co", "--exclude-standard", "distributed_training")


def run(*words: str | Path, cwd: Path, timeout: float) -> str:
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout, with its uncommitted changes, in ``folder``."""
    source = folder / "source"  # a build writes into its source folder
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    names = run(*GIT_FILES, cwd=ROOT, timeout=60).splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    more = ("--no-deps", "--no-build-isolation", "--quiet")
    words = ("-m", "pip", "wheel", source, "--wheel-dir", folder, *more)
    run(sys.executable, *words, cwd=folder, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return wheel
