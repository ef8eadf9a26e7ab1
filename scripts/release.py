#!/usr/bin/env python3
"""Build a release of the version in ``distributed_training/__init__.py``, for `make release`.

    python scripts/release.py [--folder build/release]
    python scripts/release.py --wheel [--folder build/wheel]

``--wheel`` builds only the wheel of this commit, for members of a founder's network. Its version
names the commit, and ``constraints.txt`` is put next to it. `make wheel` runs that.

Nothing is published and no tag is created. The last line shows the commands for the tag.
Afterwards the folder contains the wheel, the source archive, SHA256SUMS for both, and ``NOTES.md``,
this version's section of CHANGELOG.md.

Exit status: 0 built, 1 a check failed (one line says which), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import distributed_training

ROOT = Path(__file__).resolve().parents[1]


class Refused(Exception):
    """The release cannot be built. The text gives the cause and the remedy."""


def notes(changelog: str, version: str) -> str:
    """Return the section of a changelog below ``## [version] - date``, or raise ``Refused``."""
    unreleased = re.search(r"^## \[Unreleased\]\n+(?!## )\S", changelog, re.MULTILINE)
    if unreleased:
        raise Refused(f"CHANGELOG.md has lines under [Unreleased]: move them to [{version}]")
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## \[|\Z)"
    found = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        raise Refused(f"CHANGELOG.md says nothing of {version}: write `## [{version}] - DATE`")
    return found[1].strip() + "\n"


def git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()


def build(folder: Path, version: str, *, commit: str = "") -> list[Path]:
    """Build the wheel and the source archive into ``folder``, which is emptied; return their paths.

    ``commit``: the commit that the wheel's version names, or "" for none.
    """
    # Empty the folder, so that no file of an earlier version is published along with the new ones.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    name = f"distributed_training_miner-{version}"
    sources = folder / f"{name}.tar.gz"
    git("archive", f"--prefix={name}/", f"--output={sources}", "HEAD")
    # Built in a tree of its own, the wheel has only committed files, and its build leaves no files
    # in the checkout.
    tree = folder / "tree"
    tree.mkdir()
    subprocess.run(["tar", "-xzf", sources, "-C", tree], check=True)
    if commit:
        package = tree / name / "distributed_training" / "__init__.py"
        text = package.read_text().replace(f'"{version}"', f'"{version}+g{commit}"', 1)
        package.write_text(text)
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder)
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, tree / name], check=True)
    shutil.rmtree(tree)
    return [*folder.glob("*.whl"), sources]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="[build/release, or build/wheel]")
    parser.add_argument("--wheel", action="store_true", help="build only the wheel of this commit")
    options = parser.parse_args()
    version = distributed_training.__version__
    options.folder = options.folder or ROOT / "build" / ("wheel" if options.wheel else "release")
    if options.wheel:
        commit = git("rev-parse", "--short=10", "HEAD")
        wheel, sources = build(options.folder.resolve(), version, commit=commit)
        sources.unlink()
        shutil.copy(ROOT / "constraints.txt", options.folder)
        print(f"{wheel}\n{options.folder / 'constraints.txt'}")
        return 0
    try:
        text = notes((ROOT / "CHANGELOG.md").read_text(), version)
        if changed := git("status", "--porcelain"):
            raise Refused(f"not committed: {changed.splitlines()[0]}: commit it first")
        if git("tag", "--list", f"v{version}"):
            raise Refused(f"v{version} exists: raise it in distributed_training/__init__.py")
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 1
    files = build(options.folder.resolve(), version)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (options.folder / "SHA256SUMS").write_text("".join(sums))
    (options.folder / "NOTES.md").write_text(text)
    print("".join(sums), end="")
    print(f"git tag -s v{version} -F {options.folder / 'NOTES.md'} && git push origin v{version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
