"""Share what the benches have in common: arguments, folders, a process group of one, tables."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants; shared pages count once."""
    import psutil

    from distributed_training.common.processes import tree_of

    total = 0
    for process in tree_of(pid):
        with contextlib.suppress(psutil.Error):  # it has just ended
            total += process.memory_full_info().pss
    return total


@contextlib.contextmanager
def joined(
    store: Any, rank: int = 0, ranks: int = 1, *, cuda: bool = False, **more: Any
) -> Iterator[torch.device]:
    """Join a process group, as a trainer needs it; yield this rank's device."""
    import torch.distributed

    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks, **more)
    yield device
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Be the one rank of a process group on one thread."""
    import torch.distributed

    with joined(torch.distributed.HashStore()):
        torch.set_num_threads(1)
        try:
            yield
        except BaseException:  # ``joined`` leaves a group whose other ranks may hang
            torch.distributed.destroy_process_group()
            raise


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows below ``titles``, each column as wide as its longest cell."""
    lines = [[str(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip(), flush=True)
