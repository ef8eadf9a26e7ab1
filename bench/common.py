"""Share what the benches have in common: arguments, folders, a process group of one, tables."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that describes itself by the first line of a module's docstring."""
    return argparse.ArgumentParser(description=(doc or "").splitlines()[0])


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: a list with commas between, of ``known`` only."""

    def parse(text: str) -> list[str]:
        if unknown := ", ".join(set(text.split(",")) - set(known)):
            raise argparse.ArgumentTypeError(f"no {unknown}: there are {', '.join(known)}")
        return text.split(",")

    return parse


@contextlib.contextmanager
def folder_or_temporary(folder: Path | None) -> Iterator[Path]:
    """Make ``folder``; None: one that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        made = folder or Path(temporary)
        made.mkdir(parents=True, exist_ok=True)
        yield made


@contextlib.contextmanager
def served(*words: str) -> Iterator[int]:
    """Run a registry as a program with these words; yield its process id once it serves."""
    command = [sys.executable, "-m", "distributed_training.network_command", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            while not process.stdout.readline().startswith(b"READY"):
                if process.poll() is not None:
                    raise SystemExit("the registry did not start")
            yield process.pid
        finally:
            process.terminate()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Be the one rank of a process group on one thread, as a trainer needs it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows below ``titles``, each column as wide as its longest cell."""
    lines = [[str(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip(), flush=True)
