"""Test that the package works if it is installed as a wheel, without a checkout."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from tests.tools.wheel import build_wheel, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs in an environment with the wheel and our dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder, timeout=60)
    python = folder / "env" / "bin" / "python"
    words = ("-m", "pip", "--python", python, "install", "--no-deps", "--quiet", wheel)
    run(sys.executable, *words, cwd=folder, timeout=120)
    # Dependencies come from this environment; a .pth file does not activate its editable install.
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env" / "bin"


@pytest.mark.parametrize("program", ["miner", "validator", "doctor", "score", "localnet"])
def test_each_program_shows_its_help(programs: Path, tmp_path: Path, program: str) -> None:
    shown = run(programs / f"dt-{program}", "--help", cwd=tmp_path, timeout=100)
    assert len(shown.splitlines()) > 5


def test_the_package_that_runs_is_the_wheel_and_has_its_files(
    programs: Path, tmp_path: Path
) -> None:
    code = "import distributed_training as d; print(d.__file__)"
    found = Path(run(programs / "python", "-c", code, cwd=tmp_path, timeout=60).strip()).parent
    assert found.is_relative_to(programs.parent)
    assert (found / "py.typed").is_file()
    assert list((found / "telemetry" / "page" / "static").glob("*.js"))
