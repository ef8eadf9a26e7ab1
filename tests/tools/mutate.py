"""Small wrong changes of the product, each of which tests must notice. Run by `make mutate`.

    python -m tests.tools.mutate                   # all of tests/mutations.toml
    python -m tests.tools.mutate transfer decide   # of the files whose path has one of these words

A run starts in a copy of the tree, in a fork of a process that has imported the large libraries: a
mutation costs its tests' time and no imports. Ends with 1 if fewer than 95 % are killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "mutations.toml"
GOAL = 0.95
SECONDS = 600.0  # of a mutation; a test that it makes wait for ever has a limit of its own
_LARGE = (
    *("torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "hivemind", "boto3"),
    *("bittensor", "pyarrow", "uvicorn", "openskill", "hypothesis", "pytest"),
)


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new`` at its one place in ``path``, and one of ``tests`` must fail."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """Return the mutated source; raise ``ValueError`` if ``old`` is not there exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.path} has {source.count(self.old)} times: {self.old}")
        return source.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.path}\n    - {self.old.strip()}\n    + {self.new.strip()}"


def listed(words: list[str]) -> Iterator[Mutation]:
    """The mutations of the list, of the files that ``words`` name; each fits the source."""
    for part in tomllib.loads(LIST.read_text())["file"]:
        if not words or any(word in part["path"] for word in words):
            source = (ROOT / part["path"]).read_text()
            for old, new in part["mutations"]:
                mutation = Mutation(part["path"], old, new, tuple(part["tests"]))
                ast.parse(mutation.applied(source))
                yield mutation


def own_tree(folder: str) -> None:
    """Make this worker's copy of the tracked files, and work in it."""
    tree = Path(folder) / str(os.getpid())
    names = subprocess.check_output(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT
    )
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    os.chdir(tree)


def run_tests(tests: tuple[str, ...]) -> int:
    """Exit status of pytest in a fork of this process; -1 if it was not through in ``SECONDS``."""
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open("mutation.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for name in [
            n for n in sys.modules if n.split(".")[0] in ("tests", "distributed_training")
        ]:
            del sys.modules[name]
        sys.path.insert(0, os.getcwd())
        os.environ["PYTHONPATH"] = os.getcwd()
        import pytest

        # A test named before its file runs before it.
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--keep-duplicates"]
        os._exit(int(pytest.main([*options, "-m", "not long", *tests])))
    until = time.monotonic() + SECONDS
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what the tests left
    return os.waitstatus_to_exitcode(ended[1] if ended != (0, 0) else os.waitpid(child, 0)[1])


def attempt(mutation: Mutation) -> tuple[Mutation, int, float]:
    """The mutation, the tests' exit status with it, and their seconds."""
    path, began = Path(mutation.path), time.monotonic()
    source = path.read_text()
    path.write_text(mutation.applied(source))
    # What was compiled is kept by size and second.
    os.utime(path, (0, random.randrange(1 << 30)))
    try:
        return mutation, run_tests(mutation.tests), time.monotonic() - began
    finally:
        path.write_text(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    return run(list(listed(options.words)), options.workers)


def run(mutations: list[Mutation], workers: int) -> int:
    """Try each, print those that no test noticed, and return the command's exit status."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _LARGE:
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    with (
        TemporaryDirectory(prefix="mutations-") as folder,
        ProcessPoolExecutor(workers, context, initializer=own_tree, initargs=(folder,)) as pool,
    ):
        files = sorted({file for mutation in mutations for file in mutation.tests})
        for file, status in zip(files, pool.map(run_tests, ((f,) for f in files)), strict=True):
            if status != 0:
                raise SystemExit(f"error: {file} fails without a mutation too, so it tells nothing")
        survived = 0
        for mutation, status, seconds in pool.map(attempt, mutations):
            if status not in (0, 1, 2, -9):
                raise SystemExit(f"error: pytest ended with {status} for {mutation}")
            survived += status <= 0  # too slow a machine proves nothing
            word = "SURVIVED" if status == 0 else "killed" if status > 0 else "UNDECIDED"
            print(f"{word:12}{seconds:5.1f} s  {mutation}", flush=True)
    killed = len(mutations) - survived
    print(f"{killed} of {len(mutations)} killed ({killed / len(mutations):.0%}), goal {GOAL:.0%}")
    return int(killed < GOAL * len(mutations))


if __name__ == "__main__":
    sys.exit(main())
