#!/usr/bin/env python3
"""Write constraints.txt, requirements/*.txt and uv.lock, with versions and hashes of all files.

    pip install uv && python scripts/lock.py

``constraints.txt`` is read first: each package in it keeps its version. Edit a version there, or
delete its line to get the newest version that fits. Then run this again. The lists are valid for
Linux and macOS, Python 3.11 and newer, and all processors for which PyPI has files:

    production  a miner, without torch       test   packages that its unit tests need
    local       a subnet on this machine     dev    linters, types, every other test
    torch-cuda  PyPI's build of torch        build  pip and setuptools themselves
    torch-cpu   the smaller build from PyTorch's own index, for all Python versions there

``uv sync`` reads uv.lock, which has the same versions.

Exit status: 0 written, 1 a list could not be resolved.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
FOLDER = ROOT / "requirements"
_INDEX = "https://pypi.org/simple"  # the user's index may have files with other hashes
CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
_HEAD = (
    "# Written by scripts/lock.py. Installed by scripts/setup.sh: pip install --require-hashes\n"
)
#: torch and the packages of its build; setup.sh chooses the build.
_TORCH = re.compile(r"torch|triton|cuda-.*|nvidia-(?!ml-py).*")
_ELSEWHERE = re.compile(r"sys_platform == '(win32|emscripten)'$")

#: Package name -> the lines of its requirement: version, marker, hashes.
Lock = dict[str, str]


def resolve(*words: str, given: str | None = None) -> Lock:
    """Return the versions that uv resolves for pyproject.toml, or for ``given`` requirements.

    ``words``: additional arguments for uv, such as the extras.
    """
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--no-config"]
    command += ["--constraint", str(CONSTRAINTS), "--default-index", _INDEX]
    words = ("pyproject.toml", *words) if given is None else ("-",)
    done = subprocess.run(
        [*command, *words], cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(words)} cannot be resolved, so nothing more was written")
    entries = re.split(r"\n(?=\S)", done.stdout.strip())
    named = {entry.partition("==")[0]: entry for entry in entries}
    return {
        n: e for n, e in named.items() if not _ELSEWHERE.search(e.splitlines()[0].rstrip(" \\"))
    }


def write(name: str, lock: Lock) -> None:
    path = FOLDER / f"{name}.txt"
    path.write_text(_HEAD + "".join(f"{lock[package]}\n" for package in sorted(lock)))
    print(f"{path.relative_to(ROOT)}: {len(lock)} packages")


def without(lock: Lock, *others: Lock) -> Lock:
    return {name: entry for name, entry in lock.items() if not any(name in o for o in others)}


def version(entry: str) -> str:
    return re.split(r"[ ;\\]", entry.partition("==")[2], maxsplit=1)[0]


def write_cpu_torch(wanted: str) -> None:
    """Write the list for the CPU build; keep the old list if PyTorch's index cannot be reached."""
    path = FOLDER / "torch-cpu.txt"
    try:
        with urllib.request.urlopen(CPU_INDEX, timeout=60) as reply:
            page = reply.read().decode()
    except OSError as error:
        if path.exists() and f"=={wanted}+cpu" in path.read_text():
            print(f"{path.relative_to(ROOT)}: left unchanged ({error})")
            return
        # If torch has a new version, remove the old list, because it would install the old version.
        page = ""
    file = rf"torch-{re.escape(wanted)}(?:\+|%2B)cpu-cp3\d+-cp3\d+-manylinux[^\"#]*"
    hashes = sorted(set(re.findall(rf"{file}#sha256=([0-9a-f]{{64}})", page)))
    if not hashes:
        path.unlink(missing_ok=True)
        print(f"{path.relative_to(ROOT)}: removed, since torch {wanted}+cpu was not found")
        return
    lines = " \\\n".join(f"    --hash=sha256:{digest}" for digest in hashes)
    write("torch-cpu", {"torch": f"torch=={wanted}+cpu \\\n{lines}"})


def write_uv_lock() -> None:
    """Lock the versions in ``constraints.txt`` for ``uv sync``."""
    command = ["uv", "lock", "--quiet", "--no-config", "--default-index", _INDEX]
    for line in CONSTRAINTS.read_text().splitlines()[1:]:
        command += ["--upgrade-package", line]
    # Delete the old lock. Otherwise, uv keeps its splits by Python version, and torch has no files
    # for the versions of one of them.
    (ROOT / "uv.lock").unlink(missing_ok=True)
    subprocess.run(command, cwd=ROOT, check=True)
    print("uv.lock")


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args()
    # Resolve everything at once, so that each package has the same version in every list.
    everything = resolve("--all-extras") | resolve(given="pip\nsetuptools\n")
    pins = "".join(f"{name}=={version(entry)}\n" for name, entry in sorted(everything.items()))
    CONSTRAINTS.write_text(f"# The versions of requirements/, without hashes.\n{pins}")
    production = resolve("--extra", "production")
    local, test = resolve("--extra", "local"), resolve("--extra", "test")
    torch = {name: entry for name, entry in production.items() if _TORCH.fullmatch(name)}
    write("production", without(production, torch))
    write("local", without(local, production))
    write("test", without(test, production))
    write("dev", without(resolve("--all-extras"), production, local, test))
    write("torch-cuda", torch)
    write("build", resolve(given="pip\nsetuptools\n"))
    write_cpu_torch(version(torch["torch"]))
    write_uv_lock()
    return 0


if __name__ == "__main__":
    sys.exit(main())
